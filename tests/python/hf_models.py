"""Small models of transformers with random weights: every family that the package names, made
without the network. The weights are large enough that attention is far from uniform."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTModel,
)

VOCABULARY = 60
_SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "initializer_range": 0.25,
}
_TEXT = {**_SIZES, "vocab_size": VOCABULARY, "pad_token_id": 0}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _bert(**options: Any) -> PreTrainedModel:
    return BertModel(BertConfig(**{**_TEXT, **_NO_DROPOUT, **options}))


def _roberta(**options: Any) -> PreTrainedModel:
    return RobertaModel(RobertaConfig(**{**_TEXT, **_NO_DROPOUT, **options}))


def _modernbert(**options: Any) -> PreTrainedModel:
    """The first layer sees everything, the second a window of four tokens to each side."""
    own = {"global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 1}
    return ModernBertModel(ModernBertConfig(**{**_TEXT, **own, "sep_token_id": 2, **options}))


def _vit(**options: Any) -> PreTrainedModel:
    """224 pixels in patches of 16: 197 tokens with the one for the class."""
    return ViTModel(ViTConfig(**{**_SIZES, **_NO_DROPOUT, **options}))


def _gpt2(**options: Any) -> PreTrainedModel:
    own = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 48, "initializer_range": 0.25}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**{**own, **no_dropout, **tokens, **options}))


def _llama(**options: Any) -> PreTrainedModel:
    """Two key heads for four query heads."""
    return LlamaForCausalLM(LlamaConfig(**{**_TEXT, "num_key_value_heads": 2, **options}))


MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "bert": _bert,
    "roberta": _roberta,
    "modernbert": _modernbert,
    "vit": _vit,
    "gpt2": _gpt2,
    "llama": _llama,
}
CAUSAL = ("gpt2", "llama")


def make(name: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A model of a family, in evaluation mode; options go into its config."""
    torch.manual_seed(seed)
    return MODELS[name](**options).eval()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """Token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def padded(lengths: list[int], *, left: bool = False, seed: int = 1) -> dict[str, Tensor]:
    """A batch of sequences of these lengths, with the positions that their tokens have alone."""
    longest = max(lengths)
    ids = tokens(len(lengths), longest, seed=seed)
    place = torch.arange(longest)[None].expand(len(lengths), -1)
    each = torch.tensor(lengths)[:, None]
    mask = place >= longest - each if left else place < each
    return {
        "input_ids": ids * mask,
        "attention_mask": mask.long(),
        "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0),
    }
