"""The figures of the page, drawn by bench/scale/plot.py.

SPDX-License-Identifier: Apache-2.0
"""

import math
import pathlib
import sys
from dataclasses import dataclass

from harness.document import Picture

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench/scale"))
import plot

# Colours as in report/style.css.
STYLES = (
    plot.Style("#1b1f24", "circle", width=2.25),
    plot.Style("#0072b2", "diamond", width=2.25),
    plot.Style("#00835f", "square", "7 3"),
    plot.Style("#c27a00", "triangle"),
    plot.Style("#b0478f", "cross", "2 3"),
    plot.Style("#8a929b", "circle", "5 4", hollow=True),
    plot.Style("#0072b2", "square", "2 3", hollow=True),
    plot.Style("#00835f", "diamond", "5 4", hollow=True),
    plot.Style("#c27a00", "circle", "7 3", hollow=True),
)
MOST = 6  # lines of one panel that can be told apart
NAMED = 12  # points of one panel whose names have room
LEFT = 0.5  # of the way from chance to its end: then a training has left the plateau


@dataclass(frozen=True)
class Linear(plot.Axis):
    def at(self, value, length):
        return (value - self.low) / (self.high - self.low) * length


@dataclass(frozen=True)
class SquareRoot(plot.Axis):
    """Shares from 0 on, of which a few are large."""

    def at(self, value, length):
        return math.sqrt(max(value, 0) / self.high) * length


def shares(label, values):
    high = 1.1 * max(*values, 1e-3)
    ticks = [t for t in (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1) if t <= high]
    return SquareRoot(label, 0, high, ticks, lambda v: f"{v:g}")


def linear(label, values, zero=False):
    """An axis over the values with ticks at round numbers."""
    low, high = min(values), max(values)
    if zero:
        low = min(low, 0)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    step = nice((high - low) / 4)
    ticks = [
        step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]
    room = 0.05 * (high - low)
    return Linear(label, low - room, high + room, ticks, lambda v: f"{v + 0.0:.6g}")


def nice(step):
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= step * 0.999)


def logarithmic(label, values, text, ticks=None):
    low, high = min(values) / 1.3, max(values) * 1.3
    return plot.Axis(label, low, high, ticks or plot.decades(low, high) or [min(values)], text)


def legend_of(cells):
    return {
        c.row["name"]: (c.row.get("label", c.row["name"]), STYLES[i % len(STYLES)])
        for i, c in enumerate(cells)
    }


def panel(label, x_label, lines, y_zero=False, x_zero=True):
    """lines: [(key, points)]; none where there is nothing to draw."""
    lines = [(key, points) for key, points in lines if points]
    if not lines:
        return None
    xs = [x for _, points in lines for x, _ in points]
    ys = [y for _, points in lines for _, y in points]
    series = [plot.Series(key, points) for key, points in lines]
    return plot.Panel(linear(x_label, xs, x_zero), linear(label, ys, y_zero), series)


def picture(name, figure, caption):
    shown = "; ".join(f"{p.y.label} against {p.x.label}" for p in figure.panels)
    return Picture(name, plot.draw(figure), caption, f"{figure.title}: {shown}")


def off_the_plateau(cells):
    """The step at which all have come so far, or an earlier one that two more follow; which it
    is."""
    left, room = 0, math.inf
    for cell in cells:
        curve, chance = cell.good[0]["curve"], cell.good[0]["chance"]
        way = LEFT * abs(curve[-1][1] - chance)
        left = max(left, next(step for step, y in curve if abs(y - chance) >= way))
        room = min(room, curve[-min(3, len(curve))][0])
    return min(left, room), left <= room


def file_name(results, what):
    return f"results_{results.experiment.name.replace('-', '_')}_{what}"


