#!/usr/bin/env python3
"""One long sequence on several processes: LLN+Diag attention of which each has a piece.

    torchrun --nproc-per-node 2 examples/python/sequence_parallel.py

Each process makes its own tokens and runs the layer on them; states of keys, of constant size, are
all that travels. At the end the first process computes the sequence uncut, which nobody else has to
do, to show that rows and gradients are the same.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.distributed as dist
from torch import Tensor

from lln_attention import LLNPlusDiagAttention
from lln_attention.distributed import Pieces

BLOCK = 64


def tokens_of(rank: int, length: int) -> Tensor:
    """The tokens of a piece; anybody could make them, where a real one reads its part of a file."""
    return torch.randn(1, length, 256, generator=torch.Generator().manual_seed(rank))


def main() -> None:
    """Parses the command line; runs a forward and a backward pass and compares them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768, help="of the whole sequence")
    total = parser.parse_args().tokens
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same parameters everywhere
    layer = LLNPlusDiagAttention(256, 4, diag_block=BLOCK, mix="per_head")

    # Pieces may have any lengths, as long as they begin where blocks do. Where there are not enough
    # blocks for all, the last processes have none.
    blocks = -(-total // BLOCK)
    cuts = [min(-(-blocks * r // ranks) * BLOCK, total) for r in range(ranks + 1)]
    lengths = [end - begin for begin, end in itertools.pairwise(cuts)]
    pieces = Pieces(None, lengths[rank])
    y = layer(tokens_of(rank, lengths[rank]), pieces=pieces)
    (y.square().sum() / total).backward()
    for parameter in layer.parameters():
        dist.all_reduce(parameter.grad)  # the sum: each process has the part of its tokens
    print(f"rank {rank}: tokens {cuts[rank]} to {cuts[rank + 1]}", flush=True)

    if rank == 0:
        gradients = [parameter.grad for parameter in layer.parameters()]
        layer.zero_grad()
        uncut = layer(torch.cat([tokens_of(r, n) for r, n in enumerate(lengths)], 1))
        (uncut.square().sum() / total).backward()
        pairs = zip(gradients, layer.parameters(), strict=True)
        largest = max((a - b.grad).abs().max().item() for a, b in pairs)
        rows = (y - uncut[:, : lengths[0]]).abs().max().item()
        print(f"from the uncut sequence rows differ by {rows:.1g}, gradients by {largest:.1g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
