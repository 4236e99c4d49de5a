"""The section of one experiment: what was asked, the command, the machine, and the tables.

SPDX-License-Identifier: Apache-2.0
"""

import itertools
import math
import statistics

from harness import compare, figures, grids
from harness.document import Code, Heading, Points, Table, Text
from harness.numbers import (
    NONE,
    duration,
    fixed,
    milliseconds,
    plain,
    rate,
    result,
    size,
    unit,
    value,
)
from harness.summary import alone, machines


def label(cell):
    return cell.row.get("label", cell.row["name"])


def part_label(part):
    return part.get("label", part["name"])


def command(experiment):
    data = " --data DIR" if any("data" in t for t in (experiment.table, *experiment.parts)) else ""
    if experiment.table.get("view") == "smoke":
        return "make experiments-smoke"
    return f"experiments/run {experiment.name}{data} --runs DIR --device cuda"


def chance_row(results, part, columns):
    found = results.chance(part)
    if not found:
        return None
    metric, number, text = found
    return [f"nothing learned: {text}", NONE, value(metric, number)] + [NONE] * (columns - 3)


def speed_of(record):
    """Of a run that had the machine for itself."""
    if not alone(record):
        return None
    return record.get("tokens_per_second") or record.get("rows_per_second")


def single(results):
    cells = results.rows("")
    metric = next((c.metric for c in cells if c.good), "loss")
    head = ["attention", "seeds", unit(metric), "a run", "tokens/s", "memory", "remarks"]
    rows, asides = [], set()
    if chance := chance_row(results, "", len(head)):
        rows.append(chance)
        asides.add(0)
    for cell in cells:
        rows.append(
            [
                label(cell),
                str(len(cell.good)),
                result(cell, count=False),
                duration(cell.mean_of(lambda r: r["seconds"] if alone(r) else None)),
                rate(cell.mean_of(speed_of)),
                size(cell.mean_of(lambda r: r.get("memory_bytes"))),
                cell.marks() or "",
            ]
        )
    blocks = [
        Table(head, rows, asides),
        Text(steadiness(cells)),
        concentration(cells),
    ]
    if picture := figures.training(results):
        blocks.append(picture)
    return blocks


def norm(cell, which):
    """After the warm-up; older records have only that of all steps, which is marked."""
    own = cell.mean_of(lambda r: (r.get("gradient_norm_after_warmup") or {}).get(which))
    if own is not None:
        return plain(own)
    whole = cell.mean_of(lambda r: (r.get("gradient_norm") or {}).get(which))
    return NONE if whole is None else f"{plain(whole)} w"


def steadiness(cells):
    every = sorted({r["settings"].get("train.log_every", 10) for c in cells for r in c.good})
    steps = " or ".join(str(n) for n in every)
    text = (
        "How steady the training was, and how the heads concentrate at its end. The norm of the "
        f"gradient is that of the steps after the warm-up that are in the log, one of {steps}"
    )
    if any("gradient_norm" in r for c in cells for r in c.good):
        text += "; w: with the steps of the warm-up, where a record has no more"
    return text + ". Of Diag the instruments measure the blocks, of others the long-range part:"


def concentration(cells):
    """How steady the training was, and how the heads concentrate at its end."""
    head = [
        "attention",
        "spikes",
        "gradient norm: median",
        "99%",
        "largest",
        "entropy, nats",
        "gap",
        "log-variance",
        "alpha",
        "beta",
    ]
    rows = [
        [
            label(c),
            plain(c.mean_of(lambda r: r.get("spikes"))),
            *(norm(c, which) for which in ("median", "p99", "max")),
            fixed(c.instrument("entropy")),
            fixed(c.instrument("gap"), 3),
            fixed(c.instrument("log_variance")),
            fixed(c.instrument("alpha")),
            fixed(c.instrument("beta")),
        ]
        for c in cells
        if c.good
    ]
    return Table(head, rows)


def row_names(results):
    """Rows with a record in any part, in the order of the plan."""
    found = {}
    for (_, name), cell in results.cells.items():
        if cell.records:
            found[name] = label(cell)
    order = [row["name"] for row in results.experiment.rows]
    return sorted(found.items(), key=lambda item: order.index(item[0]))


def across(results, parts, text):
    """A table of rows against parts by text(cell)."""
    return [
        [name, *(text(results.cell(part["name"], row)) for part in parts)]
        for row, name in row_names(results)
    ]