def training(results):
    """The metric and the instruments over the steps, of the first rows of the plan."""
    cells = [c for c in results.rows("") if c.good and len(c.good[0]["curve"]) > 1][:MOST]
    if not cells:
        return None
    metric = cells[0].metric

    def instrument(cell, name):
        if not cell.measured or (name == "gap" and cell.attention == "diag"):
            return []
        found = [(e["step"], e.get(name)) for e in cell.good[0].get("instruments", [])]
        return [(step, value[0]) for step, value in found if value is not None and step > 0]

    first, all_left = off_the_plateau(cells)
    curves = [
        (c.row["name"], [(step, y) for step, y in c.good[0]["curve"] if step >= first])
        for c in cells
    ]
    panels = [panel(f"Validation {metric}", "steps", curves, x_zero=False)]
    for name, text in (
        ("entropy", "Entropy of rows, nats"),
        ("gap", "Spectral gap"),
        ("log_variance", "Variance of ln P"),
    ):
        panels.append(panel(text, "steps", [(c.row["name"], instrument(c, name)) for c in cells]))
    drawn = plot.Figure(
        f"{results.experiment.table['title']}: over the training",
        legend_of(cells),
        [p for p in panels if p],
    )
    return picture(
        file_name(results, "training"),
        drawn,
        f"The first seed of the first rows of the table; the first panel begins at step {first}"
        + (", where all have come half of the way from chance to their end" if all_left else "")
        + ". It shows how fast each learns and how its heads concentrate on the way (means over "
        "layers and heads, on one row of the validation set, of Diag of its blocks; where the "
        "instruments cannot measure an attention itself, it has no line). It does not show the "
        "spread over seeds, which is in the table, nor single heads.",
    )


def recall(results):
    families = list(dict.fromkeys(p["family"] for p in results.experiment.parts))
    panels, shown = [], {}
    for family in families:
        parts = [p for p in results.experiment.parts if p["family"] == family]
        lines = {}
        for part in parts:
            x = next(iter(part["at"].values()))
            for cell in results.rows(part["name"]):
                if cell.good:
                    shown.setdefault(cell.row["name"], cell)
                    lines.setdefault(cell.row["name"], []).append((x, 100 * cell.mean()))
        if not lines:
            continue
        xs = sorted({x for points in lines.values() for x, _ in points})
        x_axis = logarithmic("pairs", xs, plot.count_text, xs)
        label = f"Accuracy, %: {parts[0].get('label', family)}"
        y_axis = Linear(label, -5, 105, [0, 25, 50, 75, 100], lambda v: f"{v:g}")
        panels.append(plot.Panel(x_axis, y_axis, [plot.Series(k, p) for k, p in lines.items()]))
    if not panels:
        return None
    drawn = plot.Figure("Recall of key-value pairs", legend_of(list(shown.values())), panels)
    return picture(
        file_name(results, "pairs"),
        drawn,
        "Accuracy of the recalled values against the number of pairs. It shows where each "
        "attention ends with this budget and learning rate. It does not show whether a longer "
        "training, or a rate of its own, would move the end.",
    )


def cost(results):
    cells = [c for c in results.rows("") if c.alone][: len(STYLES)]
    panels = []
    for key, label, text, scale in (
        ("step_ms", "Time of a step", plot.time_text, 1e-3),
        ("memory_bytes", "Peak memory", plot.bytes_text, 1),
    ):
        lines = []
        for cell in cells:
            points = [(p["tokens"], p[key] * scale) for p in cell.alone[0]["cost"] if p.get(key)]
            lines.append((cell.row["name"], points))
        lines = [(k, p) for k, p in lines if p]
        if not lines:
            return None
        xs = sorted({x for _, points in lines for x, _ in points})
        ys = [y for _, points in lines for _, y in points]
        panels.append(
            plot.Panel(
                logarithmic("tokens", xs, plot.count_text, xs[::2]),
                logarithmic(label, ys, text),
                [plot.Series(k, p) for k, p in lines],
            )
        )
    drawn = plot.Figure("Cost of a training step against the length", legend_of(cells), panels)
    return picture(
        file_name(results, "cost"),
        drawn,
        "Both axes are logarithmic; a line ends where memory did not suffice. It shows what one "
        "step takes on the machine above, with nothing else on it. It does not show how many "
        "steps a model needs, nor what a larger batch would give.",
    )


