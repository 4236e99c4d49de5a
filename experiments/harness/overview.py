"""The beginning of the page: how much of the plan has been run, and what it says so far.

SPDX-License-Identifier: Apache-2.0
"""

from harness import analysis
from harness.document import Heading, Points, Table, Text

GATE = "lln+diag-entropy-gate"
IMPRESSION = (
    "What rests on one seed is a first impression: how far seeds lie apart is not known there."
)
SMALL = 9  # the group of the small scale, which says nothing about quality


def counted(results):
    records = results.records
    bad = sum(r["status"] in ("failed", "not_finite") for r in records)
    return results.planned, len(records), sum(r["cut"] for r in records), bad


def found_so_far(all_results):
    """Sentences of the setting of masked words, of rows that were not cut."""
    lines = []
    rows = (
        ("softmax + Diag", analysis.THEIRS),
        ("LLN (entropy) + Diag", "lln+diag-entropy"),
        ("Diag alone", "diag"),
    )
    cells = [(name, analysis.find_row(all_results, row)) for name, row in rows]
    cells = [(name, cell) for name, cell in cells if cell and not cell.cut]
    if cells:
        texts = (f"{name} {cell.mean():.3f} ({seeds(len(cell.good))})" for name, cell in cells)
        lines.append(f"Masked words, 3200 steps, validation loss: {', '.join(texts)}.")
    if share := analysis.share_added(all_results):
        lines.append(f"LLN adds to Diag {100 * share[2]:.0f}% of what softmax adds to it there.")
    for text, before, after in (
        ("Moment matching (entropy) in place of none", "lln+diag-none", "lln+diag-entropy"),
        ("A gate in place of an equal mix of LLN and Diag", "lln+diag-entropy", GATE),
    ):
        a, b = (analysis.find_row(all_results, row) for row in (before, after))
        if a and b and not a.cut and not b.cut:
            change = b.mean() - a.mean()
            least = min(len(a.good), len(b.good))
            lines.append(f"{text} changes the loss by {change:+.3f} ({seeds(least)}).")
    return lines


def seeds(count):
    return "one seed" if count == 1 else f"{count} seeds"


def blocks(all_results, groups, more=()):
    """groups: number -> title; more: sentences of other records than those of trainings."""
    large = [r for r in all_results if r.experiment.table["group"] != SMALL]
    rows, left = [], []
    for group in sorted({r.experiment.table["group"] for r in large}):
        counts = [counted(r) for r in large if r.experiment.table["group"] == group]
        planned, run, cut, bad = (sum(column) for column in zip(*counts, strict=True))
        rows.append([f"{group}. {groups[group]}", *map(str, (planned, run, cut, bad))])
        if not run:
            left.append(groups[group])
    total = [sum(int(row[i]) for row in rows) for i in (1, 2)]
    state = f"**{total[1]} of {total[0]} planned runs have a record.**"
    if left:
        state += f" None of the planned runs has been made yet of: {'; '.join(left)}."
    lines = [*found_so_far(large), *more]
    made = [Heading(2, "So far"), Text(state)]
    if lines:
        made.append(Points(lines))
    if any("one seed" in line for line in lines):
        made.append(Text(IMPRESSION))
    return [*made, Table(["group", "planned runs", "with a record", "cut short", "failed"], rows)]
