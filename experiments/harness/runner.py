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

STOPPED, NOT_FINITE = 6, 7  # exit codes of lln train
GRACE = 30  # seconds from SIGTERM to SIGKILL
MESSAGE = 2000  # characters of a failure that are kept


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


def run_folder(options, experiment, name):
    return options.runs / experiment / name


def has_checkpoint(folder):
    return any(folder.glob("checkpoints/step-*/weights.safetensors"))


def source_job(job, experiments, reference):
    """The run that another one starts from: of the same seed where there is one."""
    experiment, row = reference
    found = [j for j in experiments(experiment).jobs if j.row == row and not j.part]
    if not found:
        raise LookupError(
            f"{job.experiment}: '{job.row}' starts from {experiment}:{row}, which is no row"
        )
    return next((j for j in found if j.seed == job.seed), found[0])


def common(options):
    words = ["--device", options.device]
    return words + (["--threads", str(options.threads)] if options.threads else [])


def train_command(options, job, sources):
    words = [
        options.lln,
        "train",
        str(job.config),
        "--run",
        str(run_folder(options, job.experiment, job.name)),
        *common(options),
    ]
    if options.data:
        words += ["--data", str(options.data)]
    sets = [*job.sets, *options.extra]
    if job.start:
        sets.append(f"train.start_from={run_folder(options, *sources[job.start])}")
    if job.calibration:
        sets.append(f"attention.calibration={calibration_file(options, job)}")
    for text in sets:
        words += ["--set", text]
    return words


def calibration_file(options, job):
    return options.runs / job.experiment / f"{job.name}.calibration.json"


def stages_of(options, job, sources):
    """The commands of a job, one after another, each with its name."""
    if job.kind == "cost":
        words = [
            options.lln,
            "cost",
            str(job.config),
            *common(options),
            "--json",
            "--tokens",
            ",".join(str(n) for n in job.tokens),
        ]
        if options.data:
            words += ["--data", str(options.data)]
        for text in [*job.sets, *options.extra]:
            words += ["--set", text]
        return [("cost", words)]
    stages = []
    run = str(run_folder(options, job.experiment, job.name))
    if job.calibration:
        source = str(run_folder(options, *sources[job.calibration]))
        dump = str(calibration_file(options, job).with_suffix(".safetensors"))
        stages += [
            (
                "dump",
                [
                    options.lln,
                    "dump",
                    source,
                    "-o",
                    dump,
                    "--rows",
                    "8",
                    "--device",
                    options.device,
                ],
            ),
            (
                "calibrate",
                [options.lln, "calibrate", dump, "-o", str(calibration_file(options, job))],
            ),
        ]
    stages.append(("train", train_command(options, job, sources)))
    for folder in job.evaluate_on:
        stages.append(
            (
                f"eval {folder}",
                [
                    options.lln,
                    "eval",
                    run,
                    *common(options),
                    "--data",
                    str(options.data / folder),
                    "--json",
                ],
            )
        )
    for tokens in job.generate:
        stages.append(
            (
                f"generate {tokens}",
                [options.lln, "generate", run, *common(options), "--tokens", str(tokens), "--json"],
            )
        )
    return stages


