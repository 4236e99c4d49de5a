"""Calibrations: what calibrate() finds, where apply() puts it, and the file."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForSequenceClassification

import hf_models
import lln_attention
from lln_attention import Calibration, LLNAttention, LLNPlusDiagAttention, calibrate, hf
from lln_attention.calibration import CalibratedLayer

hf.register()

MODES = ["paper", "per_head", "exact", "entropy"]
LENGTHS = [31, 9, 17, 23]


def _batches(lengths: list[int], size: int) -> list[dict[str, Tensor]]:
    whole = hf_models.padded(lengths)
    return [
        {name: x[i : i + size] for name, x in whole.items()} for i in range(0, len(lengths), size)
    ]


def _expected_per_head(q: Tensor, k: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """By the formula of docs/matching.md, over all tokens that count; heads of 8 channels."""
    a, b = 0.2574, -0.3402

    def sigma(x: Tensor, key_heads: int) -> Tensor:
        rows = x.double().transpose(1, 2)[counts]  # [tokens, heads, 8]
        return rows.unflatten(1, (key_heads, -1)).transpose(0, 1).flatten(1).std(1)

    sigma_q, sigma_k = sigma(q, k.shape[1]), sigma(k, k.shape[1])
    st = ((sigma_q**2 * sigma_k**2 - b) / (2 * a)).sqrt()
    return (st / sigma_q).repeat_interleave(q.shape[1] // k.shape[1]), st / sigma_k


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "lln"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_scales_follow_the_formula_over_all_batches(name: str, implementation: str) -> None:
    model = hf_models.make(name)
    seen: dict[str, list[lln_attention.Observation]] = {}
    batch = hf_models.padded(LENGTHS)
    with lln_attention.observe(model, lambda call: seen.setdefault(call.name, []).append(call)):
        model(**batch)
    model.set_attn_implementation(implementation)
    found = calibrate(model, _batches(LENGTHS, 1), mode="per_head")
    assert [layer.name for layer in found.layers] == list(seen)
    counts = batch["attention_mask"].bool()
    for layer in found.layers:
        (call,) = seen[layer.name]
        alpha, beta = _expected_per_head(call.q, call.k, counts)
        torch.testing.assert_close(torch.tensor(layer.alpha), alpha.float(), rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.tensor(layer.beta), beta.float(), rtol=1e-5, atol=0)
        assert layer.dim == 8
        assert layer.tokens == sum(LENGTHS) / len(LENGTHS)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("mode", MODES)
def test_batches_may_be_cut_anywhere(mode: str) -> None:
    model = hf_models.make("bert")
    whole, parts = (calibrate(model, _batches(LENGTHS, size), mode=mode) for size in (4, 3))
    assert whole.mode == mode
    for one, other in zip(whole.layers, parts.layers, strict=True):
        torch.testing.assert_close(one.alpha, other.alpha, rtol=2e-6, atol=0)
        torch.testing.assert_close(one.beta, other.beta, rtol=2e-6, atol=0)


def test_modes_differ() -> None:
    model = hf_models.make("bert")
    scales = {mode: calibrate(model, _batches(LENGTHS, 4), mode=mode).layers for mode in MODES}
    assert len({layers[0].alpha for layers in scales.values()}) == len(MODES)
    assert len(set(scales["paper"][0].alpha)) == 1  # one standard deviation for all heads


def test_calibrating_changes_nothing_of_the_model() -> None:
    model = hf_models.make("bert").train()
    model.encoder.layer[0].eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    training = [module.training for module in model.modules()]
    steps: list[tuple[int, int | None]] = []
    calibrate(model, _batches(LENGTHS, 2), progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 2), (2, 2)]
    assert [module.training for module in model.modules()] == training
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not hasattr(model.config, "lln")
    calibrate(
        model, iter(_batches(LENGTHS, 2)), progress=lambda done, total: steps.append((done, total))
    )
    assert steps[2:] == [(1, None), (2, None)]


def test_apply_puts_the_scales_where_attention_takes_them() -> None:
    model = hf_models.make("llama")
    model.set_attn_implementation("lln")
    batch = hf_models.padded(LENGTHS)
    with pytest.raises(ValueError, match=r"lln_attention\.calibrate\(model, batches\)"):
        model(**batch)
    calibrate(model, [batch]).apply(model)
    first = model(**batch).logits
    twice = Calibration(
        "entropy",
        tuple(
            CalibratedLayer(
                layer.name, 8, layer.tokens, tuple(2 * x for x in layer.alpha), layer.beta
            )
            for layer in calibrate(model, [batch]).layers
        ),
    )
    twice.apply(model)
    assert not torch.allclose(model(**batch).logits, first, atol=1e-3)
    calibrate(model, [batch]).apply(model)
    assert torch.equal(model(**batch).logits, first)


def test_a_calibration_of_the_bare_model_fits_the_one_with_a_head() -> None:
    bare = hf_models.make("bert")
    found = calibrate(bare, _batches(LENGTHS, 4))
    headed = BertForSequenceClassification(bare.config).eval()
    headed.bert.load_state_dict(bare.state_dict(), strict=False)
    found.apply(headed)
    found.apply(nn.Sequential(bare))
    for model in (headed.bert, bare):
        module = model.encoder.layer[1].attention.self
        assert module.lln_scales.alpha.tolist() == list(found.layers[1].alpha)
    with pytest.raises(ValueError, match=r"no module 'encoder\.layer\.0\.attention\.self'"):
        found.apply(hf_models.make("gpt2"))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_a_calibration_of_other_heads_is_refused(name: str) -> None:
    """And leaves the model as it was, also the layers before the one that is at fault."""
    model = hf_models.make(name)
    right = calibrate(model, [{"input_ids": hf_models.tokens(2, 30)}])
    first, second = right.layers
    for alpha, beta in ((second.alpha[:2], second.beta), (second.alpha, second.beta[:1])):
        wrong = Calibration("entropy", (first, replace(second, alpha=alpha, beta=beta)))
        with pytest.raises(ValueError, match=rf"'{second.name}': the calibration has {len(alpha)} "
                           rf"alpha and {len(beta)} beta, the module 4 heads"):  # fmt: skip
            wrong.apply(model)
        assert not hasattr(model.config, "lln")
        assert not any(hasattr(module, "lln_scales") for module in model.modules())
    right.apply(model)


def test_modules_that_cannot_use_a_calibration() -> None:
    layers = nn.Sequential(LLNAttention(32, 4, num_kv_heads=2, matching="none"))
    scales = ((1.5,) * 3, (1.5,) * 2)
    with pytest.raises(ValueError, match=r"layer '0': .* 3 alpha and 2 beta, the module 4 heads"):
        Calibration("exact", (CalibratedLayer("0", 8, 9, *scales),)).apply(layers)
    assert layers[0].matching == "none"
    with pytest.raises(ValueError, match=r"layer '0' is a Linear: expected an attention module"):
        Calibration("exact", (CalibratedLayer("0", 8, 9, *scales),)).apply(
            nn.Sequential(nn.Linear(2, 2))
        )


def test_nothing_to_calibrate() -> None:
    model = hf_models.make("bert")
    with pytest.raises(ValueError, match="no attention layer of BertModel was seen"):
        calibrate(model, [])
    with pytest.raises(ValueError, match="no attention layer of Linear was seen"):
        calibrate(nn.Linear(3, 3), [torch.zeros(1, 3)])
    with pytest.raises(ValueError, match="mode is 'ema': expected one of paper, per_head"):
        calibrate(model, [], mode="ema")


def test_numbers_that_are_none() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    with pytest.raises(ValueError, match=r"layer '0': calibrate: .*q of key head 1 has count"):
        x = torch.randn(1, 2, 20, 8)
        x[0, 1, 3, 2] = torch.nan
        calibrate(nn.Sequential(Broken()), [x])


def test_cross_attention_of_torch_is_seen() -> None:
    """As many queries as there are; the keys' mask is not theirs."""
    layer = nn.TransformerDecoderLayer(32, 4, batch_first=True).eval()
    generator = torch.Generator().manual_seed(1)
    x, memory = (torch.randn(2, n, 32, generator=generator) for n in (30, 20))
    padding = torch.arange(20) >= torch.tensor([[20], [16]])
    batch = {"tgt": x, "memory": memory, "memory_key_padding_mask": padding}
    found = calibrate(layer, [batch], mode="per_head").layers
    assert [(each.name, each.tokens) for each in found] == [
        ("self_attn", 30),
        ("multihead_attn", 18),
    ]


