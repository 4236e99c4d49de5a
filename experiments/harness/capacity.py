"""How many random pairs an attention gives back without training: the records of
experiments/capacity.

SPDX-License-Identifier: Apache-2.0
"""

import itertools
import json
import math
import statistics

from harness import figures
from harness.document import Code, Heading, Table, Text
from harness.numbers import NONE

NAME = "capacity"
TUNED = 0  # the seed on which a factor is chosen; the others are what is shown
USUAL = 64  # channels of the table and of the figure
SHOWN = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
MIDDLE = 32  # pairs of the column that has the factor
SHARES = (0.9, 0.5)
LABELS = {
    "softmax": "softmax",
    "quadratic": "quadratic (D^2 features)",
    "performer": "Performer (256 features)",
    "lln-rotated": "LLN, four rotations (4 D features)",
    "lln-two-sided": "LLN, two-sided (2 D features)",
    "lln": "LLN, best factor",
    "lln-entropy": "LLN, matched (entropy)",
    "lln-per_head": "LLN, matched (per_head)",
    "lln-none": "LLN, alpha = beta = 1",
    "relu": "ReLU",
    "elu": "ELU",
    "power2": "power 2",
}
DRAWN = ("softmax", "quadratic", "lln-two-sided", "lln-entropy", "lln-none", "elu")
ABOUT = """
What a state holds before anything is learned: P pairs of a key and a value, normal numbers in D
channels each, all of them in the state; every key is then asked for, and the answer is right when
of the P values its own is the nearest. For softmax, LLN, ELU, ReLU and Performer keys and queries
are multiplied with the factor, alpha = beta, that is best for each number of pairs (chosen on
other draws than those shown); matched rows take alpha and beta from the keys as the library would,
and the rest have no temperature. Blocks of Diag hold the pairs of their own block and are not
shown."""
NOTE = """
Trained keys are not random: a training can place them better, if it finds out how, and a model
has many heads and layers. So this says what a head does by itself, and what its concentration is
worth, not where a trained model ends."""


def read(folder):
    """(attention, dim) -> seed -> record; none where there is no file."""
    path = folder / NAME / "records.jsonl"
    found = {}
    if path.exists():
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            found.setdefault((record["attention"], record["dim"]), {})[record["seed"]] = record
    return found


def best_scale(seeds, at):
    """Index of the factor that gave most for the at-th number of pairs."""
    column = [line[at] for line in seeds[TUNED]["accuracy"]]
    return column.index(max(column))


def shares(seeds, pairs):
    """Of right answers, of each seed but the one that chose the factor."""
    at = seeds[TUNED]["pairs"].index(pairs)
    scale = best_scale(seeds, at)
    return [r["accuracy"][scale][at] for seed, r in sorted(seeds.items()) if seed != TUNED]


def curve(seeds):
    return [(pairs, statistics.fmean(shares(seeds, pairs))) for pairs in seeds[TUNED]["pairs"]]


def held(seeds, share):
    """Up to how many pairs the share of right answers is this large: where the line between two
    numbers of pairs, drawn over their logarithms, crosses it. None: already the fewest are too
    many; infinity: all that were tried are held."""
    points = curve(seeds)
    if points[0][1] < share:
        return None
    for (less, above), (more, below) in itertools.pairwise(points):
        if below < share:
            way = (above - share) / (above - below)
            return math.exp(math.log(less) + way * math.log(more / less))
    return math.inf


def held_text(seeds, share):
    number = held(seeds, share)
    if number is None:
        return f"under {seeds[TUNED]['pairs'][0]}"
    if number == math.inf:
        return f"over {seeds[TUNED]['pairs'][-1]}"
    return f"{float(f'{number:.2g}'):g}"


def factor(seeds, pairs):
    """The best one, or that of the matching; none where there is no temperature."""
    first = seeds[TUNED]
    at = first["pairs"].index(pairs)
    return first["alpha"][at] if "alpha" in first else first["scales"][best_scale(seeds, at)]


def accuracy_table(found):
    rows = [["one of the values", *(f"{100 / p:.1f}" for p in SHOWN), NONE]]
    for name, label in LABELS.items():
        if seeds := found.get((name, USUAL)):
            means = (statistics.fmean(shares(seeds, p)) for p in SHOWN)
            own = factor(seeds, MIDDLE)
            rows.append(
                [label, *(f"{100 * y:.1f}" for y in means), NONE if own is None else f"{own:.3g}"]
            )
    head = [f"D = {USUAL}: right answers, %", *(f"{p} pairs" for p in SHOWN)]
    return Table([*head, f"factor, {MIDDLE} pairs"], rows, {0})


