"""Collective operations carried out message by message among a few ranks of one process, for
scale_model_test.py, which counts the messages.

SPDX-License-Identifier: Apache-2.0
"""


class Network:
    """Ranks that send lists to each other in rounds; counts rounds and what each has sent."""

    def __init__(self, ranks):
        self.ranks, self.rounds, self.sent = ranks, 0, [0] * ranks

    def round(self, messages):
        """{(from, to): list} -> {to: list}; nobody sends or receives twice in a round."""
        senders, receivers = [m[0] for m in messages], [m[1] for m in messages]
        assert len(set(senders)) == len(senders) and len(set(receivers)) == len(receivers)
        self.rounds += 1
        for (sender, _), message in messages.items():
            self.sent[sender] += len(message)
        return {receiver: list(message) for (_, receiver), message in messages.items()}

    def cost(self):
        return self.rounds, max(self.sent)


def added(a, b):
    return [x + y for x, y in zip(a, b)]


def parts_of(vector, ranks):
    step = len(vector) // ranks
    return [vector[i * step : (i + 1) * step] for i in range(ranks)]


def ring_all_reduce(net, vectors):
    ranks = net.ranks
    parts = [parts_of(v, ranks) for v in vectors]
    for way in ("reduce", "gather"):
        for step in range(ranks - 1):
            part = [(r - step + (way == "gather")) % ranks for r in range(ranks)]
            got = net.round({(r, (r + 1) % ranks): parts[r][part[r]] for r in range(ranks)})
            for r in range(ranks):
                own = part[(r - 1) % ranks]
                parts[r][own] = added(parts[r][own], got[r]) if way == "reduce" else got[r]
    return [sum(p, []) for p in parts]


def doubling_all_reduce(net, vectors):
    step = 1
    while step < net.ranks:
        got = net.round({(r, r ^ step): vectors[r] for r in range(net.ranks)})
        vectors = [added(vectors[r], got[r]) for r in range(net.ranks)]
        step *= 2
    return vectors


def halving_all_reduce(net, vectors):
    """Every round keeps the half that the rank's bit says; then the halves come back."""
    halves, held = [], [list(v) for v in vectors]
    step = net.ranks // 2
    while step:
        middle = len(held[0]) // 2
        low = [not r & step for r in range(net.ranks)]
        got = net.round(
            {
                (r, r ^ step): held[r][middle:] if low[r] else held[r][:middle]
                for r in range(net.ranks)
            }
        )
        held = [
            added(held[r][:middle] if low[r] else held[r][middle:], got[r])
            for r in range(net.ranks)
        ]
        halves.append((step, low))
        step //= 2
    for step, low in reversed(halves):
        got = net.round({(r, r ^ step): held[r] for r in range(net.ranks)})
        held = [held[r] + got[r] if low[r] else got[r] + held[r] for r in range(net.ranks)]
    return held


def ring_all_gather(net, vectors):
    ranks, last = net.ranks, vectors
    held = [{r: v} for r, v in enumerate(vectors)]
    for step in range(1, ranks):
        got = net.round({(r, (r + 1) % ranks): last[r] for r in range(ranks)})
        last = [got[r] for r in range(ranks)]
        for r in range(ranks):
            held[r][(r - step) % ranks] = got[r]
    return [sum((h[r] for r in range(ranks)), []) for h in held]


def doubling_all_gather(net, vectors):
    held, step = vectors, 1
    while step < net.ranks:
        got = net.round({(r, r ^ step): held[r] for r in range(net.ranks)})
        held = [got[r] + held[r] if r & step else held[r] + got[r] for r in range(net.ranks)]
        step *= 2
    return held


def pairwise_all_to_all(net, vectors):
    ranks = net.ranks
    parts = [parts_of(v, ranks) for v in vectors]
    held = [{r: parts[r][r]} for r in range(ranks)]
    for step in range(1, ranks):
        to = [(r + step) % ranks for r in range(ranks)]
        got = net.round({(r, to[r]): parts[r][to[r]] for r in range(ranks)})
        for r in range(ranks):
            held[r][(r - step) % ranks] = got[r]
    return [[h[r] for r in range(ranks)] for h in held]


def doubling_scan(net, vectors, merge):
    """Rank r receives the union of a window that ends at r - step, and passes on its own."""
    before = [None] * net.ranks
    window, step = list(vectors), 1
    while step < net.ranks:
        got = net.round({(r, r + step): window[r] for r in range(net.ranks - step)})
        for r, part in got.items():
            before[r] = part if before[r] is None else merge(part, before[r])
            window[r] = merge(part, window[r])
        step *= 2
    return before