def many(results):
    parts = [p for p in results.experiment.parts if results.rows(p["name"])]
    chances = [results.chance(p["name"]) for p in parts]
    head = [
        "attention",
        *(
            f"{part_label(p)}: {unit(c[0])}" if c else part_label(p)
            for p, c in zip(parts, chances, strict=True)
        ),
    ]
    rows = [["nothing learned", *(value(c[0], c[1]) if c else NONE for c in chances)]]
    rows += across(results, parts, result)
    asides = {0}
    for line in results.experiment.table.get("published", []):
        asides.add(len(rows))
        rows.append(
            [
                f"{line['label']}, published ({line['source']})",
                *(published(line["values"].get(p["name"])) for p in parts),
            ]
        )
    costs = [["attention", *(part_label(p) for p in parts)], across(results, parts, speed)]
    return [
        Table(head, rows, asides),
        Text("Tokens or rows a second, and peak memory:"),
        Table(*costs),
        *remarks(results),
    ]


def published(number):
    return NONE if number is None else number if isinstance(number, str) else f"{100 * number:.1f}"


def speed(cell):
    if cell is None or not cell.good:
        return NONE
    memory = size(cell.mean_of(lambda r: r.get("memory_bytes")))
    found = cell.mean_of(speed_of)
    return memory if found is None else f"{rate(found)}/s, {memory}"


def remarks(results):
    found = [
        f"{part_label(c.part)}, {label(c)}: {c.marks()}"
        if c.part["name"]
        else f"{label(c)}: {c.marks()}"
        for c in results.cells.values()
        if c.marks()
    ]
    return [Points(found)] if found else []


def grid(results):
    return [*grids.tables(results, row_names(results)), *remarks(results)]


def cost_cell(cell, tokens, key, text):
    for record in cell.alone if cell else []:
        for point in record["cost"]:
            if point["tokens"] == tokens:
                if "failure" in point:
                    return point["failure"].partition(":")[0]
                return text(point.get(key))
    return NONE


def cost(results):
    cells = results.rows("")
    lengths = results.experiment.table["tokens"]
    blocks = []
    for title, key, text in (
        ("Time of a training step:", "step_ms", milliseconds),
        ("Peak memory:", "memory_bytes", size),
    ):
        rows = [[label(c), *(cost_cell(c, n, key, text) for n in lengths)] for c in cells]
        blocks += [Text(title), Table(["attention", *map(str, lengths)], rows)]
    lines = results.experiment.table.get("published", [])
    if lines:
        used = sorted({int(n) for line in lines for n in line["values"]})
        rows = [
            [
                f"{line['label']} ({line['source']})",
                *(line["values"].get(str(n), NONE) for n in used),
            ]
            for line in lines
        ]
        blocks += [
            Text("Published, memory and time:"),
            Table(["attention", *map(str, used)], rows, set(range(len(rows)))),
        ]
    if picture := figures.cost(results):
        blocks.append(picture)
    return [*blocks, *remarks(results)]


def generated(record, position):
    return record.get("generated", {}).get(str(position), {})


def speed_between(record, first, last):
    """Tokens a second from one position to the next; time is counted from the first token on."""
    begin = 0.0 if first == 1 else generated(record, first).get("seconds")
    end = generated(record, last).get("seconds")
    if not alone(record) or begin is None or end is None or end <= begin:
        return None
    return (last - first) / (end - begin)


def causal(results):
    """Perplexities, and what generating costs."""
    others = results.experiment.table.get("evaluate_on", [])
    head = ["attention", "seeds", "perplexity", *(f"perplexity, {name}" for name in others)]
    rows = []
    if found := results.chance(""):
        rows.append(
            [
                f"nothing learned: {found[2]}",
                NONE,
                plain(math.exp(found[1]), 4),
                *(NONE for _ in others),
            ]
        )
    lengths = results.experiment.table.get("generate", [])
    made = []
    for cell in results.rows(""):

        def perplexity(record, name):
            loss = record.get("evaluated_on", {}).get(name, {}).get("loss")
            return math.exp(loss) if loss is not None else None

        if not cell.good:
            continue
        own = cell.mean_of(lambda r: math.exp(r["final"]["loss"]))
        rows.append(
            [
                label(cell),
                str(len(cell.good)),
                plain(own, 4),
                *(plain(cell.mean_of(lambda r, n=n: perplexity(r, n)), 4) for n in others),
            ]
        )
        texts = []
        for before, n in zip([1, *lengths], lengths, strict=False):
            speed = cell.mean_of(lambda r, a=before, b=n: speed_between(r, a, b))
            memory = cell.mean_of(lambda r, n=n: generated(r, n).get("memory_bytes"))
            texts.append(f"{rate(speed)}/s, {size(memory)}" if memory is not None else NONE)
        made.append([label(cell), *texts])
    return [
        *single(results),
        Table(head, rows, {0}),
        Text(
            "Generating one text: tokens a second between two positions of it, and what the layers "
            "keep of it at the second."
        ),
        Table(
            [
                "attention",
                *(f"{a} to {b}" for a, b in zip([1, *lengths], lengths, strict=False)),
            ],
            made,
        ),
    ]


