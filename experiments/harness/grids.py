"""Tables over a grid: how many pairs an attention recalls, by its width and the length of rows.

SPDX-License-Identifier: Apache-2.0
"""

from harness import figures
from harness.document import Table, Text
from harness.numbers import NONE, result, unit

HELD = 0.9  # accuracy from which on pairs count as recalled


def families(results):
    """{family: its parts that have records}, by the first value of the grid."""
    found = {}
    for part in results.experiment.parts:
        if results.rows(part["name"]):
            found.setdefault(part["family"], []).append(part)
    return {name: sorted(parts, key=at) for name, parts in found.items()}


def at(part):
    return next(iter(part["at"].values()))


def held(cells):
    """[(value, cell)] ascending -> up to which value it holds: a number, "none", or that nobody
    knows. It ends at the first failure: what is held behind one is luck."""
    most = None
    for number, cell in cells:
        if cell is None or not cell.good or cell.cut:
            return NONE if most is None else f"{most}, then not run"
        if cell.mean() < HELD:
            return "none" if most is None else str(most)
        most = number
    return NONE if most is None else f"{most}, all tried"


def label_of(part):
    return part.get("label", part["name"])


def tables(results, names):
    """names: [(row, label)] in the order of the plan."""
    blocks, summary = [], {}
    for parts in families(results).values():
        key = next(iter(parts[0]["at"])).rpartition(".")[2]
        metric, _, _ = results.chance(parts[0]["name"]) or ("accuracy", 0, "")
        head = [f"{label_of(parts[0])}: {unit(metric)}", *(f"{at(p)} {key}" for p in parts)]
        rows = [["one of the values shown", *(f"{100 / at(p):.1f}" for p in parts)]]
        for row, text in names:
            cells = [results.cell(p["name"], row) for p in parts]
            if any(c and c.records for c in cells):
                rows.append([text, *(result(c) for c in cells)])
                pairs = [(at(p), c) for p, c in zip(parts, cells, strict=True)]
                summary.setdefault(text, {})[label_of(parts[0])] = held(pairs)
        blocks.append(Table(head, rows, {0}))
    columns = [label_of(parts[0]) for parts in families(results).values()]
    blocks += [
        Text(
            f"Up to how many pairs each holds {100 * HELD:.0f}%: the largest number before the "
            "first that it fails at. For users: what must recall more pairs than that, at such a "
            "width, needs a wider state, or an attention of this table that holds them."
        ),
        Table(
            ["pairs held", *columns],
            [[text, *(own.get(c, NONE) for c in columns)] for text, own in summary.items()],
        ),
    ]
    if picture := figures.recall(results):
        blocks.append(picture)
    return blocks
