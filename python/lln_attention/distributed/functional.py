"""`attention` over pieces, and where its alpha and beta come from."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _attention_ops as _ops
from .. import _moment_ops as _moments
from .. import functional as _uncut
from .._library import python_error
from .autograd import Bidirectional, InOrder
from .calls import Calls, Inputs
from .pieces import Pieces


@torch.compiler.disable
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pieces: Pieces,
    *,
    causal: bool = False,
    diag_block: int = 0,
    mix: float | Tensor = 0.5,
    lln_weight: float | Tensor | None = None,
    diag_weight: float | Tensor | None = None,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: str = "auto",
    feature: str = "exp",
) -> Tensor:
    """`lln_attention.attention` of a sequence that lies in pieces on several processes.

    Every process of the group calls it with its piece, and runs the backward pass where one does:
    each takes part in the exchanges of the others, also with a piece without tokens. They exchange
    the states of their keys, in the backward pass the gradients of these: dim (1 + dim_v) numbers
    for each sequence and key head, whatever the number of tokens. Blocks exchange nothing.

    Gradients are those of the sum of all processes' losses. Those of alpha, beta, mix and the
    weights are the part of this process, as for every parameter: who shares parameters between
    processes sums them, where DistributedDataParallel by itself takes the mean.

    Args:
        q: Queries of the piece, [B, H, tokens, D].
        k: Keys [B, Hk, tokens, D].
        v: Values [B, Hk, tokens, Dv].
        pieces: How the sequence is cut, and which of its tokens count.
        causal: Row i sees keys j <= i of the whole sequence. Needs alpha and beta that know nothing
            of the sequence.
        diag_block: Block of the block-diagonal part (LLN+Diag); 0 for LLN alone. No piece may begin
            inside a block.
        mix: Share of LLN in LLN+Diag: one number, or a tensor [H], [H, Dv] or [B, H, tokens].
        lln_weight: Weight of LLN, with `diag_weight` in place of `mix`; shaped as `mix`.
        diag_weight: Weight of the block-diagonal part.
        alpha: Scale of the queries: a number, [H], or [B, H] (packed: one row per sequence). The
            same on all processes, and so is `beta`.
        beta: Scale of the keys: a number, [Hk], or [B, Hk]. Both or none are given.
        matching: Where alpha and beta come from if not given: as in `lln_attention.attention`, from
            the moments of the whole sequences, which are exchanged.
        feature: "exp", "elu", "relu", "softplus", or "power2" and other powers.

    Returns:
        [B, H, tokens, Dv] of the type of `q`: what the uncut sequence gives for these rows.

    Raises:
        ValueError: arguments contradict each other or the pieces. What all processes can see is
            raised on all of them; what is wrong on one alone, as a shape, is raised there before it
            takes part in any exchange.
        NotImplementedError: no kernel of this build takes the call, or a derivative is wanted that
            is not there: forward mode, torch.func, gradients of gradients.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from lln_attention.distributed import Pieces, attention
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q = k = v = torch.randn(1, 4, 1000, 32, requires_grad=True)
        >>> attention(q, k, v, Pieces(None, 1000), diag_block=64).sum().backward()
        >>> q.grad.shape
        torch.Size([1, 4, 1000, 32])
        >>> dist.destroy_process_group()
    """
    given: dict[str, Any] = {
        "causal": causal, "diag_block": diag_block, "mix": mix, "lln_weight": lln_weight,
        "diag_weight": diag_weight, "alpha": alpha, "beta": beta, "matching": matching,
        "feature": feature,
    }  # fmt: skip
    tensors, kind, fixed_mix, matching, *numbers = _uncut.settle(q, **given)
    q, k, v = (_as_ops_take(x) for x in (q, k, v))
    x = Inputs(q, k, v, *tensors)
    for name, number in zip(("alpha", "beta"), numbers, strict=True):
        if number is not None:
            x = x._replace(**{name: _ops.beside(q, number)})
    _ops.refuse_tangents(*x)
    calls = Calls(pieces, kind, causal, fixed_mix, feature)
    try:
        _check(calls, x, given)
        if diag_block:
            pieces.check_blocks(diag_block)
        if calls.has_lln():
            if matching != "none":
                alpha, beta = _match(x.q, x.k, pieces, matching, feature)
                x = x._replace(alpha=alpha, beta=beta)
            x = _per_head(x)
        if causal or not calls.has_lln():
            return InOrder.apply(calls, *x)
        parts = Bidirectional.apply(calls, *x[:5])
    except RuntimeError as error:
        raise python_error(error) from None
    return parts[0] if kind == "lln" else _weigh(parts, x.weight, x.second, fixed_mix)


@torch.compiler.disable
def update_moments(
    running: Tensor, q: Tensor, k: Tensor, pieces: Pieces, *, decay: float = 0.99
) -> None:
    """Takes the moments of q and k of all pieces into running moments, the same on all processes.

    Args:
        running: float64 [2, Hk, 3], as in `lln_attention.update_moments`; changed in place.
        q: Queries of the piece, [B, H, tokens, D].
        k: Keys [B, Hk, tokens, D].
        pieces: How the sequence is cut, and which of its tokens count.
        decay: Weight that a step leaves to those before it.

    Raises:
        ValueError: `running` is of another shape or type, or q or k have other tokens than the
            piece.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from lln_attention.distributed import Pieces, update_moments
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> running = torch.zeros(2, 4, 3, dtype=torch.float64)
        >>> q = k = torch.randn(8, 4, 64, 32)
        >>> update_moments(running, q, k, Pieces(None, 64))
        >>> dist.destroy_process_group()
    """
    _check_tokens(pieces, q=q, k=k)
    try:
        moments = _joined_moments(q.detach(), k.detach(), pieces)
        on_host = running.cpu()
        _moments.update_joined(on_host, *moments, q.shape[3], decay)
        running.copy_(on_host)
    except RuntimeError as error:
        raise python_error(error) from None


def _as_ops_take(x: Tensor) -> Tensor:
    """In the type of autocast, with contiguous channels."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(calls: Calls, x: Inputs, given: dict[str, Any]) -> None:
    """Refuses what `lln_attention.attention` refuses, before anything travels."""
    pieces = calls.pieces
    _check_tokens(pieces, q=x.q, k=x.k, v=x.v)
    try:
        calls.check(x)
    except (IndexError, RuntimeError):
        # The text of the same call with all tokens, whose numbers are the caller's.
        is_mask = pieces.keys is not None and pieces.keys.ndim == 2
        _uncut.attention(
            *x[:3], **given, key_mask=pieces.keys if is_mask else None,
            key_lengths=None if is_mask else pieces.keys, cu_seqlens=pieces.cu_seqlens,
        )  # fmt: skip
        raise


