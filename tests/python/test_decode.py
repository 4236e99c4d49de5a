"""Decoding: any pieces give the rows of the causal forward pass; states copy, merge and travel."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from lln_attention import DecodeState, attention

ALPHA, BETA = torch.tensor([1.0, 1.5, 0.7, 2.0]), torch.tensor([1.2, 0.8])


def make(diag_block: int = 0, batch: int = 2) -> DecodeState:
    return DecodeState(
        batch, 4, 16, heads_k=2, dim_v=8, alpha=ALPHA, beta=BETA, diag_block=diag_block, mix=0.3
    )


def inputs(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(2, 4, n, 16), torch.randn(2, 2, n, 16), torch.randn(2, 2, n, 8)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def cut(tensors: tuple[Tensor, ...], first: int, last: int) -> list[Tensor]:
    return [x[:, :, first:last] for x in tensors]


@pytest.mark.parametrize("diag_block", (0, 8))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), ((torch.float32, 2e-6), (torch.bfloat16, 2**-7)), ids=("f32", "bf16")
)
def test_any_pieces(dtype: torch.dtype, tolerance: float, diag_block: int) -> None:
    x = inputs(50, dtype)
    expected = attention(*x, causal=True, alpha=ALPHA, beta=BETA, diag_block=diag_block, mix=0.3)
    state = make(diag_block)
    rows = [state.append(*cut(x, 0, 20)), state.append(*cut(x, 20, 33))]
    rows += [state.step(*cut(x, i, i + 1)) for i in range(33, 50)]
    o = torch.cat([row for row in rows if row is not None], 2)
    assert o.dtype == dtype
    torch.testing.assert_close(o, expected, rtol=0, atol=tolerance * 4)
    assert state.tokens.tolist() == [50, 50]
    torch.testing.assert_close(
        state.read(x[0][:, :, 49:]), o[:, :, 49:], rtol=0, atol=4 * tolerance
    )


def test_mix_by_token_and_lengths() -> None:
    x = inputs(12)
    mix = torch.rand(2, 4, 12)
    state = make(8)
    o = state.append(*x, mix=mix, lengths=torch.tensor([12, 5]))
    assert o is not None and o[1, :, 5:].abs().max() == 0
    expected = attention(*x, causal=True, alpha=ALPHA, beta=BETA, diag_block=8, mix=mix)
    torch.testing.assert_close(o[0], expected[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(o[1, :, :5], expected[1, :, :5], rtol=0, atol=2e-6)
    assert state.tokens.tolist() == [12, 5]
    assert make(8).append(None, x[1], x[2]) is None


def test_merge_is_the_longer_sequence() -> None:
    x = inputs(40)
    for diag_block in (0, 8):
        first, later, both = make(diag_block), make(diag_block), make(diag_block)
        first.append(None, *cut(x, 0, 16)[1:])
        later.append(None, *cut(x, 16, 40)[1:])
        both.append(None, *x[1:])
        first.merge(later)
        assert first.tokens.tolist() == [40, 40]
        torch.testing.assert_close(first.read(x[0]), both.read(x[0]), rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match="no multiple of the block"):
        make_at(x, 3, 8).merge(make_at(x, 8, 8))
    with pytest.raises(ValueError, match="same configuration"):
        make(8).merge(make(4))
    same, other = (DecodeState(2, 4, 16, heads_k=2, dim_v=8, beta=beta) for beta in (1.5, 0.5))
    DecodeState(2, 4, 16, heads_k=2, dim_v=8, beta=torch.full((2,), 1.5)).merge(same)
    with pytest.raises(ValueError, match=r"beta 0\.5 and one of 1\.5"):
        other.merge(same)


@torch.no_grad()
def test_autocast() -> None:
    """Tokens of any type go in under autocast, as projections beside a cache leave them."""
    x = inputs(12)
    plain, cast = make(8), make(8)
    rounded = [y.bfloat16() for y in x]
    expected = [plain.append(*rounded), plain.step(*cut(tuple(rounded), 0, 1))]
    expected.append(plain.read(rounded[0]))
    mixed = (x[0], x[1].bfloat16(), x[2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [cast.append(*mixed), cast.step(*cut(mixed, 0, 1)), cast.read(x[0])]
    for a, b in zip(found, expected, strict=True):
        assert a is not None and b is not None and a.dtype == torch.bfloat16
        assert torch.equal(a, b)


def make_at(x: tuple[Tensor, ...], n: int, diag_block: int) -> DecodeState:
    state = make(diag_block)
    state.append(None, *cut(x, 0, n)[1:])
    return state


def test_copies_go_their_own_way() -> None:
    x = inputs(20)
    state = make_at(x, 10, 8)
    before = state.read(x[0])
    copies = (state.fork(), copy.deepcopy(state), pickle.loads(pickle.dumps(state)))
    state.append(None, *cut(x, 10, 20)[1:])
    for other in copies:
        assert torch.equal(other.read(x[0]), before)
        other.append(None, *cut(x, 10, 20)[1:])
        assert torch.equal(other.read(x[0]), state.read(x[0]))
    other = make(8)
    other.load_bytes(state.to_bytes())
    assert torch.equal(other.read(x[0]), state.read(x[0]))
    with pytest.raises(ValueError, match="bytes"):
        other.load_bytes(state.to_bytes()[:-1])
    with pytest.raises(ValueError, match="corrupt"):
        other.load_bytes(b"".join((state.to_bytes()[:-1], b"?")))


def test_reset_and_size() -> None:
    x = inputs(20)
    state = make_at(x, 20, 8)
    state.reset(0)
    assert state.tokens.tolist() == [0, 20]
    assert state.read(x[0])[0].abs().max() == 0
    size = state.nbytes
    state.append(None, *x[1:])
    assert state.nbytes == size and "batch=2" in repr(state)
    state.reset()
    assert state.tokens.tolist() == [0, 0]
