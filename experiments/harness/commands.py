"""The commands of a job: a training with what is before and after it, or a cost for each length.

SPDX-License-Identifier: Apache-2.0
"""


def run_folder(options, experiment, name):
    return options.runs / experiment / name


def checkpoints(folder):
    """Files of weights, the last step's at the end."""
    return sorted(folder.glob("checkpoints/step-*/weights.safetensors"))


def common(options):
    words = ["--device", options.device]
    return words + (["--threads", str(options.threads)] if options.threads else [])


def start_of(folder):
    """Of the last step, as all results are; lln would take a run's best checkpoint."""
    return (checkpoints(folder) or [folder])[-1]


def configured(options, job, verb, more):
    words = [options.lln, verb, str(job.config), *common(options), *more]
    return words + (["--data", str(options.data)] if options.data else [])


def with_sets(words, sets):
    return words + [word for text in sets for word in ("--set", text)]


def train_command(options, job, sources):
    run = run_folder(options, job.experiment, job.name)
    words = configured(options, job, "train", ["--run", str(run)])
    sets = [*job.sets, *options.extra]
    if job.start:
        sets.append(f"train.start_from={start_of(run_folder(options, *sources[job.start]))}")
    if job.calibration:
        sets.append(f"attention.calibration={calibration_file(options, job)}")
    return with_sets(words, sets)


def calibration_file(options, job):
    return options.runs / job.experiment / f"{job.name}.calibration.json"


def cost_stages(options, job):
    """A process for each length: one that is stopped loses only the length it was at."""
    return [
        (
            f"cost {tokens}",
            with_sets(
                configured(options, job, "cost", ["--json", "--tokens", str(tokens)]),
                [*job.sets, *options.extra],
            ),
        )
        for tokens in job.tokens
    ]


def stages_of(options, job, sources):
    """The commands of a job, one after another, each with its name. What reads a run takes its last
    checkpoint."""
    if job.kind == "cost":
        return cost_stages(options, job)
    stages = []
    run = [str(run_folder(options, job.experiment, job.name)), "--checkpoint", "last"]
    if job.calibration:
        source = [str(run_folder(options, *sources[job.calibration])), "--checkpoint", "last"]
        result = calibration_file(options, job)
        dump = str(result.with_suffix(".safetensors"))
        words = [options.lln, "dump", *source, "-o", dump, "--rows", "8"]
        stages += [
            ("dump", [*words, "--device", options.device]),
            ("calibrate", [options.lln, "calibrate", dump, "-o", str(result)]),
        ]
    stages.append(("train", train_command(options, job, sources)))
    for folder in job.evaluate_on:
        words = [options.lln, "eval", *run, *common(options), "--json"]
        stages.append((f"eval {folder}", [*words, "--data", str(options.data / folder)]))
    if job.generate:
        words = [options.lln, "generate", *run, *common(options), "--json"]
        stages.append(("generate", [*words, "--tokens", str(job.generate[-1])]))
    return stages
