"""A run that was repeated, beside its record: within the tolerance or not.

SPDX-License-Identifier: Apache-2.0
"""

import math
from dataclasses import dataclass

TOLERANCE = 0.02  # of a loss, or of a share, where experiment.toml says nothing
TIME_TOLERANCE = 0.5  # of a ratio of times, as a share of it
SECONDS = 300  # that a run of the small experiments may take; others have the limit of all runs


@dataclass(frozen=True)
class Comparison:
    name: str
    metric: str
    recorded: float | None
    found: float | None
    tolerance: float
    seconds: float
    why: str = ""
    most_seconds: float = math.inf

    @property
    def fine(self):
        return not self.fault

    @property
    def fault(self):
        if self.why:
            return self.why
        if self.recorded is None or self.found is None:
            return "no result"
        if abs(self.found - self.recorded) > self.tolerance:
            return "differs"
        return "too slow" if self.seconds > self.most_seconds else ""


def measure(record):
    """(metric, number): the last evaluation; of costs, how often longer the longest row takes than
    the shortest, which does not depend on how fast a machine is."""
    if record is None:
        return "", None
    if "cost" in record:
        times = [p["step_ms"] for p in record["cost"] if "step_ms" in p]
        return "time, longest row over shortest", times[-1] / times[0] if len(times) > 1 else None
    final = record.get("final") or {}
    return record.get("metric", ""), final.get(record.get("metric"))


def tolerance_of(experiment, part, metric, recorded):
    times = metric.startswith("time")
    usual = experiment.table.get("tolerance", TIME_TOLERANCE if times else TOLERANCE)
    given = experiment.part(part).get("tolerance", usual)
    # Of times a share, since they are what they are.
    return given * recorded if times and recorded else given


def comparison(experiment, job, recorded, found):
    metric, before = measure(recorded)
    _, now = measure(found)
    tolerance = tolerance_of(experiment, job.part, metric, before)
    seconds = found["seconds"] if found else 0.0
    why = ""
    if found is None:
        why = "not run"
    elif found["status"] != "finished":
        why = found["status"]
    elif found["settings"] != recorded["settings"]:
        why = "the record is of other settings"
    most = SECONDS if experiment.table.get("view") == "smoke" else math.inf
    return Comparison(job.name, metric, before, now, tolerance, seconds, why, most)


def comparison_text(lines):
    def number(value):
        return "-" if value is None else f"{value:.4f}"

    head = f"{'run':38} {'metric':32} {'recorded':>9} {'now':>9} {'within':>8} {'seconds':>8}"
    rows = [head]
    for line in lines:
        rows.append(
            f"{line.name:38} {line.metric:32} {number(line.recorded):>9} "
            f"{number(line.found):>9} {line.tolerance:8.3f} {line.seconds:8.1f}  "
            f"{line.fault or 'ok'}"
        )
    bad = [line for line in lines if not line.fine]
    rows.append(f"{len(lines)} runs, {len(bad)} of them not as recorded")
    return "\n".join(rows)
