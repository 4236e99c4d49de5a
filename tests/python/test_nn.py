"""The modules: what they compute, what they store, how they are copied, cast and trained."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import io
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import processes
from lln_attention import LLNAttention, LLNPlusDiagAttention, attention, match

MODES = ("none", "paper", "per_head", "exact", "entropy", "ema", "frozen")
MIXES = ("fixed", "per_head", "per_channel", "gated")


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def test_it_is_the_function_between_projections() -> None:
    layer = LLNPlusDiagAttention(32, 4, num_kv_heads=2, diag_block=8, matching="entropy")
    x, mask = torch.randn(2, 20, 32), torch.rand(2, 20) < 0.8
    q, k, v = heads(layer.q_proj(x), 4), heads(layer.k_proj(x), 2), heads(layer.v_proj(x), 2)
    o = attention(q, k, v, diag_block=8, matching="entropy", key_mask=mask)
    expected = layer.out_proj(o.transpose(1, 2).reshape(2, 20, 32))
    torch.testing.assert_close(layer(x, key_mask=mask), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("matching", MODES)
def test_every_mode_learns(matching: str, mix: str) -> None:
    layer = LLNPlusDiagAttention(16, 2, diag_block=4, mix=mix, matching=matching)
    layer(torch.randn(2, 12, 16)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert (matching == "ema") == bool(layer.running.any())


def test_mixes_begin_as_the_fixed_one() -> None:
    x = torch.randn(2, 12, 16)
    layers = [LLNPlusDiagAttention(16, 2, diag_block=4, mix=mix, mix_value=0.3) for mix in MIXES]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict(), strict=False)
        torch.testing.assert_close(layer(x), layers[0](x), rtol=0, atol=1e-6)


def test_cross_attention_masks_queries_apart() -> None:
    layer = LLNAttention(16, 2)
    x, context = torch.randn(1, 10, 16), torch.randn(1, 10, 16)
    q, k, v = (
        heads(layer.q_proj(x), 2),
        heads(layer.k_proj(context), 2),
        heads(layer.v_proj(context), 2),
    )
    mask = torch.arange(10)[None] < 6
    alpha, beta = match(q, k, key_mask=mask, cross=True)
    o = attention(q, k, v, alpha=alpha, beta=beta, key_mask=mask)
    expected = layer.out_proj(o.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, context, key_mask=mask), expected, rtol=0, atol=1e-6)


def test_running_moments_move_in_training_alone() -> None:
    layer = LLNAttention(16, 2, matching="ema")
    x = torch.randn(2, 12, 16)
    ones = layer.eval()(x)
    layer.train()
    torch.testing.assert_close(layer(x), ones)  # a step uses the steps before it
    moments = layer.running.clone()
    assert not torch.allclose(layer.eval()(x), ones)
    assert torch.equal(layer.running, moments)
    layer.freeze()
    assert layer.matching == "frozen" and (layer.alpha != 1).all()
    frozen = layer(x)
    layer.matching = "ema"
    torch.testing.assert_close(layer(x), frozen, rtol=0, atol=1e-6)


@pytest.mark.parametrize("matching", ("per_head", "ema", "frozen"))
def test_state_dict_copy_and_pickle(matching: str, tmp_path: Path) -> None:
    layer = LLNPlusDiagAttention(16, 2, diag_block=4, mix="gated", matching=matching)
    x = torch.randn(2, 12, 16)
    layer(x)
    if matching == "frozen":
        layer.freeze(torch.tensor([1.5, 2.0]), torch.tensor([0.5, 1.0]))
    layer.eval()
    torch.save(layer.state_dict(), tmp_path / "weights.pt")
    other = LLNPlusDiagAttention(16, 2, diag_block=4, mix="gated", matching=matching).eval()
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    whole = io.BytesIO()
    torch.save(layer, whole)
    whole.seek(0)
    copies = (
        other,
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(whole, weights_only=False),
    )
    for same in copies:
        assert torch.equal(same(x), layer(x))
        assert torch.equal(same.running, layer.running)


@pytest.mark.parametrize("causal", (False, True))
def test_the_mode_of_matching_comes_with_the_state_dict(causal: bool, tmp_path: Path) -> None:
    layer = LLNAttention(16, 2, causal=causal).eval()
    layer.freeze(torch.tensor([1.5, 2.0]), torch.tensor([0.5, 1.0]))
    torch.save(layer.state_dict(), tmp_path / "weights.pt")
    assert all(isinstance(x, Tensor) for x in layer.state_dict().values())
    other = LLNAttention(16, 2, causal=causal).eval()
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    x = torch.randn(2, 12, 16)
    assert other.matching == "frozen" and torch.equal(other(x), layer(x))
    with pytest.raises(ValueError, match="reads the whole sequence"):
        LLNAttention(16, 2, causal=True).load_state_dict(LLNAttention(16, 2).state_dict())


def test_decoding_without_scales_has_none() -> None:
    """Scales in the buffers are of mode frozen alone."""
    layer = LLNAttention(16, 2, causal=True, matching="none").eval()
    layer.alpha.fill_(2.0)
    x = torch.randn(1, 5, 16)
    with torch.no_grad():
        rows = layer(x, state=layer.decode_state(1))
        torch.testing.assert_close(rows, layer(x), rtol=0, atol=2e-6)


def test_casts_leave_moments_and_scales() -> None:
    layer = LLNAttention(16, 2, matching="ema", causal=True)
    layer(torch.randn(1, 12, 16))
    moments = layer.running.clone()
    layer.bfloat16()
    assert layer.q_proj.weight.dtype == torch.bfloat16
    assert torch.equal(layer.running, moments) and layer.alpha.dtype == torch.float32
    assert layer(torch.randn(1, 12, 16).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("matching", ("none", "ema", "frozen"))
def test_decoding_is_the_causal_layer(matching: str, mix: str) -> None:
    layer = LLNPlusDiagAttention(
        16, 4, num_kv_heads=2, diag_block=4, mix=mix, matching=matching, causal=True
    )
    if mix == "gated":
        nn.init.normal_(layer.gate.weight)
    x = torch.randn(2, 11, 16)
    layer(x)
    layer.eval()
    state = layer.decode_state(2)
    with torch.no_grad():
        rows = [layer(x[:, :5], state=state)]
        rows += [layer(x[:, i : i + 1], state=state) for i in range(5, 11)]
        torch.testing.assert_close(torch.cat(rows, 1), layer(x), rtol=0, atol=2e-6)
        with pytest.raises(ValueError, match="with a state"):
            layer(x, x, state=state)
    with pytest.raises(ValueError, match="causal=False"):
        LLNAttention(16, 2).decode_state(1)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "f16"))
def test_autocast(dtype: torch.dtype) -> None:
    layer = LLNPlusDiagAttention(32, 4, diag_block=8, mix="gated")
    x = torch.randn(2, 24, 32, requires_grad=True)
    expected = layer(x)
    with torch.autocast("cpu", dtype=dtype):
        o = layer(x)
        q = torch.randn(1, 2, 8, 16)
        inside = attention(q, q.to(dtype), q, alpha=1.0, beta=1.0)  # types are mixed before
        alpha, _ = match(q, q.to(dtype))
    assert o.dtype == inside.dtype == dtype and alpha.dtype == torch.float32
    rounded = q.to(dtype)
    assert torch.equal(inside, attention(rounded, rounded, rounded, alpha=1.0, beta=1.0))
    torch.testing.assert_close(o.float(), expected, rtol=0, atol=0.02)
    o.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    wide = torch.randn(1, 2, 8, 16, dtype=torch.float64)
    with torch.autocast("cpu", dtype=dtype):
        assert attention(wide, wide, wide).dtype == torch.float64


def _train(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(
        LLNPlusDiagAttention(16, 2, diag_block=4, mix="gated", matching="per_head")
    )
    x = torch.randn(2, 3, 12, 16)
    model(x[rank]).square().sum().backward()
    if rank == 0:
        gradients = {name: p.grad for name, p in model.module.named_parameters()}
        torch.save(gradients, os.path.join(folder, "gradients.pt"))
    dist.barrier()  # a rank that leaves early is an error to the other


def test_two_processes_share_a_batch(tmp_path: Path) -> None:
    """The gradient of DDP is the mean over the two halves of a batch."""
    processes.run(_train, tmp_path, 2)
    gradients = torch.load(tmp_path / "gradients.pt")
    torch.manual_seed(0)
    layer = LLNPlusDiagAttention(16, 2, diag_block=4, mix="gated", matching="per_head")
    x = torch.randn(2, 3, 12, 16)
    (layer(x.flatten(0, 1)).square().sum() / 2).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
