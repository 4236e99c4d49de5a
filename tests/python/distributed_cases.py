"""Attention in pieces against attention of the uncut sequence: one function for each case of
test_distributed.py, called by all processes of a group with that group.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lln_attention
from lln_attention.distributed import Pieces, attention

Group = dist.ProcessGroup

# Tokens of each piece: uneven, empty, one of a single token; with blocks of 16, whole ones.
CUTS = {1: (97,), 2: (30, 67), 3: (0, 96, 1), 4: (13, 0, 50, 34)}
BLOCK_CUTS = {1: (97,), 2: (32, 65), 3: (0, 96, 1), 4: (16, 0, 48, 33)}
TOKENS = 97
BATCH, HEADS, HEADS_K, DIM, DIM_V = 2, 4, 2, 8, 6


@dataclass
class Problem:
    """An attention of whole sequences: tensors that get gradients, and what else it is given."""

    leaves: dict[str, Tensor]
    g: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    key_mask: Tensor | None = None
    key_lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cuts: dict[int, Sequence[int]] = field(default_factory=lambda: CUTS)

    def tokens_that_count(self) -> dict[str, Tensor | None]:
        return {
            "key_mask": self.key_mask,
            "key_lengths": self.key_lengths,
            "cu_seqlens": self.cu_seqlens,
        }


def make(
    dtype: torch.dtype = torch.float64,
    *,
    batch: int = BATCH,
    heads_k: int = HEADS_K,
    dim: int = DIM,
    scales: bool = True,
    **rest: Any,
) -> Problem:
    """Random tensors, the same on all processes."""
    torch.manual_seed(1)
    shapes = {
        "q": (batch, HEADS, TOKENS, dim),
        "k": (batch, heads_k, TOKENS, dim),
        "v": (batch, heads_k, TOKENS, DIM_V),
    }
    leaves = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    if scales:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        leaves["alpha"] = 0.5 + torch.rand(HEADS, dtype=wide)
        leaves["beta"] = 0.5 + torch.rand(batch, heads_k, dtype=wide)
    fields = {name: rest.pop(name) for name in list(rest) if name in Problem.__annotations__}
    return Problem(leaves, torch.randn(batch, HEADS, TOKENS, DIM_V).to(dtype), rest, **fields)


def run(
    call: Callable[..., Tensor], leaves: dict[str, Tensor], g: Tensor, options: dict[str, Any]
) -> dict[str, Tensor]:
    """The output "o" and the gradients of all leaves."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    o = call(**leaves, **options)
    o.backward(g)
    found = {"o": o.detach()}
    found.update({name: x.grad for name, x in leaves.items() if x.grad is not None})
    return found


def piece_of(name: str, x: Tensor, tokens: slice) -> Tensor:
    """Of a tensor of the whole what belongs to a piece: alpha and beta belong to all of them."""
    per_token = name in ("o", "q", "k", "v") or (x.ndim == 3 and name not in ("alpha", "beta"))
    return x[:, :, tokens] if per_token else x


def tokens_of(problem: Problem, group: Group) -> slice:
    lengths = problem.cuts[group.size()]
    begin = sum(lengths[: group.rank()])
    return slice(begin, begin + lengths[group.rank()])


def pieces_of(problem: Problem, group: Group) -> Pieces:
    tokens = tokens_of(problem, group)
    given = problem.tokens_that_count()
    if problem.key_mask is not None:
        given["key_mask"] = problem.key_mask[:, tokens]
    return Pieces(group, tokens.stop - tokens.start, **given)


def run_piece(problem: Problem, group: Group, pieces: Pieces) -> dict[str, Tensor]:
    tokens = tokens_of(problem, group)
    leaves = {name: piece_of(name, x, tokens) for name, x in problem.leaves.items()}
    return run(
        lambda q, k, v, **rest: attention(q, k, v, pieces, **rest),
        leaves, problem.g[:, :, tokens], problem.options,
    )  # fmt: skip