def equal_time(results):
    panels, shown = [], {}
    for part in results.experiment.parts:
        lines = []
        for cell in results.rows(part["name"]):
            for record in cell.alone[:1]:
                shown.setdefault(cell.row["name"], cell)
                per_step = record["batch"] / record["rows_per_second"]
                lines.append((cell.row["name"], [(s * per_step, y) for s, y in record["curve"]]))
        made = panel(
            f"Validation loss, {part.get('label', part['name'])}", "seconds of training", lines
        )
        if made:
            panels.append(made)
    if not panels:
        return None
    drawn = plot.Figure("Loss against time", legend_of(list(shown.values())), panels)
    return picture(
        file_name(results, "time"),
        drawn,
        "The same number of tokens a step in rows of another length. It shows which attention has "
        "the lower loss at a given time of one GPU. It does not show trainings with a rate that "
        "falls.",
    )


def marks_of(groups):
    """{"experiment, with Diag": style}: a colour and a symbol for each experiment, hollow without
    Diag. Points alone, so that the legend has no line either."""
    experiments = list(dict.fromkeys(group.partition(",")[0] for group in groups))
    colours = list(dict.fromkeys(style.color for style in STYLES))
    symbols = list(plot.SYMBOLS)
    found = {}
    for group in groups:
        i = experiments.index(group.partition(",")[0])
        colour, symbol = colours[i % len(colours)], symbols[i % len(symbols)]
        found[group] = plot.Style(colour, symbol, width=0, hollow="without" in group)
    return found


def scatter(points, correlations, y_axis):
    """(legend, panels) of points: {panel: [(group, distance, lost, row)]}; y_axis makes an axis
    over the values of what is lost."""
    names = list(dict.fromkeys(point[0] for rows in points.values() for point in rows))
    legend = {name: (name, style) for name, style in marks_of(names).items()}
    panels = []
    for label, rows in points.items():
        if not rows:
            continue
        rho = correlations.get(label)
        text = f"{label}: distance from softmax's"
        text += f" (rho {rho:.2f})" if rho is not None else ""
        series = []
        for name in names:
            own = [point for point in rows if point[0] == name]
            few = [row for *_, row in own] if len(rows) <= NAMED else []
            if own:
                places = [(x, y) for _, x, y, _ in own]
                series.append(plot.Series(name, places, line=False, names=few))
        xs, ys = [point[1] for point in rows], [point[2] for point in rows]
        panels.append(plot.Panel(linear(text, xs, True), y_axis(ys), series))
    return legend, panels


def prediction(points, correlations):
    """points: {panel: [(group, distance, lost, row)]}."""
    legend, panels = scatter(
        points, correlations, lambda ys: shares("Share lost to the best row", ys)
    )
    if not panels:
        return None
    return picture(
        "results_prediction",
        plot.Figure("Do the instruments predict quality?", legend, panels),
        "Every point is a row of an experiment at the end of its training (means over seeds). To "
        "the right: how far its entropy (as a share of ln N), spectral gap or log-variance (as "
        "the size of the logarithm of the ratio) is from that of softmax + Diag, or, for rows "
        "without Diag, of softmax, in the same setting. Upwards: what it loses to the best row, "
        "as a share of the way from the best row to a model that learned nothing, drawn as its "
        "square root; where points crowd not all have their names. It shows "
        "whether rows that concentrate as softmax does are better. It does not show causes, and "
        "points of one experiment are not independent of each other.",
    )


def sweeps(lines):
    """lines: [(what is varied, legend, [(value, loss)])]."""
    names = list(dict.fromkeys(name for _, name, _ in lines))
    legend = {name: (name, STYLES[i]) for i, name in enumerate(names)}
    panels = []
    for varied in dict.fromkeys(varied for varied, _, _ in lines):
        own = [(name, points) for v, name, points in lines if v == varied]
        xs = sorted({x for _, points in own for x, _ in points})
        ys = [y for _, points in own for _, y in points]
        axis = logarithmic(varied, xs, plot.count_text, apart(xs))
        series = [plot.Series(name, points) for name, points in own]
        panels.append(plot.Panel(axis, linear("Validation loss", ys), series))
    return picture(
        "results_sweeps",
        plot.Figure("One number varied", legend, panels),
        "Masked words after 3200 steps. It shows how much each number matters and where it is best "
        "in this setting. It does not show what another length, width or budget would prefer, nor, "
        "where a point is one seed, whether a small difference is one.",
    )


def apart(values, ratio=1.3):
    """Those of ascending values whose texts do not touch on a logarithmic axis."""
    kept = []
    for number in values:
        if not kept or number >= ratio * kept[-1]:
            kept.append(number)
    return kept
