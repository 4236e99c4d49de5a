"""The program experiments/trained/run for its tests, and data for it that are made here."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from test_minilm import SLOTS, sentence, write_pairs

FOLDER = Path(__file__).resolve().parents[2] / "experiments/trained"


@contextmanager
def program() -> Iterator[Any]:
    """The program as a module, which finds its neighbours by itself."""
    path = list(sys.path)
    loader = SourceFileLoader("trained_run", str(FOLDER / "run"))
    spec = importlib.util.spec_from_loader("trained_run", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    yield module
    sys.path[:] = path


def write_data(folder: Path) -> Path:
    """A text and pairs of sentences."""
    draw = random.Random(0)
    write_pairs(folder / "sts-dev.csv", 20, draw)
    lines = [" ".join(sentence(draw.choice(SLOTS)) for _ in range(8)) for _ in range(40)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def options(data: Path, *more: object) -> list[str]:
    """Of a run that is small enough for a test."""
    sizes = "--tokens 32 --calibration 8 --held-out 4 --training 16 --analyzed 2 --steps 3"
    words = [data / "text.txt", data, "--threads", 1, "--records", data / "records.jsonl", *more]
    return [*map(str, words), *sizes.split(), "--batch", "4"]


def read(data: Path) -> dict[tuple[str, str, int], Any]:
    """Records by stage, row and seed."""
    lines = (data / "records.jsonl").read_text(encoding="utf-8").splitlines()
    return {(r["stage"], r["row"], r["seed"]): r for r in map(json.loads, lines)}