def expect_uncut(
    problem: Problem, group: Group, tolerance: float | None = None, least: float = 1e-3
) -> None:
    """Rows and gradients of the piece are those of the uncut sequence; those of parameters add up.

    Errors are relative to the largest element of a tensor, or to `least` where that is smaller. The
    gradient of alpha is the sum of q dq / alpha, and that of beta likewise: terms may cancel, and
    errors are relative to the sum of their sizes.
    """
    found = run_piece(problem, group, pieces_of(problem, group))
    uncut = run(
        lln_attention.attention, problem.leaves, problem.g,
        problem.options | problem.tokens_that_count(),
    )  # fmt: skip
    tokens = tokens_of(problem, group)
    if tolerance is None:
        tolerance = 1e-12 if problem.g.dtype == torch.float64 else 1e-5
    assert found.keys() == uncut.keys()
    for name, whole in uncut.items():
        expected = piece_of(name, whole, tokens)
        if expected.shape == whole.shape and name not in ("o", "q", "k", "v"):
            dist.all_reduce(found[name], group=group)
        largest = max(whole.abs().max().item(), least)
        if name in ("alpha", "beta"):
            scaled = "q" if name == "alpha" else "k"
            terms = (problem.leaves[scaled] * uncut[scaled]).abs().sum((2, 3))
            largest = max(largest, 200 * least, terms.max().item())
        error = (found[name] - expected).abs().max().item() if expected.numel() else 0.0
        assert error <= tolerance * largest, (name, error, largest, problem.options)


def both_types(group: Group, **given: Any) -> None:
    for dtype in (torch.float64, torch.float32):
        expect_uncut(make(dtype, **given), group)


def lln(group: Group) -> None:
    for causal in (False, True):
        both_types(group, causal=causal)
        both_types(group, causal=causal, heads_k=1)
        # With one channel all rows are the same, and dq is 0.
        expect_uncut(make(causal=causal, heads_k=1, batch=1, dim=1), group, least=1)
        both_types(group, causal=causal, heads_k=4, batch=1)
        both_types(group, causal=causal, scales=False, alpha=1.2, beta=0.9)
        problem = make(causal=causal, scales=False, alpha=1.2)
        problem.leaves["beta"] = torch.tensor(0.9, dtype=torch.float64)
        expect_uncut(problem, group)


def weights(group: Group) -> None:
    """LLN+Diag with mix in all its shapes, and with two weights."""
    shapes = ((), (1,), (1, 1), (HEADS,), (HEADS, 1), (HEADS, DIM_V), (BATCH, HEADS, TOKENS))
    for causal, dtype in itertools.product((False, True), (torch.float64, torch.float32)):
        blocks = {"causal": causal, "diag_block": 16, "cuts": BLOCK_CUTS}
        expect_uncut(make(dtype, **blocks, mix=0.3), group)
        for shape in shapes:
            problem = make(dtype, **blocks)
            problem.leaves["mix"] = torch.rand(shape, dtype=dtype)
            expect_uncut(problem, group)
        problem = make(dtype, **blocks)
        problem.leaves["lln_weight"] = torch.randn(HEADS, dtype=dtype)
        problem.leaves["diag_weight"] = torch.randn(BATCH, HEADS, TOKENS, dtype=dtype)
        expect_uncut(problem, group)


def blocks_alone(group: Group) -> None:
    for causal in (False, True):
        both_types(group, causal=causal, diag_block=16, mix=0.0, cuts=BLOCK_CUTS, scales=False)


def features(group: Group) -> None:
    for causal, feature in itertools.product((False, True), ("elu", "relu", "softplus", "power2")):
        both_types(group, causal=causal, feature=feature)
        both_types(group, causal=causal, feature=feature, scales=False)
        both_types(group, causal=causal, feature=feature, diag_block=16, cuts=BLOCK_CUTS)


def masks(group: Group) -> None:
    """Holes, whole pieces without a key that counts, a row without any."""
    torch.manual_seed(2)
    holes = torch.rand(BATCH, TOKENS) < 0.6
    middle = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    middle[0, 40:60] = True
    for causal, mask in itertools.product((False, True), (holes, middle)):
        both_types(group, causal=causal, key_mask=mask)


def masks_with_blocks(group: Group) -> None:
    """Blocks are counted from the first key of the whole that counts, whatever a piece holds."""
    torch.manual_seed(3)
    holes = torch.rand(BATCH, TOKENS) < 0.4
    holes[:, 0] = True
    padded = torch.rand(BATCH, TOKENS) < 0.4
    for row, first in enumerate((5, 37)):  # with borders of pieces before, in between and at them
        padded[row, :first] = False
        padded[row, first] = True
    padded_cuts = {1: (97,), 2: (37, 60), 3: (0, 53, 44), 4: (3, 34, 0, 60)}
    for causal, mix in itertools.product((False, True), (0.4, 0.0)):
        given = {"causal": causal, "diag_block": 16, "mix": mix, "scales": mix > 0}
        both_types(group, **given, key_mask=holes, cuts=BLOCK_CUTS)
        both_types(group, **given, key_mask=padded, cuts=padded_cuts)
        nothing = torch.zeros_like(holes)
        both_types(group, **given, key_mask=nothing, cuts=CUTS)