def _check_tokens(pieces: Pieces, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.ndim == 4 and x.shape[2] != pieces.tokens:
            raise ValueError(
                f"{name} has {x.shape[2]} tokens: the piece of rank {pieces.rank} has "
                f"{pieces.tokens}"
            )


def _match(
    q: Tensor, k: Tensor, pieces: Pieces, matching: str, feature: str
) -> tuple[Tensor, Tensor]:
    """alpha [S, H] and beta [S, Hk] from the whole sequences."""
    wide = q.dtype == torch.float64
    moments = _joined_moments(q.detach(), k.detach(), pieces)
    alpha, beta = _moments.match_joined(*moments, q.shape[3], matching, False, feature, wide)
    return alpha.to(q.device), beta.to(q.device)


def _joined_moments(q: Tensor, k: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """Moments of the whole sequences, [S, H, 3] and [S, Hk, 3] in host memory."""
    own = [_moments.head_moments(_as_ops_take(x), pieces.keys, pieces.cu_seqlens) for x in (q, k)]
    # In the order of ranks, and so to the same bits on all of them.
    joined = _moments.merged(pieces.gather(torch.cat(own, 1)))
    of_q, of_k = joined.split((q.shape[1], k.shape[1]), 1)
    return of_q.contiguous(), of_k.contiguous()


def _per_head(x: Inputs) -> Inputs:
    """Scales as [1 or S, heads], and weights with heads, so that a part of them can be taken."""
    (_, heads, _, _), (_, heads_k, _, _) = x.q.shape, x.k.shape

    def scale(given: Tensor | None, heads: int) -> Tensor:
        given = _ops.beside(x.q, 1.0) if given is None else given  # matching="none"
        return (given if given.ndim == 2 else given.reshape(1, -1)).expand(-1, heads)

    def weight(given: Tensor | None) -> Tensor | None:
        return given if given is None or given.ndim > 2 else given.expand(heads, *given.shape[1:])

    return x._replace(
        alpha=scale(x.alpha, heads), beta=scale(x.beta, heads_k),
        weight=weight(x.weight), second=weight(x.second),
    )  # fmt: skip


def _weigh(
    parts: tuple[Tensor, ...], weight: Tensor | None, second: Tensor | None, mix: float
) -> Tensor:
    """LLN and Diag with their weights, through which gradients flow."""
    lln, diag = parts
    if weight is None:  # the core has the number as f32
        weight = _ops.beside(lln, torch.tensor(mix, dtype=torch.float32, device=lln.device))
    second = 1 - weight if second is None else second

    def over(x: Tensor) -> Tensor:  # against [B, H, N, Dv]
        return x[..., None] if x.ndim == 3 else x[:, None] if x.ndim == 2 else x.reshape(-1, 1, 1)

    return (over(weight) * lln + over(second) * diag).to(lln.dtype)
