"""The part of the page about ideas beside LLN + Diag in a trained model: records of
experiments/trained, whose other rows are in trained_page.py.

SPDX-License-Identifier: Apache-2.0
"""

import math
import statistics

from harness import ideas, trained, trained_figures, trained_plan
from harness.document import Code, Heading, Points, Table, Text
from harness.ideas import (
    DIAG,
    FOUR,
    GATED,
    OURS,
    ROWS,
    THEIRS,
    THREE,
    closed,
    gap,
    known,
    numbers,
    of_lln,
)
from harness.numbers import NONE, fixed
from harness.trained import cosine, last_error, mean_error, recovered, swapped
from harness.trained_page import MEASURES, change, machines, share_text, spread
from harness.trained_plan import IDEAS, MATRIX, NUMBERS, SETTINGS

BEST = 3  # ideas that the figure has
ANCHOR = "#in-a-trained-model-other-attentions-in-place-of-softmax"
ABOUT = f"""
What the ideas do to a model that was trained with softmax: the setting of [group 2]({ANCHOR}), with
all-MiniLM-L6-v2 on {SETTINGS["tokens"]} tokens and {SETTINGS["steps"]} steps towards the hidden
states with softmax. It is not the setting of masked words above; what a gate and a learned mix do
there is in [another table of group 2](#what-each-component-is-worth).

Each idea stands alone beside LLN (entropy) + Diag; the row with four of them is that of the plan
above. The one that leaves the contrast out of it was added when the numbers of the first seeds were
known, and so were two rows that take 128 features apart: frozen ones, which are those that learned
ones begin with, and 32 learned ones, which are as many as channels: what they gain is not more
features, but a map that learns faster than the weights before it. Two-sided features and the
contrast take twice the work of LLN, 128 features four times; the others add next to nothing.
Definitions are those of the [zoo](zoo.md#variants-of-lln); alpha and beta are calibrated on q and k
as the map takes them, and frozen but where they are learned. Gate and learned mix begin at one
half, l of the contrast at 0.5, alpha and beta at the calibrated ones, the matrix of 128 features as
four random rotations (drawn by the seed), that of 32 as one. A gate, a mix and a learned alpha and
beta change nothing before they have learned: swapped, they are the ordinary row. What an idea adds
is trained in the recovery alone, at a learning rate of {NUMBERS:g} where it is one number of a head
or channel and of {MATRIX:g} where it is a matrix, against {SETTINGS["learning_rate"]:g} of all
else, at which a number that begins anew would not get anywhere in so few steps. These rates were
chosen beforehand; no others were tried."""
TABLE = f"""
Measures, seeds and ± are those of that section, and so are the rows without an idea: a seed is an
order of the paragraphs (of other features also the rotations), in brackets is the number of seeds,
and from {trained.FEWEST} on ± is their deviation. What a row adds to Diag is a share of what
softmax adds without a gate. The smallest error is first; numbers added are those of all 6
layers:"""
CHANGES = f"""
One change at a time, on the means over seeds; ± is the error of a difference where both rows have
{trained.FEWEST} seeds, and knows of other orders in training alone. "Of the gap" is how much of the
distance from LLN (entropy) + Diag to softmax + Diag, both without a gate, the change makes up for;
below zero it adds to it:"""
VERDICTS = f"""
Against LLN (entropy) + Diag, by the errors after the last layer and over all layers and by the
cosine; a change counts that is larger than {ideas.CERTAIN} times its error. In brackets is how much
of the gap it is, after the last layer and over all layers:"""
LIMITS = """
It shows what each idea is worth to a model that learned its queries and keys for softmax, after
minutes. It does not show what a model makes of it that was trained with it from the beginning:
there, queries, keys and what an idea adds grow together, and the order may be another one. It is
one model with heads of 32 channels, at one length, one calibration and one rate for what is
added."""
LEARNED = f"""
Where the numbers ended that the ideas add, over all heads, layers and seeds. Of a gate it is the
share that a head gives on average to what reads all keys, on the {SETTINGS["held_out"]} paragraphs
held out, and how far it lies from that average from token to token (a deviation, mean over
heads):"""


