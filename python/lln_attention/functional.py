"""LLN attention as functions of tensors, shaped like ``scaled_dot_product_attention``."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import _attention_ops as _ops
from . import _moment_ops as _moments
from ._library import python_error

# Modes of matching that read the q and k of one call, or nothing.
MODES = ("none", "paper", "per_head", "exact", "entropy")

_ScalesAndWeights = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    key_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    query_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Linear Log-Normal attention, alone or mixed with block-diagonal softmax attention.

    Time and memory are linear in the number of tokens. A row without a key that counts is zero, and
    so are its gradients. Views of any layout are taken without a copy as long as channels are
    contiguous; the result has the order of `q` in memory.

    Args:
        q: Queries [B, H, N, D]; float32, bfloat16, float16, or float64 (reference kernels, slow).
        k: Keys [B, Hk, M, D]. Hk divides H: key heads are shared by groups of query heads.
        v: Values [B, Hk, M, Dv].
        causal: Row i sees keys j <= i. Needs alpha and beta that know nothing of the sequence.
        diag_block: Block of the block-diagonal part (LLN+Diag); 0 for LLN alone.
        mix: Share of LLN in LLN+Diag: one number, or a tensor [H], [H, Dv] or [B, H, N]. The number
            0.0 gives the block-diagonal part alone, which has no alpha and beta.
        lln_weight: Weight of LLN, with `diag_weight` in place of `mix`; shaped as `mix`.
        diag_weight: Weight of the block-diagonal part.
        alpha: Scale of the queries: a number, [H], or [B, H] (packed: one row per sequence).
        beta: Scale of the keys: a number, [Hk], or [B, Hk]. Both or none are given.
        matching: Where alpha and beta come from if not given: "per_head", "exact", "entropy",
            "paper" or "none". "auto" is per_head, and none for features other than exp.
        feature: "exp", "elu", "relu", "softplus", or "power2" and other powers.
        key_mask: bool [B, M], True where a key counts.
        key_lengths: int32 or int64 [B]; the first so many keys count.
        query_mask: bool [B, N] for the moments that set alpha; in self-attention the keys' mask
            holds for queries, too. Nothing else depends on it.
        cu_seqlens: Packed sequences, int32 or int64 [S + 1]: batch is 1, and sequence s holds rows
            cu_seqlens[s] to cu_seqlens[s + 1].
        cu_seqlens_k: The same for keys, where it differs.

    Returns:
        [B, H, N, Dv] of the type of `q`.

    Raises:
        ValueError: arguments contradict each other.
        NotImplementedError: no kernel of this build takes the call, or a derivative is wanted that
            is not there: forward mode, torch.func, gradients of gradients.

    Example:
        >>> import torch
        >>> from lln_attention import attention
        >>> q = k = v = torch.randn(2, 4, 128, 32)
        >>> attention(q, k, v).shape
        torch.Size([2, 4, 128, 32])
        >>> attention(q, k, v, diag_block=64, causal=True, alpha=2.0, beta=2.0).shape
        torch.Size([2, 4, 128, 32])
    """
    tensors, kind, fixed_mix, matching, fixed_alpha, fixed_beta = settle(
        q, causal, diag_block, mix, lln_weight, diag_weight, alpha, beta, matching, feature
    )
    arguments = (
        q if q.stride(-1) == 1 else q.contiguous(),
        k if k.stride(-1) == 1 else k.contiguous(),
        v if v.stride(-1) == 1 else v.contiguous(),
        *tensors, _keys(key_mask, key_lengths), cu_seqlens, cu_seqlens_k,
        kind, causal, fixed_mix, feature, matching, query_mask, fixed_alpha, fixed_beta,
    )  # fmt: skip
    _ops.refuse_tangents(*arguments[:7])
    try:
        if torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in arguments[:7]
        ):
            return _ops.forward(*arguments)[0]
        return _ops.attention(*arguments)
    except RuntimeError as error:
        raise python_error(error) from None


