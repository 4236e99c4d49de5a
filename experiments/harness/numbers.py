"""How numbers are written in tables.

SPDX-License-Identifier: Apache-2.0
"""

NONE = "-"


def value(metric, number):
    """Losses as they are, shares in percent."""
    if number is None:
        return NONE
    return f"{number:.3f}" if metric == "loss" else f"{100 * number:.1f}"


def unit(metric):
    return metric if metric == "loss" else f"{metric}, %"


def result(cell, count=True):
    """Mean, spread and number of seeds."""
    if cell is None or not cell.good:
        return NONE
    text = value(cell.metric, cell.mean())
    spread = cell.deviation()
    if spread is not None:
        text += f" ± {value(cell.metric, spread)}"
    if count:
        text += f" ({len(cell.good)})"
    return text + star(cell)


def star(cell):
    return " *" if cell.cut else ""


def mean(cell):
    """Alone, for tables that say seeds and spread in columns of their own."""
    return value(cell.metric, cell.mean()) + star(cell)


def plain(number, digits=3):
    return NONE if number is None else f"{number:.{digits}g}"


def short(revision):
    """A commit in few characters, with its mark of changed sources."""
    return revision[:7] + "+" * revision.endswith("+")


def fixed(number, digits=2):
    return NONE if number is None else f"{number:.{digits}f}"


def in_units(number, units):
    if number is None:
        return NONE
    scale, name = next((unit for unit in units if number >= unit[0]), units[-1])
    return f"{number / scale:.3g}{name}"


def size(count):
    return in_units(count, ((1e9, " GB"), (1e6, " MB"), (1e3, " KB"), (1, " B")))


def rate(number):
    return in_units(number, ((1e6, "M"), (1e3, "k"), (1, "")))


def duration(seconds):
    if seconds is None:
        return NONE
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def milliseconds(number):
    if number is None:
        return NONE
    return f"{number:.3g} ms" if number < 1000 else f"{number / 1000:.3g} s"
