"""What collective operations cost: rounds that follow each other, and bytes that a rank sends. The
time of an operation is rounds * latency + bytes / bandwidth, the alpha-beta model; where there are
several ways to do it, the fastest counts.

The ways are those of Thakur, Rabenseifner and Gropp, Optimization of Collective Communication
Operations in MPICH, 2005. tests/rules/rank_network.py carries each out among a few ranks, and
scale_model_test.py counts.

SPDX-License-Identifier: Apache-2.0
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Link:
    """One direction of what connects a rank to the others."""

    name: str
    latency: float  # seconds from one rank to another
    bandwidth: float  # bytes per second


class Cost(NamedTuple):
    rounds: int
    sent: float  # bytes, of the rank that sends most


def doublings(ranks):
    """ceil(log2(ranks)): how often 1 must be doubled to reach `ranks`."""
    return (ranks - 1).bit_length()


# Name of the operation -> the ways to do it, each from (ranks, bytes); what the bytes are is said
# beside each. The first way sends the fewest bytes. Ways that halve or double vectors take a power
# of two of ranks.
WAYS = {
    # A vector of so many bytes on every rank becomes the sum, or the maximum, of all.
    "all_reduce": {
        "halving and doubling": lambda p, n: Cost(2 * doublings(p), 2 * (p - 1) / p * n),
        "ring": lambda p, n: Cost(2 * (p - 1), 2 * (p - 1) / p * n),
        "recursive doubling": lambda p, n: Cost(doublings(p), doublings(p) * n),
    },
    # Every rank has so many bytes; all receive those of all.
    "all_gather": {
        "recursive doubling": lambda p, n: Cost(doublings(p), (p - 1) * n),
        "ring": lambda p, n: Cost(p - 1, (p - 1) * n),
    },
    # Every rank has so many bytes, an equal part of them for each rank.
    "all_to_all": {"pairwise": lambda p, n: Cost(p - 1, (p - 1) / p * n)},
    # Messages of so many bytes; rank r ends with the union of what the ranks before it have.
    "exclusive_scan": {"doubling": lambda p, n: Cost(doublings(p), doublings(p) * n)},
    # Every rank sends so many bytes to the next.
    "shift": {"at once": lambda p, n: Cost(1 if p > 1 else 0, n if p > 1 else 0)},
}


@dataclass(frozen=True)
class Exchange:
    """An operation on so many bytes, done a number of times, one after another."""

    operation: str
    bytes: float
    times: int = 1

    def cost(self, ranks, way):
        rounds, sent = WAYS[self.operation][way](ranks, self.bytes)
        return Cost(self.times * rounds, self.times * sent)

    def seconds(self, ranks, link):
        return min(
            rounds * link.latency + sent / link.bandwidth
            for rounds, sent in (self.cost(ranks, way) for way in WAYS[self.operation])
        )

    def leanest(self, ranks):
        """The cost of the way that sends the fewest bytes."""
        return self.cost(ranks, next(iter(WAYS[self.operation])))
