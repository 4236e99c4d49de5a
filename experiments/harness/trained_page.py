"""The part of the page about other attentions in a trained model; its numbers are of trained.py.

SPDX-License-Identifier: Apache-2.0
"""

import statistics

from harness import analysis, trained, trained_figures, trained_plan
from harness.converted import score
from harness.document import Code, Heading, Points, Table, Text
from harness.numbers import NONE, fixed, short
from harness.summary import critical
from harness.trained import cosine, last_error, mean_error, sts, swapped
from harness.trained_plan import BLOCK, BLOCKS, MAPS, MODES, SCALES, SETTINGS

ABOUT = f"""
all-MiniLM-L6-v2, a sentence encoder of 6 layers and 12 heads of 32 channels that was trained with
softmax, on paragraphs of English Wikipedia cut to {SETTINGS["tokens"]} tokens: how well does each
attention stand in for softmax? Matching, the exponential, alpha = beta, the temperature and the
block are changed one at a time, in all layers. The error is |difference| / |hidden states| against
the model with softmax on {SETTINGS["held_out"]} paragraphs that were held out, after the last
layer and as a mean over the layers; that of the heads is of what each gives from the same queries,
keys and values (those of the model with softmax on {SETTINGS["analyzed"]} of the paragraphs), a
mean over all heads; the cosine is that of the embeddings, a mean over paragraphs; STS-B is
Spearman's correlation with people's judgements on the development set, whose sentences have 14
tokens on average, so that most lie inside one block of Diag. Blocks have {BLOCK} tokens, the mix
is one half. Calibrated rows have alpha and beta of each head from {SETTINGS["calibration"]} other
paragraphs; quadratic is (q.k)^2; ELU, ReLU, softplus and power 2 are the library's and have alpha
= beta = 1. Uniform reads all keys alike, which is what an attention gives that looks at nothing."""
LINEAR = """
The signed linear attention of the [zoo](zoo.md) is not here: its rows are not normalised, its size
is set by a norm behind it that this model does not have, so that putting it in place of softmax
would measure a scale and nothing else."""
RECOVERY = f"""
And after {SETTINGS["steps"]} steps of {SETTINGS["batch"]} paragraphs towards the hidden states
with softmax (the losses of `lln_attention.convert`, AdamW at {SETTINGS["learning_rate"]:g} with
alpha and beta frozen, all weights but the word embeddings), out of {SETTINGS["training"]}
paragraphs that are neither calibrated on nor held out. A seed is an order of these paragraphs and
nothing else; in brackets is the number of seeds. From {trained.FEWEST} seeds on ± is their standard
deviation, which of so few is rough: it says what another order in training does. Other paragraphs
to calibrate on, to train on or to hold out, and other models, are not in it. Every row was trained
with one seed first; which of them got more was chosen when those numbers were known. What a row
adds to Diag is what it takes from the error of Diag alone, as a share of what softmax beside Diag
takes from it, after the last layer and for all layers:"""
LIMITS = """
It does not show what a model ends at that was trained with an attention from the beginning: this
one has learned its queries and keys for softmax, and the recovery is minutes. It is one model, of
short heads, at one length; the error counts all directions of the hidden states alike, also those
that nobody reads."""
SWAPPED = """
Without any training, without Diag and beside it. No seed enters; other paragraphs, held out or
calibrated on, would give other numbers:"""
PREDICTION = f"""
Do the instruments predict this? For each head the distance of entropy, spectral gap and
log-variance of what reads all keys from those of softmax, on {SETTINGS["analyzed"]} of the
paragraphs held out and with the queries and keys of the model before any swap, against five
qualities; beside them the error of what the heads give, for which one must compute softmax itself;
of rows with blocks of {BLOCK}. Uniform has an entropy of ln N and a gap of 1; its log-variance is
0, which has no logarithm, so that it is not among the points of that instrument. Diag alone is
among none: nothing in it reads all keys. Rank correlation (Spearman): 1 would mean that rows that
are farther from softmax are always worse, 0 that it says nothing. Behind it is how large it must be
to be told from chance (p < 0.05, two-sided) in one test of independent rows. Rows of LLN differ in
alpha and beta alone, most of them along one curve: for them there is no such number. Where there
are fewer than 5 points there is no correlation."""
MEASURES = (
    ("error, last layer", last_error, lambda x: fixed(x, 3)),
    ("all layers", mean_error, lambda x: fixed(x, 3)),
    ("cosine", cosine, lambda x: fixed(x, 3)),
    ("STS-B", sts, score),
)
LABELS = {row.name: row.label for row in trained_plan.rows().values()}


NAMES = ("heads", *(name for name, *_ in MEASURES))


def cells(found, name):
    """What a row does without training."""
    own = swapped(found, name)
    shown = [NONE if own is None else text(of(own)) for _, of, text in MEASURES]
    return [fixed(trained.output_error(found, name), 3), *shown]


