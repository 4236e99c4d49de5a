#!/usr/bin/env python3
"""Converts all-MiniLM-L6-v2 to LLN+Diag attention, or LLN alone, and scores it on STS-B.

    pip install 'lln-attention[examples]'
    examples/python/convert_minilm.py TEXT STS-B build/minilm_diag
    examples/python/convert_minilm.py TEXT STS-B build/minilm_lln --implementation lln

TEXT is a file with one paragraph a line, for the calibration; STS-B a folder with sts-train.csv,
sts-dev.csv and sts-test.csv. The recovery sees the training sentences without their scores, less
those that are in the test set. The output folder gets
checkpoints (run the same command again to go on after an interruption), report.json, report.md and
the converted model. docs/minilm.md has the results.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
from pathlib import Path

import minilm
import torch

from lln_attention.convert import MODES, Progress, convert


def show(progress: Progress) -> None:
    """A line for every tenth step."""
    if progress.step % 10 == 0 or progress.step == progress.steps:
        left = progress.seconds / progress.step * (progress.steps - progress.step)
        print(
            f"step {progress.step}/{progress.steps}  hidden {progress.hidden_loss:.4f}  "
            f"embedding {progress.embedding_loss:.4f}  {left:.0f} s left",
            flush=True,
        )


def main() -> None:
    """Parses the command line and converts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="file with one paragraph a line")
    parser.add_argument("sts", type=Path, help="folder with the files of STS-B")
    parser.add_argument("folder", type=Path, help="for checkpoints, report and model")
    parser.add_argument("--implementation", choices=("lln_diag", "lln"), default="lln_diag")
    parser.add_argument("--diag-block", type=int, default=16)
    parser.add_argument(
        "--mix", type=lambda x: None if x == "fit" else float(x), default=0.5, help="or fit"
    )
    parser.add_argument("--mode", choices=MODES, default="entropy")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = minilm.load()
    parts = ("dev", "test")
    report = convert(
        model,
        minilm.unlabelled_sentences(options.sts),
        tokenizer=tokenizer,
        implementation=options.implementation,
        diag_block=options.diag_block,
        mix=options.mix,
        mode=options.mode,
        calibration_texts=minilm.paragraphs(options.text, tokenizer, 64),
        steps=options.steps,
        learning_rate=options.learning_rate,
        seed=options.seed,
        folder=options.folder,
        evaluations={
            f"STS-B {part}": minilm.sts_b_score(options.sts, part, tokenizer) for part in parts
        },
        progress=show,
    )
    model.save_pretrained(options.folder / "model")
    tokenizer.save_pretrained(options.folder / "model")
    print(report.to_markdown())


if __name__ == "__main__":
    main()