def settle(
    q: Tensor,
    causal: bool,
    diag_block: int,
    mix: float | Tensor,
    lln_weight: float | Tensor | None,
    diag_weight: float | Tensor | None,
    alpha: float | Tensor | None,
    beta: float | Tensor | None,
    matching: str,
    feature: str,
) -> tuple[_ScalesAndWeights, str, float, str, float | None, float | None]:
    """Arguments of `attention` as the ops take them.

    Returns:
        The tensors alpha, beta, mix or lln_weight, diag_weight; kind, mix as a number, the mode of
        matching, alpha and beta as numbers.
    """
    kind = "lln" if diag_block == 0 else f"lln+diag{diag_block}"
    weight, second, fixed_mix = _weights(q, mix, lln_weight, diag_weight, diag_block)
    if weight is None and fixed_mix == 0.0 and diag_block != 0:
        kind = f"diag{diag_block}"
    fixed_alpha = fixed_beta = None
    if alpha is not None or beta is not None:
        _check_scales(alpha, beta, matching)
        matching = "none"
        if kind[0] == "d":
            alpha = beta = None
        alpha, fixed_alpha = _scale(q, alpha)
        beta, fixed_beta = _scale(q, beta)
    else:
        matching = _check_matching(matching, causal and kind[0] == "l", feature)
    return (alpha, beta, weight, second), kind, fixed_mix, matching, fixed_alpha, fixed_beta


def _check_matching(matching: str, causal: bool, feature: str) -> str:
    """The mode of a call without alpha and beta."""
    if matching == "auto":
        matching = "none" if feature != "exp" else "per_head"
    elif matching not in MODES:
        raise ValueError(
            f"unknown matching {matching!r}: expected auto or one of {', '.join(MODES)}"
        )
    if causal and matching != "none":
        raise ValueError(
            f'causal attention needs alpha and beta: matching="{matching}" reads the whole '
            "sequence, so that a row would depend on its future. Calibrate them once on data "
            "(lln_attention.calibrate, or `lln calibrate`) and give alpha= and beta=, or say "
            'matching="none" for alpha = beta = 1'
        )
    return matching


def _check_scales(alpha: float | Tensor | None, beta: float | Tensor | None, matching: str) -> None:
    if alpha is None or beta is None:
        given, missing = ("alpha", "beta") if beta is None else ("beta", "alpha")
        raise ValueError(f"{given} is given and {missing} is not: give both, or none of them")
    if matching != "auto":
        raise ValueError(
            f'matching="{matching}" finds alpha and beta, which are given: leave out one of the two'
        )


def _scale(q: Tensor, x: float | Tensor | None) -> tuple[Tensor | None, float | None]:
    """A scale as the ops take it: a tensor or a number."""
    return (_ops.beside(q, x), None) if isinstance(x, Tensor) else (None, x)


def _weights(
    q: Tensor,
    mix: float | Tensor,
    lln_weight: float | Tensor | None,
    diag_weight: float | Tensor | None,
    diag_block: int,
) -> tuple[Tensor | None, Tensor | None, float]:
    """The weights as the ops take them: mix or lln_weight, diag_weight, and mix as a number."""
    if lln_weight is None and diag_weight is None:
        if not isinstance(mix, Tensor):
            return None, None, mix
        if diag_block == 0:
            raise ValueError("mix is a tensor, and LLN alone (diag_block=0) has nothing to mix")
        return _ops.beside(q, mix), None, 0.5
    if diag_block == 0:
        raise ValueError(
            "lln_weight and diag_weight weigh LLN against blocks, and LLN alone (diag_block=0) has "
            "none"
        )
    if lln_weight is None or diag_weight is None:
        given, missing = ("lln", "diag") if diag_weight is None else ("diag", "lln")
        raise ValueError(
            f"{given}_weight is given and {missing}_weight is not: give both, or mix in their place"
        )
    if isinstance(mix, Tensor) or mix != 0.5:
        raise ValueError("mix is given beside lln_weight and diag_weight, which take its place")
    return _ops.beside(q, lln_weight), _ops.beside(q, diag_weight), 0.5


def _keys(
    mask: Tensor | None,
    lengths: Tensor | None,
    names: tuple[str, str] = ("key_mask", "key_lengths"),
) -> Tensor | None:
    """Which tokens count, as the ops take it: they tell a mask from lengths by its dimensions."""
    if mask is not None and lengths is not None:
        raise ValueError(f"{names[0]} and {names[1]} are given: give one of them")
    given = mask if lengths is None else lengths
    if given is None or given.ndim == (1 if mask is None else 2):
        return given
    name, expected = (names[0], "[batch, tokens]") if lengths is None else (names[1], "[batch]")
    raise ValueError(f"{name} has shape {list(given.shape)}: expected {expected}")


