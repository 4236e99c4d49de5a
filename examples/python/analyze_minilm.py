#!/usr/bin/env python3
"""Looks into the attention of all-MiniLM-L6-v2, and at what LLN attention in its place changes.

    pip install 'lln-attention[examples]'
    examples/python/analyze_minilm.py TEXT STS-B build/minilm

TEXT is a file with one paragraph a line, STS-B a folder with sts-train.csv, sts-dev.csv and
sts-test.csv. Nothing is trained. The output folder gets analysis.json, a page with the figures of
every head (heads.html) and the pictures of docs/minilm.md, which has what came out.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import minilm
import minilm_figures
import torch
from torch import Tensor, nn

import lln_attention
from lln_attention.convert import MODES, convert

# What of an instrument's answer goes into tables and figures.
NUMBERS = ("temperature", "entropy_nats", "spectral_gap", "ks", "log_var")
ANALYZED = 16  # paragraphs that the instruments look at; all of them are calibrated on


@torch.no_grad()
def heads_of(model: nn.Module, ids: Tensor) -> dict[str, list[dict[str, Any]]]:
    """The instruments' answers for every layer and head: of softmax, and of LLN by its modes."""
    with lln_attention.collect(model) as found:
        model(ids)
    heads = {"softmax": found.analyze(kinds=("softmax",))}
    return heads | {mode: found.analyze(kinds=("lln",), matching=mode) for mode in MODES}


def swapped(
    model: nn.Module,
    tokenizer: Any,
    texts: list[str],
    calibration_texts: list[str],
    score: Callable[[nn.Module], float],
    **options: Any,
) -> dict[str, Any]:
    """How far the model is from softmax with LLN attention of these options."""
    student = copy.deepcopy(model)
    report = convert(
        student,
        texts,
        tokenizer=tokenizer,
        calibration_texts=calibration_texts,
        steps=0,
        evaluations={"sts": lambda x: score(x) if x is student else float("nan")},
        **options,
    )
    stage = report.stage("swapped")
    return options | {
        "mix": report.options["mix"],
        "hidden_errors": stage.hidden_errors,
        "mean_cosine": stage.mean_cosine,
        "min_cosine": stage.min_cosine,
        "sts": stage.scores["sts"],
    }


def all_swaps(
    model: nn.Module,
    tokenizer: Any,
    calibration_texts: list[str],
    sts: Path,
    part: str,
    block: int,
    held_out: int,
) -> list[dict[str, Any]]:
    """LLN and LLN+Diag in every mode; Diag alone as the control."""
    score = minilm.sts_b_score(sts, part, tokenizer)
    texts = minilm.unlabelled_sentences(sts)
    rows: list[dict[str, Any]] = [{"implementation": "softmax", "sts": score(model)}]
    plans: list[dict[str, Any]] = [
        {"implementation": implementation, "mode": mode, "mix": 0.5}
        for implementation in ("lln", "lln_diag")
        for mode in MODES
    ]
    plans += [{"implementation": "lln_diag", "mode": mode, "mix": None} for mode in MODES]
    plans.append({"implementation": "lln_diag", "mode": "none", "mix": 0.0})
    for plan in plans:
        plan |= {"diag_block": block, "held_out": held_out}
        rows.append(swapped(model, tokenizer, texts, calibration_texts, score, **plan))
        print(f"{plan}: STS-B {part} {rows[-1]['sts']:.4f}", flush=True)
    return rows


def table_of_layers(heads: dict[str, list[dict[str, Any]]]) -> str:
    """Softmax's numbers, means over the heads of a layer, as a table in Markdown."""
    lines = ["| layer | " + " | ".join(NUMBERS) + " |", "|---|" + "---|" * len(NUMBERS)]
    for layer in sorted({head["layer"] for head in heads["softmax"]}):
        rows = [head for head in heads["softmax"] if head["layer"] == layer]
        means = []
        for name in NUMBERS:
            numbers = [row[name] for row in rows if row[name] is not None]
            means.append(f"{sum(numbers) / len(numbers):.3f}")
        lines.append(f"| {layer} | " + " | ".join(means) + " |")
    return "\n".join(lines)


def table_of_swaps(swaps: list[dict[str, Any]]) -> str:
    """What each attention in place of softmax does to the model, as a table in Markdown."""
    titles = ("attention", "mode", "mix", "error of the last layer", "mean cosine", "STS-B")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in swaps[1:]:
        mix = f"{row['mix']:g}" if row["implementation"] == "lln_diag" else ""
        cells = [row["implementation"], row["mode"], mix, f"{row['hidden_errors'][-1]:.3f}"]
        cells += [f"{row['mean_cosine']:.3f}", f"{row['sts']:.4f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"softmax: {swaps[0]['sts']:.4f}"])


def main() -> None:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="file with one paragraph a line")
    parser.add_argument("sts", type=Path, help="folder with the files of STS-B")
    parser.add_argument("folder", type=Path, help="for analysis.json, heads.html and pictures")
    parser.add_argument("--paragraphs", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each paragraph")
    parser.add_argument("--block", type=int, default=16, help="of LLN+Diag")
    parser.add_argument("--held-out", type=int, default=256, help="sentences to compare on")
    parser.add_argument("--part", choices=("dev", "test"), default="test", help="of STS-B")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = minilm.load()
    texts = minilm.paragraphs(options.text, tokenizer, options.paragraphs, options.tokens)
    ids = tokenizer(
        texts[:ANALYZED], truncation=True, max_length=options.tokens, return_tensors="pt"
    )["input_ids"]
    heads = heads_of(model, ids)
    print(table_of_layers(heads), flush=True)
    lln_attention.report(heads["softmax"] + heads["entropy"], options.folder / "heads.html")
    swaps = all_swaps(
        model, tokenizer, texts, options.sts, options.part, options.block, options.held_out
    )
    print(table_of_swaps(swaps))
    analysis = {
        "tokens": options.tokens,
        "paragraphs": ANALYZED,
        "block": options.block,
        "part": options.part,
        "heads": heads,
        "swaps": swaps,
    }
    (options.folder / "analysis.json").write_text(json.dumps(analysis), encoding="utf-8")
    minilm_figures.draw(analysis, options.folder)


if __name__ == "__main__":
    main()
