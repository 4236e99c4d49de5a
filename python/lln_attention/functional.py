"""LLN attention as functions of tensors, shaped like ``scaled_dot_product_attention``."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from torch import Tensor

from . import _attention_ops as _ops
from ._library import python_error

MATCHINGS = ("auto", "none", "paper", "per_head", "exact", "entropy")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    diag_block: int = 0,
    mix: float | Tensor = 0.5,
    lln_weight: Tensor | None = None,
    diag_weight: Tensor | None = None,
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
            holds for queries, too.
        cu_seqlens: Packed sequences, int32 or int64 [S + 1]: batch is 1, and sequence s holds rows
            cu_seqlens[s] to cu_seqlens[s + 1].
        cu_seqlens_k: The same for keys, where it differs.

    Returns:
        [B, H, N, Dv] of the type of `q`.

    Raises:
        ValueError: arguments contradict each other; the text names all that do.
        NotImplementedError: no kernel of this build takes the call.

    Example:
        >>> import torch
        >>> from lln_attention import attention
        >>> q = k = v = torch.randn(2, 4, 128, 32)
        >>> attention(q, k, v).shape
        torch.Size([2, 4, 128, 32])
        >>> attention(q, k, v, diag_block=64, causal=True, alpha=2.0, beta=2.0).shape
        torch.Size([2, 4, 128, 32])
    """
    if diag_block == 0:
        kind = "lln"
    elif isinstance(mix, Tensor) or mix != 0.0 or lln_weight is not None:
        kind = f"lln+diag{diag_block}"
    else:
        kind = f"diag{diag_block}"
    if alpha is not None or beta is not None:
        alpha, beta = _scales(alpha, beta, q, matching)
    elif matching == "auto":
        matching = _default_matching(causal and kind[0] == "l", feature)
    if isinstance(mix, Tensor):
        mix_tensor: Tensor | None = mix.to(_ops.wide(q))
        fixed_mix = 0.5
    else:
        mix_tensor = None
        fixed_mix = mix
    save = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    try:
        return _ops.forward(  # type: ignore[no-any-return]
            q if q.stride(-1) == 1 else q.contiguous(),
            k if k.stride(-1) == 1 else k.contiguous(),
            v if v.stride(-1) == 1 else v.contiguous(),
            alpha,
            beta,
            mix_tensor,
            lln_weight,
            diag_weight,
            key_mask,
            key_lengths,
            query_mask,
            cu_seqlens,
            cu_seqlens_k,
            kind,
            causal,
            fixed_mix,
            feature,
            matching,
            save,
        )[0]
    except RuntimeError as error:
        raise python_error(error) from None


def _default_matching(causal: bool, feature: str) -> str:
    if feature != "exp":
        return "none"
    if causal:
        raise ValueError(
            'causal attention needs alpha and beta: matching="auto" would read the whole sequence, '
            "so that a row would depend on its future. Calibrate them once on data "
            "(lln_attention.calibrate, or `lln calibrate`) and give alpha= and beta=, or say "
            'matching="none" for alpha = beta = 1'
        )
    return "per_head"


def _scales(
    alpha: float | Tensor | None, beta: float | Tensor | None, q: Tensor, matching: str
) -> tuple[Tensor, Tensor]:
    if alpha is None or beta is None:
        given, missing = ("alpha", "beta") if beta is None else ("beta", "alpha")
        raise ValueError(f"{given} is given and {missing} is not: give both, or none of them")
    if matching != "auto":
        raise ValueError(
            f'matching="{matching}" finds alpha and beta, which are given: leave out one of the two'
        )
    return _scale(alpha, q), _scale(beta, q)


def _scale(x: float | Tensor, q: Tensor) -> Tensor:
    if isinstance(x, Tensor):
        return x.to(_ops.wide(q))
    return torch.full((), x, dtype=_ops.wide(q), device=q.device)