def match(
    q: Tensor,
    k: Tensor,
    *,
    mode: str = "per_head",
    key_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    query_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    running: Tensor | None = None,
    causal: bool = False,
    cross: bool = False,
) -> tuple[Tensor, Tensor]:
    """alpha and beta with which LLN concentrates as softmax attention does on the same q and k.

    No gradient flows through them.

    Args:
        q: Queries [B, H, N, D].
        k: Keys [B, Hk, M, D].
        mode: "per_head" (variance of ln P, by a fitted line), "exact" (by measured tables),
            "entropy" (entropy of rows), "paper" (one pair for all heads), "ema" (from `running`)
            or "none" (ones).
        key_mask: As in `attention`, and so are the arguments up to `cu_seqlens_k`.
        key_lengths: The first so many keys count.
        query_mask: bool [B, N], True where a query counts.
        cu_seqlens: Packed sequences.
        cu_seqlens_k: The same for keys, where it differs.
        running: Running moments of mode "ema", float64 [2, Hk, 3]; see `update_moments`.
        causal: The attention is causal, which refuses modes that read the whole sequence.
        cross: q and k are of different tokens even where there are as many.

    Returns:
        alpha [S, H] and beta [S, Hk], S the batch or the packed sequences; float32.

    Example:
        >>> import torch
        >>> from lln_attention import match
        >>> q, k = torch.randn(2, 4, 128, 32), torch.randn(2, 2, 128, 32)
        >>> alpha, beta = match(q, k, mode="entropy")
        >>> alpha.shape, beta.shape
        (torch.Size([2, 4]), torch.Size([2, 2]))
    """
    keys = _keys(key_mask, key_lengths)
    try:
        return _moments.match(
            *_readable(q, k), keys, query_mask, cu_seqlens, cu_seqlens_k, running, mode, causal,
            cross,
        )  # fmt: skip
    except RuntimeError as error:
        raise python_error(error) from None


def update_moments(
    running: Tensor,
    q: Tensor,
    k: Tensor,
    *,
    decay: float = 0.99,
    key_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    query_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cross: bool = False,
) -> None:
    """Takes the moments of q and k into running moments, for mode "ema" of `match`.

    Call it after `match`, so that a step uses the steps before it.

    Args:
        running: float64 [2, Hk, 3], zero before the first step; changed in place.
        q: Queries [B, H, N, D].
        k: Keys [B, Hk, M, D].
        decay: Weight that a step leaves to those before it.
        key_mask: As in `match`, and so are the others.
        key_lengths: The first so many keys count.
        query_mask: bool [B, N], True where a query counts.
        cu_seqlens: Packed sequences.
        cu_seqlens_k: The same for keys, where it differs.
        cross: q and k are of different tokens even where there are as many.

    Example:
        >>> import torch
        >>> from lln_attention import match, update_moments
        >>> running = torch.zeros(2, 4, 3, dtype=torch.float64)
        >>> q = k = torch.randn(8, 4, 64, 32)
        >>> update_moments(running, q, k)
        >>> alpha, beta = match(q, k, mode="ema", running=running)
    """
    keys = _keys(key_mask, key_lengths)
    try:
        _moments.update_moments(
            running, *_readable(q, k), keys, query_mask, cu_seqlens, cu_seqlens_k, decay, cross
        )
    except RuntimeError as error:
        raise python_error(error) from None


@dataclass(frozen=True)
class Moments:
    """Moments of each sequence and head over all channels of the tokens that count; float64."""

    count: Tensor
    mean: Tensor
    variance: Tensor


def head_moments(
    x: Tensor,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Moments:
    """Mean and variance of every sequence and head, in one pass.

    With a tensor on a device this call waits for it.

    Args:
        x: [B, H, N, D].
        mask: bool [B, N], True where a token counts.
        lengths: int32 or int64 [B]: the first so many tokens count.
        cu_seqlens: Packed sequences.

    Returns:
        count, mean and unbiased variance, each [S, H] in host memory.

    Example:
        >>> import torch
        >>> from lln_attention import head_moments
        >>> x = torch.randn(2, 3, 64, 16, dtype=torch.float64)
        >>> torch.allclose(head_moments(x).variance, x.flatten(2).var(-1))
        True
    """
    tokens = _keys(mask, lengths, ("mask", "lengths"))
    try:
        found = _moments.head_moments(*_readable(x), tokens, cu_seqlens)
    except RuntimeError as error:
        raise python_error(error) from None
    count, mean, m2 = found.unbind(-1)
    return Moments(count, mean, m2 / (count - 1).clamp(min=1))


def _readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors outside of autograd, in a layout whose channels are contiguous."""
    return tuple(x.detach() if x.stride(-1) == 1 else x.detach().contiguous() for x in tensors)
