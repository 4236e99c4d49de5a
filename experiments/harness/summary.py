"""Records as the page needs them: grouped by part and row, with mean and spread over seeds.

SPDX-License-Identifier: Apache-2.0
"""

import functools
import math
import statistics
from dataclasses import dataclass, field

from harness import plan
from harness.record import Records, rounded

# Attentions whose own matrix the instruments measure; of others they say what softmax would make of
# the same queries and keys. Of Diag it is the blocks.
MEASURED = ("diag", "softmax", "lln", "elu", "relu", "power", "quadratic", "linear", "performer")


@dataclass
class Cell:
    """All seeds of one row in one part."""

    part: dict
    row: dict
    records: list = field(default_factory=list)

    @property
    def good(self):
        """Those with a result: finished, or cut after an evaluation."""
        return [r for r in self.records if r.get("final") or r.get("cost")]

    @property
    def metric(self):
        return self.good[0]["metric"] if self.good else ""

    def values(self, metric=None):
        """Of the last evaluation: nothing is chosen by the validation set."""
        return [r["final"][metric or self.metric] for r in self.good]

    def mean(self, metric=None):
        return statistics.fmean(self.values(metric)) if self.good else None

    def deviation(self, metric=None):
        values = self.values(metric)
        return statistics.stdev(values) if len(values) > 1 else None

    def mean_of(self, key):
        """Of a number of the records, or of its first part where it is [mean, spread]."""
        values = [key(r) for r in self.good]
        values = [v for v in values if v is not None]
        return statistics.fmean(values) if values else None

    def instrument(self, name):
        def last(record):
            value = record["instruments"][-1].get(name) if record.get("instruments") else None
            return value[0] if isinstance(value, list) else value

        # Blocks that do not see each other have no gap.
        known = self.measured and not (name == "gap" and self.attention == "diag")
        return self.mean_of(last) if known else None

    @property
    def attention(self):
        return self.good[0]["settings"].get("attention.name", "") if self.good else ""

    @property
    def measured(self):
        return self.attention.removesuffix("+diag") in MEASURED

    @property
    def alone(self):
        """Those with a result whose times mean something."""
        return [r for r in self.good if alone(r)]

    def marks(self):
        """What a reader must know besides the number."""
        found = []
        cut = [r for r in self.records if r["cut"]]
        costs = [r for r in cut if "cost" in r]
        if costs:
            found.append(f"cut short after {len(costs[0]['cost'])} lengths")
        elif cut:
            where = " and ".join(str(r.get("final_step") or r.get("step", 0)) for r in cut)
            steps = cut[0].get("steps", "?")
            found.append(f"cut short: step {where} of {steps}")
        for later in (r["later"] for r in self.records if "later" in r):
            how = "cut short" if later["status"] == "cut" else "failed"
            said = first_line(later.get("message", ""))
            found.append(f"after the training, {later['stage']} {how}" + (said and f": {said}"))
        for status, words in (("not_finite", "not finite"), ("failed", "failed")):
            bad = [r for r in self.records if r["status"] == status]
            if bad:
                said = first_line(bad[0].get("message", ""))
                found.append(f"{len(bad)} of {len(self.records)} runs {words}: {said}")
        if self.row.get("note"):
            found.append(self.row["note"])
        return "; ".join(found)

    @property
    def cut(self):
        return any(r["cut"] for r in self.records)


def alone(record):
    """Whether it had the machine for itself."""
    return record["jobs"] == 1


def first_line(text):
    line = next((line for line in text.splitlines() if line.strip()), "")
    return line.removeprefix("lln: ").replace("|", "/")[:120]


def better(metric, a, b):
    return a < b if metric == "loss" else a > b


class Results:
    """The records of an experiment, in the order of its plan. Those of other settings than the
    plan's say nothing about it and are left out; how many is said."""

    def __init__(self, experiment, folder, records=None):
        self.experiment = experiment
        self.cells, self.stale, self.planned = {}, 0, len(experiment.jobs)
        lines = Records((records or folder) / experiment.name / "records.jsonl").lines
        others = functools.cache(lambda name: plan.read(name, folder))
        for job in experiment.jobs:
            key = (job.part, job.row)
            part, row = experiment.part(job.part), experiment.row(job.row)
            cell = self.cells.setdefault(key, Cell(part, row))
            found = lines.pop(job.key, None)
            if found is None:
                continue
            mark = rounded({"settings": job.settings, **plan.origins(job, others)})
            if all(found.get(key) == mark.get(key) for key in plan.MARKS):
                cell.records.append(found)
            else:
                self.stale += 1
        self.stale += len(lines)

    @property
    def records(self):
        return [r for cell in self.cells.values() for r in cell.records]

    def cell(self, part, row):
        return self.cells.get((part, row))

    def rows(self, part):
        """The cells of a part that have records."""
        return [c for (p, _), c in self.cells.items() if p == part and c.records]

    def chance(self, part):
        """(metric, value, text) that a model that learned nothing reaches."""
        for cell in self.rows(part):
            for record in cell.good:
                if record.get("chance") is not None:
                    return record["metric"], record["chance"], record["chance_text"]
        return None


def spearman(xs, ys):
    """Correlation of the ranks; equal values share their mean rank."""
    if len(xs) < 3:
        return None
    a, b = ranks(xs), ranks(ys)
    ma, mb = statistics.fmean(a), statistics.fmean(b)
    top = sum((x - ma) * (y - mb) for x, y in zip(a, b, strict=True))
    bottom = math.sqrt(sum((x - ma) ** 2 for x in a) * sum((y - mb) ** 2 for y in b))
    return top / bottom if bottom else None


# The least |rho| that has p < 0.05 (two-sided) by n; from 31 on the normal approximation.
LEAST = """1.000 .886 .786 .738 .700 .648 .618 .587 .560 .538 .521 .503 .485 .472 .460 .447 .435
.425 .415 .406 .398 .390 .382 .375 .368 .362"""
CRITICAL = {n: float(text) for n, text in enumerate(LEAST.split(), 5)}


def critical(count):
    """None where no correlation of so few points can be told from chance."""
    if count < min(CRITICAL):
        return None
    return CRITICAL.get(count) or 1.96 / math.sqrt(count - 1)


def ranks(values):
    order = sorted(range(len(values)), key=lambda i: values[i])
    found, i = [0.0] * len(values), 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for k in range(i, j + 1):
            found[order[k]] = (i + j) / 2
        i = j + 1
    return found


def machines(records):
    """Who computed them: [(text, runs)], the most frequent first."""
    counts = {}
    for r in records:
        about = r["machine"]
        name = about.get("gpu") or f"{about['cpu']}, {about['cores']} cores"
        torch = f", torch {r['torch']}" if r.get("torch") else ""
        shared = f", {r['jobs']} runs at a time" if r["jobs"] > 1 else ""
        revision = r["revision"] or "unknown"
        text = f"{name}{torch}, revision {revision}{shared}"
        counts[text] = counts.get(text, 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