def label(name):
    """Of the ideas of a row alone."""
    return " with ".join(IDEAS[idea].label for idea in ROWS[name].ideas[:2]) + "".join(
        f" and {IDEAS[idea].label}" for idea in ROWS[name].ideas[2:]
    )


def percent(share):
    return NONE if share is None else f"{100 * share:.0f}%"


def table(found):
    names = [THEIRS, OURS, DIAG, *trained_plan.idea_rows()]
    ends = {name: trained.recovered_mean(found, name, last_error) for name in names}
    lines = []
    for name in sorted((name for name in names if ends[name] is not None), key=ends.get):
        own, before = recovered(found, name), swapped(found, name)
        shown = [spread([of(x) for x in own], text) for _, of, text in MEASURES]
        shares = [share_text(found, name, of) for of in (last_error, mean_error)]
        added = str(own[0].get("added_parameters", 0))
        lines.append([ROWS[name].label, added, fixed(before and last_error(before), 3), *shown])
        lines[-1] += shares
    head = ["attention", "numbers added", "error, swapped", *(name for name, *_ in MEASURES)]
    return Table([*head, "added to Diag, last layer", "added to Diag, all layers"], lines)


def changes(found):
    rows = [(f"LLN (entropy) + Diag: {label(name)}", OURS, name) for name in of_lln(found)]
    rows += [
        ("128 features: learned in place of frozen", f"{OURS}-rotations", f"{OURS}-wide"),
        ("learned features: 128 in place of 32", f"{OURS}-narrow", f"{OURS}-wide"),
        ("gated in place of a learned mix", f"{OURS}-mix", GATED[0]),
        ("the contrast beside three other ideas", THREE, FOUR),
        ("softmax + Diag: gated", THEIRS, GATED[1]),
        ("softmax in place of LLN (entropy)", OURS, THEIRS),
    ]
    lines = []
    for what, *names in rows:
        if not known(found, *names):
            continue
        own = [recovered(found, name) for name in names]
        before, after = (statistics.fmean(map(last_error, some)) for some in own)
        shown = [change(own, of) for of in (last_error, mean_error, cosine)]
        shares = [NONE, NONE]
        if names[0] == OURS:
            shares = [percent(closed(found, names[1], of)) for of in (last_error, mean_error)]
        counts = ", ".join(str(len(some)) for some in own)
        lines.append([what, f"{before:.3f}", f"{after:.3f}", *shown, *shares, counts])
    head = ["change", "before", "after", "difference", "all layers", "cosine"]
    return Table([*head, "of the gap, last layer", "of the gap, all layers", "seeds"], lines)


# Parameter -> (what it is, how its number becomes that)
SHOWN = {
    "mix": ("share of LLN, a number a channel", float),
    "chain": ("l of the contrast", lambda x: 1 / (1 + math.exp(-x))),
    "log_alpha": ("alpha over the calibrated one", math.exp),
    "log_beta": ("beta over the calibrated one", math.exp),
}


def learned(found):
    """Least and largest of what was learned, and where its middle is."""
    lines = []
    for name, row in trained_plan.idea_rows().items():
        own = recovered(found, name)
        for parameter in (p for p in trained_plan.rates(row) if own and p in SHOWN):
            what, of = SHOWN[parameter]
            means, _, least, largest = zip(*(x["learned"][parameter] for x in own), strict=True)
            ends = (statistics.fmean(means), min(least), max(largest))
            lines.append([row.label, what, *(fixed(of(x), 2) for x in ends), NONE])
        if own and "gate" in row.ideas:
            means = [x for some in own for x in some["gate_mean"]]
            apart = [x for some in own for x in some["gate_deviation"]]
            ends = (statistics.fmean(means), min(means), max(means), statistics.fmean(apart))
            lines.append([row.label, "gate of a head", *(fixed(x, 2) for x in ends)])
    head = ["attention", "what", "mean", "least", "largest", "from token to token"]
    return [Text(LEARNED), Table(head, lines)] if lines else []


def shares(found, names, of=last_error):
    texts = (f"{label(name)} {percent(closed(found, name, of))}" for name in names)
    return "; ".join(texts)


