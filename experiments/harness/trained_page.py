"""The part of the page about other attentions in a trained model; its numbers are of trained.py.

SPDX-License-Identifier: Apache-2.0
"""

import statistics

from harness import analysis, trained, trained_figures, trained_plan
from harness.converted import score
from harness.document import Code, Heading, Points, Table, Text
from harness.numbers import NONE, fixed
from harness.summary import critical, spearman
from harness.trained import cosine, last_error, mean_error, sts, swapped
from harness.trained_plan import BLOCK, BLOCKS, MAPS, MODES, SCALES, SETTINGS

ABOUT = f"""
all-MiniLM-L6-v2, a sentence encoder of 6 layers and 12 heads of 32 channels that was trained with
softmax, on paragraphs of English Wikipedia cut to {SETTINGS["tokens"]} tokens: how well does each
attention stand in for softmax? Matching, the exponential, alpha = beta, the temperature and the
block are changed one at a time, in all layers. The error is |difference| / |hidden states| against
the model with softmax on {SETTINGS["held_out"]} paragraphs that were held out, after the last
layer and as a mean over the layers; the cosine is that of the embeddings, a mean over paragraphs;
STS-B is Spearman's correlation with people's judgements on the development set, whose sentences
have 14 tokens on average, so that most lie inside one block of Diag. Blocks have {BLOCK} tokens,
the mix is one half. Calibrated rows have alpha and beta of each head from
{SETTINGS["calibration"]} other paragraphs; quadratic is (q.k)^2; ELU, ReLU, softplus and power 2
are the library's and have alpha = beta = 1. Uniform reads all keys alike, which is what an
attention gives that looks at nothing."""
LINEAR = """
The signed linear attention of the [zoo](zoo.md) is not here: its rows are not normalised, its size
is set by a norm behind it that this model does not have, so that putting it in place of softmax
would measure a scale and nothing else."""
RECOVERY = f"""
And after {SETTINGS["steps"]} steps of {SETTINGS["batch"]} paragraphs towards the hidden states
with softmax (the losses of `lln_attention.convert`, AdamW at {SETTINGS["learning_rate"]:g} with
alpha and beta frozen, all weights but the word embeddings), out of {SETTINGS["training"]}
paragraphs that are neither calibrated on nor held out. A seed is an order of these paragraphs, and
nothing else is random; ± is the standard deviation over seeds, behind it in brackets their number.
The last column is what a row takes from the error of Diag alone, as a share of what softmax beside
Diag takes from it:"""
LIMITS = """
It does not show what a model ends at that was trained with an attention from the beginning: this
one has learned its queries and keys for softmax, and the recovery is minutes. It is one model, of
short heads, at one length; the error counts all directions of the hidden states alike, also those
that nobody reads."""
PREDICTION = f"""
Do the instruments predict this? For each head the distance of entropy, spectral gap and
log-variance of what reads all keys from those of softmax, on {SETTINGS["analyzed"]} of the
paragraphs held out and with the queries and keys of the model before any swap, against four
qualities; of rows with blocks of {BLOCK}. Rank correlation (Spearman): 1 would mean that rows that
are farther from softmax are always worse, 0 that it says nothing. The last column is how large it
must be to be told from chance (p < 0.05, two-sided) in one test of independent rows; here there
are many tests, and rows resemble each other. Rows of which there are fewer than 5 are left out."""
MEASURES = (
    ("error, last layer", last_error, lambda x: fixed(x, 3)),
    ("all layers", mean_error, lambda x: fixed(x, 3)),
    ("cosine", cosine, lambda x: fixed(x, 3)),
    ("STS-B", sts, score),
)
LABELS = {row.name: row.label for row in trained_plan.rows().values()}


def cells(own):
    return [NONE if own is None else text(of(own)) for _, of, text in MEASURES]


def swapped_table(found):
    """A line a row without Diag, and beside it the same with Diag."""
    lines = []
    for row in trained_plan.rows().values():
        if row.diag:
            continue
        both = [swapped(found, row.name), swapped(found, trained_plan.with_diag(row).name)]
        if any(both):
            lines.append([row.label, *cells(both[0]), *cells(both[1])])
    if own := swapped(found, "diag"):
        lines.append(["nothing (Diag alone)", *[NONE] * len(MEASURES), *cells(own)])
    names = [name for name, *_ in MEASURES]
    return Table(["in place of softmax", *names, *(f"+ Diag: {name}" for name in names)], lines)


def of_blocks(found):
    """Of Diag alone, and of LLN (entropy) beside it."""
    alone = trained.varied(found, "diag-block={}", BLOCKS, {BLOCK: "diag"})
    name = "lln+diag-entropy"
    return alone, trained.varied(found, name + "-block={}", BLOCKS, {BLOCK: name})


