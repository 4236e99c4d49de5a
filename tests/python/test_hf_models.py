"""LLN attention in models of transformers: swapped in and back, trained, compiled, saved."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import BertModel, LlamaForCausalLM, PreTrainedModel

import hf_models
import lln_attention
from lln_attention import calibrate, hf

hf.register()

IMPLEMENTATIONS = ["lln", "lln_diag"]


def _inputs(name: str) -> dict[str, Tensor]:
    if name == "vit":
        generator = torch.Generator().manual_seed(4)
        return {"pixel_values": torch.randn(2, 3, 224, 224, generator=generator)}
    batch = hf_models.padded([29, 18])
    del batch["position_ids"]
    return batch


def _output(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs)[0]


def _calibrated(name: str, implementation: str, **options: object) -> PreTrainedModel:
    model = hf_models.make(name, **options)
    calibrate(model, [_inputs(name)]).apply(model)
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("name", list(hf_models.MODELS))
def test_swapping_in_and_back_leaves_the_model_identical(name: str) -> None:
    model = hf_models.make(name)
    model.set_attn_implementation("sdpa")
    inputs = _inputs(name)
    before = _output(model, inputs)
    weights = {key: x.clone() for key, x in model.state_dict().items()}
    calibrate(model, [inputs]).apply(model)
    outputs = [before]
    for implementation in IMPLEMENTATIONS:
        model.set_attn_implementation(implementation)
        hf.configure(model, diag_block=4)
        outputs.append(_output(model, inputs))
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert not torch.allclose(outputs[one], outputs[other], atol=1e-3)
    model.set_attn_implementation("sdpa")
    assert torch.equal(_output(model, inputs), before)
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(x, weights[key]) for key, x in model.state_dict().items())


@pytest.mark.parametrize("scaling", [None, 0.125])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_layers_compute_attention_of_their_q_and_k(name: str, scaling: float | None) -> None:
    """Against the function itself, called with what the layer has, also where logits are scaled
    in an unusual way: LLN assumes q.k / sqrt(dim)."""
    model = _calibrated(name, "lln_diag")
    hf.configure(model, diag_block=8, mix=0.3)
    layer = (model.encoder.layer[0].attention.self if name == "bert"
             else model.model.layers[0].self_attn)  # fmt: skip
    if scaling is not None:
        layer.scaling = scaling
    inputs = _inputs(name)
    calls: list[tuple[Tensor, ...]] = []
    rows: list[Tensor] = []
    taken = hf.forward.attention

    def seen(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        calls.append((q, k, v))
        rows.append(taken(q, k, v, **options))
        return rows[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.forward, "attention", seen)
        observed: list[lln_attention.Observation] = []
        with lln_attention.observe(model, observed.append):
            model(**inputs)
    q, k, v = calls[0]
    ratio = 1.0 if scaling is None else scaling * math.sqrt(8)
    torch.testing.assert_close(observed[0].q, q)
    expected = lln_attention.attention(
        q,
        k,
        v,
        causal=name == "llama",
        diag_block=8,
        mix=0.3,
        alpha=layer.lln_scales.alpha,
        beta=layer.lln_scales.beta,
        key_mask=inputs["attention_mask"].bool(),
    )
    assert torch.equal(rows[0], expected)
    assert k.shape[1] == (4 if name == "bert" else 2)  # key heads are not repeated
    layer.scaling = 8**-0.5
    usual: list[lln_attention.Observation] = []
    with lln_attention.observe(model, usual.append):
        model(**inputs)
    torch.testing.assert_close(q, usual[0].q * ratio)


def test_windows_of_modernbert_keep_softmax() -> None:
    model = hf_models.make("modernbert")
    inputs = _inputs("modernbert")
    names: list[str] = []
    with lln_attention.observe(model, lambda seen: names.append(seen.name)):
        model(**inputs)
    assert names == ["layers.0.attn"]  # the one that sees everything
    outputs: dict[str, list[Tensor]] = {}
    for implementation in ["sdpa", "lln"]:
        model.set_attn_implementation(implementation)
        kept: list[Tensor] = []
        hook = model.layers[1].attn.register_forward_hook(
            lambda module, args, kwargs, output, kept=kept: kept.extend(
                [args[0] if args else kwargs["hidden_states"], output[0]]
            ),
            with_kwargs=True,
        )
        model(**inputs)
        hook.remove()
        outputs[implementation] = kept
    hidden, _ = outputs["sdpa"]
    assert not torch.allclose(hidden, outputs["lln"][0], atol=1e-3)  # the layer before is LLN
    # The same input through the layer with a window: the same output, whatever the name is.
    results = []
    for implementation in ["sdpa", "lln"]:
        model.set_attn_implementation(implementation)
        changed = copy.deepcopy(model)
        changed.layers[1].attn.register_forward_pre_hook(
            lambda module, args, kwargs: (
                (hidden, *args[1:]) if args else args,
                kwargs if args else {**kwargs, "hidden_states": hidden},
            ),
            with_kwargs=True,
        )
        changed.layers[1].attn.register_forward_hook(
            lambda module, args, output: results.append(output[0])
        )
        changed(**inputs)
    counts = inputs["attention_mask"].bool()
    assert torch.equal(results[0][counts], results[1][counts])


@pytest.mark.parametrize("name", list(hf_models.MODELS))
def test_saved_models_come_back(name: str, tmp_path: Path) -> None:
    model = _calibrated(name, "lln_diag")
    hf.configure(model, diag_block=4, mix=0.25)
    inputs = _inputs(name)
    before = _output(model, inputs)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="lln_diag").eval()
    with pytest.raises(RuntimeError, match=r"call lln_attention\.hf\.configure\(model\) once"):
        loaded(**inputs)
    hf.configure(loaded)
    assert torch.equal(_output(loaded, inputs), before)
    softmax = type(model).from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    model.set_attn_implementation("sdpa")
    assert torch.equal(_output(softmax, inputs), _output(model, inputs))


def test_settings_without_a_calibration_need_no_call_after_loading(tmp_path: Path) -> None:
    model = hf_models.make("bert")
    model.set_attn_implementation("lln_diag")
    hf.configure(model, diag_block=4, matching="entropy")
    before = _output(model, _inputs("bert"))
    model.save_pretrained(tmp_path)
    loaded = BertModel.from_pretrained(tmp_path, attn_implementation="lln_diag").eval()
    assert torch.equal(_output(loaded, _inputs("bert")), before)


def test_the_implementation_is_saved_with_the_options(tmp_path: Path) -> None:
    """A model that was made for LLN attention must not come back as softmax without a word."""
    model = _calibrated("bert", "sdpa")
    hf.configure(model, implementation="lln_diag", diag_block=4)
    before = _output(model, _inputs("bert"))
    model.save_pretrained(tmp_path / "diag")
    loaded = BertModel.from_pretrained(tmp_path / "diag").eval()
    hf.configure(loaded)
    assert loaded.config._attn_implementation == "lln_diag"
    assert torch.equal(_output(loaded, _inputs("bert")), before)
    chosen = BertModel.from_pretrained(tmp_path / "diag", attn_implementation="lln").eval()
    hf.configure(chosen)
    assert chosen.config._attn_implementation == "lln"
    chosen.set_attn_implementation("sdpa")
    hf.configure(chosen, mix=0.25)
    assert chosen.config._attn_implementation == "sdpa"

    unused = _calibrated("bert", "sdpa")
    unused.save_pretrained(tmp_path / "unused")
    with pytest.warns(UserWarning, match=r"its attention is 'sdpa': give attn_implementation"):
        hf.configure(BertModel.from_pretrained(tmp_path / "unused"))


def test_scales_keep_their_numbers_in_other_types() -> None:
    model = _calibrated("llama", "lln_diag")

    def scales() -> list[Tensor]:
        found = [layer.self_attn.lln_scales for layer in model.model.layers]
        return [x for each in found for x in (each.alpha, each.beta)]

    before = [x.clone() for x in scales()]
    for change in (model.bfloat16, model.half, model.double, model.float, model.bfloat16):
        change()
        for one, other in zip(before, scales(), strict=True):
            assert other.dtype == torch.float32 and torch.equal(one, other)
    assert torch.isfinite(_output(model, _inputs("llama"))).all()
    model.to("meta")
    assert all(x.is_meta for x in scales())


def test_copies_keep_their_scales() -> None:
    model = _calibrated("llama", "lln")
    other = copy.deepcopy(model)
    assert torch.equal(_output(other, _inputs("llama")), _output(model, _inputs("llama")))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradient_checkpointing(name: str) -> None:
    model = _calibrated(name, "lln_diag").train()
    inputs = _inputs(name)
    gradients = []
    for _ in range(2):
        model.zero_grad()
        _output(model, inputs).square().sum().backward()
        gradients.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.is_gradient_checkpointing
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["bert", "vit", "llama"])
def test_autocast(name: str) -> None:
    model = _calibrated(name, "lln_diag")
    inputs = _inputs(name)
    exact = _output(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        rough = _output(model, inputs)
    assert torch.isfinite(rough).all()
    error = (rough.float() - exact).norm() / exact.norm()
    model.set_attn_implementation("sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        peer = _output(model, inputs)
    peer_error = (peer.float() - _output(model, inputs)).norm() / exact.norm()
    assert error <= 2 * peer_error
    rough.float().sum().backward()


@pytest.mark.parametrize(("implementation", "dynamic"), [("lln", True), ("lln_diag", None)])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_compiled_without_a_graph_break(
    name: str, implementation: str, dynamic: bool | None
) -> None:
    model = _calibrated(name, implementation)
    inputs = _inputs(name) | ({"use_cache": False} if name == "llama" else {})
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    found = compiled(**inputs)[0]
    torch.testing.assert_close(found, _output(model, inputs), rtol=1e-5, atol=1e-5)
    used = [x for x in model.encoder.parameters()] if name == "bert" else [*model.parameters()]
    gradients = torch.autograd.grad(found.square().sum(), used)
    expected = torch.autograd.grad(_output(model, inputs).square().sum(), used)
    for one, other in zip(gradients, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
    shorter = inputs | {key: inputs[key][:, :21] for key in ("input_ids", "attention_mask")}
    torch.testing.assert_close(
        compiled(**shorter)[0], _output(model, shorter), rtol=1e-5, atol=1e-5
    )


def test_layers_without_a_calibration_match_each_sequence() -> None:
    """matching="per_head" leaves the calibration aside."""
    model = _calibrated("bert", "lln")
    frozen = _output(model, _inputs("bert"))
    hf.configure(model, matching="per_head")
    matched = _output(model, _inputs("bert"))
    assert not torch.allclose(frozen, matched, atol=1e-3)
    plain = hf_models.make("bert")
    plain.set_attn_implementation("lln")
    assert torch.equal(_output(plain, _inputs("bert")), matched)


def test_logits_of_a_causal_model_do_not_see_the_future() -> None:
    model = _calibrated("llama", "lln_diag")
    assert isinstance(model, LlamaForCausalLM)
    ids = hf_models.tokens(1, 20)
    whole = model(ids).logits
    ids[0, 13:] = 5
    torch.testing.assert_close(model(ids).logits[:, :13], whole[:, :13])
