"""Outputs and gradients against the definition (dense.py), in every form that a call can take."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import dense
from lln_attention import attention, match

FEATURES = ("exp", "elu", "relu", "softplus", "power2", "power3")


def inputs(
    batch: int = 2, heads: int = 4, heads_k: int = 2, n: int = 37, m: int = 37, d: int = 16,
    dv: int = 24, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k = torch.randn(batch, heads, n, d), torch.randn(batch, heads_k, m, d)
    v = torch.randn(batch, heads_k, m, dv)
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    return q, k, v


def scale(*shape: int) -> Tensor:
    return (torch.rand(shape, dtype=torch.float64) + 0.5).requires_grad_()


def assert_same(
    q: Tensor, k: Tensor, v: Tensor, parameters: dict[str, Tensor], tolerance: float, **options: Any
) -> None:
    """o and all gradients within `tolerance` times the largest of their kind."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    mask = options.pop("key_mask", None)
    typed = {name: x.detach().to(wide).requires_grad_() for name, x in parameters.items()}
    o = attention(q, k, v, **typed, key_mask=mask, **options)
    assert o.dtype == q.dtype
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *typed.values())]
    expected = dense.attention(
        *leaves[:3], **dict(zip(typed, leaves[3:], strict=True)), key_mask=mask, **options
    )
    g = torch.randn(expected.shape).to(o.dtype)
    found = (o, *torch.autograd.grad(o, (q, k, v, *typed.values()), g))
    wanted = (expected, *torch.autograd.grad(expected, leaves, g.double()))
    names = ("o", "q", "k", "v", *typed)
    for name, x, y in zip(names, found, wanted, strict=True):
        assert x.shape == y.shape, name
        error = (x.double() - y).abs().max().item()
        assert error <= tolerance * max(1.0, y.abs().max().item()), (name, error)


@pytest.mark.parametrize("diag_block", (0, 8))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(feature: str, causal: bool, diag_block: int) -> None:
    assert_same(
        *inputs(), {"alpha": scale(4), "beta": scale(2)}, 2e-13, causal=causal, feature=feature,
        diag_block=diag_block,
    )  # fmt: skip


@pytest.mark.parametrize("diag_block", (0, 8))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    ((torch.float32, 4e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)),
    ids=("f32", "bf16", "f16"),
)
def test_every_dtype(dtype: torch.dtype, tolerance: float, causal: bool, diag_block: int) -> None:
    for n in (1, 7, 64, 197):
        assert_same(
            *inputs(n=n, m=n, dtype=dtype), {"alpha": scale(4), "beta": scale(2)}, tolerance,
            causal=causal, diag_block=diag_block,
        )  # fmt: skip


@pytest.mark.parametrize("shape", ((), (4,), (4, 24), (2, 4, 37)), ids=str)
def test_mix_of_every_shape(shape: tuple[int, ...]) -> None:
    scales = {"alpha": scale(2, 4), "beta": scale(2, 2)}
    assert_same(*inputs(), scales | {"mix": scale(*shape)}, 2e-13, diag_block=8)
    weights = {"lln_weight": scale(*shape), "diag_weight": scale(*shape)}
    assert_same(*inputs(), scales | weights, 2e-13, diag_block=8)


@pytest.mark.parametrize("diag_block", (0, 8))
@pytest.mark.parametrize("causal", (False, True))
def test_masks(causal: bool, diag_block: int) -> None:
    mask = torch.rand(3, 37) < 0.7
    mask[0, :5] = False  # left padding
    mask[1] = False  # nothing to see
    scales = {"alpha": scale(4), "beta": scale(2)}
    assert_same(
        *inputs(batch=3), scales, 2e-13, key_mask=mask, causal=causal, diag_block=diag_block
    )
    q, k, v = inputs(batch=3, dtype=torch.float32)
    lengths = torch.tensor([37, 20, 0])
    by_length = attention(q, k, v, alpha=1.3, beta=0.9, causal=causal, key_lengths=lengths)
    by_mask = attention(
        q, k, v, alpha=1.3, beta=0.9, causal=causal, key_mask=torch.arange(37) < lengths[:, None]
    )
    torch.testing.assert_close(by_length, by_mask, rtol=0, atol=1e-6)
    assert by_length[2].abs().max() == 0