def said(verdict):
    if verdict is None:
        return "Too few seeds to say"
    better, worse = verdict
    if better and worse:
        return "The measures disagree"
    if not better and not worse:
        return "Not to be told apart"
    word, other = ("Better", "worse") if better else ("Worse", "better")
    if max(verdict) == 3:
        return f"{word} by all three measures"
    return f"{word} by some measures, and {other} by none"


def findings(found):
    """What the differences carry; what is said, and of what, is chosen by them."""
    by = {}
    for name in of_lln(found):
        own = (percent(closed(found, name, of)) for of in (last_error, mean_error))
        text = f"{label(name)} ({' and '.join(own)})"
        by.setdefault(said(ideas.verdict(found, name)), []).append(text)
    kinds = sorted(by.items(), key=lambda item: item[0] == said(None))  # what is not known last
    return [f"{what}: {', '.join(names)}." for what, names in kinds] + [
        *features_lines(found),
        *gate_lines(found),
    ]


def features_lines(found):
    """What more features do, and what a map does that learns."""
    rows = [f"{OURS}-{idea}" for idea in ("rotations", "narrow", "wide")]
    if not known(found, OURS, THEIRS, *rows):
        return []
    frozen, narrow, wide = (percent(closed(found, name, last_error)) for name in rows)
    counts = ", ".join(str(len(recovered(found, name))) for name in rows)
    return [
        f"128 learned features are two things: more features, which alone (frozen) make up for "
        f"{frozen} of the gap after the last layer, and a map that learns, which alone (32 "
        f"features) makes up for {narrow}; together it is {wide} (seeds: {counts})."
    ]


def gate_lines(found):
    """What a gate is worth to LLN and to softmax."""
    if not known(found, OURS, THEIRS, *GATED):
        return []
    takes = [
        statistics.fmean(numbers(found, name, last_error))
        - statistics.fmean(numbers(found, f"{name}-gate", last_error))
        for name in (OURS, THEIRS)
    ]
    shares = [
        statistics.fmean(x for own in recovered(found, name) for x in own["gate_mean"])
        for name in GATED
    ]
    return [
        f"A gate takes {takes[0]:.3f} from the error after the last layer beside LLN, and "
        f"{takes[1]:.3f} beside softmax, where it is no yardstick: open, it is the model with "
        f"softmax itself, which all are measured against. On average heads give LLN a share of "
        f"{shares[0]:.2f} and softmax one of {shares[1]:.2f}."
    ]


def so_far(folder):
    """For the beginning of the page."""
    found = ideas.read(folder)
    names = ideas.alone(found)
    if not names or not known(found, OURS, THEIRS):
        return []
    counts = sorted({len(recovered(found, name)) for name in names})
    seeds = " to ".join(str(x) for x in (counts[0], counts[-1])[: len(counts)])
    seeds = "one seed" if seeds == "1" else f"{seeds} seeds"
    line = (
        f"Ideas to bring LLN nearer to softmax, in a model that was trained with softmax, after "
        f"{SETTINGS['steps']} steps of recovery ({seeds}): of the {gap(found, last_error):.3f} by "
        f"which the error after the last layer is larger with LLN (entropy) + Diag than with "
        f"softmax + Diag, each makes up for so much: {shares(found, names)}."
    )
    together = [x for x in (THREE, FOUR) if len(recovered(found, x)) >= counts[0]]
    if together:
        line += f" Several of them: {shares(found, together)}."
    return [line]


def blocks(folder):
    found = ideas.read(folder)
    own = {key: seeds for key, seeds in found.items() if key[1] in trained_plan.idea_rows()}
    if not own:
        return []
    made = [
        Heading(3, "In a trained model"),
        *map(Text, ABOUT.split("\n\n")),
        Code("experiments/trained/run TEXT STS-B --threads 1"),
        Text(f"{machines(own)}.", small=True),
        Text(TABLE),
        table(found),
    ]
    if known(found, OURS, THEIRS):
        made += [Text(CHANGES), changes(found), Text(VERDICTS), Points(findings(found))]
        rows = (DIAG, OURS, *ideas.alone(found)[:BEST], THEIRS)
        drawn = [name for name in rows if known(found, name)]
        labels = {name: ROWS[name].label for name in drawn}
        made.append(trained_figures.by_layer(found, drawn, labels))
    return [*made, *learned(found), Text(LIMITS)]
