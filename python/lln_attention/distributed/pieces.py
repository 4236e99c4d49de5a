"""How a sequence is cut into pieces: who has which tokens, which of them count, and which packed
sequences lie on several processes. All that processes have to agree on is checked here, on all of
them alike, so that none is left waiting for another.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from numbers import Integral
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Pieces:
    """A sequence, or a batch of them, in pieces on the processes of a group, in the order of ranks.

    Every process of the group makes one with its own number of tokens, once for a batch; it holds
    for all layers. At most one of `key_mask`, `key_lengths` and `cu_seqlens` is given, by all.

    Args:
        group: The processes: a group of torch.distributed, None for all of them, or a DeviceMesh of
            one dimension (`mesh["name"]` is that of a larger one).
        tokens: Of this process; any number, 0 included.
        key_mask: bool [B, tokens] of this piece, True where a token counts.
        key_lengths: int32 or int64 [B], of the whole sequences: the first so many tokens count. The
            same on all processes.
        cu_seqlens: Packed sequences of the whole, int32 or int64 [S + 1], with B = 1. The same on
            all processes.

    Attributes:
        rank: Of this process in the group.
        lengths: Tokens of each piece.
        offset: Tokens before this piece.
        total: Tokens of all pieces.

    Raises:
        ValueError: an argument is wrong here, or on another process of the group.

    Example:
        >>> import torch.distributed as dist
        >>> from lln_attention.distributed import Pieces
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> pieces = Pieces(None, 1000)
        >>> pieces.lengths, pieces.offset
        ((1000,), 0)
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None,
        tokens: int,
        *,
        key_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        self.group = _process_group(group)
        self.rank = dist.get_rank(self.group)
        self.count = dist.get_world_size(self.group)
        self.tokens = tokens
        given = {"key_mask": key_mask, "key_lengths": key_lengths, "cu_seqlens": cu_seqlens}
        self._numbers: list[int] = []  # of key_lengths or cu_seqlens
        self.lengths = self._agree(given)
        ends = tuple(accumulate(self.lengths))
        self.offset = ends[self.rank] - tokens
        self.total = ends[-1]
        # Where pieces begin: rank and token.
        self._borders = list(zip(range(1, self.count), ends[:-1], strict=True))
        self._checked_blocks: set[int] = set()
        self._set_keys(key_mask, key_lengths)
        self._set_packing(cu_seqlens)

    def _set_keys(self, mask: Tensor | None, lengths: Tensor | None) -> None:
        self.keys = mask  # as the ops take it
        # With a mask blocks are counted from the first token that counts; `total` for none.
        self._first_keys: list[int] = []
        self.block_origins: Tensor | None = None  # in tokens of this piece, where it must be told
        if lengths is not None:
            for b, length in enumerate(self._numbers):
                if not 0 <= length <= self.total:
                    raise ValueError(f"key_lengths[{b}] is {length}: expected 0 to {self.total}")
            self.keys = (lengths - self.offset).clamp(0, self.tokens)
        if mask is not None:
            own = (mask.cumsum(1) == 0).sum(1)
            first = self._least(torch.where(own < self.tokens, self.offset + own, self.total))
            self._first_keys = first.tolist()
            # Where the first token of a piece counts, or the row begins in it, blocks are counted
            # right without being told.
            origins = first - self.offset
            if bool(((own < self.tokens) & (own != origins.clamp(min=0))).any()):
                self.block_origins = origins

    def _set_packing(self, cu_seqlens: Tensor | None) -> None:
        # Sequences that lie on more than one process: None for all of them.
        self.shared: Tensor | None = None
        self.cu_seqlens = cu_seqlens  # of this piece, and below of a call without tokens
        self.no_cu_seqlens: Tensor | None = None
        self.exchanging = self.count > 1
        if cu_seqlens is None:
            return
        self._check_cumulative()
        self.cu_seqlens = (cu_seqlens - self.offset).clamp(0, self.tokens)
        self.no_cu_seqlens = torch.zeros_like(cu_seqlens)
        over = (self._packed_over(border) for _, border in self._borders)
        shared = sorted({s for s in over if s is not None})
        self.shared = torch.tensor(shared, dtype=torch.int64, device=cu_seqlens.device)
        self.exchanging = bool(shared)

    def gather(self, x: Tensor) -> Tensor:
        """x of all processes, [pieces, ...], where x is."""
        if self.count == 1:
            return x[None]
        device = _exchange_device(self.group)
        found = x.new_empty((self.count * x.numel(),), device=device)
        dist.all_gather_into_tensor(found, x.to(device).flatten(), group=self.group)
        return found.to(x.device).view(self.count, *x.shape)

    def _least(self, x: Tensor) -> Tensor:
        """The smallest x of any process, where x is."""
        if self.count == 1:
            return x
        found = x.to(_exchange_device(self.group))
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group)
        return found.to(x.device)

    def take_shared(self, x: Tensor) -> Tensor:
        """Of x [S, ...] the sequences whose states travel."""
        return x if self.shared is None else x.index_select(0, self.shared)

    def put_shared(self, x: Tensor, shared: Tensor) -> Tensor:
        """x [S, ...] with those sequences replaced."""
        return shared if self.shared is None else x.index_copy(0, self.shared, shared)

    def check_blocks(self, block: int) -> None:
        """Refuses pieces that cut a block of Diag, on all processes alike.

        Raises:
            ValueError: a piece begins inside a block; says where it could begin.
        """
        if block in self._checked_blocks:
            return
        for rank, border in self._borders:
            for x in self._sequences_over(border):
                if (border - x.origin) % block:
                    below, above = self._nearest_cuts(border, block, x)
                    raise ValueError(
                        f"the piece of rank {rank} begins at token {border}, inside of a block of "
                        f"{block} tokens{x.words}: cut at token {below} or {above}"
                    )
        self._checked_blocks.add(block)

    def _nearest_cuts(self, border: int, block: int, x: _Blocks) -> tuple[int, int]:
        """Where else a piece could begin that begins inside of a block of x: below and above."""
        origin = min(self._first_keys, default=x.origin)
        # Where a row begins whose blocks have other borders than those of the first, cuts end.
        last = min((first for first in self._first_keys if (first - origin) % block), default=x.end)
        inside = min(border, last)
        below = inside - (inside - origin) % block
        above = border - (border - origin) % block + block
        return below, above if above <= last else x.end

    def _sequences_over(self, border: int) -> Iterator[_Blocks]:
        """The sequences with blocks on both sides of a border."""
        if self.cu_seqlens is not None:
            s = self._packed_over(border)
            if s is not None:
                begin, end = self._numbers[s : s + 2]
                yield _Blocks(begin, end, " of a packed sequence")
        elif self._first_keys:
            for row, first in enumerate(self._first_keys):
                words = f", as those of row {row} begin at token {first}"
                if first < border < self.total:
                    yield _Blocks(first, self.total, words)
        elif 0 < border < self.total:
            yield _Blocks(0, self.total, "")

    def _packed_over(self, border: int) -> int | None:
        """The packed sequence with tokens on both sides of a border."""
        cu = self._numbers
        s = bisect_right(cu, border) - 1
        return s if s + 1 < len(cu) and cu[s] < border else None

    def _agree(self, given: dict[str, Tensor | None]) -> tuple[int, ...]:
        """Tokens of each piece; refuses arguments that are wrong, or not those of the others."""
        fault = _fault(self.tokens, given)
        names = [name for name, x in given.items() if x is not None]
        which = entries = checksum = 0
        if fault is None and names:
            which = 1 + list(given).index(names[0])
            x = given[names[0]]
            assert x is not None
            entries = len(x)
            if x.ndim == 1:  # a mask differs from process to process
                self._numbers = x.tolist()
                checksum = zlib.crc32(repr(self._numbers).encode())
        record = [0 if fault else self.tokens, fault is not None, which, entries, checksum]
        records = self.gather(torch.tensor(record, dtype=torch.int64)).tolist()
        if fault is not None:
            raise ValueError(fault)
        for rank, (_, faulty, *agreed) in enumerate(records):
            if faulty:
                raise ValueError(f"the pieces of rank {rank} are refused there, with the reason")
            if agreed != records[0][2:]:
                raise ValueError(
                    f"rank {rank} has {_words(given, agreed)} and rank 0 has "
                    f"{_words(given, records[0][2:])}: expected the same"
                )
        return tuple(tokens for tokens, *_ in records)

    def _check_cumulative(self) -> None:
        cu = self._numbers
        if not cu:
            raise ValueError(
                "cu_seqlens has no elements: expected one more than there are sequences"
            )
        for s, x in enumerate(cu):
            least = 0 if s == 0 else cu[s - 1]
            most = 0 if s == 0 else self.total
            if not least <= x <= most:
                raise ValueError(f"cu_seqlens[{s}] is {x}: expected {least} to {most}")
        if cu[-1] != self.total:
            raise ValueError(
                f"cu_seqlens[{len(cu) - 1}] is {cu[-1]}: expected the tokens of all pieces, "
                f"{self.total}"
            )


