"""Time of the attention of one layer on many GPUs: arithmetic as recorded on one H200, exchange by
the links of a cluster of nodes.

SPDX-License-Identifier: Apache-2.0
"""

from collectives import Exchange, Link
from compute import lln_seconds, softmax_seconds
from methods import METHODS, PASSES, Layer

NVLINK = Link("NVLink", 3.4e-6, 450e9)
INFINIBAND = Link("InfiniBand NDR", 14e-6, 50e9)
ETHERNET = Link("100 Gb/s Ethernet", 30e-6, 12.5e9)
NODE = 8  # GPUs that NVLink connects
DEVICE_BYTES = 141e9  # memory of an H200
GPUS = [2**power for power in range(11)]
MILLION = 10**6
LAYER = Layer()


def link_of(ranks, network=INFINIBAND):
    """Beyond a node every message is taken to leave it."""
    return NVLINK if ranks <= NODE else network


def fits(tokens, ranks):
    """q, k, v, o and their gradients of one layer, in the memory of the GPUs."""
    tensors = 2 * (LAYER.heads + LAYER.key_heads) * (LAYER.dim + LAYER.dim_v)
    return LAYER.batch * LAYER.element_bytes * tokens * tensors <= ranks * DEVICE_BYTES


def arithmetic_seconds(root, name, tokens, ranks):
    """Pass -> time of a rank's piece."""
    if name.startswith("lln"):
        sides = lln_seconds(root, LAYER, tokens, ranks, name == "lln_causal")
        return {p: sum(sides[p]) for p in PASSES}
    return softmax_seconds(root, LAYER, tokens, ranks)


def exchange_seconds(name, tokens, ranks, network=INFINIBAND):
    link = link_of(ranks, network)
    return {p: METHODS[name].seconds(LAYER, tokens, ranks, link, [p]) for p in PASSES}


def in_halves(before, exchange, after):
    """Two halves of heads: each is computed, travels and is computed again. One travels while the
    other is computed; `exchange` is that of both, one after the other."""
    first_arrives = before / 2 + exchange / 2
    second_arrives = max(first_arrives, before) + exchange / 2
    first_done = max(before, first_arrives) + after / 2
    return max(first_done, second_arrives) + after / 2


def layer_seconds(root, name, tokens, ranks):
    """Forward and backward. A ring does arithmetic and exchange at the same time, bidirectional LLN
    in part; the others wait."""
    exchange = exchange_seconds(name, tokens, ranks)
    if name == "lln":
        sides = lln_seconds(root, LAYER, tokens, ranks)
        return sum(in_halves(sides[p][0], exchange[p], sides[p][1]) for p in PASSES)
    arithmetic = arithmetic_seconds(root, name, tokens, ranks)
    if name == "ring":
        return sum(max(arithmetic[p], exchange[p]) for p in PASSES)
    return sum(arithmetic.values()) + sum(exchange.values())


def undivided_seconds(root, tokens, ranks):
    """Bidirectional LLN if heads were not done in halves: fewer messages, and all wait for them."""
    exchanges = METHODS["lln"].exchanges(LAYER, tokens, ranks)
    whole = [Exchange(e.operation, e.times * e.bytes) for p in PASSES for e in exchanges[p]]
    exchange = sum(e.seconds(ranks, link_of(ranks)) for e in whole)
    return sum(arithmetic_seconds(root, "lln", tokens, ranks).values()) + exchange


def even_tokens(root, name, ranks):
    """Tokens of a rank from which on arithmetic takes longer than the exchange."""
    low, high = 1.0, 1e9
    while high / low > 1.001:
        piece = (low * high) ** 0.5
        arithmetic = sum(arithmetic_seconds(root, name, piece * ranks, ranks).values())
        longer = arithmetic > sum(exchange_seconds(name, piece * ranks, ranks).values())
        low, high = (low, piece) if longer else (piece, high)
    return high
