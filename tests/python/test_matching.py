"""Moments and matching: against numbers that torch finds, and the rules of each mode."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
import torch

from lln_attention import head_moments, match, update_moments

AUTHORS_A, AUTHORS_B = 0.14855178144710912, -0.35487039130661086


def test_moments_of_what_counts() -> None:
    x = torch.randn(3, 4, 20, 8) * 2 + 1
    mask = torch.rand(3, 20) < 0.6
    found = head_moments(x, mask=mask)
    for b in range(3):
        rows = x[b].double()[:, mask[b]].flatten(1)
        torch.testing.assert_close(found.count[b], torch.full((4,), rows.shape[1]).double())
        torch.testing.assert_close(found.mean[b], rows.mean(1))
        torch.testing.assert_close(found.variance[b], rows.var(1))
    lengths = torch.tensor([20, 3, 0], dtype=torch.int32)
    by_mask = head_moments(x, mask=torch.arange(20) < lengths[:, None])
    by_length = head_moments(x, lengths=lengths)
    assert torch.equal(by_mask.variance, by_length.variance)
    assert by_length.count[2].abs().max() == 0


def test_mode_paper_is_the_formula() -> None:
    q, k = torch.randn(2, 4, 64, 32) * 1.2, torch.randn(2, 2, 64, 32) * 0.9
    alpha, beta = match(q, k, mode="paper")
    sigma_q, sigma_k = q.double().std().item(), k.double().std().item()
    st = math.sqrt((sigma_q**2 * sigma_k**2 - AUTHORS_B) / (2 * AUTHORS_A))
    torch.testing.assert_close(alpha, torch.full((2, 4), st / sigma_q), rtol=1e-6, atol=0)
    torch.testing.assert_close(beta, torch.full((2, 2), st / sigma_k), rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", ("per_head", "exact", "entropy"))
def test_a_sequence_is_matched_alone(mode: str) -> None:
    q, k = torch.randn(3, 4, 64, 32), torch.randn(3, 2, 64, 32)
    lengths = torch.tensor([64, 40, 17])
    alpha, beta = match(q, k, mode=mode, key_lengths=lengths)
    for b, n in enumerate(lengths.tolist()):
        one = match(q[b : b + 1, :, :n], k[b : b + 1, :, :n], mode=mode)
        torch.testing.assert_close(alpha[b], one[0][0], rtol=1e-6, atol=0)
        torch.testing.assert_close(beta[b], one[1][0], rtol=1e-6, atol=0)


def test_query_mask_of_cross_attention() -> None:
    q, k = torch.randn(1, 2, 30, 32), torch.randn(1, 2, 50, 32)
    mask = torch.arange(30)[None] < 12
    found = match(q, k, query_mask=mask)
    expected = match(q[:, :, :12], k, cross=True)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=0)


def test_running_moments() -> None:
    """Means over steps with weights that decay; a step uses the steps before it."""
    running = torch.zeros(2, 2, 3, dtype=torch.float64)
    q, k = torch.randn(2, 4, 64, 32), torch.randn(2, 2, 64, 32)
    ones = match(q, k, mode="ema", running=running, causal=True)
    assert torch.equal(ones[0], torch.ones(2, 4)) and torch.equal(ones[1], torch.ones(2, 2))
    weight, mean = 0.0, torch.zeros(2, dtype=torch.float64)
    for step in range(3):
        k = torch.randn(2, 2, 64, 32) + step
        update_moments(running, q, k, decay=0.9)
        weight = 0.9 * weight + 0.1
        mean = mean + 0.1 / weight * (k.double().mean((0, 2, 3)) - mean)
    torch.testing.assert_close(running[1, :, 0], torch.full((2,), weight).double())
    torch.testing.assert_close(running[1, :, 1], mean)
    alpha, _ = match(q, k, mode="ema", running=running)
    assert (alpha[0] == alpha[1]).all() and (alpha != 1).all()


def test_types() -> None:
    q = torch.randn(1, 2, 32, 16)
    assert match(q.double(), q.double())[0].dtype == torch.float64
    assert match(q.bfloat16(), q.bfloat16())[0].dtype == torch.float32
    assert not match(q.requires_grad_(), q)[0].requires_grad
