"""On a CUDA device: the results of the CPU, the current stream, graphs, autocast, no waiting."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from lln_attention import (
    DecodeState,
    LLNPlusDiagAttention,
    attention,
    head_moments,
    match,
    update_moments,
)


def _reason() -> str:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        x = torch.zeros(1, 1, 1, 8, device="cuda")
        attention(x, x, x)
    except NotImplementedError as error:
        return str(error)
    return ""


REASON = _reason()
# Of the largest result in float32. The case table (`lln check`) holds kernels of every device to
# twice the error of a plain evaluation, which is below 1e-6 of it here, in outputs and gradients.
F32 = 1e-5
pytestmark = pytest.mark.skipif(REASON != "", reason=REASON or "none")


def inputs(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        torch.randn(2, heads, n, 64, device="cuda", dtype=dtype).requires_grad_()
        for heads in (4, 2, 2)
    )
    return q, k, v


@pytest.mark.parametrize("diag_block", (0, 64))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    ((torch.float32, F32), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)),
    ids=("f32", "bf16", "f16"),
)
def test_as_on_the_cpu(dtype: torch.dtype, tolerance: float, causal: bool, diag_block: int) -> None:
    q, k, v = inputs(300, dtype)
    options: dict[str, Any] = {"causal": causal, "diag_block": diag_block}
    scales: dict[str, Any] = {"alpha": 1.2, "beta": 1.1} if causal else {}
    o = attention(q, k, v, **options, **scales)
    host = [x.detach().cpu().float().requires_grad_() for x in (q, k, v)]
    expected = attention(*host, **options, **scales)
    torch.testing.assert_close(o.cpu().float(), expected, rtol=0, atol=tolerance)
    g = torch.randn_like(o)
    found = torch.autograd.grad(o, (q, k, v), g)
    wanted = torch.autograd.grad(expected, host, g.cpu().float())
    for x, y in zip(found, wanted, strict=True):
        largest = y.abs().max().item()
        torch.testing.assert_close(x.cpu().float(), y, rtol=0, atol=tolerance * largest)


def test_moments_as_on_the_cpu() -> None:
    q, k, _ = (x.detach() for x in inputs(100))
    for mode in ("per_head", "exact", "entropy", "paper"):
        for x, y in zip(match(q, k, mode=mode), match(q.cpu(), k.cpu(), mode=mode), strict=True):
            torch.testing.assert_close(x.cpu(), y, rtol=1e-5, atol=0)
    running = torch.zeros(2, 2, 3, dtype=torch.float64, device="cuda")
    host = running.cpu()
    update_moments(running, q, k)
    update_moments(host, q.cpu(), k.cpu())
    # Short sums are of f32 on a device.
    torch.testing.assert_close(running.cpu(), host, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        head_moments(q).mean, head_moments(q.cpu()).mean, rtol=1e-6, atol=1e-6
    )


def test_work_goes_into_the_current_stream_and_nobody_waits() -> None:
    q, k, v = inputs(1000)
    attention(q, k, v).sum().backward()  # kernels are loaded
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        before = torch.cuda.Event()
        before.record()
        o = attention(q, k, v, diag_block=64)
        torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
        assert not before.query(), "the calls returned before the stream had begun with them"
    assert not stream.query()
    torch.cuda.synchronize()
    torch.testing.assert_close(o, attention(q, k, v, diag_block=64))


@pytest.mark.parametrize("causal", (False, True))
def test_a_training_step_is_captured(causal: bool) -> None:
    q, k, v = inputs(500, torch.bfloat16)
    scales: dict[str, Any] = {"alpha": 1.2, "beta": 1.1} if causal else {}

    def step() -> tuple[Tensor, ...]:
        o = attention(q, k, v, causal=causal, diag_block=64, **scales)
        return (o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o)))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        with torch.no_grad():
            for x in (q, k, v):
                x.copy_(torch.randn_like(x))
        graph.replay()
        for x, y in zip(captured, step(), strict=True):
            assert torch.equal(x, y)


def test_decoding_is_captured() -> None:
    state = DecodeState(2, 4, 64, heads_k=2, alpha=1.2, beta=1.1, diag_block=64, device="cuda")
    other = state.fork()
    rows = [torch.randn(2, h, 1, 64, device="cuda") for h in (4, 2, 2)]
    state.step(*rows)
    state.reset()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = state.step(*rows)
    state.reset()
    for _ in range(5):
        for x in rows:
            x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(o, other.step(*rows), rtol=0, atol=1e-5)
    assert state.tokens.tolist() == other.tokens.tolist() == [5, 5]


def test_autocast_and_compile() -> None:
    layer = LLNPlusDiagAttention(256, 4, mix="gated", device="cuda")
    x = torch.randn(2, 200, 256, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o = layer(x)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.float(), layer(x), rtol=0, atol=0.03)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=F32)


def test_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device")
    x = torch.randn(1, 2, 64, 64, device="cuda:1")
    torch.testing.assert_close(
        attention(x, x, x).cpu(), attention(x.cpu(), x.cpu(), x.cpu()), rtol=0, atol=F32
    )


def test_import_starts_no_device() -> None:
    code = "import torch, lln_attention; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
