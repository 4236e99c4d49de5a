"""Shapes without data, and autocast, of the ops of decoding: they change a state and have no
gradients.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _attention_ops as _ops

state_bytes = torch.ops.lln.decode_bytes.default
append = torch.ops.lln.decode_append.default
step = torch.ops.lln.decode_step.default
read = torch.ops.lln.decode_read.default
reset = torch.ops.lln.decode_reset.default
merge = torch.ops.lln.decode_merge.default
tokens = torch.ops.lln.decode_tokens.default
save = torch.ops.lln.decode_save.default
load = torch.ops.lln.decode_load.default


@torch.library.register_fake("lln::decode_append")
def _append_fake(
    memory: Tensor, counts: Tensor, q: Tensor | None, k: Tensor, v: Tensor, *_: Any
) -> Tensor:
    return k.new_empty(0, dtype=torch.float32) if q is None else _ops.like(q, v.shape[3])


@torch.library.register_fake("lln::decode_step")
def _step_fake(memory: Tensor, counts: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return _ops.like(q, v.shape[3])


@torch.library.register_fake("lln::decode_read")
def _read_fake(memory: Tensor, counts: Tensor, q: Tensor, *rest: Any) -> Tensor:
    sizes = rest[3]
    return _ops.like(q, sizes[4])


@torch.library.register_fake("lln::decode_tokens")
def _tokens_fake(memory: Tensor, counts: Tensor, sizes: list[int], *_: Any) -> Tensor:
    return torch.empty(sizes[0], dtype=torch.int64, device="cpu")


@torch.library.register_fake("lln::decode_save")
def _save_fake(*_: Any) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _nothing(*_: Any) -> None:
    return None


for _name in ("decode_reset", "decode_merge", "decode_load"):
    torch.library.register_fake(f"lln::{_name}", _nothing)

# q, k and v stand behind the two tensors of the state.
_ops.register_autocast(append, 2, 5)
_ops.register_autocast(step, 2, 5)
_ops.register_autocast(read, 2, 3)
