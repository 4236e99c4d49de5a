"""Errors arrive as the types that Python has for them, with the core's text, and say what to do."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import lln_attention
from lln_attention import (
    DecodeState,
    LLNAttention,
    LLNPlusDiagAttention,
    _attention_ops,
    attention,
    head_moments,
    match,
    update_moments,
)
from lln_attention._library import python_error

X = torch.randn(2, 4, 8, 16)


def test_arguments_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"k has shape \[2, 4, 8, 3\]: expected \[2, 4, 8, 16\]"):
        attention(X, X[..., :3], X, alpha=1.0, beta=1.0)
    with pytest.raises(ValueError, match=r"q has shape \[4, 8, 16\]: expected \[batch, heads"):
        attention(X[0], X, X)
    with pytest.raises(ValueError, match="q has a type that is none of float32"):
        attention(X.int(), X, X)
    with pytest.raises(ValueError, match="k is f64: expected f32"):
        attention(X, X.double(), X, alpha=1.0, beta=1.0)
    with pytest.raises(ValueError, match="key_mask must be of type bool"):
        attention(X, X, X, key_mask=torch.ones(2, 8))
    with pytest.raises(ValueError, match="give one of them"):
        attention(X, X, X, key_mask=torch.ones(2, 8) > 0, key_lengths=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="alpha is given and beta is not"):
        attention(X, X, X, alpha=1.0)
    with pytest.raises(ValueError, match="leave out one of the two"):
        attention(X, X, X, alpha=1.0, beta=1.0, matching="exact")
    with pytest.raises(ValueError, match="lln_weight is given and diag_weight is not"):
        attention(X, X, X, lln_weight=torch.ones(4), diag_block=4)
    with pytest.raises(ValueError, match="feature"):
        attention(X, X, X, feature="tanh", matching="none")
    with pytest.raises(ValueError, match="cu_seqlens has no elements"):
        attention(X[:1], X[:1], X[:1], cu_seqlens=torch.empty(0, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"query_mask has shape \[2, 7\]: expected \[2, 8\]"):
        attention(X, X, X, alpha=1.0, beta=1.0, query_mask=torch.ones(2, 7) > 0)


def test_masks_and_lengths_are_not_taken_for_each_other() -> None:
    mask, lengths = torch.ones(2, 8) > 0, torch.tensor([5, 3])
    for call in (
        lambda **keys: attention(X, X, X, **keys),
        lambda **keys: match(X, X, **keys),
        lambda **keys: update_moments(torch.zeros(2, 4, 3, dtype=torch.float64), X, X, **keys),
    ):
        with pytest.raises(ValueError, match=r"key_mask has shape \[2\]: expected \[batch, tokens"):
            call(key_mask=lengths)
        with pytest.raises(ValueError, match=r"key_mask has shape \[8\]: expected \[batch, tokens"):
            call(key_mask=mask[0])
        with pytest.raises(ValueError, match=r"key_lengths has shape \[2, 8\]: expected \[batch\]"):
            call(key_lengths=mask)
    with pytest.raises(ValueError, match=r"lengths has shape \[2, 8\]: expected \[batch\]"):
        head_moments(X, lengths=mask)


def test_nothing_is_ignored_without_a_word() -> None:
    with pytest.raises(ValueError, match="unknown matching 'foo'"):
        attention(X, X, X, matching="foo", mix=0.0, diag_block=4)
    weights = {"lln_weight": torch.ones(4), "diag_weight": torch.ones(4)}
    for mix in (0.7, torch.ones(4)):
        with pytest.raises(ValueError, match="mix is given beside"):
            attention(X, X, X, mix=mix, diag_block=4, **weights)
    with pytest.raises(ValueError, match="nothing to mix"):
        attention(X, X, X, mix=torch.ones(4))
    with pytest.raises(ValueError, match="has none"):
        attention(X, X, X, **weights)


def test_derivatives_that_are_not_there() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return attention(x, X, X)

    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(call, (X,), (X,))
    with forward_ad.dual_level():
        assert torch.equal(call(X), attention(X, X, X))
        with pytest.raises(NotImplementedError, match="forward mode"):
            call(forward_ad.make_dual(X, X))
        with pytest.raises(NotImplementedError, match="forward mode"):
            DecodeState(2, 4, 16).append(None, forward_ad.make_dual(X, X), X)
    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad"):
        torch.func.grad(lambda x: call(x).sum())(X)


def test_causal_attention_says_where_scales_come_from() -> None:
    with pytest.raises(ValueError, match=r"lln_attention\.calibrate"):
        attention(X, X, X, causal=True)
    with pytest.raises(ValueError, match=r"reads the whole sequence.*lln_attention\.calibrate"):
        attention(X, X, X, causal=True, matching="exact")
    with pytest.raises(ValueError, match="reads the whole sequence"):
        LLNAttention(32, 4, causal=True, matching="entropy")
    with pytest.raises(ValueError, match="unknown matching 'median'"):
        match(X, X, mode="median")


def test_what_no_kernel_takes() -> None:
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="found float64"):
        DecodeState(1, 2, 8).append(x, x, x)
    # The same refusal by the core, which names its kernels.
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    tokens = torch.zeros(1, dtype=torch.int64)
    ones = torch.ones(2, dtype=torch.float64)
    call = (memory, tokens, x, x, x, ones, ones, None, None, None, [1, 2, 2, 8, 8])
    with pytest.raises(RuntimeError) as caught:
        torch.ops.lln.decode_append(*call, "lln", 0.5, "exp")
    error = python_error(caught.value)
    assert isinstance(error, NotImplementedError)
    assert str(error).startswith("no kernel takes append:f64:cpu")


def test_errors_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through autograd as well: a gradient of a type that the core refuses."""
    backward = _attention_ops.backward
    monkeypatch.setattr(_attention_ops, "backward", lambda g, *rest: backward(g.double(), *rest))
    o = attention(X.clone().requires_grad_(), X, X)
    with pytest.raises(ValueError, match="g is f64: expected f32"):
        o.sum().backward()