def held_table(found):
    dims = sorted({dim for _, dim in found})
    rows = []
    for name, label in LABELS.items():
        cells = [found.get((name, dim)) for dim in dims]
        if any(cells):
            texts = (" / ".join(held_text(c, s) for s in SHARES) if c else NONE for c in cells)
            rows.append([label, *texts])
    head = " / ".join(f"{100 * share:.0f}%" for share in SHARES)
    return Table([f"pairs held at {head}", *(f"D = {dim}" for dim in dims)], rows)


def spread(found):
    """The largest deviation over seeds, in points of a hundred."""
    return max(
        100 * statistics.stdev(shares(seeds, pairs))
        for (_, dim), seeds in found.items()
        if dim == USUAL
        for pairs in SHOWN
    )


def rule(found):
    """What LLN holds as a share of D: the smallest and the largest over the widths that hold
    anything."""
    own = [(dim, seeds) for (name, dim), seeds in found.items() if name == "lln"]
    texts = []
    for share in SHARES:
        parts = [held(seeds, share) / dim for dim, seeds in own if held(seeds, share)]
        texts.append(f"{min(parts):.2f} D to {max(parts):.2f} D at {100 * share:.0f}%")
    return (
        "For users: by itself a head of LLN with D channels gives back so many random pairs, at "
        f"the best concentration: {', '.join(texts)}. What must recall more needs wider or more "
        "heads, two-sided features, or softmax beside it; what lies inside a block is Diag's."
    )


def worth(found):
    """Of moment matching, at the usual width."""
    share = {
        name: f"{100 * statistics.fmean(shares(found[name, USUAL], MIDDLE)):.1f}%"
        for name in ("lln", "lln-entropy", "lln-per_head", "lln-none")
    }
    return (
        f"Moment matching finds the concentration that recall wants: with {USUAL} channels and "
        f"{MIDDLE} pairs LLN answers {share['lln-none']} without it, {share['lln-per_head']} "
        f"(per_head) and {share['lln-entropy']} (entropy) with it, and {share['lln']} at the best "
        "of all factors that were tried."
    )


def drawing(found):
    legend = {
        name: (LABELS[name], figures.STYLES[i])
        for i, name in enumerate(DRAWN)
        if (name, USUAL) in found
    }
    plot = figures.plot
    lines = {name: [(p, 100 * y) for p, y in curve(found[name, USUAL])] for name in legend}
    pairs = [p for p, _ in next(iter(lines.values()))]
    by_pairs = plot.Panel(
        figures.logarithmic("pairs", pairs, plot.count_text, SHOWN[::2]),
        figures.Linear(
            f"Right answers, %: D = {USUAL}", -5, 105, [0, 25, 50, 75, 100], lambda v: f"{v:g}"
        ),
        [plot.Series(name, points) for name, points in lines.items()],
    )
    ends = {}
    for (name, dim), seeds in sorted(found.items()):
        number = held(seeds, SHARES[-1])
        if name in legend and number is not None and number != math.inf:
            ends.setdefault(name, []).append((dim, number))
    dims = sorted({dim for _, dim in found})
    numbers = [y for points in ends.values() for _, y in points]
    by_width = plot.Panel(
        figures.logarithmic("channels", dims, plot.count_text, dims),
        figures.logarithmic(
            f"Pairs held at {100 * SHARES[-1]:.0f}%", numbers, plot.count_text, [8, 32, 128, 512]
        ),
        [plot.Series(name, ends[name]) for name in legend if name in ends],
    )
    return figures.picture(
        "results_capacity",
        plot.Figure("Random pairs that a state gives back", legend, [by_pairs, by_width]),
        "Left: the share of right answers against the number of pairs; softmax, two-sided LLN "
        "and ELU have the best factor. Right: where half of the answers are right, against "
        f"the width; what holds more than {pairs[-1]} has no point. It shows what a state of each "
        "kind holds of keys that nobody arranged. It does not show what a training makes of it.",
    )


def blocks(folder):
    found = read(folder)
    if not found:
        return []
    facts = next(iter(found.values()))[TUNED]
    machine = facts["machine"]
    return [
        Heading(3, "Limits: what a state holds, without training"),
        Text(ABOUT),
        Text(NOTE),
        Code("experiments/capacity/run"),
        Text(
            f"{machine['cpu']}, {machine['cores']} cores, torch {facts['torch']}, revision "
            f"{facts['revision'][:7]}. Three seeds of at least {facts['queries']} questions for "
            f"each number; their deviation is at most {spread(found):.1f} points in the first "
            "table."
        ),
        accuracy_table(found),
        Text(worth(found)),
        held_table(found),
        Text(rule(found)),
        drawing(found),
    ]
