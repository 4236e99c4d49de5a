"""Other attentions in a model that was trained with softmax: the numbers of the records of
experiments/trained. The page of them is in trained_page.py.

SPDX-License-Identifier: Apache-2.0
"""

import json
import math
import statistics

from harness import analysis, trained_plan
from harness.summary import critical, spearman
from harness.trained_plan import BLOCK, MAPS, RECOVERED, SETTINGS

NAME = "trained"
OUTPUT = "Output of heads"  # beside the instruments
FAMILIES = {"lln": "LLN", "softmax": "softmax at other temperatures", "uniform": "uniform"}
# Of uniform, of which nothing has to be measured; its log-variance is 0, which has no logarithm.
UNIFORM = {"entropy": math.log(SETTINGS["tokens"]), "gap": 1.0}
FEWEST = 3  # seeds that a spread is given of
# (what changes, row before, row after)
WORTH = (
    ("LLN (entropy) beside Diag", "diag", "lln+diag-entropy"),
    ("softmax beside Diag", "diag", "softmax+diag"),
    ("all keys alike (uniform) beside Diag", "diag", "uniform+diag"),
    ("beside Diag: LLN (entropy) in place of uniform", "uniform+diag", "lln+diag-entropy"),
    ("beside Diag: LLN (alpha = beta = 1) in place of uniform", "uniform+diag", "lln+diag-none"),
    ("matching beside Diag: per_head in place of none", "lln+diag-none", "lln+diag-per_head"),
    ("matching beside Diag: entropy in place of none", "lln+diag-none", "lln+diag-entropy"),
    ("matching alone: entropy in place of none", "lln-none", "lln-entropy"),
    *(
        (
            f"beside Diag: {label} in place of exp (alpha = beta = 1)",
            "lln+diag-none",
            f"{name}+diag",
        )
        for name, label in MAPS.items()
    ),
    ("alone: ELU in place of exp (alpha = beta = 1)", "lln-none", "elu"),
    ("alone: ReLU in place of exp (alpha = beta = 1)", "lln-none", "relu"),
)


def read(folder, rows=None):
    """(stage, row) -> seed -> record, of those of the plan's settings; none where there is no
    file. rows: name -> row, those of the ablations by default."""
    path = folder / NAME / "records.jsonl"
    rows, found = rows or trained_plan.rows(), {}
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


def cosine(found):
    return found["mean_cosine"]


def sts(found):
    return found["sts"]


def swapped(found, name):
    """What was found of a row without training, or nothing."""
    seeds = found.get(("swapped", name))
    return seeds[0]["found"] if seeds else None


def output_error(found, name):
    """How far what a head gives is from what softmax gives, from the same queries, keys and values:
    the mean over the heads of all layers, or nothing."""
    seeds = found.get(("outputs", name))
    return statistics.fmean(seeds[0]["found"]["output_errors"]) if seeds else None


def recovered(found, name):
    """What was found of a row after training, a seed each."""
    return [r["found"] for _, r in sorted(found.get(("recovered", name), {}).items())]


def recovered_mean(found, name, of):
    own = recovered(found, name)
    return statistics.fmean(map(of, own)) if own else None


def recovered_rows(found):
    """The rows that were trained, the smallest error first."""
    ends = {name: recovered_mean(found, name, last_error) for name in RECOVERED}
    return sorted((name for name in ends if ends[name] is not None), key=ends.get)


def share_added(found, name, of):
    """What a row takes from the error of Diag alone, as a share of what softmax beside Diag takes
    from it, when all were trained."""
    rows = ("diag", "softmax+diag", name)
    diag, soft, own = (recovered_mean(found, row, of) for row in rows)
    if None in (diag, soft, own) or diag <= soft:
        return None
    return (diag - own) / (diag - soft)


def difference(before, after):
    """Of the means of two lists, and its error where both have numbers enough."""
    change = statistics.fmean(after) - statistics.fmean(before)
    if min(len(before), len(after)) < FEWEST:
        return change, None
    return change, sum(statistics.variance(x) / len(x) for x in (before, after)) ** 0.5


def varied(found, pattern, values, usual):
    """[(value, what was found without training)] of rows that differ in one number; usual:
    {value: name of the row that has it}."""
    names = {value: pattern.format(value) for value in values} | usual
    own = [(value, swapped(found, names[value])) for value in sorted(names)]
    return [(value, each) for value, each in own if each]


def compared(found, row):
    """What was found of a row without training, with its instruments where it has any."""
    own = swapped(found, row.name)
    if own and row.long == "uniform":
        heads = len(swapped(found, "softmax")["instruments"]["entropy"])
        own = own | {"instruments": {key: [x] * heads for key, x in UNIFORM.items()}}
    return own


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
    is known of, and that read all keys; softmax itself is what they are compared with, alone and
    beside Diag. OUTPUT is the distance of what the heads give."""
    made = {name: [] for name in (*analysis.DISTANCES, OUTPUT)}
    reference = swapped(found, "softmax")
    for row in trained_plan.rows().values():
        own, number = compared(found, row), quality(row.name)
        one_setting = row.block == BLOCK and row.name not in ("softmax", "softmax+diag")
        if not (own and own.get("instruments") and number is not None and one_setting):
            continue
        for name, (key, _) in analysis.DISTANCES.items():
            if key in own["instruments"]:
                apart = distance(own, reference, name)
                made[name].append((group_of(row), apart, number, row.name))
        if (apart := output_error(found, row.name)) is not None:
            made[OUTPUT].append((group_of(row), apart, number, row.name))
    return made


def qualities(found):
    """(what, function of a row's name): what is to be predicted; less is better."""

    def of(measure):
        return lambda name: measure(swapped(found, name)) if swapped(found, name) else None

    best = swapped(found, "softmax")
    return (
        ("error, swapped", of(last_error)),
        ("1 - cosine, swapped", of(lambda own: 1 - cosine(own))),
        ("STS-B lost, swapped", of(lambda own: sts(best) - sts(own))),
        ("error, recovered", lambda name: recovered_mean(found, name, last_error)),
        ("all layers, recovered", lambda name: recovered_mean(found, name, mean_error)),
    )


PARTS = ("without Diag", "LLN, without Diag", "with Diag", "LLN, with Diag")


def one_curve(part):
    """Whether its rows are no independent ones: those of LLN differ in alpha and beta alone."""
    return part.startswith("LLN")


def correlations(found):
    """[(quality, instrument, part, points, rank correlation)] where there are points enough."""
    made = []
    for what, quality in qualities(found):
        for name, some in points(found, quality).items():
            for part in PARTS:
                own = [p for p in some if p[0] == part or p[0].endswith(f" {part}")]
                if critical(len(own)):
                    rho = spearman([p[1] for p in own], [p[2] for p in own])
                    made.append((what, name, part, len(own), rho))
    return made


def median_seconds(found, stage):
    return statistics.median(
        r["seconds"] for (own, _), seeds in found.items() if own == stage for r in seeds.values()
    )
