"""What is said over several rows and experiments: what a component is worth, where LLN+Diag loses,
and whether the instruments predict quality.

SPDX-License-Identifier: Apache-2.0
"""

import math

from harness import figures
from harness.document import Heading, Table, Text
from harness.numbers import NONE, fixed, mean, plain, result, star, value
from harness.summary import spearman
from harness.views import label, part_label

# (what changes, row before, row after), rows of the setting of masked words: language, ablation and
# beyond are one setting.
WORTH = (
    ("Diag beside softmax", "softmax", "softmax+diag"),
    ("Diag beside LLN", "lln-entropy", "lln+diag-entropy"),
    ("softmax beside Diag", "diag", "softmax+diag"),
    ("LLN (entropy) beside Diag", "diag", "lln+diag-entropy"),
    ("LLN without matching beside Diag", "diag", "lln+diag-none"),
    ("matching: per_head in place of none", "lln+diag-none", "lln+diag-per_head"),
    ("matching: entropy in place of none", "lln+diag-none", "lln+diag-entropy"),
    ("matching: exact in place of none", "lln+diag-none", "lln+diag-exact"),
    ("matching: ema in place of none", "lln+diag-none", "lln+diag-ema"),
    ("matching: learned in place of none", "lln+diag-none", "lln+diag-learned"),
    ("matching: frozen at 2.1 in place of none", "lln+diag-none", "lln+diag-frozen"),
    ("matching: calibrated and frozen in place of none", "lln+diag-none", "calibrated"),
    ("features: ELU in place of exp (entropy)", "lln+diag-entropy", "elu+diag"),
    ("features: ReLU in place of exp (entropy)", "lln+diag-entropy", "relu+diag"),
    ("features: power 2 in place of exp (entropy)", "lln+diag-entropy", "power2"),
    ("features: exact quadratic in place of exp (entropy)", "lln+diag-entropy", "quadratic+diag"),
    ("features: softplus in place of exp (entropy)", "lln+diag-entropy", "softplus"),
    ("features: linear in place of exp (entropy)", "lln+diag-entropy", "linear+diag"),
    ("mix: learned in place of 0.5", "lln+diag-entropy", "lln+diag-entropy-learned-mix"),
    ("mix: gate in place of 0.5", "lln+diag-entropy", "lln+diag-entropy-gate"),
    ("mix: gate in place of 0.5, softmax", "softmax+diag", "softmax+diag-gate"),
)
# (what is varied, attention, values, name of the row, rows of another name): one number is changed,
# in the same setting.
BLOCKS, HEADS = (16, 32, 64, 128, 256), (16, 32, 64, 128)
ALPHAS, TEMPERATURES = (0.5, 1, 1.5, 2, 2.1, 2.5, 3, 4), (0.5, 0.7, 1, 1.5, 2)
LLN, SOFT = ("LLN (entropy) + Diag", "lln+diag-entropy"), ("softmax + Diag", "softmax+diag")
SWEEPS = (
    ("alpha = beta", "LLN + Diag", ALPHAS, "alpha={:g}",
     {1: "lln+diag-none", 2.1: "lln+diag-frozen"}),
    ("temperature", SOFT[0], TEMPERATURES, "temperature={:g}", {1: SOFT[1]}),
    ("tokens of a block", LLN[0], BLOCKS, "lln-block={:g}", {64: LLN[1]}),
    ("tokens of a block", "Diag", BLOCKS, "diag-block={:g}", {64: "diag"}),
    ("channels of a head", LLN[0], HEADS, "lln-head={:g}", {64: LLN[1]}),
    ("channels of a head", SOFT[0], HEADS, "softmax-head={:g}", {64: SOFT[1]}),
)  # fmt: skip
ONE_SETTING = ("language", "ablation", "beyond")
OURS = ("lln+diag-entropy", "lln+diag", "lln+diag-ema", "lln+diag-per_head")
THEIRS = "softmax+diag"
DISTANCES = {
    "Entropy": ("entropy", lambda a, b, limit: abs(a - b) / limit),
    "Spectral gap": ("gap", lambda a, b, limit: abs(a - b)),
    "Log-variance": ("log_variance", lambda a, b, limit: abs(math.log(a / b))),
}


