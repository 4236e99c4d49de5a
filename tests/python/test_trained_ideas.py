"""experiments/trained: what its ideas beside LLN + Diag compute, and that they learn."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.fixture(scope="module")
def ideas(experiment: Any) -> Any:
    import ideas

    return ideas


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
def test_every_idea_is_its_definition(experiment: Any, attentions: Any, ideas: Any) -> None:
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
def test_rotations_leave_sizes_as_they_are(experiment: Any, attentions: Any, ideas: Any) -> None:
    found = ideas.rotations(3, 8, 20, 1)
    assert found.shape == (3, 8, 20)
    for matrix in found:
        for begin in (0, 8, 16):
            block = matrix[:, begin : begin + 8]
            torch.testing.assert_close(block.T @ block, torch.eye(block.shape[1]))
    assert not torch.equal(found, ideas.rotations(3, 8, 20, 2))


@torch.no_grad()
def test_calibration_of_ideas(experiment: Any, attentions: Any, ideas: Any) -> None:
    """That of the package where nothing is mapped, and of what the map takes where it is."""
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


def test_ideas_are_trained(experiment: Any, tmp_path: Path) -> None:
    """Their parameters get somewhere, at rates of their own, and the record says where."""
    plan = experiment.trained_plan
    names = list(plan.idea_rows())
    words = options(write_data(tmp_path), "--rows", ",".join(names), "--seeds", "0")
    experiment.main(words)
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