def swapped_table(found):
    """A line a row without Diag, and beside it the same with Diag."""
    lines = []
    for row in trained_plan.rows().values():
        both = (row.name, with_diag(row.name))
        if not row.diag and any(swapped(found, name) for name in both):
            lines.append([row.label, *(cell for name in both for cell in cells(found, name))])
    if swapped(found, "diag"):
        lines.append(["nothing (Diag alone)", *[NONE] * len(NAMES), *cells(found, "diag")])
    return Table(["in place of softmax", *NAMES, *(f"+ Diag: {name}" for name in NAMES)], lines)


def block_table(found):
    """Diag alone, and LLN (entropy) beside it."""
    lines = []
    for block in sorted((BLOCK, *BLOCKS)):
        end = "" if block == BLOCK else f"-block={block}"
        both = (f"diag{end}", f"lln+diag-entropy{end}")
        if any(swapped(found, name) for name in both):
            lines.append([str(block), *(cell for name in both for cell in cells(found, name))])
    head = [f"{who}: {name}" for who in ("Diag alone", "LLN + Diag") for name in NAMES]
    return Table(["tokens of a block", *head], lines)


def plus_minus(error, text):
    """An error that is rounded to nothing would look like none."""
    shown = text(error)
    return f" ± {shown}" if float(shown) else f" ± < {shown[:-1]}1"


def spread(numbers, text):
    """Mean, deviation where there are seeds enough, and their number."""
    shown = text(statistics.fmean(numbers))
    if len(numbers) >= trained.FEWEST:
        shown += plus_minus(statistics.stdev(numbers), text)
    return f"{shown} ({len(numbers)})"


def recovered_table(found):
    lines = []
    for name in trained.recovered_rows(found):
        own = trained.recovered(found, name)
        numbers = [spread([of(x) for x in own], text) for _, of, text in MEASURES]
        before = swapped(found, name)
        shown = [share_text(found, name, of) for of in (last_error, mean_error)]
        lines.append([LABELS[name], fixed(before and last_error(before), 3), *numbers, *shown])
    if swapped(found, "softmax"):
        lines.insert(0, [LABELS["softmax"], fixed(0, 3), *cells(found, "softmax")[1:], NONE, NONE])
    head = ["attention", "error, swapped", *(name for name, *_ in MEASURES)]
    return Table([*head, "added to Diag, last layer", "added to Diag, all layers"], lines, {0})


def share_text(found, name, of):
    """Of rows with Diag beside what reads all keys."""
    share = trained.share_added(found, name, of)
    return NONE if share is None or "+diag" not in name else f"{100 * share:.0f}%"


def best(found, names, of, sign):
    """The name that has the least (sign 1) or the most (-1), and its number."""
    own = {name: of(swapped(found, name)) for name in names}
    name = min(own, key=lambda x: sign * own[x])
    return name, own[name]


KINDS = (
    ("no matching", ["lln-none"]),
    ("calibrated", [f"lln-{mode}" for mode in MODES[1:]]),
    ("one alpha = beta", [f"lln-alpha={x:g}" for x in SCALES]),
    ("another map", list(MAPS)),
    ("uniform", ["uniform"]),
)


def findings(found):
    """What stands out without training; every name and number is chosen by the records."""
    lines = []
    for place in ("Without Diag", "Beside Diag"):
        parts = []
        for what, of, sign, text in (
            ("Error", last_error, 1, lambda x: fixed(x, 3)),
            ("STS-B", sts, -1, score),
        ):
            shown = []
            for kind, names in KINDS:
                own = names if place.startswith("Without") else [with_diag(x) for x in names]
                own = [name for name in own if swapped(found, name)]
                if own:
                    name, number = best(found, own, of, sign)
                    which = f" ({LABELS[name].removesuffix(' + Diag')})" * (len(names) > 1)
                    shown.append(f"{kind} {text(number)}{which}")
            if shown:
                parts.append(f"{what}: {', '.join(shown)}")
        if parts:
            lines.append(f"{place}. {'. '.join(parts)}.")
    if not lines:
        return []
    counts = {kind: sum(1 for name in names if swapped(found, name)) for kind, names in KINDS}
    shown = ", ".join(f"{kind} {count}" for kind, count in counts.items() if count)
    about = f"""The best of each kind, chosen on these very numbers. A kind with more rows has more
    chances of a good one; the numbers of rows: {shown}."""
    return [Text(about), Points(lines)]


def with_diag(name):
    return trained_plan.with_diag(trained_plan.rows()[name]).name


def change(own, of):
    """Of the mean over seeds from the first row to the second, with its error where it has one."""
    number, error = trained.difference(*([of(x) for x in some] for some in own))
    return f"{number:+.4f}" + ("" if error is None else plus_minus(error, lambda x: fixed(x, 4)))


def worth_table(found):
    """What one change does after the recovery; none where no change has both rows."""
    lines = []
    for what, *names in trained.WORTH:
        own = [trained.recovered(found, name) for name in names]
        if not all(own):
            continue
        before, after = (statistics.fmean(map(last_error, some)) for some in own)
        shown = [change(own, of) for of in (last_error, mean_error, cosine)]
        counts = ", ".join(str(len(some)) for some in own)
        lines.append([what, f"{before:.3f}", f"{after:.3f}", *shown, counts])
    if not lines:
        return []
    about = f"""One change at a time: error after the last layer before and after, and the
    differences of it, of the mean over all layers (less is better) and of the cosine (more is
    better). ± is the error of a difference, that of the two means over seeds, where both have
    {trained.FEWEST} or more; as above it says what another order in training does, and nothing of
    other texts. Where the measures disagree, neither row is the better one."""
    head = ["change", "before", "after", "difference", "all layers", "cosine", "seeds"]
    return [Text(about), Table(head, lines)]


