"""Cost of a call: what it adds to the kernel, and the kernel against plain torch, in one run.

Times are the least of many, and ratios are of calls that take turns. The ratios are held by the
clock with torch's own number of threads, where the machine is free, and always in time of one
thread on the processor, which leaves out other work on the machine: there three quarters of a goal
are asked for, since torch's plain form gains less from a second thread than ours.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lln_attention import attention

# A call costs less than this, or, on a machine where all of torch is slower, than so many calls of
# torch's own attention without tokens (10.9 us where the first number was set).
MOST_OVERHEAD = 15e-6
MOST_SDPA_CALLS = 1.5
# A forward and its backward cost less than so many of torch's own attention.
MOST_SDPA_STEPS = 2.5
Clock = Callable[[], float]


def least(
    calls: list[Callable[[], Any]], rounds: int, repeats: int = 1, clock: Clock = time.perf_counter
) -> list[float]:
    """The least time of each call, in seconds."""
    times = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            start = clock()
            for _ in range(repeats):
                call()
            times[i] = min(times[i], (clock() - start) / repeats)
    return times


@pytest.fixture(params=("one thread", "by the clock"))
def measure(request: pytest.FixtureRequest) -> Iterator[tuple[Clock, float]]:
    """How ratios are measured, and the share of a goal to be reached; torch has its threads."""
    if request.param == "by the clock":
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > cores:
            pytest.skip(f"other work is running: a load of {load:.1f} on {cores} cores")
        yield time.perf_counter, 1.0
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield time.thread_time, 0.75
    torch.set_num_threads(threads)


def identity(q: Tensor, k: Tensor, v: Tensor, alpha: float, beta: float) -> Tensor:
    """LLN in plain torch, in the form that the library rests on."""
    u = beta * k
    c = torch.logsumexp(u, -2, keepdim=True)
    return torch.softmax(alpha * q + c, -1) @ (torch.softmax(u, -2).mT @ v)


@torch.inference_mode()
def test_overhead_of_a_call() -> None:
    """A call without tokens runs no kernel: all its time, by the clock, is overhead."""
    q = torch.randn(1, 2, 0, 16)
    scale, mask, lengths = torch.ones(2), torch.ones(1, 0) > 0, torch.zeros(1, dtype=torch.int64)
    forms: dict[str, dict[str, Any]] = {
        "default": {},
        "tensors": {"alpha": scale, "beta": scale},
        "numbers": {"alpha": 2.0, "beta": 2.0},
        "causal": {"alpha": 2.0, "beta": 2.0, "causal": True, "diag_block": 64},
        "mask": {"key_mask": mask},
        "lengths": {"key_lengths": lengths, "diag_block": 64},
        "mask of queries": {"key_mask": mask, "query_mask": mask},
        "mixed": {"key_mask": mask, "diag_block": 64, "mix": scale},
        "weights": {"diag_block": 64, "lln_weight": scale, "diag_weight": scale},
    }
    calls: list[Callable[[], Any]] = [
        lambda form=form: attention(q, q, q, **form) for form in forms.values()
    ]
    calls.append(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    *own, softmax = least(calls, 300, 20)
    most = max(MOST_OVERHEAD, MOST_SDPA_CALLS * softmax)
    assert max(own) < most, (dict(zip(forms, own, strict=True)), most)


def test_overhead_of_a_step() -> None:
    """A forward and its backward of a few tokens, by the clock: nearly all is overhead."""
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    g, scale = torch.randn(1, 2, 8, 16), torch.ones(2)

    def step(call: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(), (q, k, v), g)

    calls = [
        step(lambda: attention(q, k, v, alpha=scale, beta=scale)),
        step(lambda: attention(q, k, v, alpha=2.0, beta=2.0, causal=True, diag_block=64)),
        step(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)),
    ]
    *own, softmax = least(calls, 100, 20)
    assert max(own) < MOST_SDPA_STEPS * softmax, (own, softmax)


@torch.inference_mode()
@pytest.mark.parametrize(("n", "ratio", "rounds"), ((16384, 4.0, 5), (4096, 1.5, 15)))
def test_forward_against_plain_torch(
    measure: tuple[Clock, float], n: int, ratio: float, rounds: int
) -> None:
    clock, share = measure
    q, k, v = torch.randn(3, 1, 12, n, 64)
    calls: list[Callable[[], Any]] = [
        lambda: attention(q, k, v, alpha=1.5, beta=1.5),
        lambda: identity(q, k, v, 1.5, 1.5),
    ]
    torch.testing.assert_close(calls[0](), calls[1](), rtol=0, atol=1e-4)
    own, plain = least(calls, rounds, clock=clock)
    assert plain / own >= share * ratio, (own, plain)


@torch.inference_mode()
def test_forward_against_softmax(measure: tuple[Clock, float]) -> None:
    clock, share = measure
    q, k, v = torch.randn(3, 1, 12, 4096, 64)

    def run() -> Tensor:
        return attention(q, k, v, alpha=1.5, beta=1.5)

    def softmax() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    before = least([run], 15, clock=clock)[0]
    other = least([softmax], 2, clock=clock)[0]
    own = min(before, least([run], 15, clock=clock)[0])
    assert other / own >= share * 40, (own, other)
