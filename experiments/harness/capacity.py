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
from harness.numbers import NONE, short

NAME = "capacity"
TUNED = 0  # the seed on which a factor is chosen; the others are what is shown
USUAL = 64  # channels of the table and of the figure
SHOWN = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
MIDDLE = 32  # pairs of the column that has the factor
COMPARED = (8, 32, 256)  # pairs of the table of matching
CLOSE = 0.005  # shares of right answers that count as the same when a factor is chosen
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
What a state holds before anything is learned: P pairs of a key, normal numbers in D channels, and a
value, a random direction in as many; all of them in the state; every key is then asked for, and the
answer is right when of the P values its own is the nearest direction. Keys and queries of softmax,
LLN, ELU and Performer are multiplied with a factor, alpha = beta: the smallest one that is within
half a point of the best for that number of pairs, on other draws than those shown (scores of
softmax and Performer grow with its square). Matched rows take alpha and beta from the keys as the
library would, and the rest have no temperature. Blocks of Diag hold the pairs of their own block
and are not shown."""
NOTE = """
Trained keys are not random: a training can place them better, if it finds out how, and a model
has many heads and layers. So this says what a head does by itself, and what its concentration is
worth, not where a trained model ends."""


MATCHING = """
Moment matching was not made for recall, it follows the concentration of softmax. What it is worth
here, in all widths: with many pairs most of what the best factor is worth; with few pairs in wide
heads it is sharper than recall wants, and alpha = beta = 1 does as well or better."""


def read(folder):
    """(attention, dim) -> seed -> record; none where there is no file."""
    path = folder / NAME / "records.jsonl"
    found = {}
    if path.exists():
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            found.setdefault((record["attention"], record["dim"]), {})[record["seed"]] = record
    return found


def best_scale(seeds, at):
    """Index of the smallest factor that gave about as much as any for the at-th number of pairs."""
    column = [line[at] for line in seeds[TUNED]["accuracy"]]
    return next(i for i, share in enumerate(column) if share >= max(column) - CLOSE)


def shares(seeds, pairs):
    """Of right answers, of each seed but the one that chose the factor."""
    at = seeds[TUNED]["pairs"].index(pairs)
    scale = best_scale(seeds, at)
    return [r["accuracy"][scale][at] for seed, r in sorted(seeds.items()) if seed != TUNED]


def mean(seeds, pairs):
    return statistics.fmean(shares(seeds, pairs))


def curve(seeds):
    return [(pairs, mean(seeds, pairs)) for pairs in seeds[TUNED]["pairs"]]


def held(seeds, share):
    """Up to how many pairs the mean of the seeds answers this share rightly."""
    return crossing(curve(seeds), share)


def crossing(points, share):
    """Where the line between two numbers of pairs, drawn over their logarithms, crosses the share.
    None: already the fewest are too many; infinity: all that were tried are held."""
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
            means = (mean(seeds, p) for p in SHOWN)
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


def held_spread(found):
    """The largest deviation over seeds of a number of pairs held, as a part of it, where all seeds
    have one."""
    largest = 0
    for seeds in found.values():
        pairs = seeds[TUNED]["pairs"]
        lines = list(zip(*(shares(seeds, p) for p in pairs), strict=True))
        for share in SHARES:
            ends = [crossing(list(zip(pairs, line, strict=True)), share) for line in lines]
            if None not in ends and math.inf not in ends:
                largest = max(largest, statistics.stdev(ends) / statistics.fmean(ends))
    return largest


def matching_table(found):
    """What matching is worth: right answers without it, with it, and at the best factor."""
    rows = []
    for dim in sorted({dim for _, dim in found}):
        for pairs in COMPARED:
            cells = []
            for name in ("lln-none", "lln-per_head", "lln-entropy", "lln"):
                seeds = found[name, dim]
                cells.append(f"{100 * mean(seeds, pairs):.1f} ({factor(seeds, pairs):.3g})")
            rows.append([f"D = {dim}, {pairs} pairs", *cells])
    head = ["right answers, % (factor)", "alpha = beta = 1", "per_head", "entropy", "best factor"]
    return Table(head, rows)


def rule(found):
    """What LLN holds as a share of D, over the widths that hold anything."""
    texts = []
    for name, label in (("lln", "at the best factor"), ("lln-entropy", "matched by entropy")):
        own = sorted((dim, seeds) for (own, dim), seeds in found.items() if own == name)
        for share in SHARES:
            ends = [(dim, held(seeds, share)) for dim, seeds in own]
            ends = [(dim, end) for dim, end in ends if end is not None and end != math.inf]
            parts = [end / dim for dim, end in ends]
            texts.append(
                f"{min(parts):.2f} D to {max(parts):.2f} D at {100 * share:.0f}% {label} (D = "
                f"{ends[0][0]} to {ends[-1][0]})"
            )
    return (
        "For users: by itself a head of LLN with D channels gives back so many random pairs: "
        f"{'; '.join(texts)}. What must recall more needs wider or more heads, two-sided "
        "features, or softmax beside it; what lies inside a block is Diag's."
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
    seeds = next(iter(found.values()))
    facts = seeds[TUNED]
    machine = facts["machine"]
    return [
        Heading(3, "Limits: what a state holds, without training"),
        Text(ABOUT),
        Text(NOTE),
        Code("experiments/capacity/run"),
        Text(
            f"{machine['cpu']}, {machine['cores']} cores, torch {facts['torch']}, revision "
            f"{short(facts['revision'])}. Means of {len(seeds) - 1} seeds with at least "
            f"{facts['queries']} questions for each number; the deviation over seeds is at most "
            f"{spread(found):.1f} points in the first table, and {100 * held_spread(found):.0f}% "
            "of a number of pairs held."
        ),
        accuracy_table(found),
        drawing(found),
        held_table(found),
        Text(rule(found)),
        Text(MATCHING),
        matching_table(found),
    ]
