"""What torch has to know of the ops ``forward`` and ``backward`` besides their kernels.

Shapes without data (fake tensors, ``torch.compile``), gradients, and autocast. The arguments follow
the schemas in ``python/ops/library.cc``, in their order.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _library

_library.load()

forward = torch.ops.lln.forward.default
backward = torch.ops.lln.backward.default

# Places of arguments of `forward`.
_TENSORS = 13
_QUERY_MASK = 10


def like(x: Tensor, channels: int | torch.SymInt) -> Tensor:
    """An empty tensor [B, H, N, channels] that has its heads inside its tokens where `x` has."""
    batch, heads, tokens, _ = x.shape
    if x.stride(1) >= x.stride(2):
        return x.new_empty(batch, heads, tokens, channels)
    return x.new_empty(batch, tokens, heads, channels).transpose(1, 2)


def wide(x: Tensor) -> torch.dtype:
    """The type of scales, weights and states beside tensors of the type of `x`."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _none(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.float32)


@torch.library.register_fake("lln::forward")
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    cu_seqlens, kind, causal, save = rest[6], rest[8], rest[9], rest[13]
    has_lln = kind.startswith("lln")
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    heads_k, dim, dim_v = k.shape[1], q.shape[3], v.shape[3]
    saved = (_none(q), _none(q))
    if save and has_lln and not causal:
        saved = (
            q.new_empty(sequences, heads_k, 1, dim, dtype=wide(q)),
            q.new_empty(sequences, heads_k, dim, dim_v, dtype=wide(q)),
        )
    scales = (_none(q), _none(q))
    if has_lln and alpha is None and beta is None:
        scales = (
            q.new_empty(sequences, q.shape[1], dtype=wide(q)),
            q.new_empty(sequences, heads_k, dtype=wide(q)),
        )
    return (like(q, dim_v), *saved, *scales)


@torch.library.register_fake("lln::backward")
def _backward_fake(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    scales_wanted, weights_wanted = rest[-2:]

    def optional(x: Tensor | None, wanted: bool) -> Tensor:
        return _none(q) if x is None or not wanted else x.new_empty(x.shape)

    return (
        *(like(x, x.shape[3]) for x in (q, k, v)),
        *(optional(x, scales_wanted) for x in rest[:2]),
        *(optional(x, weights_wanted) for x in rest[2:5]),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, key_lse, channel_values, alpha, beta = output
    tensors = list(inputs[:_TENSORS])
    if tensors[3] is None and alpha.dim() == 2:
        tensors[3:5] = alpha, beta
    del tensors[_QUERY_MASK]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, key_lse, channel_values)
    ctx.settings = inputs[_TENSORS : _TENSORS + 4]


def _backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    gradients: list[Tensor | None] = [None] * len(needs)
    if g is None:
        return tuple(gradients)
    if g.stride(-1) != 1:
        g = g.contiguous()
    try:
        found = backward(g, *ctx.saved_tensors, *ctx.settings, any(needs[3:5]), any(needs[5:8]))
    except RuntimeError as error:
        raise _library.python_error(error) from None
    gradients[:8] = [x if need else None for x, need in zip(found, needs[:8], strict=True)]
    return tuple(gradients)


def _no_second_backward(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "lln::backward has no derivative: gradients of gradients of LLN attention are not available"
    )


torch.library.register_autograd("lln::forward", _backward, setup_context=_setup_context)
torch.library.register_autograd("lln::backward", _no_second_backward)


def _register_autocast(device_type: str, key: str) -> None:
    def forward_in_autocast(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
        with torch.autocast(device_type, enabled=False):
            return forward(q, k, v, *rest)  # type: ignore[no-any-return]

    _registrations.impl("forward", forward_in_autocast, key)


_registrations = torch.library.Library("lln", "IMPL")
_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")
