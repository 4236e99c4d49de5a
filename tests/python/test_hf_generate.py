"""Generation in constant memory gives the tokens of a causal forward over everything."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_models
from lln_attention import DecodeState, calibrate, hf

hf.register()

IMPLEMENTATIONS = ["lln", "lln_diag"]
BLOCK = 8


def _model(name: str, implementation: str) -> PreTrainedModel:
    model = hf_models.make(name)
    calibrate(model, [hf_models.padded([40, 33, 25], seed=3)]).apply(model)
    model.set_attn_implementation(implementation)
    hf.configure(model, diag_block=BLOCK)
    return model


def _generate(model: PreTrainedModel, prompt: dict[str, Tensor], new: int, **how: object) -> Tensor:
    """Exactly so many new tokens, whichever they are."""
    torch.manual_seed(11)
    ids = {name: prompt[name] for name in ("input_ids", "attention_mask")}
    return model.generate(**ids, max_new_tokens=new, eos_token_id=None, pad_token_id=0, **how)


def _greedy_by_full_forwards(
    model: PreTrainedModel, prompt: dict[str, Tensor], new: int
) -> tuple[Tensor, Tensor]:
    """The same without any cache, and the logits that it chose by."""
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    logits = []
    for _ in range(new):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        logits.append(out.logits[:, -1])
        ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids, torch.stack(logits, 1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", hf_models.CAUSAL)
@torch.no_grad()
def test_greedy_tokens_are_those_of_full_forwards(name: str, implementation: str) -> None:
    model = _model(name, implementation)
    prompt = hf_models.padded([13, 5, 9], left=True)
    expected, logits = _greedy_by_full_forwards(model, prompt, 30)
    assert len(expected[:, 13:].unique()) > 5  # not one token for ever
    cache = hf.LLNCache()
    found = _generate(
        model,
        prompt,
        30,
        do_sample=False,
        past_key_values=cache,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert torch.equal(found.sequences, expected)
    torch.testing.assert_close(torch.stack(found.logits, 1), logits, rtol=1e-4, atol=1e-4)
    # The last token is chosen and not yet seen.
    assert cache.get_seq_length() == 13 + 29
    assert cache.layers[0].state.tokens.tolist() == [13 + 29, 5 + 29, 9 + 29]
    # The cache of transformers, which keeps all keys, gives the same.
    assert torch.equal(_generate(model, prompt, 30, do_sample=False), expected)


@pytest.mark.parametrize("how", [{"do_sample": True, "top_k": 20}, {"num_beams": 3}],
                         ids=["sampling", "beams"])  # fmt: skip
@pytest.mark.parametrize("name", hf_models.CAUSAL)
def test_other_ways_to_choose(name: str, how: dict[str, object]) -> None:
    model = _model(name, "lln_diag")
    prompt = hf_models.padded([13, 5], left=True)
    expected = _generate(model, prompt, 20, use_cache=False, **how)
    found = _generate(model, prompt, 20, past_key_values=hf.LLNCache(), **how)
    assert torch.equal(found, expected)
    assert not torch.equal(found, _generate(model, prompt, 20, do_sample=False))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_memory_does_not_grow(implementation: str) -> None:
    model = _model("llama", implementation)
    prompt = hf_models.padded([10])
    sizes = []
    for new in (2, 100):
        cache = hf.LLNCache()
        _generate(model, prompt, new, do_sample=False, past_key_values=cache)
        sizes.append(cache.nbytes)
    # Two layers, two key heads of 8 channels, which are padded to 16; f32.
    floats = 2 * (2 * 16 + 8 * 16) + (BLOCK * (16 + 16) if implementation == "lln_diag" else 0)
    assert sizes == [2 * 2 * 4 * floats] * 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.no_grad()
def test_prompts_in_pieces(implementation: str) -> None:
    model = _model("llama", implementation)
    ids = hf_models.tokens(2, 40)
    whole = model(ids, use_cache=False).logits
    cache = hf.LLNCache()
    pieces = [model(part, past_key_values=cache).logits for part in ids.split([11, 1, 20, 8], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_cache_can_be_copied_and_reset() -> None:
    model = _model("gpt2", "lln_diag")
    ids = hf_models.tokens(1, 20)
    cache = hf.LLNCache()
    model(ids[:, :15], past_key_values=cache)
    kept = copy.deepcopy(cache)
    first = model(ids[:, 15:], past_key_values=cache).logits
    assert torch.equal(model(ids[:, 15:], past_key_values=kept).logits, first)
    cache.reset()
    assert cache.get_seq_length() == 0
    model(ids[:, :15], past_key_values=cache)
    assert torch.equal(model(ids[:, 15:], past_key_values=cache).logits, first)


@torch.no_grad()
def test_batches_that_change() -> None:
    model = _model("llama", "lln_diag")
    ids = hf_models.tokens(3, 12)
    cache = hf.LLNCache()
    model(ids[:, :11], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 0, 2]))
    rows = torch.tensor([2, 0, 1])
    found = model(ids[rows, 11:], past_key_values=cache).logits
    torch.testing.assert_close(
        found, model(ids[rows], use_cache=False).logits[:, 11:], rtol=1e-4, atol=1e-4
    )


def test_autocast_generates() -> None:
    model = _model("llama", "lln")
    with torch.autocast("cpu", torch.bfloat16):
        tokens = _generate(
            model, hf_models.padded([9, 4], left=True), 5, past_key_values=hf.LLNCache()
        )
    assert tokens.shape == (2, 14)


def test_another_attention_is_noticed() -> None:
    model = _model("llama", "sdpa")
    with pytest.raises(RuntimeError, match=r"LLNCache is for attn_implementation='lln'"):
        _generate(model, hf_models.padded([9]), 3, past_key_values=hf.LLNCache())


def test_rolling_back_is_refused() -> None:
    model = _model("llama", "lln")
    with pytest.raises(NotImplementedError, match=r"copy\.deepcopy\(cache\)"):
        _generate(
            model,
            hf_models.padded([9]),
            5,
            do_sample=False,
            past_key_values=hf.LLNCache(),
            prompt_lookup_num_tokens=3,
        )


def test_gradients_are_refused() -> None:
    model = _model("llama", "lln")
    with pytest.raises(RuntimeError, match="decoding has no gradients"):
        model(hf_models.tokens(1, 5), past_key_values=hf.LLNCache())


def test_selected_sequences_go_their_own_way() -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(3, 2, 9, 16, generator=generator) for _ in range(3))
    state = DecodeState(3, 2, 16, diag_block=4, alpha=torch.rand(3, 2), beta=torch.rand(3, 2))
    state.append(None, k[:, :, :6], v[:, :, :6], lengths=torch.tensor([6, 2, 4]))
    order = torch.tensor([2, 0, 2, 1])
    chosen = state.select(order)
    assert chosen.tokens.tolist() == [4, 6, 4, 2]
    rows = state.append(q[:, :, 6:], k[:, :, 6:], v[:, :, 6:])
    assert torch.equal(
        chosen.append(q[order, :, 6:], k[order, :, 6:], v[order, :, 6:]), rows[order]
    )
