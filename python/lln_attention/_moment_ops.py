"""Shapes without data and autocast of the ops of moments: ``match``, ``update_moments``, both for
moments taken in pieces, ``head_moments`` and ``calibrate``. No gradient flows through any of them.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _attention_ops as _ops

match = torch.ops.lln.match.default
update_moments = torch.ops.lln.update_moments.default
match_joined = torch.ops.lln.match_joined.default
update_joined = torch.ops.lln.update_joined.default
head_moments = torch.ops.lln.head_moments.default
calibrate = torch.ops.lln.calibrate.default


@torch.library.register_fake("lln::match")
def _match_fake(
    q: Tensor, k: Tensor, keys: Tensor | None, query_mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    sequences = _ops.sequence_count(q, rest[0])
    return (
        q.new_empty(sequences, q.shape[1], dtype=_ops.wide(q)),
        q.new_empty(sequences, k.shape[1], dtype=_ops.wide(q)),
    )


@torch.library.register_fake("lln::update_moments")
def _update_moments_fake(*_: Any) -> None:
    return None


@torch.library.register_fake("lln::match_joined")
def _match_joined_fake(q_moments: Tensor, k_moments: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    dtype = torch.float64 if rest[-1] else torch.float32
    return tuple(x.new_empty(x.shape[:2], dtype=dtype) for x in (q_moments, k_moments))


@torch.library.register_fake("lln::head_moments")
def _head_moments_fake(x: Tensor, tokens: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    return torch.empty(
        _ops.sequence_count(x, cu_seqlens), x.shape[1], 3, dtype=torch.float64, device="cpu"
    )


@torch.library.register_fake("lln::calibrate")
def _calibrate_fake(
    q_moments: Tensor, k_moments: Tensor, heads: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q_moments.new_empty(heads, dtype=torch.float32),
        k_moments.new_empty(len(k_moments), dtype=torch.float32),
        k_moments.new_empty((), dtype=torch.int64),
    )


_ops.register_autocast(match, 0, 2)
_ops.register_autocast(update_moments, 1, 3)


def merged(sets: Tensor) -> Tensor:
    """Moments (count, mean, squared deviations) of the union of disjoint sets.

    [sets, ..., 3] to [..., 3], the same bits for the same order of sets.
    """
    count, mean, m2 = sets.unbind(-1)
    total = count.sum(0)
    middle = (count * mean).sum(0) / total.clamp(min=1)
    spread = m2.sum(0) + (count * (mean - middle).square()).sum(0)
    return torch.stack([total, middle, spread], dim=-1)
