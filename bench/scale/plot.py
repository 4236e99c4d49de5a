"""Figures as SVG in the look of the reports (report/style.css, report/plot.js): panels with
logarithmic axes, lines with symbols, one legend. Knows nothing of attention.

SPDX-License-Identifier: Apache-2.0
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

WIDTH, GAP, EDGE = 860, 34, 18
PLOT_HEIGHT = 270
MARGIN = {"top": 34, "right": 14, "bottom": 46, "left": 62}
ROW = MARGIN["top"] + PLOT_HEIGHT + MARGIN["bottom"]  # panels stand in rows of two
PAPER, INK, SOFT, LINE, GRID = "#ffffff", "#1b1f24", "#5a636e", "#dfe3e7", "#eceff1"
FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
LETTER = 0.55  # of the size of the font: a letter's width, near enough to space out a legend


@dataclass(frozen=True)
class Style:
    color: str
    symbol: str = ""
    dash: str = ""
    width: float = 1.75
    hollow: bool = False


@dataclass(frozen=True)
class Series:
    key: str  # of the legend
    points: list  # (x, y)
    line: bool = True
    symbols: bool = True
    names: list = field(default_factory=list)  # of its points, where they have room


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float
    ticks: list
    text: Callable

    def at(self, value, length):
        low, high = math.log(self.low), math.log(self.high)
        return (math.log(value) - low) / (high - low) * length


@dataclass(frozen=True)
class Panel:
    x: Axis
    y: Axis
    series: list


@dataclass(frozen=True)
class Figure:
    title: str
    legend: dict  # key -> (label, Style)
    panels: list = field(default_factory=list)
    note: str = ""


def decades(low, high, step=1):
    """Powers of ten between the two, every `step`-th."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**power for power in range(first, last + 1) if power % step == 0]


def with_unit(value, units):
    """Units as (size, name), ascending."""
    size, name = next((u for u in reversed(units) if value >= 0.9999 * u[0]), units[0])
    return f"{value / size:g} {name}"


def time_text(seconds):
    return with_unit(seconds, [(1e-6, "µs"), (1e-3, "ms"), (1, "s")])


def bytes_text(count):
    return with_unit(count, [(1, "B"), (1e3, "KB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB")])


def binary_text(count):
    return with_unit(count, [(1, "B"), (2**10, "KiB"), (2**20, "MiB")])


def count_text(count):
    if count < 1e4:
        return f"{count:g}"
    return with_unit(count, [(1e3, "K"), (1e6, "M"), (1e9, "G")]).replace(" ", "")


def text(x, y, words, size=12.5, color=INK, anchor="start", weight=400):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
    )


def stroke(style):
    dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
    return f'fill="none" stroke="{style.color}" stroke-width="{style.width}"{dash}'


SYMBOLS = {
    "circle": "M-3.3,0a3.3,3.3 0 1,0 6.6,0a3.3,3.3 0 1,0 -6.6,0Z",
    "square": "M-2.9,-2.9h5.8v5.8h-5.8Z",
    "diamond": "M0,-4.5L3.2,0L0,4.5L-3.2,0Z",
    "triangle": "M0,-3.9L3.7,2.9H-3.7Z",
    "cross": "M-3.8,-1.3h2.5v-2.5h2.6v2.5h2.5v2.6h-2.5v2.5h-2.6v-2.5h-2.5Z",
}


def symbol(x, y, style):
    fill, edge = (PAPER, style.color) if style.hollow else (style.color, PAPER)
    return (
        f'<path d="{SYMBOLS[style.symbol]}" transform="translate({x:.1f},{y:.1f})" '
        f'fill="{fill}" stroke="{edge}" stroke-width="{1.4 if style.hollow else 0.75}"/>'
    )


