"""Conversion of a small BERT: that it recovers, repeats itself, resumes and refuses.

The model is random and tiny, and so are the texts; docs/minilm.md has what a conversion does to a
real model.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import lln_attention  # noqa: E402
from lln_attention import hf  # noqa: E402
from lln_attention.convert import Progress, convert  # noqa: E402
from lln_attention.text_batches import TextBatches  # noqa: E402

OPTIONS: dict[str, Any] = {"batch_size": 8, "held_out": 8, "max_tokens": 48, "diag_block": 4}


class WordTokenizer:
    """Words of the form w17 become 17; 0 is padding."""

    pad_token_id: int | None = 0

    def __call__(self, texts: list[str], truncation: bool, max_length: int) -> dict[str, Any]:
        assert truncation
        return {"input_ids": [[int(w[1:]) for w in t.split()][:max_length] for t in texts]}


def make_texts(count: int = 60) -> list[str]:
    draw = random.Random(0)
    return [
        " ".join(f"w{draw.randrange(1, 50)}" for _ in range(draw.randrange(3, 40)))
        for _ in range(count)
    ]


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=64,
        initializer_range=0.2,  # softmax would be flat with the usual one
    )
    return transformers.BertModel(config).eval()


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    changed = [name for name, x in first.items() if not torch.equal(x, second[name])]
    assert not changed


def run(model: Any, **options: Any) -> Any:
    return convert(model, make_texts(), tokenizer=WordTokenizer(), **(OPTIONS | options))


@pytest.mark.parametrize("implementation", ["lln", "lln_diag"])
def test_recovery_comes_closer_to_the_teacher(model: Any, implementation: str) -> None:
    embedding = model.get_input_embeddings().weight.clone()
    report = run(model, implementation=implementation, steps=80, learning_rate=3e-3)
    softmax, swapped, recovered = report.stages
    assert softmax.hidden_errors == [0.0, 0.0, 0.0]
    assert swapped.hidden_errors[0] == 0.0 < swapped.hidden_errors[1]
    assert recovered.hidden_errors[-1] < 0.8 * swapped.hidden_errors[-1]
    assert recovered.mean_cosine > swapped.mean_cosine
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert model.config._attn_implementation == implementation


def test_without_steps_no_weight_changes(model: Any) -> None:
    before = weights_of(model)
    report = run(model, steps=0, mode="none")
    assert_same(weights_of(model), before)
    assert [stage.name for stage in report.stages] == ["softmax", "swapped"]
    assert report.calibration is None


def test_swapping_back_gives_the_teacher(model: Any) -> None:
    ids = torch.arange(1, 21)[None]
    with torch.no_grad():
        before = model(ids).last_hidden_state
        run(model, steps=0)
        assert not torch.equal(model(ids).last_hidden_state, before)
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(ids).last_hidden_state, before)


def test_modes_find_their_own_scales(model: Any) -> None:
    found = {}
    for mode in ("paper", "per_head", "exact", "entropy"):
        report = run(copy.deepcopy(model), steps=0, mode=mode)
        assert report.calibration["mode"] == mode
        found[mode] = tuple(report.calibration["layers"][0]["alpha"])
    assert len(set(found.values())) == 4


def test_fitted_mix_is_the_best_of_the_tenths(model: Any) -> None:
    texts = ["w1 w2 w3", "w4 w5 w6 w7"] * 40
    options = OPTIONS | {"tokenizer": WordTokenizer(), "steps": 0}
    # Every text is one block: Diag is softmax, and LLN only adds error.
    assert convert(copy.deepcopy(model), texts, mix=None, **options).options["mix"] == 0.1
    found = run(copy.deepcopy(model), steps=0, mix=None, diag_block=1)
    errors = {
        mix: sum(run(copy.deepcopy(model), steps=0, mix=mix, diag_block=1).stages[1].hidden_errors)
        for mix in (0.1, 0.9, found.options["mix"])
    }
    assert found.options["mix"] > 0.1  # with blocks of one token LLN is all there is to read others
    assert errors[found.options["mix"]] == min(errors.values()) < errors[0.1]


def test_goes_on_after_an_interruption_to_the_same_bits(model: Any, tmp_path: Path) -> None:
    other = copy.deepcopy(model)
    third = copy.deepcopy(model)
    whole = run(model, steps=9)

    def interrupt(progress: Progress) -> None:
        if progress.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(other, steps=9, folder=tmp_path, checkpoint_every=3, progress=interrupt)
    # The model is as it came, so that both it and a fresh copy can go on.
    assert_same(weights_of(other), weights_of(third))
    assert other.config._attn_implementation == "sdpa" and not hasattr(other.config, "lln")
    assert not any(hasattr(module, "lln_scales") for module in other.modules())
    seen: list[int] = []
    report = run(
        third, steps=9, folder=tmp_path, checkpoint_every=3, progress=lambda p: seen.append(p.step)
    )
    assert seen == [4, 5, 6, 7, 8, 9]
    assert_same(weights_of(third), weights_of(model))
    assert report.losses == whole.losses
    assert report.stages == whole.stages


def test_a_finished_conversion_is_not_run_again(model: Any, tmp_path: Path) -> None:
    other = copy.deepcopy(model)
    run(model, steps=2, folder=tmp_path)
    seen: list[Progress] = []
    run(other, steps=2, folder=tmp_path, progress=seen.append)
    assert seen == []
    assert_same(weights_of(other), weights_of(model))


def test_checkpoint_of_another_conversion(model: Any, tmp_path: Path) -> None:
    other = copy.deepcopy(model)
    run(copy.deepcopy(model), steps=1, folder=tmp_path)
    with pytest.raises(ValueError, match=r"differs in mix, seed: use another folder"):
        run(copy.deepcopy(model), steps=1, folder=tmp_path, seed=1, mix=0.25)
    with torch.no_grad():
        other.encoder.layer[0].output.dense.bias[0] += 1
    with pytest.raises(ValueError, match=r"differs in weights:"):
        run(other, steps=1, folder=tmp_path)


def test_report_files(model: Any, tmp_path: Path) -> None:
    calls: list[str] = []

    def score(student: Any) -> float:
        calls.append(student.config._attn_implementation)
        return 0.25 * len(calls)

    report = run(model, steps=1, folder=tmp_path, evaluations={"quality": score})
    assert calls == ["sdpa", "lln_diag", "lln_diag"]
    stored = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [stage["scores"]["quality"] for stage in stored["stages"]] == [0.25, 0.5, 0.75]
    assert stored["options"]["diag_block"] == 4
    assert stored["texts"] == {"texts_trained": 52, "texts_held_out": 8} | {
        "mean_tokens": stored["texts"]["mean_tokens"]
    }
    assert len(stored["losses"]) == 1
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert page == report.to_markdown()
    assert "| recovered | " in page and "| quality |" in page
    with pytest.raises(ValueError, match=r"no stage 'trained': found softmax, swapped, recovered"):
        report.stage("trained")


def test_all_faults_are_named(model: Any) -> None:
    with pytest.raises(ValueError) as caught:
        run(model, mode="guess", implementation="sdpa", steps=-1, learning_rate=0.0, held_out=60)
    text = str(caught.value)
    for part in (
        "mode is 'guess': expected one of none, paper",
        "implementation is 'sdpa': expected one of lln, lln_diag",
        "steps is -1: expected 0 or more",
        "learning_rate is 0.0",
        "60 texts: expected at least held_out + batch_size = 68",
    ):
        assert part in text


def test_options_of_the_attention_are_checked_first(model: Any) -> None:
    with pytest.raises(ValueError, match=r"diag_block is 0: .*; mix is 7: expected a number from"):
        run(model, mix=7, diag_block=0)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match=r"^texts is one text: expected a list of them$"):
        convert(model, "w1 w2 " * 50, tokenizer=WordTokenizer(), **OPTIONS)
    with pytest.raises(ValueError, match=r"^calibration_texts is one text"):
        run(model, calibration_texts="w1 w2")


def test_an_error_leaves_the_model_as_it_came(model: Any) -> None:
    """Also one that has a calibration already."""
    ids = torch.arange(1, 21)[None]
    model.train()
    calibration = lln_attention.calibrate(model, [ids], mode="per_head")
    calibration.apply(model)
    before, options = weights_of(model), copy.deepcopy(model.config.lln)

    def fail(progress: Progress) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run(model, steps=2, learning_rate=0.1, progress=fail)
    assert_same(weights_of(model), before)
    assert model.config._attn_implementation == "sdpa"
    assert model.config.lln == options
    scales = model.encoder.layer[1].attention.self.lln_scales
    assert scales.alpha.tolist() == list(calibration.layers[1].alpha)
    assert all(module.training for module in model.modules())


def test_modules_keep_their_mode(model: Any) -> None:
    model.train()
    model.encoder.layer[0].eval()
    training = {name: module.training for name, module in model.named_modules()}
    run(model, steps=1)
    assert {name: module.training for name, module in model.named_modules()
            if name in training} == training  # fmt: skip


def test_a_decoder_whose_tokenizer_has_no_padding() -> None:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_head=2, n_layer=2, n_inner=64, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    tokenizer = WordTokenizer()
    tokenizer.pad_token_id = None
    report = convert(model, make_texts(), tokenizer=tokenizer, steps=40, learning_rate=3e-3,
                     **OPTIONS)  # fmt: skip
    _, swapped, recovered = report.stages
    assert recovered.hidden_errors[-1] < 0.9 * swapped.hidden_errors[-1]


def test_a_converted_model_comes_back(model: Any, tmp_path: Path) -> None:
    run(model, steps=1)
    model.save_pretrained(tmp_path)
    loaded = transformers.BertModel.from_pretrained(tmp_path).eval()
    hf.configure(loaded)
    ids = torch.arange(1, 21)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).last_hidden_state, model(ids).last_hidden_state)


def test_reports_are_written_whole(model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    report = run(model, steps=0, folder=tmp_path)
    before = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert before.keys() == {"report.json", "report.md"}
    write = Path.write_text

    def half(path: Path, text: str, **options: Any) -> int:
        write(path, text[: len(text) // 2], **options)
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="no space left"):
        report.save(tmp_path)
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == before


def test_a_model_is_converted_once(model: Any) -> None:
    run(model, steps=0)
    with pytest.raises(ValueError, match=r"attention 'lln_diag' already: give it as it was loaded"):
        run(model, steps=0)
    with pytest.raises(ValueError, match=r"model is a Linear: expected a model of transformers"):
        run(torch.nn.Linear(2, 2))


def test_held_out_texts_are_never_trained_on() -> None:
    texts = [f"w{i} " * (1 + i % 7) for i in range(1, 48)]
    batches = TextBatches(WordTokenizer(), texts, 48, 8, 7, 3, torch.device("cpu"))

    def words(batch: dict[str, torch.Tensor]) -> list[int]:
        return [int(row[0]) for row in batch["input_ids"]]

    held_out = {word for batch in batches.held_out() for word in words(batch)}
    assert len(held_out) == 7
    passes = [
        [word for i in range(5) for word in words(batches.of_step(first + i))] for first in (0, 5)
    ]
    for trained in passes:
        assert len(set(trained)) == 40 and not held_out & set(trained)
    assert passes[0] != passes[1]
    again = TextBatches(WordTokenizer(), texts, 48, 8, 7, 3, torch.device("cpu"))
    assert words(again.of_step(9)) == words(batches.of_step(9))


def test_padding_is_masked() -> None:
    texts = ["w3 w4", "w5 w6 w7", "w8"]
    batches = TextBatches(WordTokenizer(), texts, 2, 3, 0, 0, torch.device("cpu"))
    batch = batches.first(3)[0]
    assert sorted(map(tuple, batch["input_ids"].tolist())) == [(3, 4), (5, 6), (8, 0)]
    assert torch.equal(batch["attention_mask"], (batch["input_ids"] > 0).long())