class _Blocks(NamedTuple):
    """The blocks of a sequence: from where to where, and what to say of them."""

    origin: int
    end: int
    words: str


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"the mesh has {group.ndim} dimensions: expected one, as mesh[name] of a larger one"
            )
        group = group.get_group()
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not in the group")
    return group


def _exchange_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors have to be that processes exchange: on the CPU, where the group can."""
    backends = dist.get_backend_config(group)
    if "cpu" in backends:
        return torch.device("cpu")
    return torch.device(backends.partition(":")[0])


def _fault(tokens: int, given: dict[str, Tensor | None]) -> str | None:
    """What is wrong with arguments as far as one process can tell."""
    names = [name for name, x in given.items() if x is not None]
    if not isinstance(tokens, Integral) or tokens < 0:
        return f"tokens is {tokens!r}: expected an integer of 0 or more"
    if len(names) > 1:
        return f"{' and '.join(names)} are given: give one of them"
    for name in names:
        x = given[name]
        if not isinstance(x, Tensor):
            return f"{name} is of type {type(x).__name__}: expected a tensor"
        shape = list(x.shape)
        if name == "key_mask":
            if x.ndim != 2 or shape[1] != tokens:
                return f"key_mask has shape {shape}: expected [batch, {tokens}]"
            if x.dtype != torch.bool:
                return "key_mask must be of type bool, True where a token counts"
        elif x.ndim != 1:
            expected = "[batch]" if name == "key_lengths" else "[sequences + 1]"
            return f"{name} has shape {shape}: expected {expected}"
        elif x.dtype not in (torch.int32, torch.int64):
            return f"{name} must be of type int32 or int64"
    return None


def _words(given: dict[str, Tensor | None], agreed: list[int]) -> str:
    """What a process was given, from its record."""
    which, entries, checksum = agreed
    if which == 0:
        return "no " + ", ".join(given)
    values = f" and the checksum {checksum:08x}" if checksum else ""
    return f"{list(given)[which - 1]} with {entries} entries{values}"
