"""Shapes without data of the ops of pieces: ``piece_forward`` and ``piece_backward``, which write
into their arguments, ``match_joined`` and ``update_joined``. Gradients of a sequence in pieces are
made by ``lln_attention.distributed``, which calls them.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _library

_library.load()

piece_forward = torch.ops.lln.piece_forward.default
piece_backward = torch.ops.lln.piece_backward.default
match_joined = torch.ops.lln.match_joined.default
update_joined = torch.ops.lln.update_joined.default


def _only_written(*_: Any) -> None:
    return None


for _name in ("piece_forward", "piece_backward", "update_joined"):
    torch.library.register_fake(f"lln::{_name}", _only_written)


@torch.library.register_fake("lln::match_joined")
def _match_joined_fake(q_moments: Tensor, k_moments: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if rest[-1] else torch.float32
    return (
        q_moments.new_empty(q_moments.shape[:2], dtype=dtype),
        k_moments.new_empty(k_moments.shape[:2], dtype=dtype),
    )