def lengths(group: Group) -> None:
    for causal, given in itertools.product((False, True), ((97, 20), (0, 31))):
        key_lengths = torch.tensor(given, dtype=torch.int32)
        both_types(group, causal=causal, key_lengths=key_lengths)
        both_types(group, causal=causal, key_lengths=key_lengths, diag_block=16, cuts=BLOCK_CUTS)


def packed(group: Group) -> None:
    """Sequences that cross no border, one and several, and empty ones."""
    for causal, ends in itertools.product(
        (False, True), ((0, 97), (0, 5, 5, 97), (0, 13, 30, 63, 97), (0, 31, 62, 90, 97, 97))
    ):
        cu_seqlens = torch.tensor(ends)
        both_types(group, causal=causal, batch=1, cu_seqlens=cu_seqlens)
        if not causal:
            expect_uncut(make(batch=1, scales=False, cu_seqlens=cu_seqlens), group)


def packed_with_blocks(group: Group) -> None:
    """Blocks are counted from the begin of each sequence."""
    cuts = {1: (97,), 2: (37, 60), 3: (37, 0, 60), 4: (5, 16, 40, 36)}
    cu_seqlens = torch.tensor((0, 5, 61, 61, 97))
    for causal in (False, True):
        both_types(group, causal=causal, diag_block=16, batch=1, cu_seqlens=cu_seqlens, cuts=cuts)


def large_keys(group: Group) -> None:
    """Keys that are 200 larger in exponent erase neither others nor their gradients.

    c is then about 200, where f32 numbers are 1.5e-5 apart; the uncut sequence has such errors.
    """
    for causal, at in itertools.product((False, True), (0, 50, 96)):
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-5)):
            problem = make(dtype, causal=causal)
            for scale in ("alpha", "beta"):
                problem.leaves[scale].fill_(1)
            problem.leaves["k"][:, :, [at, 20, 80], ::3] += 200
            expect_uncut(problem, group, tolerance, least=1)


def keys_far_away(group: Group) -> None:
    """Where all keys are 200 larger in exponent, and values have a mean, f32 is near f64.

    c is then about 200, where f32 numbers are 1.5e-5 apart. Where merged means of values are
    off by as much, dq is off by more, as a difference of them.
    """
    cuts = {1: (97,), 2: (48, 49), 3: (33, 32, 32), 4: (25, 24, 24, 24)}
    for causal in (False, True):
        short = make(torch.float32, causal=causal, batch=1, heads_k=1, cuts=cuts)
        for scale in ("alpha", "beta"):
            short.leaves[scale].fill_(1)
        short.leaves["k"] += 200
        short.leaves["v"] += 3
        found = run_piece(short, group, pieces_of(short, group))
        wide = {name: x.double() for name, x in short.leaves.items()}
        exact = run(lln_attention.attention, wide, short.g.double(), short.options)
        for name in "oqkv":
            expected = piece_of(name, exact[name], tokens_of(short, group))
            error = (found[name] - expected).abs().max() / exact[name].abs().max()
            assert error <= 2.5e-5, (causal, name, error)


def matching(group: Group) -> None:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    mask[0, 80:] = False
    for mode in ("none", "paper", "per_head", "exact", "entropy"):
        both_types(group, matching=mode, scales=False)
        both_types(group, matching=mode, scales=False, key_mask=mask)
        both_types(group, matching=mode, scales=False, diag_block=16, cuts=BLOCK_CUTS, mix=0.25)


def short_types(group: Group) -> None:
    """bf16 and f16: near the same in f32."""
    for dtype, causal in itertools.product((torch.bfloat16, torch.float16), (False, True)):
        given = {"causal": causal, "diag_block": 16, "cuts": BLOCK_CUTS}
        problem = make(dtype, **given)
        expect_uncut(problem, group, 2e-2)
        assert run_piece(problem, group, pieces_of(problem, group))["o"].dtype == dtype
