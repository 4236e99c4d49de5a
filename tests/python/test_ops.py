"""What torch asks of an op: opcheck of each of them, gradcheck, refusal of second gradients."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from lln_attention import attention

Q, K, V = (2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 6)


def tensors(dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    return [torch.randn(s, dtype=dtype, requires_grad=grad) for s in (Q, K, V)]


def options(kind: str = "lln", causal: bool = False) -> tuple[Any, ...]:
    return kind, causal, 0.5, "exp"


# Arguments after q, k and v: alpha, beta, mix, diag_weight, keys, cu_seqlens, cu_seqlens_k.
NONE = (None,) * 7
GIVEN = (torch.rand(4), torch.rand(2), None, None, None, None, None)
WEIGHTS = (torch.rand(2, 4), torch.rand(2), torch.rand(4), torch.rand(4), None, None, None)
MASKED = (torch.rand(()), torch.rand(()), None, None, torch.rand(2, 9) < 0.7, None, None)
CALLS = (
    (NONE, options(), "per_head"),
    (NONE, options("diag4", True), "none"),
    (GIVEN, options("lln", True), "none"),
    (WEIGHTS, options("lln+diag4"), "none"),
    (MASKED, options("lln+diag4", True), "none"),
)


@pytest.mark.parametrize("call", CALLS, ids=("matched", "diag", "causal", "weights", "masked"))
def test_attention_ops(call: tuple[Any, ...]) -> None:
    rest, settings, matching = call
    opcheck(torch.ops.lln.attention.default, (*tensors(), *rest, *settings, matching))
    for transposed in (False, True):
        q, k, v = tensors(grad=True)
        if transposed:
            q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        opcheck(torch.ops.lln.forward.default, (q, k, v, *rest, *settings, matching))
    q, k, v = tensors()
    alpha, beta = (torch.rand(4), torch.rand(2)) if rest[0] is None else rest[:2]
    saved = torch.ops.lln.forward(q, k, v, alpha, beta, *rest[2:], *settings, "none")[1:3]
    g = torch.randn(2, 4, 9, 6)
    given = (g, q, k, v, alpha, beta, *rest[2:], *saved, *settings)
    for wanted in (False, True):
        opcheck(torch.ops.lln.backward.default, (*given, wanted and "lln" in settings[0], wanted))


def test_scales_that_are_no_tensors() -> None:
    """Numbers, one number beside a tensor, and matching with a mask of queries."""
    mask = torch.rand(2, 9) < 0.7
    beta_given = (None, torch.rand(2), *NONE[2:])
    for rest, extra in (
        (NONE, (None, 1.5, 0.5)),
        (beta_given, (None, 1.5, None)),
        (NONE, (mask, None, None)),
    ):
        settings = (*options(), "per_head", *extra)
        opcheck(torch.ops.lln.attention.default, (*tensors(), *rest, *settings))
        opcheck(torch.ops.lln.forward.default, (*tensors(grad=True), *rest, *settings))


def test_moment_ops() -> None:
    q, k, _ = tensors()
    mask = torch.rand(2, 9) < 0.7
    running = torch.rand(2, 2, 3, dtype=torch.float64)
    opcheck(
        torch.ops.lln.match.default, (q, k, mask, None, None, None, None, "entropy", False, False)
    )
    opcheck(
        torch.ops.lln.match.default, (q, k, None, None, None, None, running, "ema", True, False)
    )
    opcheck(
        torch.ops.lln.update_moments.default, (running, q, k, mask, None, None, None, 0.9, False)
    )
    opcheck(torch.ops.lln.head_moments.default, (q, mask, None))
    moments = torch.tensor([[80.0, 0.1, 70.0], [80.0, 0.0, 90.0]], dtype=torch.float64)
    opcheck(torch.ops.lln.calibrate.default, (moments, moments, 4, 8, 2, "entropy"))


def test_piece_ops() -> None:
    q, k, v = tensors()
    state = (torch.randn(2, 2, 1, 8), torch.randn(2, 2, 8, 6))
    origins = torch.tensor([-2, 3])
    inputs = (q, k, v, *WEIGHTS, *state, origins, *options("lln+diag4", True))
    written = [torch.empty(x.shape) for x in (torch.empty(2, 4, 9, 6), *state)]
    opcheck(torch.ops.lln.piece_forward.default, (*written, *inputs))
    gradients = [torch.empty(x.shape) for x in (q, k, v, *WEIGHTS[:4], *state)]
    opcheck(
        torch.ops.lln.piece_backward.default,
        (*gradients, torch.randn(2, 4, 9, 6), *state, *inputs),
    )
    moments = [torch.rand(2, heads, 3, dtype=torch.float64) + 50 for heads in (4, 2)]
    for wide in (False, True):
        opcheck(torch.ops.lln.match_joined.default, (*moments, 8, "exact", False, "exp", wide))
    running = torch.rand(2, 2, 3, dtype=torch.float64)
    opcheck(torch.ops.lln.update_joined.default, (running, *moments, 8, 0.9))


def test_decode_ops() -> None:
    q, k, v = tensors()
    config = ([2, 4, 2, 8, 6], "lln+diag4", 0.5, "exp")
    size = torch.ops.lln.decode_bytes(config[0], config[1], config[3], False)

    def state() -> tuple[Tensor, Tensor]:
        memory, tokens = torch.empty(size, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
        torch.ops.lln.decode_reset(memory, tokens, -1, *config)
        return memory, tokens

    alpha, beta = torch.rand(4), torch.rand(2)
    rest = (alpha, beta, None, None)
    one = [x[:, :, :1] for x in (q, k, v)]
    lengths = torch.tensor([9, 4])
    ops = torch.ops.lln
    opcheck(ops.decode_append.default, (*state(), q, k, v, *rest, lengths, *config))
    opcheck(ops.decode_append.default, (*state(), None, k, v, *rest, None, *config))
    opcheck(ops.decode_step.default, (*state(), *one, *rest, *config))
    opcheck(ops.decode_read.default, (*state(), q, alpha, None, None, *config))
    opcheck(ops.decode_reset.default, (*state(), 1, *config))
    opcheck(ops.decode_merge.default, (*state(), *state(), *config))
    opcheck(ops.decode_tokens.default, (*state(), *config))
    opcheck(ops.decode_save.default, (*state(), *config))
    saved = ops.decode_save(*state(), *config)
    opcheck(ops.decode_load.default, (*state(), saved, *config))


def test_instrument_ops() -> None:
    q = torch.randn(1, 2, 16, 8)
    opcheck(
        torch.ops.lln.analyze.default,
        (q, q, None, None, "softmax,lln", "per_head", False, 0, 0, "layer"),
    )


@pytest.mark.parametrize("feature", ("exp", "softplus"))
@pytest.mark.parametrize("diag_block", (0, 4))
@pytest.mark.parametrize("causal", (False, True))
def test_gradcheck(causal: bool, diag_block: int, feature: str) -> None:
    mask = torch.rand(2, 9) < 0.8
    names = ["alpha", "beta"] + ["mix"] * (diag_block > 0)
    parameters = [
        (torch.rand(n, dtype=torch.float64) + 0.5).requires_grad_() for n in (4, 2, 4)[: len(names)]
    ]

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        return attention(
            q, k, v, causal=causal, diag_block=diag_block, feature=feature, key_mask=mask,
            **dict(zip(names, rest, strict=True)),
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, (*tensors(torch.float64, True), *parameters))


def test_gradients_of_gradients_are_refused() -> None:
    q, k, v = tensors(grad=True)
    (dq,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        dq.sum().backward()


def test_the_op_without_a_state_refuses_gradients() -> None:
    o = torch.ops.lln.attention(*tensors(grad=True), *NONE, *options(), "per_head")
    with pytest.raises(NotImplementedError, match=r"lln_attention\.attention"):
        o.sum().backward()