def test_cross_attention() -> None:
    assert_same(*inputs(n=11, m=50), {"alpha": scale(4), "beta": scale(2)}, 2e-13)


@pytest.mark.parametrize("matching", ("auto", "per_head", "exact", "entropy", "paper", "none"))
def test_matching_inside_the_call(matching: str) -> None:
    q, k, v = inputs(dtype=torch.float32)
    mode = "per_head" if matching == "auto" else matching
    alpha, beta = match(q, k, mode=mode)
    assert not alpha.requires_grad
    o, expected = attention(q, k, v, matching=matching), attention(q, k, v, alpha=alpha, beta=beta)
    assert torch.equal(o, expected)
    g = torch.randn_like(o)
    found = torch.autograd.grad(o, (q, k, v), g)
    for x, y in zip(found, torch.autograd.grad(expected, (q, k, v), g), strict=True):
        assert torch.equal(x, y)


def test_padding_changes_nothing() -> None:
    """A padded sequence gives the rows and gradients that it gives alone, moments included."""
    for diag_block in (0, 8):
        q, k, v = inputs(dtype=torch.float32)
        mask = torch.arange(37) < torch.tensor([[37], [21]])
        o = attention(q, k, v, key_mask=mask, diag_block=diag_block)[1, :, :21]
        g = torch.randn_like(o)
        alone = [x[1:, :, :21].detach().requires_grad_() for x in (q, k, v)]
        expected = attention(*alone, diag_block=diag_block)[0]
        torch.testing.assert_close(o, expected, rtol=0, atol=1e-6)
        padded = [x[1:, :, :21] for x in torch.autograd.grad(o, (q, k, v), g)]
        for x, y in zip(padded, torch.autograd.grad(expected, alone, g), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=2e-6)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("index", (torch.int32, torch.int64), ids=("i32", "i64"))
def test_packed_sequences(causal: bool, index: torch.dtype) -> None:
    bounds = (0, 5, 5, 30, 37)
    cu_seqlens = torch.tensor(bounds, dtype=index)
    q, k, v = inputs(batch=1, dtype=torch.float32)
    scales: dict[str, Any] = {"alpha": 1.2, "beta": 1.1} if causal else {}
    o = attention(q, k, v, causal=causal, diag_block=8, cu_seqlens=cu_seqlens, **scales)
    for first, last in itertools.pairwise(bounds):
        rows = (x[:, :, first:last] for x in (q, k, v))
        expected = attention(*rows, causal=causal, diag_block=8, **scales)
        torch.testing.assert_close(o[:, :, first:last], expected, rtol=0, atol=1e-6)
    o.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


@pytest.mark.parametrize("causal", (False, True))
def test_views_of_any_layout(causal: bool) -> None:
    """Heads inside tokens, slices of a fused projection, expanded heads; o has the order of q."""
    fused = torch.randn(2, 33, 3, 4, 16)
    q, k, v = fused.transpose(1, 3).unbind(2)
    assert q.stride(1) < q.stride(2)
    options: dict[str, Any] = {"causal": causal, "alpha": 1.1, "beta": 0.9, "diag_block": 8}
    o = attention(q, k, v, **options)
    assert o.transpose(1, 2).is_contiguous()
    expected = attention(q.contiguous(), k.contiguous(), v.contiguous(), **options)
    assert expected.is_contiguous() and torch.equal(o, expected)
    shared = k[:, :1].expand(2, 4, 33, 16)
    expected = attention(q, shared.contiguous(), v, **options)
    assert torch.equal(attention(q, shared, v, **options), expected)
    turned = q.transpose(2, 3).contiguous().transpose(2, 3)  # channels are not contiguous
    assert torch.equal(attention(turned, k, v, **options), o)