def rows_of(part):
    return part if trained.one_curve(part) else f"all {part}"


def prediction_table(found):
    """A line an instrument and part; the qualities without training have the same rows."""
    own = {(name, part): {} for _, name, part, *_ in trained.correlations(found)}
    for what, name, part, count, rho in trained.correlations(found):
        own[name, part][what] = (count, rho)
    names = [what for what, _ in trained.qualities(found)]
    stages = [[x for x in names if x.endswith(stage)] for stage in ("swapped", "recovered")]
    lines = []
    for (name, part), by in own.items():
        line = [name, rows_of(part)]
        for stage in stages:
            known = [by[what] for what in stage if what in by]
            shown = [analysis.correlation(rho) for _, rho in known]
            counts = [count for count, _ in known][:1]
            least = [NONE if trained.one_curve(part) else f"{critical(x):.2f}" for x in counts]
            cells = [str(x) for x in counts] + shown + least
            line += cells or [NONE] * (len(stage) + 2)
        lines.append(line)
    head = [text for stage in stages for text in ("points", *stage, "p < 0.05 from")]
    return Table(["instrument", "rows", *head], lines)


def verdict(count, rho):
    if rho is None or abs(rho) < critical(count):
        return "not to be told from chance"
    return f"the closer to softmax, the {'better' if rho > 0 else 'worse'}"


ALONE = "on nearly one curve, so that the numbers alone are given"


def disagreeing(correlations):
    """(instrument, part) where the errors after the recovery have correlations of other signs."""
    rhos = {}
    for what, name, part, _, rho in correlations:
        if what.endswith("recovered"):
            rhos.setdefault((name, part), []).append(rho or 0)
    return {key for key, own in rhos.items() if min(own) < 0 < max(own)}


def prediction_findings(found):
    """What the correlations with the errors say, in words."""
    known = [x for x in trained.correlations(found) if not x[0].startswith(("STS-B", "1 - cosine"))]
    apart, said = disagreeing(known), {}
    for what, name, part, count, rho in known:
        if what.endswith("recovered") and (name, part) in apart:
            what, text = "recovered", "the two measures of the error disagree"
        elif trained.one_curve(part):
            text, name = ALONE, f"{name} {analysis.correlation(rho)}"
        else:
            text = verdict(count, rho)
        names = said.setdefault((what, part), {}).setdefault(text, {})
        names[name.lower()] = True
    lines = []
    for (what, part), by in said.items():
        texts = (f"{text} ({', '.join(names)})" for text, names in by.items())
        lines.append(f"{what[0].upper()}{what[1:]}, {rows_of(part)}: {'; '.join(texts)}.")
    return [Points(lines)] if lines else []


def prediction_text(found):
    looked_at = sum(1 for *_, rho in trained.correlations(found) if rho is not None)
    return f"""{PREDICTION} The table has {looked_at} correlations, and rows resemble each other:
    that some are large enough is to be expected of chance."""


def machines(found):
    """Who measured it, and of which sources."""
    by = {}
    for record in (r for seeds in found.values() for r in seeds.values()):
        about = record["machine"]
        name = f"{about['cpu']}, {about['cores']} cores of which {record['threads']} used"
        counts = by.setdefault(f"{name}, torch {record['torch']}", {})
        revision = short(record["revision"])
        counts[revision] = counts.get(revision, 0) + 1
    lines = []
    for name, counts in by.items():
        shown = [f"{x} ({n})" for x, n in sorted(counts.items(), key=lambda item: -item[1])]
        lines.append(f"{name}; runs by revision: {', '.join(shown)}")
    return "; ".join(lines)


def blocks(folder):
    found = trained.read(folder)
    if not found:
        return []
    made = [
        Heading(3, "In a trained model: other attentions in place of softmax"),
        Text(ABOUT),
        Text(LINEAR),
        Code("experiments/trained/run TEXT STS-B --threads 1"),
        Text(f"{machines(found)}.", small=True),
    ]
    done = {stage for stage, _ in found}
    if "swapped" in done:
        made += [
            Text(SWAPPED),
            swapped_table(found),
            *findings(found),
            Text("The block of Diag, alone and beside LLN (entropy):"),
            block_table(found),
            trained_figures.sweeps(found),
        ]
    if "recovered" in done:
        seconds = trained.median_seconds(found, "recovered")
        made += [
            Text(RECOVERY),
            recovered_table(found),
            *worth_table(found),
            Text(f"A run took {seconds:.0f} s (median; other work ran beside it). {LIMITS}"),
        ]
    if swapped(found, "softmax"):
        made += [Text(prediction_text(found)), prediction_table(found)]
        made += prediction_findings(found)
        made += trained_figures.prediction(found)
    return made
