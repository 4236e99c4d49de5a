"""What LLN attention takes of a mask: which keys count, [batch, keys] or None for all of them.

Causality is an argument of the attention itself. A mask that says anything else is refused, since
LLN never forms the matrix that it would be laid over.
"""

# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)


def key_padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function of "lln" and "lln_diag", as AttentionMaskInterface calls it."""
    if local_size is not None:
        # A layer with a window keeps SDPA (forward.py), so it gets the mask of SDPA.
        mask: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            **kwargs,
        )
        return mask
    if mask_function is not causal_mask_function and (
        mask_function is not bidirectional_mask_function
    ):
        raise NotImplementedError(
            "LLN attention takes padding and causality, not packed sequences or other masks that "
            "are laid over the attention matrix: give each sequence its own row of the batch and "
            "an attention_mask [batch, tokens] (position_ids that start anew inside a row mean "
            "packing), or use set_attn_implementation('sdpa')"
        )
    if kv_offset + kv_length > q_offset + q_length:
        raise NotImplementedError(
            f"LLN attention got {kv_offset + kv_length} keys for {q_offset + q_length} tokens: "
            "static caches and prefixes are not supported; for generation in constant memory pass "
            "past_key_values=lln_attention.hf.LLNCache()"
        )
    if attention_mask is None:
        return None
    counts = attention_mask[:, kv_offset : kv_offset + kv_length]
    if counts.shape[1] != kv_length:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[1]} tokens: expected "
            f"{kv_offset + kv_length}, those of the cache included"
        )
    return counts
