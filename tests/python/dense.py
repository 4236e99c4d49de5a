"""LLN attention by its definition: the whole matrix of weights, in plain torch and float64."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import torch
from torch import Tensor


def log_feature(x: Tensor, feature: str) -> Tensor:
    """ln phi(x)."""
    if feature == "exp":
        return x
    if feature == "elu":
        return torch.where(x <= 0, x, torch.log1p(x.clamp(min=0)))
    if feature == "relu":
        return torch.log(x.clamp(min=0) + 1e-3)
    if feature == "softplus":
        return torch.log(torch.nn.functional.softplus(x))
    power = float(feature.removeprefix("power"))
    return (power * torch.log(x.abs())).clamp(min=math.log(1e-12))


def _weights(visible: Tensor, scores: Tensor) -> Tensor:
    """Softmax over the visible keys; zeros where there are none."""
    scores = scores.masked_fill(~visible, -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = torch.exp(scores - top)
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def _over_heads(x: float | Tensor, like: Tensor) -> Tensor:
    """A scale, [], [H] or [B, H], against [B, H, N, D]."""
    x = torch.as_tensor(x, dtype=like.dtype)
    return x.reshape(*([1] * (2 - x.dim())), *x.shape, 1, 1)


def _over_weights(x: float | Tensor, like: Tensor) -> Tensor:
    """A weight, [], [H], [H, Dv] or [B, H, N], against [B, H, N, Dv]."""
    x = torch.as_tensor(x, dtype=like.dtype)
    if x.dim() == 2:
        return x[None, :, None, :]
    return x[..., None] if x.dim() == 3 else x.reshape(1, -1, 1, 1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    alpha: float | Tensor,
    beta: float | Tensor,
    causal: bool = False,
    diag_block: int = 0,
    mix: float | Tensor = 0.5,
    lln_weight: Tensor | None = None,
    diag_weight: Tensor | None = None,
    feature: str = "exp",
    key_mask: Tensor | None = None,
) -> Tensor:
    """What `lln_attention.attention` computes, for one batch that is not packed."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    a = log_feature(_over_heads(alpha, q) * q, feature)
    u = log_feature(_over_heads(beta, k) * k, feature).repeat_interleave(group, 1)
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    (batch, _, rows, dim), columns = q.shape, k.shape[2]
    if key_mask is None:
        key_mask = torch.ones(batch, columns, dtype=torch.bool)
    visible = key_mask[:, None, None, :].expand(batch, 1, rows, columns)
    if causal:
        visible = visible & torch.ones(rows, columns, dtype=torch.bool).tril()
    scores = torch.logsumexp(a[:, :, :, None, :] + u[:, :, None, :, :], -1)
    lln = _weights(visible, scores) @ v
    if not diag_block:
        return lln
    first = torch.where(key_mask.any(1), key_mask.int().argmax(1), 0)
    block = [(torch.arange(n)[None] - first[:, None]).div(diag_block, rounding_mode="floor")
             for n in (rows, columns)]  # fmt: skip
    same = block[0][:, None, :, None] == block[1][:, None, None, :]
    diag = _weights(visible & same, q @ k.mT / math.sqrt(dim)) @ v
    if lln_weight is not None and diag_weight is not None:
        return _over_weights(lln_weight, v) * lln + _over_weights(diag_weight, v) * diag
    mix = _over_weights(mix, v)
    return mix * lln + (1 - mix) * diag
