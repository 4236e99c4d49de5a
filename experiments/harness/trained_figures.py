"""The figures about other attentions in a trained model.

SPDX-License-Identifier: Apache-2.0
"""

import statistics

from harness import figures, trained
from harness.summary import spearman
from harness.trained import last_error, sts
from harness.trained_plan import BLOCK, BLOCKS, SCALES, SETTINGS, TEMPERATURES


def swept(found):
    """{what is varied: {legend: [(value, what was found)]}}."""
    lln, mixed = "LLN", "LLN + Diag"
    blocks = "lln+diag-entropy"
    return {
        "alpha = beta": {
            lln: trained.varied(found, "lln-alpha={:g}", SCALES, {1: "lln-none"}),
            mixed: trained.varied(found, "lln+diag-alpha={:g}", SCALES, {1: "lln+diag-none"}),
        },
        "temperature": {
            "softmax": trained.varied(found, "softmax-t={:g}", TEMPERATURES, {1: "softmax"}),
        },
        "tokens of a block": {
            "Diag alone": trained.varied(found, "diag-block={}", BLOCKS, {BLOCK: "diag"}),
            "LLN (entropy) + Diag": trained.varied(
                found, blocks + "-block={}", BLOCKS, {BLOCK: blocks}
            ),
        },
    }


def panel(varied, lines, label, of):
    """None where there is nothing to draw."""
    drawn = {name: [(x, of(own)) for x, own in some] for name, some in lines.items() if some}
    if not drawn:
        return None
    xs = sorted({x for own in drawn.values() for x, _ in own})
    ys = [y for own in drawn.values() for _, y in own]
    axis = figures.logarithmic(varied, xs, lambda v: f"{v:g}", figures.apart(xs))
    series = [figures.plot.Series(name, own) for name, own in drawn.items()]
    return figures.plot.Panel(axis, figures.linear(label, ys), series)


def sweeps(found):
    lines = swept(found)
    names = [name for some in lines.values() for name, own in some.items() if own]
    legend = {name: (name, figures.STYLES[i]) for i, name in enumerate(names)}
    panels = [
        panel(varied, some, label, of)
        for varied, some in lines.items()
        for label, of in (("Error, last layer", last_error), ("STS-B, development", sts))
    ]
    return figures.picture(
        "results_trained_sweeps",
        figures.plot.Figure(
            "In place of softmax, without training", legend, [p for p in panels if p]
        ),
        "The error of the hidden states after the last layer (paragraphs) and STS-B (sentences) "
        "against one number for all heads, against the temperature of softmax, and against the "
        "block. It shows where a trained model is disturbed least. It does not show what a "
        "training would make of it.",
    )


def by_layer(found, rows, labels):
    """The error of every layer after the training, and before it of those that were swapped."""
    legend = {name: (labels[name], figures.STYLES[i]) for i, name in enumerate(rows)}
    after = {name: trained.recovered(found, name) for name in rows}
    means = {
        name: [statistics.fmean(x) for x in zip(*(x["hidden_errors"] for x in own), strict=True)]
        for name, own in after.items()
    }
    before = {name: trained.swapped(found, name) for name in rows}
    errors = {name: own["hidden_errors"] for name, own in before.items() if own}
    panels = [
        figures.panel(
            label,
            "layer",
            [(name, list(enumerate(own))[1:]) for name, own in some.items()],
            True,
            False,
        )
        for label, some in (("Error, swapped", errors), ("Error, recovered", means))
    ]
    return figures.picture(
        "results_trained_ideas",
        figures.plot.Figure("Ideas beside LLN + Diag, by layer", legend, [p for p in panels if p]),
        "The error of the hidden states after each layer, without training and after the recovery "
        "(means over seeds), for the ideas alone with the least errors after the last layer and "
        "for what they lie between. It shows where in the model an idea helps. It does not show "
        "the spread over seeds, which is smaller than a mark.",
    )


def prediction(found):
    """The error without training of rows without Diag, against each instrument; none where no row
    was measured."""
    own = trained.points(found, trained.qualities(found)[0][1])
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
            "the size of the logarithm of the ratio), or of what the heads give. Upwards: the "
            "error of the hidden states. It shows whether attentions that concentrate as softmax "
            "does stand in for it better. It does not show what training makes of them.",
        )
    ]
