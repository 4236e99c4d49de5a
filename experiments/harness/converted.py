"""A model that was trained with softmax, converted: the records of experiments/minilm.

SPDX-License-Identifier: Apache-2.0
"""

import json

from harness.document import Code, Heading, Table, Text
from harness.numbers import short

NAME = "minilm"
MODES = ("none", "paper", "per_head", "exact", "entropy")
PARTS = (("test", "test"), ("dev", "development"))
KINDS = (("lln_diag", "LLN + Diag"), ("lln", "LLN"))
ABOUT = """
all-MiniLM-L6-v2, a sentence encoder of 6 layers and 12 heads of 32 channels that was trained with
softmax. The metric is Spearman's correlation with the judgements of STS-B, test and development
set. Blocks of Diag have 16 tokens, because sentences have 14 on average. One seed; no number says
how the model does on long texts. [minilm.md](minilm.md) has what becomes of its heads, and what to
make of all this."""
SWAPPED = """
Attention in place of softmax without any training, alpha and beta calibrated on 64 paragraphs; in
brackets the mix of LLN that fits the hidden states of training sentences best, the rest is Diag."""
RECOVERED = """
And after 300 steps of 64 sentences towards the hidden states with softmax, without labels:"""


def read(folder):
    """Name -> record; none where there is no file."""
    path = folder / NAME / "records.jsonl"
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {record["name"]: record for record in map(json.loads, lines)}


def score(number):
    return f"{number:.4f}".lstrip("0")


def swapped(record):
    """A column for LLN, for the usual mix, and for the one that fits."""
    rows = record["found"]["swaps"]
    by_mode = {mode: [r for r in rows if r.get("mode") == mode] for mode in MODES}
    lines = []
    for mode in MODES:
        alone, half, fitted = by_mode[mode][:3]
        fit = f"{score(fitted['sts'])} ({fitted['mix']:g})"
        lines.append([mode, score(alone["sts"]), score(half["sts"]), fit])
    lines.append(["Diag alone", "", score(rows[-1]["sts"]), ""])
    lines.append(["softmax", score(rows[0]["sts"]), "", ""])
    return lines


def recovered(records):
    lines = []
    for kind, label in KINDS:
        stages = {s["name"]: s["scores"] for s in records[f"recovered-{kind}"]["found"]["stages"]}
        for part, name in PARTS:
            numbers = (stages[s][f"STS-B {part}"] for s in ("swapped", "recovered", "softmax"))
            lines.append([f"{label}, {name}", *map(score, numbers)])
    return lines


def machine(record):
    return f"{record['machine']['cpu']}, revision {short(record['revision'])}"


def blocks(folder):
    records = read(folder)
    if not records:
        return []
    made = [Heading(3, "A trained model converted"), Text(ABOUT)]
    made.append(Code("experiments/minilm/run TEXT STS-B FOLDER"))
    machines = sorted({machine(record) for record in records.values()})
    made += [Text(f"{'; '.join(machines)}."), Text(SWAPPED)]
    for part, name in PARTS:
        head = [f"{name} set", "LLN", "LLN + Diag, mix 0.5", "LLN + Diag, mix fitted"]
        made.append(Table(head, swapped(records[f"swapped-{part}"])))
    return [
        *made,
        Text(RECOVERED),
        Table(["", "swapped", "recovered", "softmax"], recovered(records)),
    ]
