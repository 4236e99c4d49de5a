"""What is kept of a run: one line of JSON of a few kilobytes. Records of an experiment are the
lines of its records.jsonl, in the order of rows and seeds, so that two machines' lines merge.

SPDX-License-Identifier: Apache-2.0
"""

import json
import math
import os
import pathlib
import statistics

CURVE_POINTS = 40
INSTRUMENTS = ("temperature", "log_variance", "entropy", "entropy_limit", "gap", "alpha", "beta")
# A spike is a mean of `log_every` losses that lies above the median of the SPIKE_BEFORE means
# before it by more than SPIKE_DEVIATIONS of their median deviations (scaled to a normal's standard
# deviation) and by more than SPIKE_SHARE of the median: those deviations are near 0 at times.
SPIKE_BEFORE, SPIKE_DEVIATIONS, SPIKE_SHARE, NORMAL = 11, 5, 0.02, 1.4826


def rounded(value, digits=6):
    """Numbers with so many significant digits, in whatever holds them."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    return value


def json_lines(path):
    """The complete lines; the last of a killed process may be torn."""
    found = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return found


def thinned(points, most=CURVE_POINTS):
    """At most so many of the points, evenly, with the last one."""
    if len(points) <= most:
        return points
    return [points[math.ceil((i + 1) * len(points) / most) - 1] for i in range(most)]


def spikes(losses):
    count = 0
    for i in range(SPIKE_BEFORE, len(losses)):
        before = losses[i - SPIKE_BEFORE : i]
        middle = statistics.median(before)
        deviation = NORMAL * statistics.median(abs(loss - middle) for loss in before)
        limit = max(SPIKE_DEVIATIONS * deviation, SPIKE_SHARE * abs(middle))
        count += losses[i] > middle + limit
    return count


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def spread(values):
    """[mean, standard deviation] over heads."""
    values = [v for v in values if v is not None and math.isfinite(v)]
    if not values:
        return None
    return [statistics.fmean(values), statistics.pstdev(values)]


def instruments(rows):
    """One entry a step: mean and spread over layers and heads. The log-variance is 1/temperature^2,
    as both are defined."""
    steps = {}
    for row in rows:
        temperature = row.get("temperature")
        if temperature:
            row["log_variance"] = temperature**-2
        steps.setdefault(row["step"], []).append(row)
    found = []
    for step, heads in steps.items():
        entry = {"step": step, "kind": heads[0]["kind"], "heads": len(heads)}
        for name in INSTRUMENTS:
            value = spread([head.get(name) for head in heads])
            if value is not None:
                entry[name] = value[0] if name == "entropy_limit" else value
        found.append(entry)
    return thinned(found, 12)


def norms(rows):
    """Of the gradient, in the steps that were logged: every log_every-th."""
    found = [row["gradient_norm"] for row in rows]
    if not found:
        return None
    return {
        "median": statistics.median(found),
        "p99": quantile(found, 0.99),
        "max": max(found),
        "steps": len(found),
    }


def training(run, warmup=0):
    """What the folder of a run says, whole or cut short."""
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    lines = json_lines(run / "metrics.jsonl")
    logged = [line for line in lines if "evaluation" not in line]
    evaluated = [line for line in lines if "evaluation" in line]
    best = next((line for line in reversed(evaluated) if line["best"]), None)
    record = {
        key: facts.get(key)
        for key in ("task", "metric", "chance", "chance_text", "parameters", "steps", "batch")
    }
    record["step"] = logged[-1]["step"] if logged else 0
    record["data_rows"] = evaluated[-1]["rows"] if evaluated else None
    record["final"] = evaluated[-1]["evaluation"] if evaluated else None
    record["final_step"] = evaluated[-1]["step"] if evaluated else None
    record["best"] = best["evaluation"] if best else None
    record["best_step"] = best["step"] if best else None
    record["curve"] = thinned([[e["step"], e["evaluation"][facts["metric"]]] for e in evaluated])
    record["train_loss"] = thinned([[row["step"], row["loss"]] for row in logged])
    if logged:
        record["gradient_norm_after_warmup"] = norms([r for r in logged if r["step"] > warmup])
        record["spikes"] = spikes([row["loss"] for row in logged])
        for key in ("tokens_per_second", "rows_per_second"):
            speeds = [row[key] for row in logged if row.get(key)]
            record[key] = statistics.median(speeds) if speeds else None
        record["memory_bytes"] = max(row["memory_bytes"] for row in logged)
        record["train_seconds"] = logged[-1]["seconds"]
    record["instruments"] = instruments(json_lines(run / "instruments.jsonl"))
    return {"torch": facts["torch"], "version": facts["version"], **record}


class Records:
    """The lines of one experiment, on disk after each change."""

    def __init__(self, path, order=()):
        self.path = pathlib.Path(path)
        self.order = {key: i for i, key in enumerate(order)}
        self.lines = {key_of(line): line for line in json_lines(self.path)}

    def find(self, key):
        return self.lines.get(tuple(key))

    def add(self, record):
        self.lines[key_of(record)] = rounded(record)
        self.write()

    def write(self):
        """Under another name first: a record is there or not, never half."""
        last = len(self.order)
        ordered = sorted(self.lines.items(), key=lambda at: (self.order.get(at[0], last), at[0]))
        part = self.path.with_name(f".{self.path.name}.part")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            for _, line in ordered:
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
        os.replace(part, self.path)


def key_of(record):
    return (record["experiment"], record.get("part", ""), record["row"], record["seed"])
