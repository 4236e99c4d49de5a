"""The attention layers of transformers as `lln_attention.observe` sees them: with q and k as the
layer made them, whatever its implementation does with them."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..observation import Observation, keys_that_count, reported, with_usual_scaling
from .forward import causality
from .settings import IMPLEMENTATIONS, configs_of


class _Observed:
    """An attention function of transformers that shows what it is called with."""

    def __init__(
        self,
        forward: Callable[..., Any] | None,
        names: dict[nn.Module, str],
        callback: Callable[[Observation], None],
    ) -> None:
        self.forward = forward
        self.names = names
        self.callback = callback

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Any:
        # Layers with a window keep softmax, so there is nothing to learn from them.
        if module in self.names and kwargs.get("sliding_window") is None:
            self.callback(
                Observation(
                    self.names[module],
                    with_usual_scaling(query, kwargs.get("scaling")).detach(),
                    key.detach(),
                    _key_mask(attention_mask, key),
                    causality(module, kwargs.get("is_causal")),
                )
            )
        # transformers keeps the eager function of a model in the module that defines the model.
        forward = self.forward or sys.modules[type(module).__module__].eager_attention_forward
        with reported():
            return forward(module, query, key, value, attention_mask, **kwargs)


@contextmanager
def observe_transformers(
    model: nn.Module, callback: Callable[[Observation], None]
) -> Iterator[None]:
    """While it is open, `callback` gets an `Observation` of every layer that LLN can replace."""
    names = {module: name for name, module in model.named_modules()}
    replaced: dict[str, Callable[..., Any] | None] = {}
    try:
        for implementation in {config._attn_implementation for config in configs_of(model)}:
            forward = ALL_ATTENTION_FUNCTIONS.get(implementation)
            replaced[implementation] = forward
            ALL_ATTENTION_FUNCTIONS[implementation] = _Observed(forward, names, callback)
        yield
    finally:
        for implementation, forward in replaced.items():
            if forward is None:
                ALL_ATTENTION_FUNCTIONS.pop(implementation)
            else:
                ALL_ATTENTION_FUNCTIONS[implementation] = forward


@contextmanager
def softmax_instead(model: nn.Module) -> Iterator[None]:
    """While it is open, layers with LLN attention compute softmax by SDPA."""
    switched = [
        (config, config._attn_implementation)
        for config in configs_of(model)
        if config._attn_implementation in IMPLEMENTATIONS
    ]
    try:
        for config, _ in switched:
            config._attn_implementation = "sdpa"
        yield
    finally:
        for config, implementation in switched:
            config._attn_implementation = implementation


def _key_mask(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """bool [batch, keys] from the mask of any implementation."""
    if mask is None:
        return None
    if mask.ndim == 2:
        return mask[:, : key.shape[2]].bool()
    return keys_that_count(mask, key)
