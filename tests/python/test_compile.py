"""torch.compile: whole graphs, any length, the same results as without it."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lln_attention import DecodeState, LLNAttention, LLNPlusDiagAttention, attention

CALLS: dict[str, Callable[..., Tensor]] = {
    "matched": lambda q, k, v, m: attention(q, k, v),
    "diag": lambda q, k, v, m: attention(q, k, v, diag_block=8, key_mask=m),
    "causal": lambda q, k, v, m: attention(q, k, v, causal=True, alpha=1.5, beta=1.5),
}


def gradients(o: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(o.square().sum(), inputs)


@pytest.mark.parametrize("name", CALLS)
def test_whole_graph_of_any_length(name: str) -> None:
    torch.compiler.reset()
    count = 0

    def backend(graph: Any, examples: Any) -> Any:
        nonlocal count
        count += 1
        return graph

    def call(*inputs: Tensor) -> Tensor:
        return CALLS[name](*inputs).sin()

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    counted = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for n in (16, 37, 64):
        q, k, v = (torch.randn(2, 4, n, 8, requires_grad=True) for _ in range(3))
        mask = torch.rand(2, n) < 0.9
        o, expected = compiled(q, k, v, mask), call(q, k, v, mask)
        torch.testing.assert_close(o, expected, rtol=0, atol=1e-6)
        for x, y in zip(gradients(o, q, k, v), gradients(expected, q, k, v), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        counted(q, k, v, mask)
    assert count == 1, "one graph serves every length"


def test_compiled_autograd() -> None:
    """A backward that Dynamo traces, of a forward that it does not: one graph as well."""
    torch.compiler.reset()
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    expected = gradients(attention(q, k, v), q, k, v)
    compiler = torch.compile(backend="eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        attention(q, k, v).square().sum().backward()
    for x, y in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(x.grad, y, rtol=0, atol=1e-6)


def test_modules() -> None:
    torch.compiler.reset()
    for layer in (
        LLNAttention(32, 4, num_kv_heads=2, matching="ema"),
        LLNPlusDiagAttention(32, 4, diag_block=8, mix="gated", matching="entropy"),
    ):
        x = torch.randn(2, 24, 32)
        before = layer.running.clone()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True)
        o = compiled(x)
        assert (layer.matching == "ema") == (not torch.equal(layer.running, before))
        after = layer.running.clone()
        layer.running.copy_(before)
        torch.testing.assert_close(o, layer(x), rtol=0, atol=1e-6)
        torch.testing.assert_close(layer.running, after, rtol=1e-6, atol=0)


def test_decoding() -> None:
    torch.compiler.reset()
    state = DecodeState(1, 2, 8, alpha=1.5, beta=1.5, diag_block=4)
    expected = state.fork()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return state.step(q, k, v) * 2

    compiled = torch.compile(call, fullgraph=True)
    for _ in range(6):
        q, k, v = torch.randn(3, 1, 2, 1, 8)
        torch.testing.assert_close(compiled(q, k, v), expected.step(q, k, v) * 2, rtol=0, atol=1e-6)
    assert state.tokens.tolist() == [6]


def test_inference_graph_saves_nothing() -> None:
    torch.compiler.reset()
    graphs = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph

    q = torch.randn(1, 2, 8, 4)
    with torch.no_grad():
        torch.compile(lambda x: attention(x, x, x), fullgraph=True, backend=backend)(q)
    targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert torch.ops.lln.attention.default in targets


def test_numbers_may_change() -> None:
    """Scales and mix as numbers that differ from call to call."""
    torch.compiler.reset()

    def call(x: Tensor, scale: float, mix: float) -> Tensor:
        return attention(x, x, x, alpha=scale, beta=scale + 0.5, diag_block=4, mix=mix)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(2, 4, 9, 8, requires_grad=True)
    for numbers in ((1.5, 0.3), (2.5, 0.4), (0.5, 0.6)):
        o, expected = compiled(x, *numbers), call(x, *numbers)
        assert torch.equal(o, expected)
        assert torch.equal(gradients(o, x)[0], gradients(expected, x)[0])
