"""Cost of a call: what it adds to the kernel, and the kernel against plain torch, in one run.

Times are the least of many, of one thread on the processor, so that other work on the machine is
left out; ratios are of calls that take turns.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lln_attention import attention

MOST_OVERHEAD = 15e-6


def least(calls: list[Callable[[], Any]], rounds: int, repeats: int = 1) -> list[float]:
    """The least time of each call, in seconds."""
    times = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            start = time.thread_time()
            for _ in range(repeats):
                call()
            times[i] = min(times[i], (time.thread_time() - start) / repeats)
    return times


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def identity(q: Tensor, k: Tensor, v: Tensor, alpha: float, beta: float) -> Tensor:
    """LLN in plain torch, in the form that the library rests on."""
    u = beta * k
    c = torch.logsumexp(u, -2, keepdim=True)
    return torch.softmax(alpha * q + c, -1) @ (torch.softmax(u, -2).mT @ v)


@torch.inference_mode()
def test_overhead_of_a_call() -> None:
    """A call without tokens runs no kernel: all its time is overhead."""
    q = torch.randn(1, 2, 0, 16)
    scale = torch.ones(2)
    calls: list[Callable[[], Any]] = [
        lambda: attention(q, q, q),
        lambda: attention(q, q, q, alpha=scale, beta=scale),
        lambda: attention(q, q, q, alpha=scale, beta=scale, causal=True, diag_block=64),
    ]
    times = least(calls, 300, 20)
    assert max(times) < MOST_OVERHEAD, times


@torch.inference_mode()
def test_forward_against_plain_torch() -> None:
    for n, ratio, rounds in ((16384, 4.0, 5), (4096, 1.5, 15)):
        q, k, v = torch.randn(3, 1, 12, n, 64)
        calls: list[Callable[[], Any]] = [
            lambda q=q, k=k, v=v: attention(q, k, v, alpha=1.5, beta=1.5),
            lambda q=q, k=k, v=v: identity(q, k, v, 1.5, 1.5),
        ]
        torch.testing.assert_close(calls[0](), calls[1](), rtol=0, atol=1e-4)
        own, plain = least(calls, rounds)
        assert plain / own >= ratio, (n, own, plain)


@torch.inference_mode()
def test_forward_against_softmax() -> None:
    q, k, v = torch.randn(3, 1, 12, 4096, 64)

    def run() -> Tensor:
        return attention(q, k, v, alpha=1.5, beta=1.5)

    before = least([run], 15)[0]
    softmax = least([lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)], 2)[0]
    own = min(before, least([run], 15)[0])
    assert softmax / own >= 40, (own, softmax)
