"""What attention in pieces promises besides its numbers: what travels, the same bits, errors on all
processes. One function for each case of test_distributed.py, as in distributed_cases.py.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import distributed_cases as cases
import lln_attention
from distributed_cases import BATCH, DIM, DIM_V, HEADS, HEADS_K, Group
from lln_attention import LLNAttention, LLNPlusDiagAttention
from lln_attention.distributed import Pieces, attention, calls, exchange, update_moments


@contextlib.contextmanager
def traffic() -> Iterator[dict[str, int]]:
    """Bytes that this process gives to each kind of exchange."""
    sent = {"reduced": 0, "gathered": 0, "sent": 0}
    reduce, gather, messages = (
        dist.all_reduce,
        dist.all_gather_into_tensor,
        dist.batch_isend_irecv,
    )

    def counted_reduce(x: Tensor, *rest: Any, **options: Any) -> Any:
        sent["reduced"] += x.nbytes
        return reduce(x, *rest, **options)

    def counted_gather(out: Tensor, x: Tensor, *rest: Any, **options: Any) -> Any:
        sent["gathered"] += x.nbytes
        return gather(out, x, *rest, **options)

    def counted_messages(ops: list[dist.P2POp]) -> Any:
        sent["sent"] += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return messages(ops)

    with (
        mock.patch.object(dist, "all_reduce", counted_reduce),
        mock.patch.object(dist, "all_gather_into_tensor", counted_gather),
        mock.patch.object(dist, "batch_isend_irecv", counted_messages),
    ):
        yield sent


def expect_traffic(group: Group, tokens: int, sequences: int | None, **options: Any) -> None:
    """What one forward and one backward pass exchange, by the formula."""
    rank, count = group.rank(), group.size()
    batch = 1 if sequences is not None else BATCH
    given = {}
    if sequences is not None:  # one that all processes have a part of, and one inside each piece
        ends = [0, *(r * tokens + 3 for r in range(1, count)), count * tokens]
        given["cu_seqlens"] = torch.tensor(ends if sequences > 1 else [0, count * tokens])
    pieces = Pieces(group, tokens, **given)
    q = torch.randn(batch, HEADS, tokens, DIM, requires_grad=True)
    k = torch.randn(batch, HEADS_K, tokens, DIM)
    v = torch.randn(batch, HEADS_K, tokens, DIM_V)
    with traffic() as forward:
        o = attention(q, k, v, pieces, **options)
    with traffic() as backward:
        o.sum().backward()
    shared = 0 if count == 1 else batch if sequences is None else min(sequences, count - 1)
    number = 4 * shared * HEADS_K * DIM
    rounds = [1 << i for i in range(math.ceil(math.log2(count)))]
    nothing = {"reduced": 0, "gathered": 0, "sent": 0}
    if options.get("mix") == 0.0:
        assert forward == backward == nothing
    elif options.get("causal"):
        later = sum(rank + d < count for d in rounds)
        earlier = sum(rank - d >= 0 for d in rounds)
        assert forward == nothing | {"sent": later * number * (1 + DIM_V)}
        assert backward == nothing | {"sent": earlier * number * (2 + DIM_V)}
    else:
        matched = "alpha" not in options and count > 1
        moments = 8 * len(o if sequences is None else given["cu_seqlens"][1:]) * 3
        assert forward == nothing | {
            "reduced": number * (2 + DIM_V),
            "gathered": matched * moments * (HEADS + HEADS_K),
        }
        assert backward == nothing | {"reduced": number * (1 + DIM_V)}


def bytes_moved(group: Group) -> None:
    """They depend on sequences, heads and channels, never on the number of tokens."""
    scales = {"alpha": 1.0, "beta": 1.0}
    for tokens in (16, 64, 256):
        for sequences in (None, 1, 4):
            expect_traffic(group, tokens, sequences, **scales)
            expect_traffic(group, tokens, sequences, **scales, causal=True)
            expect_traffic(group, tokens, sequences)
        expect_traffic(group, tokens, None, **scales, diag_block=16)
        expect_traffic(group, tokens, None, diag_block=16, mix=0.0)
        with traffic() as lengths:
            Pieces(group, tokens)
        with traffic() as mask:
            Pieces(group, tokens, key_mask=torch.ones(BATCH, tokens, dtype=torch.bool))
        several = group.size() > 1
        assert lengths == {"reduced": 0, "gathered": 40 * several, "sent": 0}
        assert mask == lengths | {"reduced": 8 * BATCH * several}


def same_bits(group: Group) -> None:
    """From run to run; and the merged state on all processes."""
    for causal in (False, True):
        problem = cases.make(torch.float32, causal=causal, diag_block=16, cuts=cases.BLOCK_CUTS)
        pieces = cases.pieces_of(problem, group)
        first, second = (cases.run_piece(problem, group, pieces) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)
    tokens = cases.tokens_of(problem, group)
    x = [cases.piece_of(name, problem.leaves[name], tokens) for name in "qkv"]
    scales = (torch.ones(1, HEADS), torch.ones(1, HEADS_K))
    own = calls.Calls(pieces, "lln", False, 0.5, "exp").state_of_keys(calls.Inputs(*x, *scales))
    merge = exchange.StateMerge(pieces, own)
    merge.begin_sum()
    merged = merge.finish()
    for tensor in merged:
        assert all(torch.equal(other, tensor) for other in pieces.gather(tensor))


def expect_refused(group: Group, text: str, call: Callable[[], Any]) -> None:
    """On all processes, none of which is left waiting."""
    with pytest.raises(ValueError, match=text):
        call()
    dist.barrier(group)


def cut_blocks(group: Group) -> None:
    """Pieces that begin inside a block are refused everywhere, with the nearest borders."""
    last = group.size() - 1
    if last == 0:
        return
    tokens = 40 if group.rank() == last else 20
    q = torch.randn(1, HEADS, tokens, DIM)

    def call(block: int, **given: Any) -> Tensor:
        return attention(q, q, q, Pieces(group, tokens, **given), diag_block=block)

    whole = 20 * last + 40
    text = "rank 1 begins at token 20, inside of a block of 16 tokens: cut at token 16 or 32"
    expect_refused(group, text, lambda: call(16))
    lengths = torch.tensor([whole])
    expect_refused(group, text, lambda: call(16, key_lengths=lengths))
    packed = torch.tensor([0, 1, 22, whole])
    text = "20, inside of a block of 16 tokens of a packed sequence: cut at token 17 or 22"
    expect_refused(group, text, lambda: call(16, cu_seqlens=packed))
    mask = torch.ones(1, tokens, dtype=torch.bool)
    mask[0, :3] = group.rank() > 0
    text = "20, inside of a block of 10 tokens, as those of row 0 begin at token 3: cut at token 13"
    expect_refused(group, text, lambda: call(10, key_mask=mask))
    padded_rows(group)
    assert call(20).shape == q.shape
    assert call(64, cu_seqlens=torch.tensor([*range(0, whole, 20), whole])).shape == q.shape


def padded_rows(group: Group) -> None:
    """The borders that are named suit all rows, whose blocks begin at tokens of their own."""
    count, whole = group.size(), 20 * group.size() + 20

    def check(lengths: list[int], first_keys: tuple[int, int]) -> None:
        begin, tokens = sum(lengths[: group.rank()]), lengths[group.rank()]
        mask = torch.arange(begin, begin + tokens) >= torch.tensor(first_keys)[:, None]
        Pieces(group, tokens, key_mask=mask).check_blocks(10)

    for first_keys, below, above in (
        ((3, 13), 13, 23),
        ((3, 23), 13, 23),
        ((3, 10), 3, whole),  # none in between suits both
        ((10, 7), 7, whole),
        ((3, 21), 13, whole),
        ((10, 17), 10, whole),
    ):
        text = f"20, inside of a block of 10 .*: cut at token {below} or {above}$"
        lengths = [20] * (count - 1) + [40]
        expect_refused(group, text, functools.partial(check, lengths, first_keys))
        for cut in (below, above):
            check([cut, whole - cut] + [0] * (count - 2), first_keys)


def wrong_pieces(group: Group) -> None:
    """What one process is given wrong, or otherwise than the others, is refused by all."""
    here = group.rank() == group.size() - 1
    several = group.size() > 1
    tokens = 8 * group.size()
    mask = torch.ones(2, 9 if here else 8, dtype=torch.bool)
    text = r"expected \[batch, 8\]" if here else f"the pieces of rank {group.size() - 1} are"
    expect_refused(group, text, lambda: Pieces(group, 8, key_mask=mask))
    for wrong in (-1, 10.5, None):
        text = f"tokens is {wrong}: expected an integer" if here else "refused there"
        given = wrong if here else 8
        expect_refused(group, text, lambda given=given: Pieces(group, given))
    for name, wrong in (("key_mask", [[True] * 8]), ("key_lengths", 8), ("cu_seqlens", "08")):
        text = f"{name} is of type {type(wrong).__name__}: expected a tensor"
        given = {name: wrong} if here else {}
        expect_refused(
            group, text if here else "refused there", lambda given=given: Pieces(group, 8, **given)
        )
    lengths = torch.tensor([3, 4])
    for wrong, text in (
        ({"key_lengths": lengths.float()}, "int32 or int64"),
        ({"key_lengths": lengths[None]}, r"expected \[batch\]"),
        ({"key_mask": mask[:, :8].int()}, "of type bool"),
        ({"key_mask": mask[:, :8], "key_lengths": lengths}, "give one of them"),
        ({"key_lengths": lengths * 100}, rf"key_lengths\[0\] is 300: expected 0 to {tokens}"),
        ({"cu_seqlens": torch.tensor([0, 5, 3])}, r"cu_seqlens\[2\] is 3: expected 5 to"),
        ({"cu_seqlens": torch.tensor([0, 5])}, f"the tokens of all pieces, {tokens}"),
        ({"cu_seqlens": lengths[:0]}, "no elements"),
    ):
        expect_refused(group, text, lambda wrong=wrong: Pieces(group, 8, **wrong))
    if several:
        for given, text in (
            ({"key_lengths": lengths + here}, "checksum"),
            ({"key_lengths": lengths[: 1 + here]}, "key_lengths with 2 entries"),
            ({"key_mask": mask[:, :8]} if here else {}, "rank 0 has no key_mask"),
        ):
            expect_refused(group, text, lambda given=given: Pieces(group, 8, **given))


def wrong_calls(group: Group) -> None:
    """The errors of the uncut attention, before anything travels: other calls can follow."""
    pieces = Pieces(group, 8)
    x = torch.randn(2, HEADS, 8, DIM)
    for arguments, options in (
        ((x, x[..., :3], x), {"alpha": 1.0, "beta": 1.0}),
        ((x[0], x, x), {}),
        ((x[0, 0, 0], x, x), {}),
        ((x.int(), x, x), {}),
        ((x, x.double(), x), {"alpha": 1.0, "beta": 1.0}),
        ((x, x[:, :3], x[:, :3]), {"alpha": 1.0, "beta": 1.0}),
        ((x, x, x), {"alpha": 1.0}),
        ((x, x, x), {"alpha": torch.ones(3), "beta": 1.0}),
        ((x, x, x), {"alpha": math.nan, "beta": 1.0}),
        ((x, x, x), {"diag_block": 8, "mix": torch.ones(2, HEADS, 9), "alpha": 1.0, "beta": 1.0}),
        ((x, x, x), {"diag_block": -1}),
        ((x, x, x), {"causal": True}),
        ((x, x, x), {"matching": "median"}),
        ((x, x, x), {"feature": "tanh", "matching": "none"}),
    ):
        with pytest.raises(ValueError) as uncut:
            lln_attention.attention(*arguments, **options)
        with pytest.raises(ValueError) as caught, traffic() as sent:
            attention(*arguments[:3], pieces, **options)
        assert str(caught.value) == str(uncut.value)
        assert not any(sent.values()), options
    with pytest.raises(ValueError, match="mode paper matches the exponential"):
        attention(x, x, x, pieces, matching="paper", feature="relu")
    with pytest.raises(ValueError, match=r"k has 7 tokens: the piece of rank \d has 8"):
        attention(x, x[:, :, :7], x, pieces)
    masked = Pieces(group, 8, key_lengths=torch.tensor([3]))
    with pytest.raises(ValueError, match=r"key_lengths has 1 entries"):
        attention(x, x, x, masked, alpha=1.0, beta=1.0)
    assert attention(x, x, x, pieces).shape == x.shape


def derivatives_that_are_not_there(group: Group) -> None:
    pieces = Pieces(group, 8)
    x = torch.randn(1, HEADS, 8, DIM, requires_grad=True)
    for causal in (False, True):
        o = attention(x, x, x, pieces, alpha=1.0, beta=1.0, causal=causal)
        (dx,) = torch.autograd.grad(o.sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="gradients of gradients"):
            dx.sum().backward()
    y = x.detach()
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(lambda x: attention(x, y, y, pieces), (y,), (y,))
    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad"):
        torch.func.grad(lambda x: attention(x, y, y, pieces, alpha=1.0, beta=1.0).sum())(y)


def ways_of_training(group: Group) -> None:
    """Recomputed activations, autocast, other layouts and gradients that are expanded."""
    problem = cases.make(torch.float32, scales=False, diag_block=16, cuts=cases.BLOCK_CUTS)
    pieces = cases.pieces_of(problem, group)
    tokens = cases.tokens_of(problem, group)
    x = [
        cases.piece_of(name, problem.leaves[name], tokens).clone().requires_grad_()
        for name in "qkv"
    ]

    def call(*x: Tensor) -> Tensor:
        return attention(*x, pieces, diag_block=16)

    o = call(*x)
    expected = torch.autograd.grad(o.sum(), x)
    again = checkpoint(call, *x, use_reentrant=False)
    found = torch.autograd.grad(again.sum(), x)
    assert torch.equal(o, again)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    turned = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in x]
    o_turned = call(*turned)
    assert o_turned.stride(1) <= o_turned.stride(2)
    torch.testing.assert_close(o_turned, o, rtol=0, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        short = call(*x)
    assert short.dtype == torch.bfloat16
    torch.testing.assert_close(short.float(), o, rtol=0, atol=0.03)
    with torch.inference_mode():
        assert torch.equal(call(*x), o)


def modules(group: Group) -> None:
    """A layer with pieces is the layer without; running moments are those of whole sequences."""
    x = torch.randn(2, cases.TOKENS, 32, generator=torch.Generator().manual_seed(4))
    problem = cases.make(cuts=cases.BLOCK_CUTS)
    tokens, pieces = cases.tokens_of(problem, group), cases.pieces_of(problem, group)
    for matching, mix, causal in (
        ("per_head", "gated", False),
        ("ema", "per_channel", True),
        ("ema", "fixed", False),
        ("frozen", "per_head", True),
    ):
        torch.manual_seed(5)
        whole = LLNPlusDiagAttention(
            32, 4, num_kv_heads=2, diag_block=16, matching=matching, mix=mix, causal=causal
        )
        layer = copy.deepcopy(whole)
        for _ in range(2):  # the second with moments of the first
            whole.zero_grad()
            layer.zero_grad()
            expected, found = whole(x), layer(x[:, tokens], pieces=pieces)
            torch.testing.assert_close(found, expected[:, tokens], rtol=0, atol=1e-5)
            expected.square().sum().backward()
            found.square().sum().backward()
        # Torch may round a projection of fewer rows otherwise.
        torch.testing.assert_close(layer.running, whole.running, rtol=1e-6, atol=1e-6)
        for ours, theirs in zip(layer.parameters(), whole.parameters(), strict=True):
            dist.all_reduce(ours.grad, group=group)
            largest = theirs.grad.abs().max().item()
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-5 * largest)
    with pytest.raises(ValueError, match="with pieces there is no"):
        LLNAttention(32, 4)(x[:, tokens], x[:, tokens], pieces=pieces)


def moments_of_refused_calls(group: Group) -> None:
    """Nothing travels, and running moments stay as they are."""
    pieces = Pieces(group, 20)
    layer = LLNPlusDiagAttention(32, 4, diag_block=16, causal=True)
    running = torch.zeros(2, HEADS, 3, dtype=torch.float64)
    x = torch.randn(1, HEADS, 20, DIM)
    for text, call in (
        ("has 19 tokens", lambda: layer(torch.randn(1, 19, 32), pieces=pieces)),
        ("q has 19 tokens", lambda: update_moments(running, x[:, :, :19], x, pieces)),
        ("k has 19 tokens", lambda: update_moments(running, x, x[:, :, :19], pieces)),
    ):
        with pytest.raises(ValueError, match=text), traffic() as sent:
            call()
        assert not any(sent.values())
    if group.size() > 1:
        with traffic() as sent:
            expect_refused(
                group, "inside of a block", lambda: layer(torch.randn(1, 20, 32), pieces=pieces)
            )
        assert not any(sent.values())
    assert not layer.running.any() and not running.any()
    for wrong in (running.float(), running[:, :1].clone(), running[0]):
        with pytest.raises(ValueError) as uncut:
            lln_attention.update_moments(wrong, x, x)
        expect_refused(
            group, re.escape(str(uncut.value)), lambda w=wrong: update_moments(w, x, x, pieces)
        )


def meshes(group: Group) -> None:
    """Called with all processes."""
    if group.size() != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("batch", "sequence"))
    cases.expect_uncut(cases.make(), mesh["sequence"].get_group())
    pieces = Pieces(mesh["sequence"], 5 + dist.get_rank() % 2)
    assert pieces.lengths == (5, 6) and pieces.offset == 5 * pieces.rank
    with pytest.raises(ValueError, match="the mesh has 2 dimensions"):
        Pieces(mesh, 5)
    assert Pieces(None, 3).lengths == (3, 3, 3, 3)
    others = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match="not in the group"):
            Pieces(others, 3)
