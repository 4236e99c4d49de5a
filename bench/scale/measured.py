"""Latency and bandwidth of Gloo on one machine, fitted to the times that measure.py recorded, and
what the model makes of attention there.

SPDX-License-Identifier: Apache-2.0
"""

import json

from collectives import Link, doublings
from methods import METHODS, Layer

FORMS = ("bidirectional", "causal")
RESULTS = "bench/results/scale/cpu-gloo.json"


def fit(points):
    """(a, b) of seconds = a + b * bytes with the least sum of squared relative errors, a >= 0."""
    sums = [0.0] * 5
    for size, seconds in points:
        u, w = 1 / seconds, size / seconds  # a u + b w should be 1
        for i, term in enumerate((u * u, u * w, w * w, u, w)):
            sums[i] += term
    uu, uw, ww, u, w = sums
    a = (ww * u - uw * w) / (uu * ww - uw * uw)
    return (a, (w - uw * a) / ww) if a > 0 else (0.0, w / ww)


class Machine:
    def __init__(self, root):
        self.report = json.loads((root / RESULTS).read_text(encoding="utf-8"))
        sizes = self.report["layer"]
        self.layer = Layer(sizes["heads"], sizes["heads"], sizes["dim"], sizes["dim"], 1, 4)
        self.cores = self.report["machine"]["cores"]

    def points(self, operation, ranks):
        """(bytes, seconds) of a bare operation."""
        return [
            (r["bytes"], r["median_ms"] / 1e3)
            for r in self.report["operations"]
            if (r["operation"], r["ranks"]) == (operation, ranks)
        ]

    def ranks(self):
        return sorted({r["ranks"] for r in self.report["operations"]})

    def operation_seconds(self, operation, ranks, size):
        if operation == "exclusive_scan":
            return doublings(ranks) * self.operation_seconds("shift", ranks, size)
        a, b = fit(self.points(operation, ranks))
        return a + b * size

    def link(self, ranks):
        """Latency and bandwidth behind an all-reduce, which Gloo does in a ring."""
        a, b = fit(self.points("all_reduce", ranks))
        return Link("Gloo", a / (2 * (ranks - 1)), 2 * (ranks - 1) / ranks / b)

    def attention(self, form, ranks, which="train"):
        """(tokens, seconds) as measured."""
        return [
            (r["tokens"], r["median_ms"] / 1e3)
            for r in self.report["attention"]
            if (r["form"], r["ranks"], r["pass"]) == (form, ranks, which)
        ]

    def model(self, form, ranks):
        """(tokens, seconds) of forward and backward: what one process measured, shared by the cores
        that there are, and then the exchange. A causal piece moves twelve tensors more than a
        sequence alone, of which a bidirectional forward moves four (compute.py)."""
        method = METHODS["lln_causal" if form == "causal" else "lln"]
        forward = dict(self.attention("bidirectional", 1, "forward"))
        more = 12 / 4 if form == "causal" else 0
        exchange = sum(
            e.times * self.operation_seconds(e.operation, ranks, e.bytes)
            for exchanges in method.exchanges(self.layer, 0, ranks).values()
            for e in exchanges
        )
        return [
            (tokens, (alone + more * forward[tokens]) / min(ranks, self.cores) + exchange)
            for tokens, alone in self.attention(form, 1)
        ]
