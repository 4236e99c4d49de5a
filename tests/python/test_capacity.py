"""experiments/capacity is what its records say: some of it, run again."""

# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
import pathlib
from importlib.machinery import SourceFileLoader

import pytest
import torch

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "experiments/capacity"


@pytest.fixture(scope="module")
def experiment():
    loader = SourceFileLoader("capacity_run", str(FOLDER / "run"))
    spec = importlib.util.spec_from_loader("capacity_run", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["softmax", "lln", "lln-entropy", "lln-two-sided", "performer"])
def test_a_record_is_found_again(experiment, name):
    lines = (FOLDER / "records.jsonl").read_text(encoding="utf-8").splitlines()
    record = next(
        r for r in map(json.loads, lines) if (r["attention"], r["dim"], r["seed"]) == (name, 16, 1)
    )
    again = experiment.run(torch, name, 16, 1)
    assert again["scales"] == tuple(record["scales"])
    # Answers that are a near tie may fall the other way where sums are rounded otherwise.
    for line, recorded in zip(again["accuracy"], record["accuracy"], strict=True):
        assert line == pytest.approx(recorded, abs=0.02)


def test_pairs_are_held_by_the_value_of_their_key(experiment):
    """A read that returns another row's value is wrong everywhere."""
    torch.manual_seed(0)
    assert experiment.accuracy(torch, lambda t, k, v, s: v, 16, 32, 1) == 1
    assert experiment.accuracy(torch, lambda t, k, v, s: v.roll(1, 2), 16, 32, 1) == 0
