"""Generation in constant memory: a cache of transformers whose layers hold a `DecodeState`.

An attention function of transformers never sees the cache: the attention module gives the new keys
to `Cache.update` and calls the function with what that returns. So a layer of this cache returns
the new keys alone, as a `NewKeys` that knows the layer, and the function asks it for the rows.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

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


class StateLayer(CacheLayerMixin):
    """What one attention layer has seen."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
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
        """Takes the new tokens into the state.

        Args:
            q: [batch, heads, tokens, dim].
            k: [batch, key heads, tokens, dim].
            v: [batch, key heads, tokens, dim of values].
            counts: bool [batch, tokens], False for padding; None where there is none.
            options: alpha, beta, and for LLN+Diag diag_block and mix, as `attention` takes them.

        Returns:
            The rows of q, zero where a token does not count.
        """
        self.pending = False
        if self.state is None:
            self.state = _new_state(q, k, v, options)
        # Under autocast rotations may have made q and k wider than v.
        q, k = q.to(v.dtype), k.to(v.dtype)
        if counts is None:
            return _rows(self.state.append(q, k, v))
        if q.shape[2] == 1:
            return _rows(self.state.append(q, k, v, lengths=counts.sum(1)))
        # A state takes the first tokens of each sequence: those that count go there.
        order = counts.byte().argsort(dim=1, descending=True, stable=True)[:, None, :, None]
        in_front = (x.gather(2, order.expand_as(x)) for x in (q, k, v))
        rows = _rows(self.state.append(*in_front, lengths=counts.sum(1)))
        return torch.empty_like(rows).scatter_(2, order.expand_as(rows), rows)

    def select(self, sequences: Tensor) -> None:
        """Goes on with these sequences, in this order."""
        if self.state is not None:
            self.state = self.state.select(sequences)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search."""
        self.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these sequences."""
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence so many times."""
        if self.state is not None:
            each = torch.arange(len(self.state.tokens)).repeat_interleave(repeats)
            self.select(each)

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: sums do not say what their parts were."""
        raise NotImplementedError(
            "LLNCache cannot take tokens back: generate without an assistant model or prompt "
            "lookup, or keep copy.deepcopy(cache) of the point to go back to"
        )

    def reset(self) -> None:
        """Forgets everything."""
        self.state, self.seen, self.pending = None, 0, False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that the attention function gets, and of those before them."""
        return query_length, self.seen

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The same, as older versions of transformers call it."""
        return -1


def _rows(found: Tensor | None) -> Tensor:
    assert found is not None  # there were queries
    return found


def _new_state(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> DecodeState:
    batch, heads, _, dim = q.shape
    alpha, beta = options["alpha"], options["beta"]
    return DecodeState(
        batch,
        heads,
        dim,
        heads_k=k.shape[1],
        dim_v=v.shape[3],
        alpha=1.0 if alpha is None else alpha,
        beta=1.0 if beta is None else beta,
        diag_block=options.get("diag_block", 0),
        mix=options.get("mix", 0.5),
        device=q.device,
    )


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
