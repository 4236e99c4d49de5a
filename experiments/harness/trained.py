"""Other attentions in a model that was trained with softmax: the records of experiments/trained.

SPDX-License-Identifier: Apache-2.0
"""

import json
import math
import statistics

from harness import analysis, figures, trained_plan
from harness.converted import score
from harness.document import Code, Heading, Table, Text
from harness.numbers import NONE, fixed
from harness.summary import critical, spearman
from harness.trained_plan import BLOCK, BLOCKS, RECOVERED, SCALES, SETTINGS

NAME = "trained"
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
nothing else is random; ± is the standard deviation over seeds, behind it in brackets their
number:"""
LIMITS = """
It does not show what a model ends at that was trained with an attention from the beginning: this
one has learned its queries and keys for softmax, and the recovery is minutes. It is one model, of
short heads, at one length; the error counts all directions of the hidden states alike, also those
that nobody reads."""
PREDICTION = f"""
Do the instruments predict this? For each head the distance of entropy, spectral gap and
log-variance of what reads all keys from those of softmax, on {SETTINGS["analyzed"]} of the
paragraphs held out and with the queries and keys of the model before any swap, against three
qualities; of rows with blocks of {BLOCK}. Rank correlation (Spearman): 1 would mean that rows that
are farther from softmax are always worse, 0 that it says nothing. The last column is how large it
must be to be told from chance (p < 0.05, two-sided) in one test of independent rows; here there
are many tests, and rows resemble each other. Rows of which there are fewer than 5 are left out."""
FAMILIES = {"lln": "LLN", "softmax": "softmax at other temperatures"}  # the rest: other maps


def read(folder):
    """(stage, row) -> seed -> record, of those of the plan's settings; none where there is no
    file."""
    path = folder / NAME / "records.jsonl"
    rows, found = trained_plan.rows(), {}
    if path.exists():
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            row = rows.get(record["row"])
            if row and record["settings"] == trained_plan.settings_of(record["stage"], row):
                own = found.setdefault((record["stage"], record["row"]), {})
                own[record["seed"]] = record
    return found


def last_error(found):
    return found["hidden_errors"][-1]


def mean_error(found):
    """Over the layers, without the embeddings below them."""
    return statistics.fmean(found["hidden_errors"][1:])


MEASURES = (
    ("error, last layer", last_error, lambda x: fixed(x, 3)),
    ("all layers", mean_error, lambda x: fixed(x, 3)),
    ("cosine", lambda found: found["mean_cosine"], lambda x: fixed(x, 3)),
    ("STS-B", lambda found: found["sts"], score),
)


def swapped(found, name):
    """What was found of a row without training, or nothing."""
    seeds = found.get(("swapped", name))
    return seeds[0]["found"] if seeds else None


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


def of_blocks(found, pattern, usual):
    """[(block, what was found)] of the rows that differ in the block alone."""
    names = {BLOCK: usual} | {b: pattern.format(b) for b in BLOCKS}
    own = [(b, swapped(found, names[b])) for b in sorted(names)]
    return [(b, x) for b, x in own if x]


def block_table(found):
    alone = dict(of_blocks(found, "diag-block={}", "diag"))
    mixed = dict(of_blocks(found, "lln+diag-entropy-block={}", "lln+diag-entropy"))
    lines = [[str(b), *cells(alone.get(b)), *cells(mixed.get(b))] for b in sorted({*alone, *mixed})]
    names = [name for name, *_ in MEASURES]
    head = [*(f"Diag alone: {name}" for name in names), *(f"LLN + Diag: {name}" for name in names)]
    return Table(["tokens of a block", *head], lines)


def of_scales(found, pattern, usual):
    """[(alpha = beta, error after the last layer)]."""
    names = {1: usual} | {x: pattern.format(x) for x in SCALES}
    own = [(x, swapped(found, names[x])) for x in sorted(names)]
    return [(x, last_error(each)) for x, each in own if each]


def spread(numbers, text):
    """Mean, deviation and number of seeds."""
    shown = text(statistics.fmean(numbers))
    if len(numbers) > 1:
        shown += f" ± {text(statistics.stdev(numbers))}"
    return f"{shown} ({len(numbers)})"


def recovered(found, name):
    """What was found of a row after training, a seed each."""
    return [r["found"] for _, r in sorted(found.get(("recovered", name), {}).items())]


def recovered_mean(found, name, of):
    own = recovered(found, name)
    return statistics.fmean(map(of, own)) if own else None


def recovered_table(found):
    labels = {row.name: row.label for row in trained_plan.rows().values()}
    lines = []
    ends = {name: recovered_mean(found, name, last_error) for name in RECOVERED}
    for name in sorted((n for n in ends if ends[n] is not None), key=ends.get):
        own = recovered(found, name)
        numbers = [spread([of(x) for x in own], text) for _, of, text in MEASURES]
        before = swapped(found, name)
        lines.append([labels[name], fixed(before and last_error(before), 3), *numbers])
    if own := swapped(found, "softmax"):
        lines.insert(0, [labels["softmax"], fixed(0, 3), *cells(own)])
    return Table(["attention", "error, swapped", *(name for name, *_ in MEASURES)], lines, {0})


def distance(own, reference, name):
    """Of an instrument from softmax's: the mean over the heads of all layers."""
    key, apart = analysis.DISTANCES[name]
    limit = math.log(SETTINGS["tokens"])
    pairs = zip(own["instruments"][key], reference["instruments"][key], strict=True)
    return statistics.fmean(apart(a, b, limit) for a, b in pairs if a and b)