def training_seconds(record):
    """Of the steps alone, without evaluations and instruments."""
    return record["final_step"] * record["batch"] / record["rows_per_second"]


def loss_at(record, seconds):
    """The validation metric after so many seconds of training, between evaluations by a line."""
    per_step = record["batch"] / record["rows_per_second"]
    points = [(step * per_step, number) for step, number in record["curve"]]
    for (t0, y0), (t1, y1) in itertools.pairwise(points):
        if t0 <= seconds <= t1:
            return y0 + (y1 - y0) * (seconds - t0) / (t1 - t0)
    return points[-1][1] if points and math.isclose(points[-1][0], seconds) else None


def mean_or_none(numbers):
    known = [n for n in numbers if n is not None]
    return statistics.fmean(known) if known else None


def equal_time(results):
    rows = []
    for part in results.experiment.parts:
        cells = [c for c in results.rows(part["name"]) if c.good]
        timed = {c.row["name"]: [r for r in c.alone if r.get("rows_per_second")] for c in cells}
        common = min((training_seconds(r) for own in timed.values() for r in own), default=None)
        for cell in cells:
            own = timed[cell.row["name"]]
            per_step = mean_or_none(1000 * r["batch"] / r["rows_per_second"] for r in own)
            then = mean_or_none(loss_at(r, common) for r in own)
            rows.append(
                [
                    part_label(part),
                    label(cell),
                    milliseconds(per_step),
                    result(cell),
                    duration(common),
                    value("loss", then),
                ]
            )
    head = ["rows of", "attention", "a step", "loss, all steps", "at equal time of", "loss then"]
    chance = next(
        (results.chance(p["name"]) for p in results.experiment.parts if results.chance(p["name"])),
        None,
    )
    if chance:
        rows.insert(
            0, ["any", f"nothing learned: {chance[2]}", NONE, value("loss", chance[1]), NONE, NONE]
        )
    blocks = [Table(head, rows, {0} if chance else set())]
    if picture := figures.equal_time(results):
        blocks.append(picture)
    return [*blocks, *remarks(results)]


def smoke(results):
    """What a rerun is compared with."""
    rows = []
    for cell in results.cells.values():
        for record in cell.good:
            metric, number = compare.measure(record)
            tolerance = compare.tolerance_of(results.experiment, cell.part["name"], metric, number)
            chance = results.chance(cell.part["name"])
            rows.append(
                [
                    part_label(cell.part),
                    label(cell),
                    metric,
                    fixed(chance[1], 3) if chance else NONE,
                    fixed(number, 3),
                    fixed(tolerance, 3),
                    duration(record["seconds"])
                    + ("" if alone(record) else f", {record['jobs']} at a time"),
                ]
            )
    head = ["group", "attention", "metric", "nothing learned", "recorded", "a rerun is within"]
    return [Table([*head, "took"], rows), *remarks(results)]


def view_of(results):
    table = results.experiment.table
    if table.get("view") == "smoke":
        return smoke
    if table.get("view") == "equal-time":
        return equal_time
    if table.get("kind") == "cost":
        return cost
    if any("family" in part for part in results.experiment.parts):
        return grid
    if table.get("generate"):
        return causal
    return many if results.experiment.parts[0]["name"] else single


def runs(count):
    return f"{count} run" + "s" * (count != 1)


def evaluated(results):
    """On how many rows of the validation set, which may have fewer than were asked for."""
    found = {}
    for cell in results.cells.values():
        for count in (r.get("data_rows") for r in cell.good):
            if count:
                found.setdefault(count, []).append(part_label(cell.part))
    if not found:
        return ""
    if len(found) == 1:
        return f" Evaluated on {next(iter(found))} rows."
    each = (f"{count} ({', '.join(dict.fromkeys(names))})" for count, names in found.items())
    return f" Evaluated on {'; '.join(each)} rows."


def section(results):
    experiment = results.experiment
    blocks = [Heading(3, experiment.table["title"])]
    for key in ("about", "note"):
        if experiment.table.get(key):
            blocks.append(Text(experiment.table[key]))
    blocks.append(Code(command(experiment)))
    records = results.records
    stale = f"; {results.stale} records of other settings are left out" if results.stale else ""
    if not records:
        return [*blocks, Text(f"**Not run yet** ({runs(results.planned)}){stale}.")]
    left = results.planned - len(records)
    state = f"{len(records)} of {runs(results.planned)}" if left else runs(len(records))
    by = "; ".join(f"{text} ({runs(count)})" for text, count in machines(records))
    blocks.append(Text(f"{state}{stale}. {by}.{evaluated(results)}", small=True))
    return [*blocks, *view_of(results)(results)]
