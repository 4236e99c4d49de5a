"""Time of the attention of one layer on one H200, from the results recorded in bench/results: what
was measured at 64M elements a tensor, in proportion to tokens, or to their square for softmax.

SPDX-License-Identifier: Apache-2.0
"""

import json
import re
from dataclasses import dataclass
from functools import cache

from methods import PASSES

H16, H12 = "bf16:cuda:b4h16n16384d64:lln", "bf16:cuda:b1h12n512d64:lln"
RECORDED = {
    # name: (file, peer, problem)
    "lln forward": ("h200-lln.json", "lln", "forward:bf16:cuda:b1h16n65536d64:lln"),
    "lln": ("h200-lln.json", "lln", "train:bf16:cuda:b1h16n65536d64:lln"),
    "lln causal forward": ("h200-forms.json", "lln", f"forward:{H16}:causal"),
    "lln causal": ("h200-forms.json", "lln", f"train:{H16}:causal"),
    "shortest forward": ("h200-short.json", "lln", f"forward:{H12}"),
    "shortest": ("h200-short.json", "lln", f"train:{H12}"),
    "softmax forward": ("h200-peers.json", "torch-cudnn", f"forward:{H16}"),
    "softmax": ("h200-peers.json", "torch-cudnn", f"train:{H16}"),
}


@dataclass(frozen=True)
class Recorded:
    seconds: float
    sequences: int  # batch and heads
    tokens: int
    ratio: float  # over the floor of memory traffic

    def linear(self, heads, tokens):
        return self.seconds * heads * tokens / (self.sequences * self.tokens)

    def quadratic(self, heads, pairs):
        return self.seconds * heads * pairs / (self.sequences * self.tokens**2)


@cache
def recorded(root, name):
    file, peer, problem = RECORDED[name]
    report = json.loads((root / "bench/results" / file).read_text(encoding="utf-8"))
    found = next(
        r for r in report["results"] if r["problem"] == problem and r.get("peer", "lln") == peer
    )
    b, h, n = map(int, re.search(r":b(\d+)h(\d+)n(\d+)d", problem).groups())
    return Recorded(found["median_ms"] / 1e3, b * h, n, found["ratio"])


def passes(forward, train):
    return {"forward": forward, "backward": train - forward}


def lln_seconds(root, layer, tokens, ranks, causal=False):
    """Pass -> time of a rank's piece before its exchange, and after it.

    Bidirectional the passes over keys and over rows lie on different sides of it, and share the
    time as they share the tensors that they move: k, v | q, o and q, g, dq | k, v, dk, dv. A causal
    piece is computed as a whole, on one side; on the other it moves tensors that a sequence alone
    does not: k, v for its state; k, v and dk, dv of later rows, which are added to its own.
    """
    sequences, piece = layer.batch * layer.heads, tokens / ranks

    def taken(name):
        return recorded(root, name).linear(sequences, piece)

    form = "lln causal" if causal else "lln"
    done = passes(taken(form + " forward"), taken(form))
    if causal:
        tensor = taken("lln forward") / 4 if ranks > 1 else 0
        sides = {"forward": (2 * tensor, done["forward"]),
                 "backward": (done["backward"], 10 * tensor)}  # fmt: skip
    else:
        sides = {which: (part * done[which], (1 - part) * done[which])
                 for which, part in (("forward", 2 / 4), ("backward", 3 / 7))}  # fmt: skip
    shortest = passes(
        recorded(root, "shortest forward").seconds, recorded(root, "shortest").seconds
    )
    return {p: at_least(shortest[p], sides[p]) for p in PASSES}


def at_least(shortest, sides):
    factor = max(1, shortest / sum(sides))
    return tuple(factor * side for side in sides)


def softmax_seconds(root, layer, tokens, ranks):
    """Pass -> time of a rank, whether rows and keys or heads are shared out."""
    sequences, pairs = layer.batch * layer.heads, tokens**2 / ranks
    return passes(
        recorded(root, "softmax forward").quadratic(sequences, pairs),
        recorded(root, "softmax").quadratic(sequences, pairs),
    )