def block_table(found):
    alone, mixed = map(dict, of_blocks(found))
    lines = [[str(b), *cells(alone.get(b)), *cells(mixed.get(b))] for b in sorted({*alone, *mixed})]
    names = [name for name, *_ in MEASURES]
    head = [*(f"Diag alone: {name}" for name in names), *(f"LLN + Diag: {name}" for name in names)]
    return Table(["tokens of a block", *head], lines)


def spread(numbers, text):
    """Mean, deviation and number of seeds."""
    shown = text(statistics.fmean(numbers))
    if len(numbers) > 1:
        shown += f" ± {text(statistics.stdev(numbers))}"
    return f"{shown} ({len(numbers)})"


def recovered_table(found):
    lines = []
    for name in trained.recovered_rows(found):
        own = trained.recovered(found, name)
        numbers = [spread([of(x) for x in own], text) for _, of, text in MEASURES]
        before, share = swapped(found, name), trained.share_added(found, name)
        told = share is not None and name.partition("-")[0].endswith("+diag")
        added = f"{100 * share:.0f}%" if told else NONE
        lines.append([LABELS[name], fixed(before and last_error(before), 3), *numbers, added])
    if own := swapped(found, "softmax"):
        lines.insert(0, [LABELS["softmax"], fixed(0, 3), *cells(own), NONE])
    head = ["attention", "error, swapped", *(name for name, *_ in MEASURES), "added to Diag"]
    return Table(head, lines, {0})


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
            ("error", last_error, 1, lambda x: fixed(x, 3)),
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
            lines.append(f"{place}, the best of each kind. {'. '.join(parts)}.")
    return lines


def with_diag(name):
    return trained_plan.with_diag(trained_plan.rows()[name]).name


def recovered_findings(found):
    """What matching, the map and the long-range part are worth after the recovery."""

    def error(name):
        return trained.recovered_mean(found, name, last_error)

    lines = []
    for what, before, after in (
        ("Matching (entropy in place of none) beside Diag", "lln+diag-none", "lln+diag-entropy"),
        ("Matching (per_head in place of none) beside Diag", "lln+diag-none", "lln+diag-per_head"),
        ("Matching (entropy in place of none) without Diag", "lln-none", "lln-entropy"),
        *(
            (f"{label} in place of the exponential (entropy) beside Diag",
             "lln+diag-entropy", f"{name}+diag")
            for name, label in MAPS.items()
        ),
        ("LLN (entropy) beside Diag in place of Diag alone", "diag", "lln+diag-entropy"),
        ("softmax beside Diag in place of Diag alone", "diag", "softmax+diag"),
    ):  # fmt: skip
        if None not in (error(before), error(after)):
            change = error(after) - error(before)
            counts = {len(trained.recovered(found, name)) for name in (before, after)}
            seeds = "one seed" if 1 in counts else f"{min(counts)} seeds"
            lines.append(f"{what}: the error changes by {change:+.3f} ({seeds}).")
    return lines


def prediction_table(found):
    lines = []
    for what, quality in trained.qualities(found):
        for name, some in trained.points(found, quality).items():
            for part in ("without Diag", "LLN, without Diag", "with Diag", "LLN, with Diag"):
                own = [p for p in some if p[0] == part or p[0].endswith(f" {part}")]
                least = critical(len(own))
                if least is None:
                    continue
                rho = spearman([p[1] for p in own], [p[2] for p in own])
                label = part if part.startswith("LLN") else f"all {part}"
                shown = [analysis.correlation(rho), f"{least:.2f}"]
                lines.append([what, name, label, str(len(own)), *shown])
    head = ["quality", "instrument", "rows", "points", "rank correlation", "p < 0.05 from"]
    return Table(head, lines)


def machines(found):
    """Who measured it, and of which sources."""
    texts = {}
    for seeds in found.values():
        for record in seeds.values():
            about = record["machine"]
            text = (
                f"{about['cpu']}, {about['cores']} cores of which {record['threads']} used, torch "
                f"{record['torch']}, revision {record['revision'][:7]}"
            )
            texts[text] = texts.get(text, 0) + 1
    return "; ".join(f"{text} ({n} run{'s' * (n > 1)})" for text, n in texts.items())


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
            Text("Without any training, without Diag and beside it; nothing here is random:"),
            swapped_table(found),
            Points(findings(found)),
            Text("The block of Diag, alone and beside LLN (entropy):"),
            block_table(found),
            trained_figures.sweeps(found),
        ]
    if "recovered" in done:
        seconds = trained.median_seconds(found, "recovered")
        made += [
            Text(RECOVERY),
            recovered_table(found),
            Points(recovered_findings(found)),
            Text(f"A run takes {seconds:.0f} s (median; other work ran beside it). {LIMITS}"),
        ]
    if swapped(found, "softmax"):
        made += [Text(PREDICTION), prediction_table(found), *trained_figures.prediction(found)]
    return made