def draw_axes(panel, width):
    height, parts = PLOT_HEIGHT, []
    for tick in panel.x.ticks:
        x = panel.x.at(tick, width)
        parts.append(f'<path d="M{x:.1f},0V{height}" stroke="{GRID}"/>')
        parts.append(text(x, height + 18, panel.x.text(tick), 12, SOFT, "middle"))
    for tick in panel.y.ticks:
        y = height - panel.y.at(tick, height)
        parts.append(f'<path d="M0,{y:.1f}H{width:.1f}" stroke="{GRID}"/>')
        parts.append(text(-8, y + 4, panel.y.text(tick), 12, SOFT, "end"))
    parts.append(f'<path d="M0,{height}H{width:.1f}" stroke="{LINE}"/>')
    parts.append(text(width / 2, height + 38, panel.x.label, 12, SOFT, "middle"))
    parts.append(text(2 - MARGIN["left"], -15, panel.y.label, 13.5, INK, weight=560))
    return parts


def room_around(point, points):
    return min((math.dist(point, other) for other in points if other is not point), default=0)


def place_name(x, y, name, width, taken):
    """Where a name stands beside its point: on the side that has room, or on the other one where
    names that are `taken` are in the way, or nowhere. (x, anchor), and its box is taken."""
    length = 6.2 * len(name)
    sides = [(x + 7, "start", x + 7), (x - 7, "end", x - 7 - length)]
    for at, anchor, left in reversed(sides) if x > width / 2 else sides:
        box = (left, left + length, y - 6, y + 6)
        if left >= 0 and left + length <= width and not any(
            box[0] < other[1] and other[0] < box[1] and box[2] < other[3] and other[2] < box[3]
            for other in taken
        ):
            taken.append(box)
            return at, anchor
    return None


def draw_series(series, style, panel, width, taken):
    at = [
        (panel.x.at(x, width), PLOT_HEIGHT - panel.y.at(y, PLOT_HEIGHT)) for x, y in series.points
    ]
    parts = []
    if series.line and len(at) > 1:
        parts.append(f'<path d="M{"L".join(f"{x:.1f},{y:.1f}" for x, y in at)}" {stroke(style)}/>')
    if style.symbol and series.symbols:
        parts += [symbol(x, y, style) for x, y in at]
    named = list(zip(at, series.names, strict=False))
    # Points that stand alone have their names first.
    for (x, y), name in sorted(named, key=lambda point: -room_around(point[0], at)):
        if found := place_name(x, y, name, width, taken):
            parts.append(text(found[0], y + 4, name, 11, SOFT, found[1]))
    return parts


def draw_legend(legend, top):
    """The entries in rows, and the height below them."""
    parts, x, y = [], EDGE, top
    for label, style in legend.values():
        room = 29 + LETTER * 12.5 * len(label)
        if x > EDGE and x + room > WIDTH - EDGE:
            x, y = EDGE, y + 21
        if style.width:
            parts.append(f'<path d="M{x:.1f},{y - 4:.1f}h22" {stroke(style)}/>')
        if style.symbol:
            parts.append(symbol(x + 11, y - 4, style))
        parts.append(text(x + 29, y, label))
        x += room + 18
    return parts, y + 14


def draw(figure):
    """The whole figure as the text of an SVG file."""
    parts = [text(EDGE, 36, figure.title, 20, INK, weight=620)]
    legend, top = draw_legend(figure.legend, 66)
    parts += legend
    width = (WIDTH - 2 * EDGE - GAP) / 2
    inside, height = width - MARGIN["left"] - MARGIN["right"], top
    for i, panel in enumerate(figure.panels):
        left, above = EDGE + i % 2 * (width + GAP), top + i // 2 * ROW
        parts.append(
            f'<g transform="translate({left + MARGIN["left"]:.1f},{above + MARGIN["top"]:.1f})">'
        )
        parts += draw_axes(panel, inside)
        names = []  # the places that they take
        for series in panel.series:
            parts += draw_series(series, figure.legend[series.key][1], panel, inside, names)
        parts.append("</g>")
        height = above + ROW
    if figure.note:
        parts.append(text(EDGE, height + 12, figure.note, 11.5, SOFT))
        height += 20
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" role="img" font-family="{FONT}">'
    )
    ground = f'<rect width="{WIDTH}" height="{height:.0f}" fill="{PAPER}"/>'
    return "\n".join([head, f"<title>{escape(figure.title)}</title>", ground, *parts, "</svg>\n"])
