"""What the attention layers of a model are called with, while the model runs: the common ground of
calibrations and instruments.

Attention is seen where it is `torch.nn.functional.scaled_dot_product_attention`, that of this
package, or a layer of transformers with any implementation.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import _attention_ops as _ops

# Set inside an attention layer that was reported as a whole.
_reported: ContextVar[bool] = ContextVar("lln_attention_reported", default=False)

_SDPA = ("q", "k", "v", "attn_mask", "dropout_p", "is_causal")
# As in python/ops/library.cc.
_LLN = (
    "q", "k", "v", "alpha", "beta", "mix", "diag_weight", "keys", "cu_seqlens", "cu_seqlens_k",
    "kind", "causal",
)  # fmt: skip


@dataclass(frozen=True)
class Observation:
    """One call of one attention layer.

    Attributes:
        name: Of the innermost module that runs, in the model.
        q: [batch, heads, tokens, dim], such that the logits of softmax are q.k / sqrt(dim).
        k: [batch, key heads, tokens, dim].
        key_mask: bool [batch, tokens], True where a key counts; None where all do.
        causal: Whether a token sees only itself and those before it.
    """

    name: str
    q: Tensor
    k: Tensor
    key_mask: Tensor | None
    causal: bool


@contextmanager
def observe(model: nn.Module, callback: Callable[[Observation], None]) -> Iterator[None]:
    """While it is open, `callback` gets an `Observation` of every attention inside the model.

    The model computes what it always does. A model that multiplies its own matrices is not seen
    (nor is torch.nn.MultiheadAttention with need_weights=True), nor what torch.compile has compiled
    before, nor layers of transformers with a sliding window, which LLN does not replace. For one
    thread at a time.

    Args:
        model: Any module.
        callback: Called before the attention itself is computed.

    Example:
        >>> import torch
        >>> from lln_attention import LLNAttention, observe
        >>> model = torch.nn.Sequential(LLNAttention(32, 2))
        >>> with observe(model, lambda seen: print(seen.name, list(seen.q.shape))):
        ...     _ = model(torch.randn(1, 7, 32))
        0 [1, 2, 7, 16]
    """
    with ExitStack() as stack:
        names = stack.enter_context(_running(model))
        stack.enter_context(_watched(names, callback))
        if holds_transformers(model):
            from .hf.observe import observe_transformers

            stack.enter_context(observe_transformers(model, callback))
        yield


@contextmanager
def reported() -> Iterator[None]:
    """What runs inside is a part of an attention layer that was seen already."""
    token = _reported.set(True)
    try:
        yield
    finally:
        _reported.reset(token)


def holds_transformers(model: nn.Module) -> bool:
    """Whether some module is a model of transformers, which need not be installed."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and any(
        isinstance(module, transformers.PreTrainedModel) for module in model.modules()
    )


def with_usual_scaling(q: Tensor, scaling: float | None) -> Tensor:
    """q such that the logits of softmax are q.k / sqrt(dim), which matching and Diag assume."""
    ratio = 1.0 if scaling is None else scaling * math.sqrt(q.shape[-1])
    return q if abs(ratio - 1.0) <= 1e-6 else q * ratio


def keys_that_count(mask: Tensor, k: Tensor) -> Tensor:
    """bool [batch, keys]: those that some query of some head sees, by a mask over the matrix."""
    if mask.is_floating_point():
        mask = mask > torch.finfo(mask.dtype).min / 2
    heads_and_queries = mask.expand(torch.broadcast_shapes(mask.shape, (len(k), 1, 1, k.shape[2])))
    return heads_and_queries.bool().any(2).any(1)


@contextmanager
def _running(model: nn.Module) -> Iterator[list[str]]:
    """The names of the modules that are inside their forward, the innermost last."""
    names: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: names.append(name)

    def leave(*_: Any) -> None:
        names.pop()

    with ExitStack() as stack:
        # Fused encoder layers of torch.nn do not call the functions that are watched.
        fused = torch.backends.mha.get_fastpath_enabled()
        stack.callback(torch.backends.mha.set_fastpath_enabled, fused)
        torch.backends.mha.set_fastpath_enabled(False)
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(enter(name)).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield names


@contextmanager
def _watched(names: list[str], callback: Callable[[Observation], None]) -> Iterator[None]:
    """Shows calls of the functions that compute attention, in whichever module they run."""

    def watch(function: Callable[..., Any], see: Callable[..., Iterator[Observation]]) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if names and not _reported.get():
                for seen in see(names[-1], *args, **kwargs):
                    callback(seen)
            return function(*args, **kwargs)

        return watched

    with ExitStack() as stack:
        for place, name, see in (
            (nn.functional, "scaled_dot_product_attention", _seen_in_sdpa),
            (_ops, "attention", _seen_in_lln),
            (_ops, "forward", _seen_in_lln),
        ):
            original = getattr(place, name)
            stack.callback(setattr, place, name, original)
            setattr(place, name, watch(original, see))
        yield


def _seen_in_sdpa(name: str, *args: Any, **kwargs: Any) -> Iterator[Observation]:
    renamed = {"query": "q", "key": "k", "value": "v"}
    call = dict(zip(_SDPA, args, strict=False)) | {renamed.get(x, x): y for x, y in kwargs.items()}
    q, k = (x.detach().reshape(-1, *x.shape[-3:]) for x in (call["q"], call["k"]))
    mask = call.get("attn_mask")
    key_mask = None if mask is None else keys_that_count(mask, k)
    q = with_usual_scaling(q, call.get("scale"))
    yield Observation(name, q, k, key_mask, bool(call.get("is_causal")))


def _seen_in_lln(name: str, *args: Any) -> Iterator[Observation]:
    call = dict(zip(_LLN, args, strict=False))
    q, k, keys, causal = call["q"].detach(), call["k"].detach(), call["keys"], call["causal"]
    if call["cu_seqlens"] is None:
        if keys is not None and keys.ndim == 1:  # lengths
            keys = torch.arange(k.shape[2], device=k.device) < keys[:, None]
        yield Observation(name, q, k, keys, causal)
        return
    ends = call["cu_seqlens"].tolist()
    ends_k = ends if call["cu_seqlens_k"] is None else call["cu_seqlens_k"].tolist()
    for i in range(len(ends) - 1):
        own = (slice(None), slice(None), slice(ends[i], ends[i + 1]))
        own_k = (slice(None), slice(None), slice(ends_k[i], ends_k[i + 1]))
        yield Observation(name, q[own], k[own_k], None, causal)
