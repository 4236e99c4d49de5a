"""Calls of the core on one piece, for some of its heads: keys become a state, rows read a state, or
both at once, each forward and backward. Nothing travels here.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _attention_ops as _ops
from .exchange import State
from .pieces import Pieces

_NO_STATE = (None, None)


class Part(NamedTuple):
    """Some of the heads: those of queries, and those of the keys that they read."""

    rows: slice
    keys: slice


class Inputs(NamedTuple):
    """The tensors of a call, or their gradients, in the order of the ops.

    Scales are [1 or S, heads]; weights [heads], [heads, dim_v] or [B, heads, tokens].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor | None = None
    beta: Tensor | None = None
    weight: Tensor | None = None  # the share of LLN, or its weight beside a second one
    second: Tensor | None = None

    def parts(self) -> list[Part]:
        """Two halves of the heads: the state of one travels while the other is computed."""
        heads = self.k.shape[1]
        group = self.q.shape[1] // heads
        cuts = (0, heads // 2, heads) if heads > 1 else (0, heads)
        return [Part(slice(a * group, b * group), slice(a, b)) for a, b in itertools.pairwise(cuts)]

    def of(self, part: Part) -> Inputs:
        """The same of some heads."""

        def heads(x: Tensor | None, which: slice) -> Tensor | None:
            return None if x is None else x[:, which]

        def weight(x: Tensor | None) -> Tensor | None:
            return x[part.rows] if x is not None and x.ndim < 3 else heads(x, part.rows)

        return Inputs(
            self.q[:, part.rows], self.k[:, part.keys], self.v[:, part.keys],
            heads(self.alpha, part.rows), heads(self.beta, part.keys), weight(self.weight),
            weight(self.second),
        )  # fmt: skip

    def without_rows(self) -> Inputs:
        """Keys alone."""
        return self._replace(q=self.q[:, :, :0], weight=None, second=None)

    def without_keys(self) -> Inputs:
        """Rows alone."""
        return self._replace(k=self.k[:, :, :0], v=self.v[:, :, :0], weight=None, second=None)

    def new_gradients(self, wanted: tuple[bool, ...]) -> Inputs:
        """Room for gradients; of scales and weights where they are wanted."""
        rest = (
            torch.empty_like(x, memory_format=torch.contiguous_format)
            if x is not None and needed
            else None
            for x, needed in zip(self[3:], wanted[3:], strict=True)
        )
        return Inputs(*(_ops.like(x, x.shape[3]) for x in self[:3]), *rest)


@dataclass(frozen=True)
class Calls:
    """The calls of one attention."""

    pieces: Pieces
    kind: str
    causal: bool
    fixed_mix: float
    feature: str

    def has_lln(self) -> bool:
        """Whether there is more than blocks."""
        return self.kind.startswith("lln")

    def chained(self) -> bool:
        """Whether pieces need the state of those before them."""
        return self.causal and self.has_lln() and self.pieces.exchanging

    def check(self, x: Inputs) -> None:
        """Has the core look at all but the tokens; scales that are not there yet are ones."""
        tokens, keys = self.pieces.tokens, self.pieces.keys
        one = _ops.beside(x.q, 1.0)

        def weight(w: Tensor | None) -> Tensor | None:
            return w if w is None or w.ndim != 3 or w.shape[2] != tokens else w[:, :, :0]

        _ops.piece_forward(
            x.v.new_empty((*x.q.shape[:2], 0, x.v.shape[-1])), *_NO_STATE,
            *(t[..., :0, :] for t in x[:3]), *(one if t is None else t for t in x[3:5]),
            weight(x.weight), weight(x.second),
            None if keys is None else keys[:, :0] if keys.ndim == 2 else torch.zeros_like(keys),
            self.pieces.no_cu_seqlens, None, *_NO_STATE, *self._words(),
        )  # fmt: skip

    def state_of_keys(self, x: Inputs) -> State:
        """The state of the piece's keys."""
        state = self._new_state(x)
        x = x.without_rows()
        pieces = self.pieces
        _ops.piece_forward(
            _ops.like(x.q, x.v.shape[3]), *state, *x, pieces.keys, pieces.no_cu_seqlens,
            pieces.cu_seqlens, *_NO_STATE, *self._lln(),
        )  # fmt: skip
        return state

    def state_of_keys_backward(self, x: Inputs, gradient: State, d: Inputs) -> None:
        """Gradients of k, v and beta from that of their state."""
        x, d = x.without_rows(), d.without_rows()
        pieces = self.pieces
        _ops.piece_backward(
            *d._replace(alpha=None), *_NO_STATE, _ops.like(x.q, x.v.shape[3]), *gradient, *x,
            pieces.keys, pieces.no_cu_seqlens, pieces.cu_seqlens, *_NO_STATE, *self._lln(),
        )  # fmt: skip

    def read_state(self, x: Inputs, state: State, o: Tensor) -> None:
        """LLN of the piece's rows over the keys of a state."""
        pieces = self.pieces
        _ops.piece_forward(
            o, *_NO_STATE, *x.without_keys(), None, pieces.cu_seqlens, pieces.no_cu_seqlens, *state,
            *self._lln(),
        )  # fmt: skip

    def read_state_backward(self, x: Inputs, state: State, g: Tensor, d: Inputs) -> State:
        """Gradients of q and alpha; -> that of the state."""
        gradient = self._new_state(x)
        pieces = self.pieces
        _ops.piece_backward(
            *d.without_keys()._replace(beta=None), *gradient, g, *_NO_STATE, *x.without_keys(),
            None, pieces.cu_seqlens, pieces.no_cu_seqlens, *state, *self._lln(),
        )  # fmt: skip
        return gradient

    def whole(self, x: Inputs, state: State | None, o: Tensor) -> None:
        """The piece's rows over its own keys, and for LLN those of a state."""
        pieces = self.pieces
        _ops.piece_forward(
            o, *_NO_STATE, *x, pieces.keys, pieces.cu_seqlens, None, *(state or _NO_STATE),
            *self._words(),
        )  # fmt: skip

    def whole_backward(self, x: Inputs, state: State | None, g: Tensor, d: Inputs) -> State | None:
        """Gradients of all inputs; -> that of the state, where one is given."""
        gradient = None if state is None else self._new_state(x)
        pieces = self.pieces
        _ops.piece_backward(
            *d, *(gradient or _NO_STATE), g, *_NO_STATE, *x, pieces.keys, pieces.cu_seqlens, None,
            *(state or _NO_STATE), *self._words(),
        )  # fmt: skip
        return gradient

    def _words(self) -> tuple[Tensor | None, str, bool, float, str]:
        """The last arguments of the ops: where blocks are counted from, and the options."""
        origins = self.pieces.block_origins if "diag" in self.kind else None
        return origins, self.kind, self.causal, self.fixed_mix, self.feature

    def _lln(self) -> tuple[None, str, bool, float, str]:
        """The same for keys and rows by themselves, which know no order and no blocks."""
        return None, "lln", False, self.fixed_mix, self.feature

    def _new_state(self, x: Inputs) -> State:
        sequences = _ops.sequence_count(x.q, self.pieces.cu_seqlens)
        _, heads_k, _, dim = x.k.shape
        dtype = _ops.wide(x.q)
        return State(
            x.k.new_empty((sequences, heads_k, 1, dim), dtype=dtype),
            x.k.new_empty((sequences, heads_k, dim, x.v.shape[3]), dtype=dtype),
        )