def test_limits_are_reported() -> None:
    model = hf_models.make("bert", initializer_range=1e-3)
    with pytest.warns(UserWarning, match="mode entropy: a limit was applied in 2 of 2 layers"):
        calibrate(model, _batches(LENGTHS, 4))


def test_file_round_trip(tmp_path: Path) -> None:
    found = calibrate(hf_models.make("llama"), _batches(LENGTHS, 4))
    path = tmp_path / "calibration.json"
    found.save(path)
    assert Calibration.load(path) == found
    assert [each.name for each in tmp_path.iterdir()] == ["calibration.json"]


def test_reads_what_the_program_writes(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(
        '{"format": "lln-calibration", "version": 1, "mode": "exact", "layers": [\n'
        ' {"name": "encoder.0", "dim": 64, "tokens": 512,\n'
        '  "alpha": [2.0999999, 2.20000005],\n  "beta": [2.0999999]}]}\n'
    )
    layer = Calibration.load(path).layer("encoder.0")
    assert layer.alpha == tuple(torch.tensor([2.1, 2.2]).tolist())
    with pytest.raises(ValueError, match=r"no layer 'other': found 'encoder\.0'"):
        Calibration.load(path).layer("other")


_LAYER: dict[str, Any] = {"name": "a", "dim": 8, "tokens": 5, "alpha": [1.0], "beta": [1.0]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format is 'other', version 1"),
        ({"version": 2}, "version 2: expected 'lln-calibration', version 1"),
        ({"mode": "ema"}, "mode is 'ema'"),
        ({"more": 1}, "a calibration has the fields"),
        ({"layers": 3}, "layers is 3: expected an array"),
        ({"layers": [3]}, "a layer is int: expected an object"),
        ({"layers": [_LAYER, _LAYER]}, "layers occur twice: a"),
        ({"layers": [{**_LAYER, "alpha": [0]}]}, r"layer 'a': alpha is \[0.0\]: expected positive"),
        ({"layers": [{**_LAYER, "alpha": [1e39]}]}, "expected positive numbers"),
        ({"layers": [{**_LAYER, "beta": []}]}, r"beta is \[\]"),
        ({"layers": [{**_LAYER, "beta": ["1"]}]}, "beta is .*: expected numbers"),
        ({"layers": [{**_LAYER, "dim": 0}]}, "dim is 0"),
        ({"layers": [{**_LAYER, "dim": "8"}]}, "dim is '8'"),
        ({"layers": [{**_LAYER, "tokens": None}]}, "tokens None"),
    ],
)
def test_files_that_are_something_else(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    right = {"format": "lln-calibration", "version": 1, "mode": "exact", "layers": [_LAYER]}
    path.write_text(json.dumps(right))
    Calibration.load(path)
    path.write_text(json.dumps(right | change))
    with pytest.raises(ValueError, match=message) as caught:
        Calibration.load(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_without_json(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        Calibration.load(path)


class _Plain(nn.Module):
    """Attention by torch's function, with a scale of its own and padding."""

    def forward(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(
            q, k, k, attn_mask=mask[:, None, None], scale=0.5
        )


def test_any_module_can_be_calibrated() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(3, 2, 40, 8, generator=generator) for _ in range(2))
    mask = torch.arange(40) < torch.tensor([40, 17, 23])[:, None]
    found = calibrate(nn.ModuleDict({"a": _Plain()})["a"], [(q, k, mask)], mode="per_head")
    alpha, beta = _expected_per_head(q * 0.5 * 8**0.5, k, mask)
    torch.testing.assert_close(torch.tensor(found.layers[0].alpha), alpha.float())
    torch.testing.assert_close(torch.tensor(found.layers[0].beta), beta.float())
    assert found.layers[0].tokens == 80 / 3


def test_modules_of_the_package_are_frozen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        LLNAttention(32, 4, num_kv_heads=2, causal=True),
        LLNPlusDiagAttention(32, 4, diag_block=8),
    )
    x = 3 * torch.randn(4, 50, 32)
    found = calibrate(model, [x], mode="per_head")
    assert [layer.name for layer in found.layers] == ["0", "1"]
    q, k = (
        projection(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        for projection in (model[0].q_proj, model[0].k_proj)
    )
    alpha, beta = _expected_per_head(q, k, torch.ones(4, 50, dtype=torch.bool))
    torch.testing.assert_close(torch.tensor(found.layers[0].alpha), alpha.float())
    torch.testing.assert_close(torch.tensor(found.layers[0].beta), beta.float())
    found.apply(model)
    assert [layer.matching for layer in model] == ["frozen", "frozen"]
    assert model[1].alpha.tolist() == list(found.layers[1].alpha)


def test_encoder_layers_of_torch_are_seen() -> None:
    """Also in evaluation mode, where torch would run them fused; padding does not count."""
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
    x = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(1))
    padding = torch.zeros(2, 20, dtype=torch.bool)
    padding[1, 12:] = True
    batch = {"src": x, "src_key_padding_mask": padding}
    (found,) = calibrate(layer, [batch], mode="per_head").layers
    assert (found.name, found.tokens) == ("self_attn", 16)
    assert torch.backends.mha.get_fastpath_enabled()


def test_packed_sequences_count_one_by_one() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 2, 50, 8, generator=generator)

    class Packed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ends = torch.tensor([0, 20, 50])
            return lln_attention.attention(x, x, x, cu_seqlens=ends, matching="none")

    (found,) = calibrate(Packed(), [x], mode="per_head").layers
    assert found.tokens == 25