def test_no_copy_of_views() -> None:
    """The largest call allocates its result and what the kernel needs, and no second q, k or v."""
    fused = torch.randn(1, 4096, 3, 8, 64)
    q, k, v = fused.transpose(1, 3).unbind(2)
    with torch.inference_mode(), torch.profiler.profile(profile_memory=True) as profile:
        attention(q, k, v)
    allocated = sum(max(0, e.self_cpu_memory_usage) for e in profile.events())
    assert allocated < 1.5 * q.numel() * 4


def test_threads_change_no_bit() -> None:
    """The threads are torch's: as many as it is told to use, and the same result for any number."""
    q, k, v = inputs(batch=1, n=3000, m=3000, dtype=torch.float32)
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        o = attention(q, k, v, diag_block=64)
        found.append((o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))))
    torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def test_empty_tensors() -> None:
    q, k, v = inputs(n=0, m=5, dtype=torch.float32)
    assert attention(q, k, v).shape == (2, 4, 0, 24)
    q, k, v = inputs(n=5, m=0, dtype=torch.float32)
    o = attention(q, k, v, alpha=1.0, beta=1.0)
    assert o.abs().max() == 0
    o.sum().backward()
    assert q.grad is not None and q.grad.abs().max() == 0


def test_mix_of_zero_is_the_blocks_alone() -> None:
    q, k, v = inputs(dtype=torch.float32)
    o = attention(q, k, v, causal=True, diag_block=8, mix=0.0)
    expected = dense.attention(q, k, v, alpha=1.0, beta=1.0, causal=True, diag_block=8, mix=0.0)
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=1e-6)
    alpha = torch.ones(4, requires_grad=True)
    given = attention(q, k, v, causal=True, diag_block=8, mix=0.0, alpha=alpha, beta=1.0)
    assert torch.equal(given, o)
    given.sum().backward()
    assert alpha.grad is None


def test_large_keys_do_not_overflow() -> None:
    q, k, v = inputs(dtype=torch.float32)
    o = attention(q, k * 200, v, alpha=1.0, beta=1.0)
    expected = dense.attention(q, k * 200, v, alpha=1.0, beta=1.0)
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=1e-4)


def test_numbers_are_as_tensors() -> None:
    """Scales and weights, their gradients' way back included."""
    x = torch.randn(2, 4, 20, 16, requires_grad=True)
    half = torch.full((4,), 0.75)
    for numbers, tensors in (
        ({"alpha": 1.5, "beta": 0.5}, {"alpha": torch.tensor(1.5), "beta": torch.tensor(0.5)}),
        (
            {"alpha": 1.5, "beta": torch.full((4,), 0.5)},
            {"alpha": torch.full((4,), 1.5), "beta": 0.5},
        ),
        ({"lln_weight": 0.75, "diag_weight": 0.75}, {"lln_weight": half, "diag_weight": half}),
    ):
        outputs = [attention(x, x, x, diag_block=8, **given) for given in (numbers, tensors)]
        assert torch.equal(*outputs)
        assert torch.equal(*(torch.autograd.grad(o.square().sum(), x)[0] for o in outputs))


def test_query_mask_is_of_the_moments() -> None:
    q, k = torch.randn(2, 4, 20, 16), torch.randn(2, 4, 12, 16)
    mask = torch.arange(20) < torch.tensor([[20], [7]])
    alpha, beta = match(q, k, query_mask=mask)
    found = attention(q, k, k, query_mask=mask)
    assert torch.equal(found, attention(q, k, k, alpha=alpha, beta=beta))
    assert not torch.equal(found, attention(q, k, k))
    # Blocks alone have no alpha, so that there is nothing to refuse.
    blocks = {"causal": True, "diag_block": 4, "mix": 0.0}
    assert torch.equal(attention(q, q, q, query_mask=mask, **blocks), attention(q, q, q, **blocks))