class Running:
    """A job in the middle of its stages."""

    def __init__(self, options, job, sources):
        self.options, self.job = options, job
        self.folder = run_folder(options, job.experiment, job.name)
        self.stages = stages_of(options, job, sources)
        self.begin = time.monotonic()
        self.outputs = {}  # stage -> what it printed, parsed
        self.cut = ""  # what cut it short: the limit, or the total
        self.killed_at = 0.0
        self.process = None
        if self.folder.exists():
            shutil.rmtree(self.folder)  # of a run that did not get to its record
        self.log = self.folder.with_name(self.folder.name + ".log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("", encoding="utf-8")
        self.next_stage()

    def next_stage(self):
        self.stage, words = self.stages.pop(0)
        self.stage_begin = time.monotonic()
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
        elif self.options.limit and now - self.stage_begin > self.options.limit:
            self.stop("limit")
        if self.cut and now > self.killed_at:
            self.process.kill()

    def ended(self):
        """Whether nothing is left to do; begins the next stage where one is."""
        code = self.process.poll()
        if code is None:
            return False
        self.code = code
        # What `lln cost` measured before a failure counts, too.
        if self.stage not in ("train", "dump", "calibrate"):
            try:
                self.outputs[self.stage] = json.loads(self.out.read_text(encoding="utf-8"))
            except json.JSONDecodeError:
                self.outputs[self.stage] = None
        if code != 0 or self.cut or not self.stages:
            return True
        self.next_stage()
        return False

    def message(self):
        text = self.log.read_text(encoding="utf-8", errors="replace")
        printed = self.out.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in (text + printed).splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("lln: ") and "warning" not in line]
        words = "\n".join(told or lines[-5:])
        # Folders of the machine that it ran on are nobody's business.
        for folder in (
            self.options.runs,
            self.options.data,
            pathlib.Path(self.options.lln).parent,
            self.job.config.parent,
        ):
            if folder is not None:
                words = words.replace(f"{folder}/", "").replace(str(folder), folder.name)
        return words[-MESSAGE:]

    def status(self):
        if self.cut:
            return "cut"
        if self.code == 0:
            return "finished"
        return "not_finite" if self.code == NOT_FINITE and self.stage == "train" else "failed"

    def record(self):
        job, options = self.job, self.options
        found = {
            "experiment": job.experiment,
            "part": job.part,
            "row": job.row,
            "seed": job.seed,
            "status": self.status(),
            "cut": bool(self.cut),
            "cut_by": self.cut,
            "device": options.device,
            "machine": options.machine,
            "jobs": options.jobs,
            "revision": options.revision,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "seconds": time.monotonic() - self.begin,
            "settings": effective(job, options),
        }
        if found["status"] in ("failed", "not_finite"):
            found["stage"] = self.stage
            found["message"] = self.message()
        if job.kind == "cost":
            printed = self.outputs.get("cost") or {}
            found["cost"] = cost_points(printed)
            found.update({key: printed[key] for key in ("torch", "version") if key in printed})
        elif (self.folder / "run.json").exists():
            found.update(records.training(self.folder))
        for stage, printed in self.outputs.items():
            verb, _, what = stage.partition(" ")
            if verb == "eval" and "metrics" in (printed or {}):
                found.setdefault("evaluated_on", {})[what] = printed["metrics"]
            elif verb == "generate" and printed:
                found.setdefault("generated", {})[what] = generation(printed)
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


def generation(printed):
    return {key: value for key, value in printed.items() if isinstance(value, (int, float))}


def effective(job, options):
    return {**job.settings, **plan.parsed_sets(options.extra)}


def same(found, job, options):
    return found["settings"] == records.rounded(effective(job, options))


def done(found, job, options):
    """Whether a record stands for this job: failures for other reasons than the numbers, and what
    the end of a whole command cut short, are tried again."""
    if found is None or options.again or not same(found, job, options):
        return False
    return found["status"] != "failed" and found.get("cut_by") != "total"


class Runner:
    def __init__(self, options, experiments, stores, say=None):
        self.options, self.experiments, self.stores = options, experiments, stores
        self.say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self.begin = time.monotonic()
        self.running, self.failed, self.finished = [], 0, 0

    def needed(self, jobs):
        """The jobs without a record, and before them the runs that they start from."""
        waiting, seen = [], set()

        def add(job, forced=False):
            if job.key in seen:
                return
            have = done(self.stores(job.experiment).find(job.key), job, self.options)
            if forced:
                have = has_checkpoint(run_folder(self.options, job.experiment, job.name))
            if have:
                return
            seen.add(job.key)
            for reference in (job.start, job.calibration):
                if reference:
                    add(source_job(job, self.experiments, reference), forced=True)
            waiting.append(job)

        for job in jobs:
            add(job)
        return waiting

    def sources(self, job):
        found = {}
        for reference in (job.start, job.calibration):
            if reference:
                source = source_job(job, self.experiments, reference)
                found[reference] = (source.experiment, source.name)
        return found

    def ready(self, job):
        return all(
            has_checkpoint(run_folder(self.options, *place)) for place in self.sources(job).values()
        )

    def total_over(self):
        return bool(self.options.total) and time.monotonic() - self.begin > self.options.total

    def run(self, jobs):
        """True where nothing failed. KeyboardInterrupt ends the children and is passed on."""
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
        except KeyboardInterrupt:
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
            job = next((job for job in waiting if self.ready(job)), None)
            if job is None:
                return
            waiting.remove(job)
            self.running.append(Running(self.options, job, self.sources(job)))

    def finish(self, running):
        found, job = running.record(), running.job
        store = self.stores(job.experiment)
        before = store.find(job.key)
        # A run that was repeated for its checkpoint alone does not replace its record.
        if not done(before, job, self.options):
            store.add(found)
            if self.options.copy:
                target = self.options.copy / job.experiment / store.path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(store.path, target)
        running.clean()
        self.finished += 1
        self.failed += found["status"] in ("failed", "not_finite")
        self.say(f"{self.finished}/{self.count}  {job.experiment} {job.name}  {summary(found)}")

    def end_children(self):
        for running in self.running:
            running.process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + GRACE
        for running in self.running:
            try:
                running.process.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
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
    if found["status"] in ("failed", "not_finite"):
        text += "  " + found["message"].splitlines()[0][:200] if found["message"] else ""
    return text
