"""Attention over pieces as functions with gradients, which do their exchanges themselves: of
states of keys in the forward pass, of gradients of states in the backward pass. Every process takes
part in every exchange, in the same order, whatever its piece holds.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import _attention_ops as _ops
from .._library import python_error
from .calls import Calls, Inputs
from .exchange import (
    Scan,
    State,
    StateMerge,
    StateSum,
    add_gradients,
    gradient_message,
    merge,
    part_gradient,
    received_gradient,
)


class Bidirectional(torch.autograd.Function):
    """LLN over all pieces and, where the kind has blocks, Diag: their outputs, not yet weighed."""

    @staticmethod
    def forward(ctx: Any, calls: Calls, *tensors: Tensor) -> tuple[Tensor, ...]:
        x = Inputs(*tensors)
        own, merges = [], []
        for part in x.parts():
            own.append(calls.state_of_keys(x.of(part)))
            merges.append(StateMerge(calls.pieces, own[-1]))
        for merging in merges:
            merging.begin_sum()
        outputs = [_ops.like(x.q, x.v.shape[3])]
        if calls.kind != "lln":  # while the sums travel
            outputs.append(_ops.like(x.q, x.v.shape[3]))
            _blocks_alone(calls).whole(_without_scales(x), None, outputs[1])
        merged = []
        for part, merging in zip(x.parts(), merges, strict=True):
            merged.append(merging.finish())
            calls.read_state(x.of(part), merged[-1], outputs[0][:, part.rows])
        ctx.calls = calls
        ctx.save_for_backward(*tensors, *_flat(own), *_flat(merged))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _derive(_bidirectional_backward, ctx, *gradients)


def _bidirectional_backward(ctx: Any, *gradients: Tensor) -> Inputs:
    calls, saved = ctx.calls, ctx.saved_tensors
    x, states = Inputs(*saved[:5]), _states(saved[5:])
    parts = x.parts()
    own, merged = states[: len(parts)], states[len(parts) :]
    d = x.new_gradients((*ctx.needs_input_grad[1:], False, False))
    sums = []
    for part, state in zip(parts, merged, strict=True):
        rows = gradients[0][:, part.rows]
        gradient = calls.read_state_backward(x.of(part), state, rows, d.of(part))
        sums.append(StateSum(calls.pieces, gradient))
    of_blocks = None
    if calls.kind != "lln":  # while the sums travel
        inputs = _without_scales(x)
        of_blocks = inputs.new_gradients((False,) * len(inputs))
        _blocks_alone(calls).whole_backward(inputs, None, gradients[1], of_blocks)
    for part, state, whole, added in zip(parts, own, merged, sums, strict=True):
        gradient = part_gradient(state, whole, added.finish())
        calls.state_of_keys_backward(x.of(part), gradient, d.of(part))
    if of_blocks is not None:
        _add(of_blocks, d, ("q", "k", "v"))
    return d


class InOrder(torch.autograd.Function):
    """Attention whose pieces need no others, or those before them alone: causal, and Diag."""

    @staticmethod
    def forward(ctx: Any, calls: Calls, *tensors: Any) -> Tensor:
        x = Inputs(*tensors)
        parts = x.parts()
        own, scans = [], []
        if calls.chained():
            for part in parts:
                own.append(calls.state_of_keys(x.of(part)))
                scans.append(Scan(calls.pieces, own[-1].message(calls.pieces), merge))
        o = _ops.like(x.q, x.v.shape[3])
        before = []
        for i, part in enumerate(parts):
            message = scans[i].finish() if scans else None
            state = None
            if message is not None:
                state = own[i].filled(-torch.inf).replaced(calls.pieces, message)
                before.append(state)
            calls.whole(x.of(part), state, o[:, part.rows])
        ctx.calls = calls
        ctx.save_for_backward(*tensors, *_flat(own), *_flat(before))
        return o

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _derive(_in_order_backward, ctx, g)


def _in_order_backward(ctx: Any, g: Tensor) -> Inputs:
    calls, saved = ctx.calls, ctx.saved_tensors
    pieces = calls.pieces
    x, states = Inputs(*saved[:7]), _states(saved[7:])
    parts = x.parts()
    own, before = states[: len(parts)], states[len(parts) :]
    wanted = ctx.needs_input_grad[1:]
    d = x.new_gradients(wanted)
    scans = []
    for i, part in enumerate(parts):
        state = before[i] if before else None
        gradient = calls.whole_backward(x.of(part), state, g[:, part.rows], d.of(part))
        if own:
            # The first piece has nothing before it.
            state = state or own[i].filled(-torch.inf)
            message = gradient_message(pieces, state, gradient or own[i].filled(0))
            scans.append(Scan(pieces, message, add_gradients, reverse=True))
    for part, state, scan in zip(parts, own, scans, strict=False):
        after = scan.finish()
        if after is not None:
            inputs = x.of(part).without_rows()
            later = inputs.new_gradients(wanted)
            gradient = received_gradient(pieces, state, after)
            calls.state_of_keys_backward(inputs, gradient, later)
            _add(later, d.of(part), ("k", "v", "beta"))
    return d


class _Gradients(torch.autograd.Function):
    """A backward pass whose own derivative is refused."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], tuple[Tensor | None, ...]], *_: Any) -> Any:
        return run()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise NotImplementedError("gradients of gradients of LLN attention are not available")


def _derive(
    backward: Callable[..., Inputs], ctx: Any, *gradients: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of a function's arguments."""
    gradients = tuple(g if g.stride(-1) == 1 else g.contiguous() for g in gradients)

    def run() -> tuple[Tensor | None, ...]:
        try:
            found = backward(ctx, *gradients)
        except RuntimeError as error:
            raise python_error(error) from None
        needs = ctx.needs_input_grad[1:]
        return (None, *(x if need else None for x, need in zip(found, needs, strict=False)))

    if not torch.is_grad_enabled():
        return run()
    return _Gradients.apply(run, *gradients, *ctx.saved_tensors)


def _add(x: Inputs, to: Inputs, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(to, name) is not None:
            getattr(to, name).add_(getattr(x, name))


def _blocks_alone(calls: Calls) -> Calls:
    return replace(calls, kind=calls.kind.removeprefix("lln+"), feature="exp")


def _without_scales(x: Inputs) -> Inputs:
    return x._replace(alpha=None, beta=None)


def _flat(states: list[State]) -> list[Tensor]:
    """For save_for_backward, which takes tensors."""
    return [x for state in states for x in state]


def _states(flat: Sequence[Tensor]) -> list[State]:
    return [State(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)]
