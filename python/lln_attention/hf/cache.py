"""Generation in constant memory: a cache of transformers whose layers hold a `DecodeState`.

An attention function of transformers never sees the cache: the attention module gives the new keys
to `Cache.update` and calls the function with what that returns. So a layer of this cache returns
the new keys alone, as a `NewKeys` that knows the layer, and the function asks it for the rows.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

if TYPE_CHECKING:
    from ..decode import DecodeState


class LLNCache(Cache):
    """A cache for `generate` whose size does not grow with the tokens that it has seen.

    For models with attn_implementation="lln" or "lln_diag": greedy search, sampling and beam
    search, batches with padding on the left. "lln_diag" also keeps the running block of keys
    and values. A cache is for one sequence of calls; use a new one for the next prompt.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from lln_attention import hf
        >>> hf.register()
        >>> config = LlamaConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
        ...                      num_hidden_layers=1, intermediate_size=64, vocab_size=100)
        >>> model = LlamaForCausalLM(config).eval()
        >>> model.set_attn_implementation("lln")
        >>> hf.configure(model, matching="none")
        >>> cache = LLNCache()
        >>> tokens = model.generate(torch.tensor([[1, 5, 7]]), max_new_tokens=4, min_new_tokens=4,
        ...                         do_sample=False, past_key_values=cache)
        >>> tokens.shape
        torch.Size([1, 7])
        >>> cache.get_seq_length()
        6
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=StateLayer)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        states = [layer.state for layer in self.layers if isinstance(layer, StateLayer)]
        return sum(state.nbytes for state in states if state is not None)


class StateLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What one attention layer has seen."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state: DecodeState | None = None
        self.seen = 0  # tokens, padding included
        self.pending = False  # whether keys were handed out that no attention has taken

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first `attend` knows more."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys with this layer attached, and the new values."""
        if self.pending:
            raise RuntimeError(
                "LLNCache is for attn_implementation='lln' and 'lln_diag': another attention "
                "function has used its keys. Call model.set_attn_implementation('lln') first"
            )
        self.pending = True
        self.seen += key_states.shape[2]
        return NewKeys.of(key_states, self), value_states

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, counts: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Takes the new tokens into the state; the rows of q, [batch, heads, tokens, dim]."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that the attention function gets, and of those before them."""
        return query_length, self.seen

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class NewKeys(Tensor):
    """Keys that came in with this call, on their way to the attention function."""

    layer: StateLayer
    # What is computed from them is an ordinary tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(keys: Tensor, layer: StateLayer) -> NewKeys:
        """The same memory, with the layer attached."""
        new = keys.as_subclass(NewKeys)
        new.layer = layer
        return new

    def attend(
        self, q: Tensor, v: Tensor, counts: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """The rows of q by the layer's state, after these keys and values joined it."""
        return self.layer.attend(q, self.as_subclass(Tensor), v, counts, options)
