"""Ways to cut the attention of one layer into pieces of a sequence on several ranks, and what each
must exchange: the model behind docs/scale_model.md. Formulas are given twice, as code and as the
text that the page prints; tests/rules/scale_model_test.py holds both against what is counted.

SPDX-License-Identifier: Apache-2.0
"""

from collections.abc import Callable
from dataclasses import dataclass

from collectives import Cost, Exchange

STATE_BYTES = 4  # states and sums of gradients are f32
MOMENT_BYTES = 8  # moments are f64
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Layer:
    """Sizes of the attention; `batch` is of sequences that lie on more than one rank."""

    heads: int = 16  # of queries
    key_heads: int = 16
    dim: int = 64
    dim_v: int = 64
    batch: int = 1
    element_bytes: int = 2  # of q, k, v, o and their gradients: bf16

    def state_bytes(self, vectors=1):
        """`vectors` numbers for each channel beside the matrix."""
        numbers = vectors * self.dim + self.dim * self.dim_v
        return STATE_BYTES * self.batch * self.key_heads * numbers


def by_halves(operation, size):
    """One half of the heads travels while the other is computed: every exchange is done twice."""
    return Exchange(operation, size / 2, times=2)


def lln_bidirectional(layer, tokens, ranks):
    largest = STATE_BYTES * layer.batch * layer.key_heads * layer.dim
    state = by_halves("all_reduce", layer.state_bytes())
    return {"forward": [by_halves("all_reduce", largest), state], "backward": [state]}


def lln_causal(layer, tokens, ranks):
    return {
        "forward": [by_halves("exclusive_scan", layer.state_bytes())],
        "backward": [by_halves("exclusive_scan", layer.state_bytes(vectors=2))],
    }


def matching(layer, tokens, ranks):
    moments = 3 * MOMENT_BYTES * layer.batch * (layer.heads + layer.key_heads)
    return {"forward": [Exchange("all_gather", moments)], "backward": []}


def ring(layer, tokens, ranks):
    """k and v go round; in the backward dk and dv, too, once more to come home, summed in f32."""
    numbers = layer.batch * layer.key_heads * tokens / ranks * (layer.dim + layer.dim_v)
    keys, gradients = layer.element_bytes * numbers, STATE_BYTES * numbers
    return {
        "forward": [Exchange("shift", keys, ranks - 1)],
        "backward": [Exchange("shift", keys + gradients, ranks - 1), Exchange("shift", gradients)],
    }


def ulysses(layer, tokens, ranks):
    """q, k and v to whole sequences of some heads, o back; the gradients go the other way."""
    rows = layer.element_bytes * layer.batch * tokens / ranks
    tensors = [
        Exchange("all_to_all", rows * heads * dim)
        for heads in (layer.heads, layer.key_heads)
        for dim in (layer.dim, layer.dim_v)
    ]
    return {"forward": tensors, "backward": tensors}


def delta_rule(layer, tokens, ranks):
    """A state and the dim x dim matrix that carries one through the piece, of one sequence."""
    numbers = layer.key_heads * layer.dim * (layer.dim_v + layer.dim)
    gathered = [Exchange("all_gather", STATE_BYTES * numbers)]
    return {"forward": gathered, "backward": gathered}


@dataclass(frozen=True)
class Method:
    name: str
    exchanges: Callable
    sent: dict  # pass -> bytes that a rank sends, as text
    rounds: dict  # pass -> rounds, as text
    most_ranks: Callable = lambda layer: None  # None: any number

    def leanest(self, layer, tokens, ranks, passes=PASSES):
        """Rounds and bytes of the exchanges, each in the way that sends the fewest bytes."""
        done = self.exchanges(layer, tokens, ranks)
        costs = [exchange.leanest(ranks) for p in passes for exchange in done[p]]
        return Cost(sum(c.rounds for c in costs), sum(c.sent for c in costs))

    def seconds(self, layer, tokens, ranks, link, passes=PASSES):
        done = self.exchanges(layer, tokens, ranks)
        return sum(e.seconds(ranks, link) for p in passes for e in done[p])

    def takes(self, layer, ranks):
        most = self.most_ranks(layer)
        return most is None or ranks <= most


def both(text):
    return {"forward": text, "backward": text}


METHODS = {
    "lln": Method(
        "lln, bidirectional",
        lln_bidirectional,
        {
            "forward": "2 (P - 1) / P · 4 B H (2 D + D Dv)",
            "backward": "2 (P - 1) / P · 4 B H (D + D Dv)",
        },
        {"forward": "8 R", "backward": "4 R"},
    ),
    "lln_causal": Method(
        "lln, causal",
        lln_causal,
        {"forward": "R · 4 B H (D + D Dv)", "backward": "R · 4 B H (2 D + D Dv)"},
        both("2 R"),
    ),
    "matching": Method(
        "lln, matching per head",
        matching,
        {"forward": "(P - 1) · 24 B (Hq + H)", "backward": "0"},
        {"forward": "R", "backward": "0"},
    ),
    "ring": Method(
        "ring attention",
        ring,
        {
            "forward": "(P - 1) · b B H N / P · (D + Dv)",
            "backward": "((P - 1) b + 4 P) · B H N / P · (D + Dv)",
        },
        {"forward": "P - 1", "backward": "P"},
    ),
    "ulysses": Method(
        "Ulysses",
        ulysses,
        both("(P - 1) / P · b B (Hq + H) N / P · (D + Dv)"),
        both("4 (P - 1)"),
        most_ranks=lambda layer: layer.key_heads,
    ),
    "delta_rule": Method(
        "flash-linear-attention",
        delta_rule,
        both("(P - 1) · 4 H D (D + Dv)"),
        both("R"),
    ),
}
