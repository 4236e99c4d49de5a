"""What is said over several rows and experiments: what a component is worth, where LLN+Diag loses,
and whether the instruments predict quality.

SPDX-License-Identifier: Apache-2.0
"""

import math

from harness import figures
from harness.document import Heading, Table, Text
from harness.numbers import NONE, fixed, mean, plain, result, value
from harness.summary import critical, spearman
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


def difference(a, b, scale, digits):
    """[b - a, its error] as texts; of what was cut short there is none."""
    if a.cut or b.cut:
        return [NONE, NONE]
    spread, change = joint_spread(a, b), b.mean() - a.mean()
    error = NONE if spread is None else f"± {scale * spread:.{digits}f}"
    return [f"{scale * change:+.{digits}f}", error]


def verdict(ours, theirs, metric):
    """What can be said of ours: nothing of what was cut, little of one seed."""
    if ours.cut or theirs.cut:
        return NONE
    spread, change = joint_spread(ours, theirs), ours.mean() - theirs.mean()
    if change == 0:
        return "equal"
    if spread is None:
        return "one seed"
    if abs(change) < 2 * spread:
        return "no difference beyond the spread"
    return "loses" if (change > 0) == (metric == "loss") else "wins"


def share_added(all_results):
    """What LLN adds to Diag as a share of what softmax adds: (softmax, LLN, share), or nothing."""
    cells = [find_row(all_results, r) for r in ("diag", THEIRS, "lln+diag-entropy")]
    if any(c is None or c.cut for c in cells) or cells[0].mean() <= cells[1].mean():
        return None
    diag, soft, ours = (c.mean() for c in cells)
    return diag - soft, diag - ours, (diag - ours) / (diag - soft)


def worth(all_results):
    rows = []
    for what, before, after in WORTH:
        a, b = find_row(all_results, before), find_row(all_results, after)
        if a is None or b is None:
            continue
        shown = difference(a, b, 1, 3)
        rows.append([what, mean(a), mean(b), *shown, f"{len(a.good)}, {len(b.good)}"])
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
    if found := share_added(all_results):
        blocks.append(
            Text(
                f"Of what softmax adds to Diag ({found[0]:.3f}), LLN (entropy) adds "
                f"{found[1]:.3f}: {100 * found[2]:.0f}%."
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
        drawn = [(number, cell.mean()) for number, cell in cells if not cell.cut]
        if drawn:
            lines.append((varied, name, drawn))
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
    return [*blocks, figures.sweeps(lines)] if lines else blocks


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
            form = (1, 3) if metric == "loss" else (100, 1)
            title = results.experiment.table["title"]
            rows.append(
                [
                    f"{title}, {part_label(part)}" if part["name"] else title,
                    label(ours),
                    metric,
                    value(metric, chance),
                    mean(ours),
                    mean(theirs),
                    *difference(theirs, ours, *form),
                    f"{len(ours.good)}, {len(theirs.good)}",
                    verdict(ours, theirs, metric),
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
            "difference of means over seeds; without one there is one seed, and nothing is said "
            "of who wins. What was cut short has no difference."
        ),
        Table(head, rows),
    ]


def lost(metric, number, best, chance):
    """0: the best row; 1: nothing learned."""
    return (number - best) / (chance - best)


def of_setting(all_results, results, part):
    """The whole trainings of one setting: those of a part, or of all experiments that share it."""
    sharing = results.experiment.name in ONE_SETTING and not part
    own = [r for r in all_results if r.experiment.name in ONE_SETTING] if sharing else [results]
    return [c for r in own for c in r.rows(part) if c.good and not c.cut]


def distances(all_results):
    """{panel: [(group, distance from softmax, share lost, row)]}. Rows with Diag are compared with
    softmax + Diag, those without with softmax; Diag alone has no long-range part to compare."""
    found = {name: [] for name in DISTANCES}
    for results in all_results:
        for part in results.experiment.parts:
            chance = results.chance(part["name"])
            setting = of_setting(all_results, results, part["name"])
            if chance is None or not setting:
                continue
            best = (min if chance[0] == "loss" else max)(c.mean() for c in setting)
            if math.isclose(best, chance[1]):
                continue
            for cell in results.rows(part["name"]):
                if not comparable(cell) or repeated(cell, setting):
                    continue
                reference = softmax_like(cell, setting)
                if reference is None or cell is reference:
                    continue
                group = f"{results.experiment.name}, with{'' if has_diag(cell) else 'out'} Diag"
                share = lost(chance[0], cell.mean(), best, chance[1])
                limit = cell.instrument("entropy_limit")
                for name, (key, distance) in DISTANCES.items():
                    a, b = cell.instrument(key), reference.instrument(key)
                    if a and b:
                        found[name].append((group, distance(a, b, limit), share, cell.row["name"]))
    return found


def comparable(cell):
    known = cell.good and not cell.cut and cell.attention != "diag"
    return bool(known and cell.instrument("entropy"))


def repeated(cell, setting):
    """Whether another experiment has the same row with more seeds, or had it before."""
    same = [c for c in setting if c.row["name"] == cell.row["name"]]
    return cell is not max(same, key=lambda c: len(c.good))


def has_diag(cell):
    return cell.attention.endswith("+diag")


def softmax_like(cell, setting):
    wanted = "softmax+diag" if has_diag(cell) else "softmax"
    found = [c for c in setting if c.row["name"] == wanted and comparable(c)]
    return max(found, key=lambda c: len(c.good), default=None)


def prediction(all_results):
    points = distances(all_results)
    blocks = [Heading(3, "Do the instruments predict quality?")]
    if not any(points.values()):
        return [*blocks, Text("**Not run yet**: it is made of all runs that have instruments.")]
    rows, correlations = [], {}
    for name, found in points.items():
        own = {"all": found}
        for point in found:
            own.setdefault(point[0], []).append(point)
        for group, some in own.items():
            rho = spearman([x for _, x, _, _ in some], [y for _, _, y, _ in some])
            correlations.setdefault(name, rho)
            least = critical(len(some))
            needed = NONE if least is None else f"{least:.2f}"
            rows.append([name, group, str(len(some)), correlation(rho), needed])
    blocks.append(
        Text(
            "Rank correlation (Spearman) between the distance of an instrument from softmax's and "
            "what is lost. 1 would mean that rows that are farther from softmax are always worse, "
            "0 that it says nothing. Rows with Diag are measured against softmax + Diag, those "
            "without against softmax. The last column is how large it must be, up or down, to be "
            "told from chance (p < 0.05, two-sided): with fewer than 5 points nothing can. It "
            "holds for one test of rows that are independent; here there are several tests, and "
            "rows resemble each other."
        )
    )
    head = ["instrument", "rows", "points", "rank correlation", "p < 0.05 from"]
    blocks.append(Table(head, rows))
    if picture := figures.prediction(points, correlations):
        blocks.append(picture)
    return blocks


def correlation(rho):
    return NONE if rho is None else f"{rho:+.2f}"