def test_other_errors_stay_as_they_are() -> None:
    for text in ("no colon", "CUDA error: no device", "lln device: lost"):
        assert type(python_error(RuntimeError(text))) is RuntimeError
    assert str(python_error(RuntimeError("lln device: lost"))) == "lost"
    assert isinstance(python_error(RuntimeError("lln out_of_memory: all")), MemoryError)


def test_values_that_are_not_finite() -> None:
    bad = X.clone()
    bad[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"infinity|NaN|finite"):
        match(bad, X)


def test_modules_and_states() -> None:
    with pytest.raises(ValueError, match="not divisible"):
        LLNAttention(30, 4)
    with pytest.raises(ValueError, match="does not divide"):
        LLNAttention(32, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match="expected one of fixed"):
        LLNPlusDiagAttention(32, 4, mix="random")
    with pytest.raises(ValueError, match="for the exponential"):
        LLNAttention(32, 4, feature="relu", matching="exact")
    with pytest.raises(ValueError, match="no running moments"):
        LLNAttention(32, 4).freeze()
    with pytest.raises(ValueError, match=r"alpha has shape \[3\]: expected \[4\]"):
        LLNAttention(32, 4).freeze(torch.ones(3), torch.ones(4))
    with pytest.raises(ValueError, match=r"beta has shape \[4\]: expected \[2\]"):
        LLNAttention(32, 4, num_kv_heads=2).freeze(torch.ones(4), torch.ones(4))
    for sizes in ({"heads_k": 0}, {"dim_v": 0}):
        with pytest.raises(ValueError, match="1 fault"):
            DecodeState(1, 4, 4, **sizes)
    with pytest.raises(ValueError, match="multiple of key heads"):
        DecodeState(1, 3, 4, heads_k=2)
    state = DecodeState(1, 2, 8)
    row = torch.randn(1, 2, 1, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="no_grad"):
        state.step(row, row, row)
    tokens, mix = row.detach(), torch.ones(2, requires_grad=True)
    blocks = DecodeState(1, 2, 8, diag_block=4)
    for call in (
        lambda: blocks.step(tokens, tokens, tokens, mix=mix),
        lambda: blocks.append(tokens, tokens, tokens, mix=mix),
        lambda: blocks.read(tokens, mix=mix),
    ):
        with pytest.raises(RuntimeError, match="no_grad"):
            call()
    with pytest.raises(ValueError, match="expected 0 to 0"):
        state.reset(1)


def test_a_missing_library_says_how_to_build_it(tmp_path: Path) -> None:
    source = Path(lln_attention.__file__).parent
    package = tmp_path / "lln_attention"
    package.mkdir()
    for file in source.glob("*.py"):
        (package / file.name).write_text(file.read_text())
    run = subprocess.run(
        [sys.executable, "-c", "import lln_attention"], capture_output=True, text=True,
        env={"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"}, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert run.returncode != 0
    assert "ImportError" in run.stderr and "pip install ." in run.stderr
