"""What travels between processes: states of keys and their gradients, merged over all pieces, or
over those before or after each. Exchanges are begun, and finished after other work.

A message is one tensor [shared sequences, key heads, dim, columns]. That of a state (c, C) has the
columns c and C: ln of the sum over keys of phi, and their mean value. docs/pieces.md has the
formulas.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .pieces import Pieces


class State(NamedTuple):
    """The state of a set of keys, or the gradient of one, as the ops take it."""

    lse: Tensor  # [S, heads_k, 1, dim]
    values: Tensor  # [S, heads_k, dim, dim_v]

    def message(self, pieces: Pieces) -> Tensor:
        """Of the sequences that other processes have a part of."""
        return torch.cat((pieces.take_shared(self.lse).mT, pieces.take_shared(self.values)), -1)

    def replaced(self, pieces: Pieces, message: Tensor) -> State:
        """This state with a message in place of those sequences."""
        return State(
            pieces.put_shared(self.lse, message[..., :1].mT.contiguous()),
            pieces.put_shared(self.values, message[..., 1:].contiguous()),
        )

    def filled(self, lse: float) -> State:
        """The same everywhere: the state of no keys with -inf, a gradient of nothing with 0."""
        return State(torch.full_like(self.lse, lse), torch.zeros_like(self.values))


def share(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole), and 0 for a part without keys."""
    return torch.exp(part - whole).masked_fill(part == -torch.inf, 0)


def merge(a: Tensor, b: Tensor) -> Tensor:
    """The state of the union of two sets of keys, as messages."""
    largest = torch.maximum(a[..., :1], b[..., :1])
    of_a, of_b = share(a[..., :1], largest), share(b[..., :1], largest)
    return _state_of_sums(largest, of_a + of_b, of_a * a[..., 1:] + of_b * b[..., 1:])


def _state_of_sums(largest: Tensor, mass: Tensor, sums: Tensor) -> Tensor:
    """The message of a state from sums over keys of phi and of phi v, relative to exp(largest).

    Means are divided by the mass, not by the exponential of its rounded logarithm, whose error
    grows with c. Without keys the sums are 0, and the largest c is -inf.
    """
    return torch.cat((largest + torch.log(mass), sums / mass.masked_fill(mass == 0, 1)), -1)


def part_gradient(part: State, whole: State, gradient: State) -> State:
    """What the gradient of a merged state sends to one of its parts."""
    # Of the rounded c: rows were read with it, so that its error cancels in the gradient.
    e = share(part.lse, whole.lse)
    inner = ((part.values - whole.values) * gradient.values).sum(-1)[:, :, None]
    return State(e * (gradient.lse + inner), e.mT * gradient.values)


# The gradient of the state before a piece sends to every piece before it
#   dC1 = e dC,  dc1 = e (dc + (C1 - C) . dC) = C1 . dC1 - e T,  e = exp(c1 - c),  T = C . dC - dc,
# where only e depends on the receiver. So the messages (c, T, dC) of several pieces add up to one,
# all taken relative to the c of the nearest: no exponent is above 0, as later c are larger.
def gradient_message(pieces: Pieces, state: State, gradient: State) -> Tensor:
    """(c, T, dC) of the state before a piece and its gradient."""
    c, values = state.message(pieces).split((1, state.values.shape[-1]), -1)
    dc, dvalues = gradient.message(pieces).split((1, state.values.shape[-1]), -1)
    return torch.cat((c, (values * dvalues).sum(-1, keepdim=True) - dc, dvalues), -1)


def add_gradients(near: Tensor, far: Tensor) -> Tensor:
    """Two such messages as one."""
    e = share(near[..., :1], far[..., :1])
    return torch.cat((near[..., :1], near[..., 1:] + e * far[..., 1:]), -1)


