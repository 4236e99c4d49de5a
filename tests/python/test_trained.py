"""experiments/trained: what its attentions compute, and a run of it on paragraphs made here."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
import torch

import dense
from hf_models import make
from test_minilm import MISSING, SLOTS, sentence, write_pairs

FOLDER = Path(__file__).resolve().parents[2] / "experiments/trained"

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def experiment() -> Any:
    """The program as a module, which finds its neighbours by itself."""
    path = list(sys.path)
    loader = SourceFileLoader("trained_run", str(FOLDER / "run"))
    spec = importlib.util.spec_from_loader("trained_run", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    yield module
    sys.path[:] = path


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
    folder = tmp_path_factory.mktemp("trained")
    draw = random.Random(0)
    write_pairs(folder / "sts-dev.csv", 20, draw)
    lines = [" ".join(sentence(draw.choice(SLOTS)) for _ in range(8)) for _ in range(40)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def options(data: Path, *more: object) -> list[str]:
    sizes = "--tokens 32 --calibration 8 --held-out 4 --training 16 --analyzed 2 --steps 3"
    words = [data / "text.txt", data, "--threads", 1, "--records", data / "records.jsonl", *more]
    return [*map(str, words), *sizes.split(), "--batch", "4"]


def read(data: Path) -> dict[tuple[str, str, int], Any]:
    lines = (data / "records.jsonl").read_text(encoding="utf-8").splitlines()
    return {(r["stage"], r["row"], r["seed"]): r for r in map(json.loads, lines)}


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


def by_formula(row: Any, added: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    """A row with an idea, of one sequence without padding, [heads, tokens, channels] each, in
    float64, from the formulas of docs/zoo.md."""
    heads, tokens, channels = q.shape
    found = torch.empty(heads, tokens, channels, dtype=torch.float64)
    for h in range(heads):
        rows, keys = q[h].double(), k[h].double()
        logits = rows @ keys.T / math.sqrt(channels)
        block = torch.arange(tokens) // row.block
        near = logits.masked_fill(block[:, None] != block, -math.inf).softmax(-1)
        alpha, beta = 1.3, 0.8
        if "scales" in row.ideas:
            alpha, beta = alpha * added.log_alpha[h].exp(), beta * added.log_beta[h].exp()
        if "centred" in row.ideas:
            keys = keys - sum(keys) / tokens
        if set(row.ideas) & {"wide", "narrow", "rotations"}:
            rows, keys = rows @ added.wide[h].double(), keys @ added.wide[h].double()
        weights = (alpha * rows).exp() @ (beta * keys).exp().T
        if "two-sided" in row.ideas:
            weights = weights + (-alpha * rows).exp() @ (-beta * keys).exp().T
        far = logits.softmax(-1) if row.long == "softmax" else weights / weights.sum(-1)[:, None]
        if "contrast" in row.ideas:
            far = far - torch.sigmoid(added.chain[h].double()) * (far @ far - far)
        share = torch.full((tokens, channels), 0.5)
        if "gate" in row.ideas:
            gate = added.gate
            share = torch.sigmoid(x @ gate.weight[h] + gate.bias[h])[:, None]
        if "mix" in row.ideas:
            share = added.mix[h]
        found[h] = share * (far @ v[h].double()) + (1 - share) * (near @ v[h].double())
    return found


@torch.no_grad()
def test_every_idea_is_its_definition(experiment: Any, attentions: Any) -> None:
    import ideas

    plan = experiment.trained_plan
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 40, 8).unbind()
    k = k + torch.randn(3, 1, 8)  # a mean that matters to LLN
    x = torch.randn(2, 40, 24)
    counts = torch.ones(2, 40, dtype=torch.bool)
    counts[1, 29:] = False
    assert {idea for row in plan.idea_rows().values() for idea in row.ideas} == set(plan.IDEAS)
    for row in plan.idea_rows().values():
        plain = plan.rows()["softmax+diag" if row.long == "softmax" else "lln+diag-none"]
        added = ideas.Added(row.ideas, 3, 8)
        scales = (torch.full((3,), 1.3), torch.full((3,), 0.8))
        before = attentions.read(plain, q, k, v, counts, scales)
        found = attentions.read(row, q, k, v, counts, scales, added, x)
        # Nothing is said of a row without a change, and an idea that acts at once does.
        assert plan.untrained(row) == (not torch.allclose(found, before, atol=1e-4)), row.name
        for own in added.parameters():
            own.add_(0.3 * torch.randn_like(own))
        found = attentions.read(row, q, k, v, counts, scales, added, x)
        assert {name.split(".")[0] for name, _ in added.named_parameters()} == set(plan.rates(row))
        assert not torch.allclose(found, before, atol=1e-3), row.name
        for i, rows in ((0, 40), (1, 29)):
            own = (y[i, :, :rows] for y in (q, k, v))
            expected = by_formula(row, added, *own, x[i, :rows]).float()
            torch.testing.assert_close(
                found[i, :, :rows], expected, rtol=1e-4, atol=1e-5, msg=row.name
            )
        whole = attentions.read(row, q[:1], k[:1], v[:1], None, scales, added, x[:1])
        torch.testing.assert_close(whole, found[:1], rtol=1e-5, atol=1e-5, msg=row.name)


@torch.no_grad()
def test_rotations_leave_sizes_as_they_are(experiment: Any, attentions: Any) -> None:
    import ideas

    found = ideas.rotations(3, 8, 20, 1)
    assert found.shape == (3, 8, 20)
    for matrix in found:
        for begin in (0, 8, 16):
            block = matrix[:, begin : begin + 8]
            torch.testing.assert_close(block.T @ block, torch.eye(block.shape[1]))
    assert not torch.equal(found, ideas.rotations(3, 8, 20, 2))


@torch.no_grad()
def test_calibration_of_ideas(experiment: Any, attentions: Any) -> None:
    """That of the package where nothing is mapped, and of what the map takes where it is."""
    import ideas

    from lln_attention import calibrate

    model = make("bert").eval()
    ids = torch.randint(1, 60, (6, 40))
    batches = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids.split(2)]
    layers = attentions.inputs(model, batches)
    expected = calibrate(model, batches, mode="entropy")
    heads, channels = layers[0][1].shape[1], layers[0][1].shape[3]

    def found(*names: str) -> Any:
        added = {name: ideas.Added(names, heads, channels) for name, *_ in layers}
        return ideas.calibrate(layers, added, "entropy", 2), added

    own, _ = found()
    for mine, theirs in zip(own.layers, expected.layers, strict=True):
        assert (mine.name, mine.dim, mine.tokens) == (theirs.name, theirs.dim, theirs.tokens)
        assert mine.alpha == pytest.approx(theirs.alpha, rel=1e-5)
    own, _ = found("two-sided")
    assert {layer.dim for layer in own.layers} == {2 * channels}
    # A mean of the keys counts in their deviation, and centring takes it out again.
    shifted = [(name, q, k + 3 * torch.arange(channels), v) for name, q, k, v in layers]
    own, added = found("centred")
    again = ideas.calibrate(shifted, added, "entropy", 2)
    for mine, theirs in zip(again.layers, own.layers, strict=True):
        assert mine.beta == pytest.approx(theirs.beta, rel=1e-3)


def test_ideas_are_trained(
    experiment: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their parameters get somewhere, at rates of their own, and the record says where."""
    plan = experiment.trained_plan
    names = list(plan.idea_rows())
    records = tmp_path / "records.jsonl"
    words = options(data, "--rows", ",".join(names), "--seeds", "0")
    experiment.main([*words, "--records", str(records)])
    found = read(tmp_path)
    for name, row in plan.idea_rows().items():
        own = found["recovered", name, 0]["found"]
        assert (("swapped", name, 0) in found) == plan.untrained(row)
        assert set(own["learned"]) >= set(plan.rates(row)) - {"gate"}
        assert (own["added_parameters"] > 0) == bool(plan.rates(row))
        assert ("gate_mean" in own) == ("gate" in row.ideas)
        assert "instruments" not in own
    own = {name: found["recovered", name, 0]["found"] for name in names}
    assert own["lln+diag-entropy-gate"]["added_parameters"] == 6 * (384 * 12 + 12)
    assert len(own["softmax+diag-gate"]["gate_mean"]) == 72
    assert own["lln+diag-entropy-mix"]["added_parameters"] == 6 * 384
    assert own["lln+diag-entropy-wide"]["added_parameters"] == 6 * 12 * 32 * 128
    # Three steps of a warm-up to 0.02, by which the numbers have moved; at the rate of all else
    # it would be less than 0.0001.
    mean, deviation, least, largest = own["lln+diag-entropy-contrast"]["learned"]["chain"]
    assert 0.001 < max(-least, largest) < 0.02 and deviation > 0 and abs(mean) < 0.02
    capsys.readouterr()
