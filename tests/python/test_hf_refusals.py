"""What LLN attention cannot do inside transformers is refused, with what to do in its place."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from transformers import (
    BartConfig,
    BartModel,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

import hf_models
from lln_attention import hf

hf.register()


def _lln(name: str, **options: object) -> torch.nn.Module:
    model = hf_models.make(name, **options)
    model.set_attn_implementation("lln")
    hf.configure(model, matching="none")
    return model


@pytest.mark.parametrize("name", list(hf_models.MODELS))
def test_output_attentions(name: str) -> None:
    inputs = torch.zeros(1, 3, 224, 224) if name == "vit" else hf_models.tokens(1, 5)
    with pytest.raises(NotImplementedError, match=r"output_attentions.*lln_attention\.analyze"):
        _lln(name)(inputs, output_attentions=True)
    by_config = _lln(name, output_attentions=True, attn_implementation="eager")
    with pytest.raises(NotImplementedError, match=r"output_attentions.*lln_attention\.analyze"):
        by_config(inputs)
    by_config(inputs, output_attentions=False)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("bert", "attention_probs_dropout_prob"),
        ("gpt2", "attn_pdrop"),
        ("llama", "attention_dropout"),
    ],
)
def test_dropout_on_weights(name: str, option: str) -> None:
    model = _lln(name, **{option: 0.1})
    model(hf_models.tokens(1, 5))
    with pytest.raises(NotImplementedError, match=rf"dropout 0\.1.*{option}"):
        model.train()(hf_models.tokens(1, 5))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_custom_masks(name: str) -> None:
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=r"mask of shape \[1, 1, 5, 5\]"):
        _lln(name)(hf_models.tokens(1, 5), attention_mask=mask)


def test_packed_sequences() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with pytest.raises(NotImplementedError, match="its own row of the batch"):
        _lln("llama")(hf_models.tokens(1, 5), position_ids=positions, use_cache=False)


@pytest.mark.parametrize("implementation", ["sdpa", "lln"])
def test_packing_with_a_cache_is_none(implementation: str) -> None:
    """Positions that start anew are then positions and nothing else, by transformers' own rule."""
    model = _lln("llama")
    model.set_attn_implementation(implementation)
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    ids = hf_models.tokens(1, 5)
    before = model(ids, position_ids=positions).logits
    ids[0, 0] = 3 if ids[0, 0] > 3 else 4
    after = model(ids, position_ids=positions).logits
    assert not torch.allclose(before[:, 3:], after[:, 3:], atol=1e-3)


def test_causal_sliding_window() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = MistralForCausalLM(
        MistralConfig(**sizes, intermediate_size=48, vocab_size=60, sliding_window=4)
    ).eval()
    model.set_attn_implementation("lln")
    hf.configure(model, matching="none")
    with pytest.raises(NotImplementedError, match=r"sliding window \(this layer's is 4\)"):
        model(hf_models.tokens(1, 9))


def test_cross_attention() -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartModel(
        BartConfig(**sizes, **heads, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=60)
    ).eval()
    model.set_attn_implementation("lln")
    with pytest.raises(NotImplementedError, match="decoders without cross attention"):
        model(hf_models.tokens(1, 5))


def test_static_cache() -> None:
    model = _lln("llama")
    cache = StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(NotImplementedError, match=r"hf\.LLNCache\(\)"):
        model(hf_models.tokens(1, 5), past_key_values=cache)


def test_masks_of_another_length() -> None:
    with pytest.raises(ValueError, match="attention_mask has 3 tokens: expected 5"):
        _lln("llama")(hf_models.tokens(1, 5), attention_mask=torch.ones(1, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "sdpa"}, "implementation is 'sdpa': expected one of lln, lln_diag"),
        ({"diag_block": 0}, "diag_block is 0: expected a positive integer"),
        ({"mix": 1.5}, "mix is 1.5: expected a number from 0 to 1"),
        ({"matching": "ema"}, "matching is 'ema': expected one of auto, none"),
    ],
)
def test_settings(options: dict[str, object], message: str) -> None:
    model = hf_models.make("bert")
    with pytest.raises(ValueError, match=message):
        hf.configure(model, **options)
    assert not hasattr(model.config, "lln")


def test_a_module_without_transformers() -> None:
    with pytest.raises(ValueError, match="Linear holds no model of transformers"):
        hf.configure(torch.nn.Linear(2, 2), mix=0.5)