def group_of(row):
    family = FAMILIES.get(row.long, "other maps")
    return f"{family}, with{'' if row.diag else 'out'} Diag"


def points(found, quality):
    """{instrument: [(group, distance from softmax's, quality, row)]} of the rows that quality(name)
    is known of; softmax itself is what they are compared with, alone and beside Diag."""
    made = {name: [] for name in analysis.DISTANCES}
    reference = swapped(found, "softmax")
    for row in trained_plan.rows().values():
        own, number = swapped(found, row.name), quality(row.name)
        one_setting = row.block == BLOCK and row.name not in ("softmax", "softmax+diag")
        if not (own and own.get("instruments") and number is not None and one_setting):
            continue
        for name, some in made.items():
            some.append((group_of(row), distance(own, reference, name), number, row.name))
    return made


def qualities(found):
    """(what, function of a row's name): what is to be predicted, less is better."""

    def of(measure):
        return lambda name: measure(swapped(found, name)) if swapped(found, name) else None

    return (
        ("error, swapped", of(last_error)),
        ("STS-B lost, swapped", of(lambda own: swapped(found, "softmax")["sts"] - own["sts"])),
        ("error, recovered", lambda name: recovered_mean(found, name, last_error)),
    )


def prediction_table(found):
    lines = []
    for what, quality in qualities(found):
        for name, some in points(found, quality).items():
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


def sweep_drawing(found):
    """Error against alpha = beta and against the block."""
    plot = figures.plot
    scales = [
        ("LLN", of_scales(found, "lln-alpha={:g}", "lln-none")),
        ("LLN + Diag", of_scales(found, "lln+diag-alpha={:g}", "lln+diag-none")),
    ]
    blocks = [
        ("Diag alone", of_blocks(found, "diag-block={}", "diag")),
        ("LLN (entropy) + Diag",
         of_blocks(found, "lln+diag-entropy-block={}", "lln+diag-entropy")),
    ]  # fmt: skip
    blocks = [(name, [(b, last_error(own)) for b, own in some]) for name, some in blocks]
    names = [name for name, _ in scales + blocks]
    legend = {name: (name, figures.STYLES[i + 1]) for i, name in enumerate(names)}
    panels = []
    for label, lines in (("alpha = beta", scales), ("tokens of a block", blocks)):
        drawn = [(name, own) for name, own in lines if own]
        if not drawn:
            continue
        xs = sorted({x for _, own in drawn for x, _ in own})
        ys = [y for _, own in drawn for _, y in own]
        axis = figures.logarithmic(label, xs, lambda v: f"{v:g}", figures.apart(xs))
        series = [plot.Series(name, own) for name, own in drawn]
        panels.append(plot.Panel(axis, figures.linear("Error, last layer", ys, True), series))
    return figures.picture(
        "results_trained_sweeps",
        plot.Figure("In place of softmax, without training", legend, panels),
        "The error of the hidden states after the last layer against one number for all heads, and "
        "against the block. It shows where a trained model is disturbed least. It does not show "
        "what a training would make of it.",
    )


def prediction_drawing(found):
    """The error without training of rows without Diag, against each instrument."""
    own = points(found, qualities(found)[0][1])
    alone = {name: [p for p in some if p[0].endswith("without Diag")] for name, some in own.items()}
    rho = {n: spearman([p[1] for p in some], [p[2] for p in some]) for n, some in alone.items()}
    legend, panels = figures.scatter(
        alone, rho, lambda ys: figures.linear("Error, last layer", ys, True)
    )
    if not panels:
        return []
    return [
        figures.picture(
            "results_trained_prediction",
            figures.plot.Figure("Instruments and the error without training", legend, panels),
            "Every point is an attention without Diag in place of softmax in all layers. To the "
            f"right: the distance of its instrument from softmax's on {SETTINGS['analyzed']} of "
            "the paragraphs, the mean over 72 heads (entropy as a share of ln N, log-variance as "
            "the size of the logarithm of the ratio). Upwards: the error of the hidden states. It "
            "shows whether attentions that concentrate as softmax does stand in for it better. It "
            "does not show whether they read the same keys, nor what training makes of them.",
        )
    ]


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
    return "; ".join(f"{text} ({n} runs)" for text, n in texts.items())


def seconds(found, stage):
    """The median of its runs."""
    return statistics.median(
        r["seconds"] for (own, _), seeds in found.items() if own == stage for r in seeds.values()
    )


def blocks(folder):
    found = read(folder)
    if not found:
        return []
    done = {stage for stage, _ in found}
    made = [
        Heading(3, "In a trained model: other attentions in place of softmax"),
        Text(ABOUT),
        Text(LINEAR),
        Code("experiments/trained/run TEXT STS-B --threads 1"),
        Text(f"{machines(found)}."),
    ]
    if "swapped" in done:
        made += [
            Text(
                "Without any training, without Diag and beside it (no seed: nothing is random; "
                f"{seconds(found, 'swapped'):.0f} s a row):"
            ),
            swapped_table(found),
            Text("The block of Diag, alone and beside LLN (entropy):"),
            block_table(found),
            sweep_drawing(found),
        ]
    if "recovered" in done:
        made += [
            Text(RECOVERY),
            recovered_table(found),
            Text(f"A run takes {seconds(found, 'recovered'):.0f} s. {' '.join(LIMITS.split())}"),
        ]
    if swapped(found, "softmax"):
        made += [Text(PREDICTION), prediction_table(found), *prediction_drawing(found)]
    return made