def find_row(all_results, row):
    """The cell of a row in the setting of masked words, that with the most seeds."""
    found = [r.cell("", row) for r in all_results if r.experiment.name in ONE_SETTING]
    found = [c for c in found if c and c.good]
    return max(found, key=lambda c: len(c.good), default=None)


def joint_spread(a, b):
    """Of a difference of two means, from the spread over seeds."""
    parts = [(c.deviation(), len(c.good)) for c in (a, b)]
    if any(s is None for s, _ in parts):
        return None
    return math.sqrt(sum(s * s / n for s, n in parts))


def worth(all_results):
    rows = []
    for what, before, after in WORTH:
        a, b = find_row(all_results, before), find_row(all_results, after)
        if a is None or b is None:
            continue
        spread = joint_spread(a, b)
        change = b.mean() - a.mean()
        rows.append(
            [
                what,
                mean(a),
                mean(b),
                f"{change:+.3f}",
                NONE if spread is None else f"± {spread:.3f}",
                f"{len(a.good)}, {len(b.good)}",
            ]
        )
    blocks = [Heading(3, "What each component is worth")]
    if not rows:
        return [*blocks, Text("**Not run yet**: it is made of the rows above.")]
    found = chance_of(all_results)
    if found:
        rows.insert(
            0, [f"nothing learned: {found[2]}", value("loss", found[1]), NONE, NONE, NONE, NONE]
        )
    blocks += [
        Text(
            "One change at a time in the setting of masked words with 3200 steps: validation loss "
            "before and after, and the difference; less is better. The error of the difference is "
            "that of the two means over seeds; where one of them has one seed there is none, and "
            "a difference of a few hundredths says little."
        ),
        Table(
            ["change", "before", "after", "difference", "error", "seeds"],
            rows,
            {0} if found else set(),
        ),
    ]
    diag, soft, ours = (find_row(all_results, r) for r in ("diag", THEIRS, "lln+diag-entropy"))
    if diag and soft and ours and diag.mean() > soft.mean():
        share = (diag.mean() - ours.mean()) / (diag.mean() - soft.mean())
        blocks.append(
            Text(
                f"Of what softmax adds to Diag ({diag.mean() - soft.mean():.3f}), LLN (entropy) "
                f"adds {diag.mean() - ours.mean():.3f}: {100 * share:.0f}%."
            )
        )
    return blocks


def sweeps(all_results):
    """One number varied: loss, and how concentrated the heads are at the end."""
    blocks, rows, lines = [Heading(3, "Sweeps")], [], []
    for varied, name, numbers, pattern, others in SWEEPS:
        cells = [(n, find_row(all_results, others.get(n, pattern.format(n)))) for n in numbers]
        cells = [(number, cell) for number, cell in cells if cell]
        if len(cells) < 2:
            continue
        lines.append((varied, name, [(number, cell.mean()) for number, cell in cells]))
        for number, cell in cells:
            spikes = cell.mean_of(lambda r: r.get("spikes"))
            shown = [result(cell), plain(spikes), fixed(cell.instrument("entropy"))]
            shown += [fixed(cell.instrument("gap"), 3), fixed(cell.instrument("log_variance"))]
            rows.append([varied, name, f"{number:g}", *shown])
    if not rows:
        return [*blocks, Text("**Not run yet**: they are made of the rows above.")]
    head = [
        "varied",
        "attention",
        "value",
        "loss",
        "spikes",
        "entropy, nats",
        "gap",
        "log-variance",
    ]
    found = chance_of(all_results)
    if found:
        text = f"nothing learned: {found[2]}"
        rows.insert(0, ["any", text, NONE, value("loss", found[1]), *[NONE] * 4])
    blocks.append(Table(head, rows, {0} if found else set()))
    return [*blocks, figures.sweeps(lines)]


def chance_of(all_results):
    for results in all_results:
        if results.experiment.name in ONE_SETTING and (found := results.chance("")):
            return found
    return None


