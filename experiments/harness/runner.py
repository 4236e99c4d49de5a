"""Runs jobs as processes of `lln`, some at a time, and writes a record as each ends. Whoever stops
it (a limit, Ctrl-C) loses no finished run: the next start goes on with those that have no record.

SPDX-License-Identifier: Apache-2.0
"""

import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

from harness import plan
from harness import record as records
from harness.commands import checkpoints, run_folder, stages_of

STOPPED, NOT_FINITE = 6, 7  # exit codes of lln train
GRACE = 30  # seconds from SIGTERM to SIGKILL
MESSAGE = 2000  # characters of a failure that are kept
# In the folder of a run whose training came to its end: what it was trained with.
MARKER = "trained.json"


@dataclass
class Options:
    lln: str
    data: pathlib.Path | None
    runs: pathlib.Path
    device: str = "cpu"
    jobs: int = 1
    limit: float = 540
    total: float = 0  # 0: none
    threads: int = 0
    keep: bool = False
    kept: frozenset = frozenset()  # (experiment, row) whose checkpoints stay
    again: bool = False
    copy: pathlib.Path | None = None
    extra: tuple = ()  # --set for all
    revision: str = ""
    machine: dict = field(default_factory=dict)


class Running:
    """A job in the middle of its stages."""

    def __init__(self, options, job, sources, origins):
        self.options, self.job, self.origins = options, job, origins
        self.folder = run_folder(options, job.experiment, job.name)
        self.stages = stages_of(options, job, sources)
        self.begin = time.monotonic()
        self.outputs = {}  # stage -> what it printed, parsed
        self.passed = []  # stages that ended well
        self.cut = ""  # what cut it short: the limit, or the total
        self.killed_at = 0.0
        self.process, self.code = None, None
        if self.folder.exists():
            shutil.rmtree(self.folder)  # of a run that did not get to its record
        self.log = self.folder.with_name(self.folder.name + ".log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("", encoding="utf-8")
        self.next_stage()

    def next_stage(self):
        self.stage, words = self.stages.pop(0)
        self.out = self.log.with_suffix(".out")
        with self.log.open("ab") as log, self.out.open("wb") as out:
            # A group of its own: Ctrl-C at the terminal is for the runner, which ends its children.
            self.process = subprocess.Popen(
                words, stdout=out, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def stop(self, why):
        if not self.cut:
            self.cut = why
            self.killed_at = time.monotonic() + GRACE
            self.process.terminate()

    def check_limits(self, total_over):
        now = time.monotonic()
        if total_over:
            self.stop("total")
        elif self.options.limit and now - self.begin > self.options.limit:
            self.stop("limit")
        if self.cut and now > self.killed_at:
            self.process.kill()

    def ended(self):
        """Whether nothing is left to do; begins the next stage where one is."""
        self.code = self.process.poll()
        if self.code is None:
            return False
        # What `lln cost` measured before a failure counts, too.
        if self.stage not in ("train", "dump", "calibrate"):
            try:
                self.outputs[self.stage] = json.loads(self.out.read_text(encoding="utf-8"))
            except json.JSONDecodeError:
                self.outputs[self.stage] = None
        if self.code == 0:
            self.passed.append(self.stage)
            if self.stage == "train":
                self.mark()
            if any("failure" in point for point in cost_points(self.outputs.get(self.stage))):
                self.stages.clear()  # greater lengths need more memory
        if self.code != 0 or not self.stages:
            return True
        if self.cut:
            self.stage = self.stages[0][0]  # it is this one that is missing
            return True
        self.next_stage()
        return False

    def mark(self):
        text = json.dumps(mark_of(self.job, self.options, self.origins))
        part = self.folder / f".{MARKER}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(self.folder / MARKER)

    def message(self):
        text = self.log.read_text(encoding="utf-8", errors="replace")
        printed = self.out.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in (text + printed).splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("lln: ") and "warning" not in line]
        return self.without_folders("\n".join(told or lines[-5:]))

    def without_folders(self, words):
        """Folders of the machine that it ran on are nobody's business."""
        for folder in (
            self.options.runs,
            self.options.data,
            pathlib.Path(self.options.lln).parent,
            self.job.config.parent,
        ):
            if folder is not None:
                words = words.replace(f"{folder}/", "").replace(str(folder), folder.name)
        return words[-MESSAGE:]

    def state(self):
        """Of the stage that was the last."""
        if self.stage in self.passed:
            return "finished"
        if self.cut:
            return "cut"
        return "not_finite" if self.code == NOT_FINITE and self.stage == "train" else "failed"

    def identity(self):
        job, options = self.job, self.options
        return {
            "experiment": job.experiment,
            "part": job.part,
            "row": job.row,
            "seed": job.seed,
            "device": options.device,
            "machine": options.machine,
            "jobs": options.jobs,
            "revision": options.revision,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "seconds": time.monotonic() - self.begin,
            **mark_of(job, options, self.origins),
        }

    def record(self):
        """Of a run whose folder cannot be read it is one of a failure, and says why."""
        try:
            return {**self.identity(), **self.outcome()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            said = self.without_folders(f"{type(error).__name__}: {error}")
            failed = {"status": "failed", "cut": False, "cut_by": "", "stage": "record"}
            return {**self.identity(), **failed, "message": f"its folder cannot be read: {said}"}

    def outcome(self):
        """The state of the training, and apart from it that of what came later."""
        state, later = self.state(), "train" in self.passed and self.stage != "train"
        own = "finished" if later else state
        found = {"status": own, "cut": own == "cut", "cut_by": self.cut if own == "cut" else ""}
        place = {"stage": self.stage}
        if state in ("failed", "not_finite"):
            place["message"] = self.message()
        if later and state != "finished":
            found["later"] = {**place, "status": state, "cut_by": self.cut}
        elif own in ("failed", "not_finite"):
            found.update(place)
        if self.job.kind == "cost":
            printed = [p for p in self.outputs.values() if p]
            found["cost"] = [point for p in printed for point in cost_points(p)]
            for p in printed[:1]:
                found.update({key: p[key] for key in ("torch", "version") if key in p})
        elif (self.folder / "run.json").exists():
            warmup = effective(self.job, self.options).get("train.warmup", 0)
            found.update(records.training(self.folder, warmup))
        for stage, printed in self.outputs.items():
            verb, _, what = stage.partition(" ")
            if verb == "eval" and "metrics" in (printed or {}):
                found.setdefault("evaluated_on", {})[what] = printed["metrics"]
            elif verb == "generate" and printed:
                found["generated"] = generation(printed, self.job.generate)
        return found

    def clean(self):
        """Checkpoints go, unless another run may start from them; logs stay."""
        self.out.unlink(missing_ok=True)
        job = self.job
        if not self.options.keep and (job.experiment, job.row) not in self.options.kept:
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)


def cost_points(printed):
    if not printed or "points" not in printed:
        return []
    kept = (
        "tokens",
        "rows",
        "parameters",
        "step_ms",
        "fastest_ms",
        "tokens_per_second",
        "memory_bytes",
        "failure",
    )
    return [{key: point[key] for key in kept if key in point} for point in printed["points"]]


def generation(printed, positions):
    """Seconds and memory at these positions of the text."""
    marks = {mark.pop("tokens"): mark for mark in printed.get("marks", [])}
    return {str(n): marks[n] for n in positions if n in marks}


def effective(job, options):
    return {**job.settings, **plan.parsed_sets(options.extra)}


def mark_of(job, options, origins):
    """What a result depends on: the settings, and those of the runs that it starts from."""
    return records.rounded({"settings": effective(job, options), **origins})


def marked(folder, mark):
    """Whether the folder has the end of a training of just that."""
    try:
        found = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return found == mark and bool(checkpoints(folder))


def whole(found):
    """Whether there is nothing that a rerun could add."""
    return found["status"] == "finished" and "later" not in found


def done(found, mark, again=False):
    """Whether a record stands for a job: failures for other reasons than the numbers, and what
    the end of a whole command cut short, are tried again."""
    if found is None or again or any(found.get(key) != mark.get(key) for key in plan.MARKS):
        return False
    states = [found, found.get("later", {})]
    return not any(s.get("status") == "failed" or s.get("cut_by") == "total" for s in states)


def replaces(found, before, planned):
    """Whether a record takes the place of another: a failure or a part never that of a whole one,
    unless only the new one is of the settings that the plan has now."""
    if before is None or not whole(before) or whole(found) or found["status"] == "not_finite":
        return True
    return before["settings"] != planned and found["settings"] == planned


class Runner:
    def __init__(self, options, experiments, stores, say=None):
        self.options, self.experiments, self.stores = options, experiments, stores
        self.say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self.begin = time.monotonic()
        self.running, self.failed, self.finished = [], 0, 0

    def origins(self, job):
        return plan.origins(job, self.experiments, self.options.extra)

    def mark(self, job):
        return mark_of(job, self.options, self.origins(job))

    def done(self, job):
        found = self.stores(job.experiment).find(job.key)
        return done(found, self.mark(job), self.options.again)

    def trained(self, job):
        return marked(run_folder(self.options, job.experiment, job.name), self.mark(job))

    def source_jobs(self, job):
        return {
            reference: plan.source_job(job, self.experiments, reference)
            for reference in (job.start, job.calibration)
            if reference
        }

    def needed(self, jobs):
        """The jobs without a record, and before them the runs that they start from."""
        waiting, seen = [], set()

        def add(job, forced=False):
            if job.key in seen or (self.trained(job) if forced else self.done(job)):
                return
            seen.add(job.key)
            for source in self.source_jobs(job).values():
                add(source, forced=True)
            waiting.append(job)

        for job in jobs:
            add(job)
        return waiting

    def sources(self, job):
        return {ref: (own.experiment, own.name) for ref, own in self.source_jobs(job).items()}

    def ready(self, job, waiting):
        """Whether what it starts from is trained to its end, and will not be trained again."""
        ahead = {other.key for other in waiting} | {r.job.key for r in self.running}
        sources = self.source_jobs(job).values()
        return all(own.key not in ahead and self.trained(own) for own in sources)

    def total_over(self):
        return bool(self.options.total) and time.monotonic() - self.begin > self.options.total

    def run(self, jobs):
        """True where nothing failed. Whatever ends it early ends the children and is passed on."""
        waiting = self.needed(jobs)
        self.count = len(waiting)
        try:
            while waiting or self.running:
                self.fill(waiting)
                if not self.running:
                    break
                time.sleep(0.05)
                for running in list(self.running):
                    if running.ended():
                        self.running.remove(running)
                        self.finish(running)
                    else:
                        running.check_limits(self.total_over())
        except BaseException:
            self.end_children()
            raise
        for job in waiting:
            self.say(
                f"not run: {job.experiment} {job.name}"
                + ("" if self.total_over() else ": what it starts from has not been trained")
            )
        return self.failed == 0 and (not waiting or self.total_over())

    def fill(self, waiting):
        while len(self.running) < self.options.jobs and not self.total_over():
            job = next((job for job in waiting if self.ready(job, waiting)), None)
            if job is None:
                return
            waiting.remove(job)
            self.running.append(Running(self.options, job, self.sources(job), self.origins(job)))

    def finish(self, running):
        found, job = records.rounded(running.record()), running.job
        store = self.stores(job.experiment)
        before, note = store.find(job.key), ""
        # A run that was repeated for its checkpoint alone does not replace its record.
        if not self.done(job):
            if replaces(found, before, records.rounded(job.settings)):
                self.keep(store, job, found)
            else:
                note = "  (not recorded: the record of the run that finished stays)"
        running.clean()
        self.finished += 1
        states = (found["status"], found.get("later", {}).get("status"))
        self.failed += "failed" in states or "not_finite" in states
        text = f"{self.finished}/{self.count}  {job.experiment} {job.name}  {summary(found)}{note}"
        self.say(text)

    def keep(self, store, job, found):
        store.add(found)
        if self.options.copy:
            target = self.options.copy / job.experiment / store.path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(store.path, target)

    def end_children(self):
        """Asked to end, and killed where they do not, or where Ctrl-C comes a second time."""
        for running in self.running:
            running.process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + GRACE
        for running in self.running:
            try:
                running.process.wait(max(0.1, limit - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as why:
                if isinstance(why, KeyboardInterrupt):
                    limit = 0.0
                running.process.kill()
                running.process.wait()


def summary(found):
    text = f"{found['status']}  {found['seconds']:.0f} s"
    if found.get("best"):
        metric = found["metric"]
        text += (
            f"  {metric} {found['best'][metric]:.4f} (chance {found['chance']:.4f})"
            f" at step {found['best_step']}/{found['steps']}"
        )
    bad = found.get("later", found)
    if "later" in found:
        text += f"  {bad['stage']}: {bad['status']}"
    if bad.get("message"):
        text += "  " + bad["message"].splitlines()[0][:200]
    return text
