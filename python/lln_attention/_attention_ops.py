"""What torch has to know of the ops of attention besides their kernels.

Shapes without data (fake tensors, ``torch.compile``), gradients, and autocast, of the ops
``attention``, ``forward`` and ``backward``. Arguments follow the schemas in
``python/ops/library.cc``, in their order. ``piece_forward`` and ``piece_backward`` write into their
arguments and need none of it: ``lln_attention.distributed`` makes gradients of them.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _library

_library.load()

attention = torch.ops.lln.attention.default
forward = torch.ops.lln.forward.default
backward = torch.ops.lln.backward.default
piece_forward = torch.ops.lln.piece_forward.default
piece_backward = torch.ops.lln.piece_backward.default
# Of the op itself: an observer takes the place of the name `forward`.
_redispatch = forward.redispatch

# How many arguments of `forward` are tensors; the options follow them.
_TENSORS = 10
_OPTIONS = 4


def like(x: Tensor, channels: int | torch.SymInt) -> Tensor:
    """An empty tensor [B, H, N, channels] that has its heads inside its tokens where `x` has."""
    batch, heads, tokens, _ = x.shape
    if x.stride(1) >= x.stride(2):
        return x.new_empty(batch, heads, tokens, channels)
    return x.new_empty(batch, tokens, heads, channels).transpose(1, 2)


def wide(x: Tensor) -> torch.dtype:
    """The type of scales, weights and states beside tensors of the type of `x`."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def beside(x: Tensor, y: float | Tensor) -> Tensor:
    """A scale or weight `y` in the type that it has beside tensors of the type of `x`."""
    dtype = wide(x)
    if not isinstance(y, Tensor):
        return torch.full((), y, dtype=dtype, device=x.device)
    return y if y.dtype == dtype else y.to(dtype)


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Refuses derivatives of forward mode, which the ops would drop without a word."""
    # The number of the innermost level, which says at no cost that there is none.
    if forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "LLN attention has no derivatives in forward mode (torch.func.jvp, "
            "torch.autograd.forward_ad): use torch.autograd.grad or backward()"
        )


def sequence_count(x: Tensor, cu_seqlens: Tensor | None) -> int | torch.SymInt:
    """The batch, or the packed sequences."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _none(x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.float32)


@torch.library.register_fake("lln::attention")
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return like(q, v.shape[3])


@torch.library.register_fake("lln::forward")
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    cu_seqlens, kind, causal = rest[3], rest[5], rest[6]
    fixed = (*rest[11:13], None, None)[:2]
    has_lln = kind.startswith("lln")
    sequences = sequence_count(q, cu_seqlens)
    heads_k, dim, dim_v = k.shape[1], q.shape[3], v.shape[3]
    saved = (_none(q), _none(q))
    if has_lln and not causal:
        saved = (
            q.new_empty(sequences, heads_k, 1, dim, dtype=wide(q)),
            q.new_empty(sequences, heads_k, dim, dim_v, dtype=wide(q)),
        )
    matched = alpha is None and beta is None and fixed == (None, None)

    def scale(number: float | None, heads: int | torch.SymInt) -> Tensor:
        if not has_lln or (number is None and not matched):
            return _none(q)
        return q.new_empty((sequences, heads) if matched else (1, 1), dtype=wide(q))

    return (like(q, dim_v), *saved, scale(fixed[0], q.shape[1]), scale(fixed[1], heads_k))


@torch.library.register_fake("lln::backward")
def _backward_fake(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    scales_wanted, weights_wanted = rest[-2:]

    def optional(x: Tensor | None, wanted: bool) -> Tensor:
        return _none(q) if x is None or not wanted else x.new_empty(x.shape)

    return (
        *(like(x, x.shape[3]) for x in (q, k, v)),
        *(optional(x, scales_wanted) for x in rest[:2]),
        *(optional(x, weights_wanted) for x in rest[2:4]),
    )


class _Attention(torch.autograd.Function):
    """``forward`` with gradients; its first argument is the dispatch keys of the call."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _below_autograd(keys, inputs)
        _, key_lse, channel_values, alpha, beta = output
        tensors = list(inputs[:_TENSORS])
        for place, made in ((3, alpha), (4, beta)):
            if made.dim() == 2:  # matched, or a number
                tensors[place] = made
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, key_lse, channel_values)
        # No option has a default: the dispatcher leaves out trailing arguments that equal theirs.
        ctx.options = inputs[_TENSORS : _TENSORS + _OPTIONS]
        return output

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        # One for the keys, then one for each argument.
        needs = ctx.needs_input_grad
        gradients: list[Tensor | None] = [None] * len(needs)
        if g is None:
            return tuple(gradients)
        if g.stride(-1) != 1:
            g = g.contiguous()
        try:
            found = _derive(g, *ctx.saved_tensors, *ctx.options, any(needs[4:6]), any(needs[6:8]))
        except RuntimeError as error:
            raise _library.python_error(error) from None
        gradients[1:8] = [x if need else None for x, need in zip(found, needs[1:8], strict=True)]
        return tuple(gradients)


def _below_autograd(keys: Any, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        return _redispatch(keys & torch._C._after_autograd_keyset, *inputs)


def _derive(*inputs: Any) -> tuple[Tensor, ...]:
    """``backward``, without the way over Python to its refusal where nothing is to be refused."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():  # Dynamo cannot trace the guard
        return backward(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return backward(*inputs)


def _forward_autograd(keys: Any, *inputs: Any) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        return _Attention.apply(keys, *inputs)
    return _below_autograd(keys, inputs)


def _attention_backward(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "lln::attention keeps nothing for a backward pass: where gradients are wanted call "
        "lln_attention.attention, or lln::forward"
    )


def _second_backward(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "lln::backward has no derivative: gradients of gradients of LLN attention are not available"
    )


torch.library.register_autograd("lln::attention", _attention_backward)
torch.library.register_autograd("lln::backward", _second_backward)

_registrations = torch.library.Library("lln", "IMPL")
# In place of register_autograd, whose way to a context fills in all arguments by the schema, at
# more cost than the rest of a small call.
_registrations.impl(forward, _forward_autograd, "Autograd", with_keyset=True)


def register_autocast(op: Any, first: int, last: int) -> None:
    """Makes `op` take its arguments `first` to `last` - 1 in the type of autocast, on CPU and CUDA.

    What stands beside them (scales, weights) keeps its type, which is why torch's own
    ``register_autocast`` does not do: it casts every tensor.
    """

    def register(device_type: str, key: str) -> None:
        def in_autocast(*args: Any) -> Any:
            dtype = torch.get_autocast_dtype(device_type)
            cast = (
                x if x is None or x.dtype == torch.float64 else x.to(dtype)
                for x in args[first:last]
            )
            with torch.autocast(device_type, enabled=False):
                return op(*args[:first], *cast, *args[last:])

        _registrations.impl(op, in_autocast, key)

    register("cpu", "AutocastCPU")
    register("cuda", "AutocastCUDA")


register_autocast(attention, 0, 3)
register_autocast(forward, 0, 3)