def losses(all_results):
    """LLN+Diag against softmax+Diag wherever both were run."""
    rows = []
    for results in all_results:
        if results.experiment.table.get("kind") == "cost":
            continue
        for part in results.experiment.parts:
            theirs = results.cell(part["name"], THEIRS)
            ours = [results.cell(part["name"], name) for name in OURS]
            ours = next((c for c in ours if c and c.good), None)
            if not ours or not theirs or not theirs.good:
                continue
            metric, chance, _ = results.chance(part["name"])
            spread, change = joint_spread(ours, theirs), ours.mean() - theirs.mean()
            scale = 1 if metric == "loss" else 100
            digits = 3 if metric == "loss" else 1
            verdict = "loses" if (change > 0) == (metric == "loss") else "wins"
            if spread is not None and abs(change) < 2 * spread:
                verdict = "no difference beyond the spread"
            title = results.experiment.table["title"]
            rows.append(
                [
                    f"{title}, {part_label(part)}" if part["name"] else title,
                    label(ours),
                    metric,
                    value(metric, chance),
                    mean(ours),
                    mean(theirs),
                    f"{scale * change:+.{digits}f}",
                    NONE if spread is None else f"± {scale * spread:.{digits}f}",
                    f"{len(ours.good)}, {len(theirs.good)}",
                    verdict,
                ]
            )
    blocks = [Heading(3, "Limits: LLN + Diag against softmax + Diag")]
    if not rows:
        return [
            *blocks,
            Text("**Not run yet**: it is made of all experiments that have both rows."),
        ]
    head = [
        "experiment",
        "LLN",
        "metric",
        "nothing learned",
        "LLN + Diag",
        "softmax + Diag",
        "difference",
        "error",
        "seeds",
        "LLN + Diag",
    ]
    return [
        *blocks,
        Text(
            "Everywhere where both were trained, whichever is better. The error is that of the "
            "difference of means over seeds; without one there is one seed, and small "
            "differences say nothing."
        ),
        Table(head, rows),
    ]


def lost(metric, number, best, chance):
    """0: the best row; 1: nothing learned."""
    return (number - best) / (chance - best)


def distances(all_results):
    """{panel: [(experiment, distance from softmax, share lost)]}."""
    found = {name: [] for name in DISTANCES}
    for results in all_results:
        for part in results.experiment.parts:
            cells = [c for c in results.rows(part["name"]) if c.good and c.instrument("entropy")]
            cells = [c for c in cells if not star(c)]  # of another budget
            by_name = {c.row["name"]: c for c in cells}
            reference = by_name.get("softmax+diag") or by_name.get("softmax")
            if reference is None and results.experiment.name in ONE_SETTING:
                reference = find_row(all_results, "softmax+diag")
            chance = results.chance(part["name"])
            if reference is None or chance is None or len(cells) < 3:
                continue
            metric = chance[0]
            best = (min if metric == "loss" else max)(c.mean() for c in cells)
            if math.isclose(best, chance[1]):
                continue
            for cell in cells:
                if cell is reference:
                    continue
                share = lost(metric, cell.mean(), best, chance[1])
                limit = cell.instrument("entropy_limit")
                for name, (key, distance) in DISTANCES.items():
                    a, b = cell.instrument(key), reference.instrument(key)
                    if a and b:
                        found[name].append((results.experiment.name, distance(a, b, limit), share))
    return found


def prediction(all_results):
    points = distances(all_results)
    blocks = [Heading(3, "Do the instruments predict quality?")]
    if not any(points.values()):
        return [*blocks, Text("**Not run yet**: it is made of all runs that have instruments.")]
    rows, correlations = [], {}
    for name, found in points.items():
        correlations[name] = spearman([x for _, x, _ in found], [y for _, _, y in found])
        own = {}
        for experiment, x, y in found:
            own.setdefault(experiment, []).append((x, y))
        rows.append([name, "all", str(len(found)), correlation(correlations[name])])
        for experiment, pairs in own.items():
            rho = spearman([x for x, _ in pairs], [y for _, y in pairs])
            rows.append([name, experiment, str(len(pairs)), correlation(rho)])
    blocks.append(
        Text(
            "Rank correlation (Spearman) between the distance of an instrument from softmax's and "
            "what is lost. 1 would mean that rows that are farther from softmax are always worse, "
            "0 that it says nothing."
        )
    )
    blocks.append(Table(["instrument", "experiment", "points", "rank correlation"], rows))
    if picture := figures.prediction(points, correlations):
        blocks.append(picture)
    return blocks


def correlation(rho):
    return NONE if rho is None else f"{rho:+.2f}"
