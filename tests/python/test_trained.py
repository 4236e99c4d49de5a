"""experiments/trained: what its attentions compute, and a run of it on paragraphs made here."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import dense
from hf_models import make
from test_minilm import MISSING
from trained_program import options, program, read, write_data

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def experiment() -> Any:
    with program() as module:
        yield module


@pytest.fixture(scope="module")
def attentions(experiment: Any) -> Any:
    import attentions

    return attentions


def by_definition(row: Any, q: Any, k: Any, v: Any, counts: Any) -> Any:
    """In float64 and with the whole matrix."""
    q, k, v = (x.double() for x in (q, k, v))
    near = dense.attention(q, k, v, alpha=1, beta=1, diag_block=row.block, mix=0.0, key_mask=counts)
    if row.long in ("softmax", "quadratic", "uniform"):
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        weights = {
            "softmax": (logits / row.factor).exp(),
            "quadratic": logits.square(),
            "uniform": torch.ones_like(logits),
        }[row.long]
        weights = weights * counts[:, None, None]
        far = weights / weights.sum(-1, keepdim=True) @ v
    elif row.long:
        feature = "exp" if row.long == "lln" else row.long
        far = dense.attention(
            q, k, v, alpha=row.factor, beta=row.factor, feature=feature, key_mask=counts
        )
    else:
        return near
    return far / 2 + near / 2 if row.diag else far


def test_every_attention_is_its_definition(experiment: Any, attentions: Any) -> None:
    q, k, v = torch.randn(3, 2, 3, 40, 8).unbind()
    counts = torch.ones(2, 40, dtype=torch.bool)
    counts[1, 29:] = False
    for row in experiment.trained_plan.rows().values():
        if row.mode not in ("", "none"):
            continue  # calibrated: of a model
        expected = by_definition(row, q, k, v, counts)
        found = attentions.read(row, q, k, v, counts)
        for i, rows in ((0, 40), (1, 29)):
            torch.testing.assert_close(
                found[i, :, :rows],
                expected[i, :, :rows].float(),
                rtol=1e-4,
                atol=1e-5,
                msg=row.name,
            )
        # Without padding no mask is needed.
        whole = attentions.read(row, q[:1], k[:1], v[:1])
        torch.testing.assert_close(whole, found[:1], rtol=1e-5, atol=1e-6, msg=row.name)


@torch.no_grad()
def test_a_model_gets_the_attention_of_its_row(experiment: Any, attentions: Any) -> None:
    """Softmax and LLN+Diag as transformers and lln_attention.hf have them."""
    from lln_attention import calibrate, hf

    rows = experiment.trained_plan.rows()
    ids = torch.randint(1, 60, (2, 40))
    given = {"input_ids": ids, "attention_mask": (torch.arange(40) < torch.tensor([[40], [31]]))}
    given["attention_mask"] = given["attention_mask"].long()
    model, expected = make("bert").eval(), make("bert").eval()
    expected.load_state_dict(model.state_dict())
    real = given["attention_mask"].bool()

    def states(of: Any) -> Any:
        return of(**given).last_hidden_state[real]

    softmax = states(model)
    calibration = calibrate(model, [given], mode="per_head")
    attentions.swap(model, rows["softmax"])
    torch.testing.assert_close(states(model), softmax)
    attentions.swap(model, rows["lln+diag-per_head"], calibration)
    hf.configure(expected, implementation="lln_diag", diag_block=16, calibration=calibration)
    torch.testing.assert_close(states(model), states(expected))
    assert (states(model) - softmax).abs().max() > 1e-3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("trained"))


def test_run(experiment: Any, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = options(data, "--rows", "softmax,diag,lln+diag-entropy,quadratic", "--seeds", "1")
    experiment.main(words)
    first = read(data)
    swapped = {row: r["found"] for (stage, row, _), r in first.items() if stage == "swapped"}
    assert max(swapped["softmax"]["hidden_errors"]) < 1e-5
    assert swapped["softmax"]["mean_cosine"] > 0.9999
    assert swapped["lln+diag-entropy"]["hidden_errors"][-1] > 0.01
    # Far from softmax, and it says so: instruments are those of what reads all keys.
    assert swapped["quadratic"]["hidden_errors"][-1] > swapped["diag"]["hidden_errors"][-1]
    assert "instruments" not in swapped["diag"]
    entropies = [swapped[name]["instruments"]["entropy"] for name in ("softmax", "quadratic")]
    assert [len(x) for x in entropies] == [72, 72]
    assert all(0 <= x <= math.log(32) for heads in entropies for x in heads)
    heads = {row: r["found"] for (stage, row, _), r in first.items() if stage == "outputs"}
    assert max(heads["softmax"]["output_errors"]) < 1e-5
    assert len(heads["diag"]["output_errors"]) == 72 and max(heads["diag"]["output_errors"]) > 0.1
    recovered = first["recovered", "diag", 1]
    assert recovered["found"]["hidden_errors"][-1] < swapped["diag"]["hidden_errors"][-1]
    assert recovered["settings"]["steps"] == 3 and len(recovered["found"]["losses"]) == 3

    # What has a record is not run again; what has none is found as it was.
    capsys.readouterr()
    experiment.main(words)
    assert "all of it has a record" in capsys.readouterr().err
    lines = [r for k, r in first.items() if k[:2] != ("recovered", "diag")]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (data / "records.jsonl").write_text(text + '{"torn', encoding="utf-8")
    experiment.main(words)
    assert "1 of 1: recovered diag, seed 1" in capsys.readouterr().err
    again = read(data)
    assert list(again) == list(first)
    found, before = (x["recovered", "diag", 1]["found"] for x in (again, first))
    assert found["hidden_errors"] == pytest.approx(before["hidden_errors"], rel=1e-3, abs=1e-5)
    assert found["losses"] == [pytest.approx(point, rel=1e-3) for point in before["losses"]]


def test_errors(experiment: Any, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, folder = str(data / "text.txt"), str(data)
    for words, said in (
        ([text, "nowhere"], "sts-dev.csv is not there"),
        ([text, folder, "--rows", "softmax,lln+dia"], "'lln+dia' is none of softmax, "),
        ([text, folder, "--steps", "3"], "other settings need --records FILE"),
        ([text, folder, "--steps", "0"], "are positive"),
        ([text, folder, "--records", "nowhere/x"], "nowhere is not a folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            experiment.main(words)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
    few = options(data, "--rows", "elu", "--held-out")
    few = [*few[: few.index("--held-out")], *few[few.index("--held-out") + 1 :]]
    with pytest.raises(SystemExit, match="expected 1024"):
        experiment.main([*few, "--held-out", "1000"])
