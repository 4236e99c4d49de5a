"""The q and k of every attention layer of a model, as the model runs, whatever implementation it
has: what calibrations and instruments are made from."""
# SPDX-License-Identifier: Apache-2.0

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..observation import Observation
from .forward import with_usual_scaling
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
            is_causal = kwargs.get("is_causal")
            self.callback(
                Observation(
                    self.names[module],
                    module,
                    with_usual_scaling(query, kwargs.get("scaling")).detach(),
                    key.detach(),
                    keys_that_count(attention_mask, key),
                    bool(getattr(module, "is_causal", False) if is_causal is None else is_causal),
                )
            )
        # transformers keeps the eager function of a model in the module that defines the model.
        forward = self.forward or sys.modules[type(module).__module__].eager_attention_forward
        return forward(module, query, key, value, attention_mask, **kwargs)


@contextmanager
def observe(model: nn.Module, callback: Callable[[Observation], None]) -> Iterator[None]:
    """While it is open, `callback` gets an `Observation` of every call of an attention layer.

    The model computes what it always does. Layers with a sliding window are left out, and parts
    that torch.compile has compiled before are not seen. For one thread at a time.

    Args:
        model: A model of transformers, or a module that holds some.
        callback: Called before the attention itself is computed.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1,
        ...                     intermediate_size=64, vocab_size=100)
        >>> model = BertModel(config).eval()
        >>> with observe(model, lambda seen: print(seen.name, list(seen.q.shape))):
        ...     _ = model(torch.arange(7)[None])
        encoder.layer.0.attention.self [1, 2, 7, 16]
    """
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


def keys_that_count(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """bool [batch, keys] from the mask of any implementation: those that some query sees."""
    if mask is None:
        return None
    if mask.is_floating_point():
        mask = mask > torch.finfo(mask.dtype).min / 2
    mask = mask.bool()
    if mask.ndim == 4:
        mask = mask[:, 0].any(dim=-2)
    return mask[:, : key.shape[2]].expand(key.shape[0], -1)


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