def received_gradient(pieces: Pieces, own: State, message: Tensor) -> State:
    """What such a message of the pieces after this one sends to its state."""
    c, values = own.message(pieces).split((1, own.values.shape[-1]), -1)
    e = share(c, message[..., :1])
    dvalues = e * message[..., 2:]
    dc = (values * dvalues).sum(-1, keepdim=True) - e * message[..., 1:2]
    return own.filled(0).replaced(pieces, torch.cat((dc, dvalues), -1))


class Reduction:
    """The sum or the largest over all pieces of every number of x, in its place. Begun."""

    def __init__(self, pieces: Pieces, x: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        self._x = x
        self._work = dist.all_reduce(x, op, group=pieces.group, async_op=True)

    def finish(self) -> Tensor:
        """The same on all processes."""
        if self._work is not None:
            self._work.wait()
        return self._x


class StateSum:
    """The sum of a gradient of a state over all pieces, begun."""

    def __init__(self, pieces: Pieces, own: State) -> None:
        self._pieces, self._own = pieces, own
        if pieces.exchanging:
            self._sum = Reduction(pieces, own.message(pieces), dist.ReduceOp.SUM)

    def finish(self) -> State:
        """The same on all processes, where sequences are shared."""
        if not self._pieces.exchanging:
            return self._own
        return self._own.replaced(self._pieces, self._sum.finish())


class StateMerge:
    """The merge of the states of all pieces, begun; it takes two exchanges."""

    def __init__(self, pieces: Pieces, own: State) -> None:
        self._pieces, self._own = pieces, own
        if pieces.exchanging:
            self._message = own.message(pieces)
            c = self._message[..., :1].clone(memory_format=torch.contiguous_format)
            self._maximum = Reduction(pieces, c, dist.ReduceOp.MAX)

    def begin_sum(self) -> None:
        """The second exchange: states relative to the largest c of any piece."""
        if self._pieces.exchanging:
            self._largest = self._maximum.finish()
            e = share(self._message[..., :1], self._largest)
            message = torch.cat((e, e * self._message[..., 1:]), -1)
            self._sum = Reduction(self._pieces, message, dist.ReduceOp.SUM)

    def finish(self) -> State:
        """The state of all keys."""
        if not self._pieces.exchanging:
            return self._own
        mass, sums = self._sum.finish().split((1, self._own.values.shape[-1]), -1)
        message = _state_of_sums(self._largest, mass, sums)
        return self._own.replaced(self._pieces, message)


class Scan:
    """What all pieces before this one combine to, or all after it, in rounds of doubling distance.

    `combine` takes what is known of nearer pieces and what comes from those beyond. Begun.
    """

    def __init__(
        self,
        pieces: Pieces,
        own: Tensor,
        combine: Callable[[Tensor, Tensor], Tensor],
        *,
        reverse: bool = False,
    ) -> None:
        self._pieces, self._combine = pieces, combine
        self._step = -1 if reverse else 1
        self._inclusive = own
        self._begin(1)

    def finish(self) -> Tensor | None:
        """Without this piece; None where there are no others before it, or after it."""
        exclusive: Tensor | None = None
        distance = 1
        while distance < self._pieces.count:
            for work in self._works:
                work.wait()
            if self._received is not None:
                far = self._received
                exclusive = far if exclusive is None else self._combine(exclusive, far)
                self._inclusive = self._combine(self._inclusive, far)
            distance *= 2
            self._begin(distance)
        return exclusive

    def _begin(self, distance: int) -> None:
        """A round: what is known here goes `distance` pieces on."""
        pieces, way = self._pieces, self._step * distance
        to, source = pieces.rank + way, pieces.rank - way
        messages = []
        self._received: Tensor | None = None
        if 0 <= to < pieces.count:
            send = dist.P2POp(dist.isend, self._inclusive, group=pieces.group, group_peer=to)
            messages.append(send)
        if 0 <= source < pieces.count:
            self._received = torch.empty_like(self._inclusive)
            receive = dist.P2POp(dist.irecv, self._received, group=pieces.group, group_peer=source)
            messages.append(receive)
        self._works = dist.batch_isend_irecv(messages) if messages else []
