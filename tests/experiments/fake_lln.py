#!/usr/bin/env python3
"""Stands in for `lln` in tests of the experiments: writes the folder of a run at once, with numbers
that follow from the settings. Settings that are no settings of lln choose what happens:
fake.exit (a code), fake.sleep (seconds before the end), fake.deaf (SIGTERM does nothing),
fake.broken (the folder cannot be read), fake.later (seconds that what reads the run takes),
fake.slow (a length whose cost takes long).

SPDX-License-Identifier: Apache-2.0
"""

import json
import math
import pathlib
import random
import signal
import sys
import time

import tomllib

STOPPED = 6


def arguments(words):
    options, sets, positional, i = {}, {}, [], 0
    while i < len(words):
        if words[i] == "--set":
            key, _, value = words[i + 1].partition("=")
            sets[key] = value
        elif words[i] == "--json":
            i -= 1
        elif words[i].startswith("-"):
            options[words[i]] = words[i + 1]
        else:
            positional.append(words[i])
            i -= 1
        i += 2
    return options, sets, positional


def setting(config, sets, key, default):
    if key in sets:
        return sets[key]
    table, _, name = key.partition(".")
    return config.get(table, {}).get(name, default)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def checkpoint(run):
    folder = run / "checkpoints/step-00000001"
    folder.mkdir(parents=True)
    (folder / "weights.safetensors").write_bytes(b"weights")


def write_run(run, config, sets, share=1.0):
    get = lambda key, default: setting(config, sets, key, default)  # noqa: E731
    numbers = random.Random(json.dumps(sets, sort_keys=True))
    task = get("data.task", "mlm")
    loss_task = task in ("mlm", "lm")
    metric = "loss" if loss_task else "matthews" if task == "cola" else "accuracy"
    chance = 7.5 if loss_task else 0.0 if metric == "matthews" else 0.5
    best = 3 + numbers.random() / 2 if loss_task else 0.6 + 0.4 * numbers.random()
    steps = int(get("train.steps", 400))
    run.mkdir(parents=True)
    facts = {
        "task": task,
        "metric": metric,
        "chance": chance,
        "chance_text": "a guess",
        "parameters": 1000,
        "steps": steps,
        "batch": int(get("train.batch", 32)),
        "torch": "2.0",
        "version": "0.0",
    }
    (run / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    rows, heads = [], []
    speed = 50 + 50 * numbers.random()
    for i in range(1, 41):
        step = steps * i // 40
        if i > 40 * share:
            break
        rows.append(
            {
                "step": step,
                "loss": 3 + 4 * math.exp(-i / 10),
                "learning_rate": 1e-3,
                "gradient_norm": 1 + numbers.random(),
                "tokens_per_second": 512 * speed,
                "rows_per_second": speed,
                "memory_bytes": 10**9,
                "seconds": i / 10,
            }
        )
        if i % 8 == 0:
            value = chance + (best - chance) * (1 - math.exp(-i / 8))
            evaluated = {metric: value, "loss": value}
            rows.append(
                {"step": step, "evaluation": evaluated, "rows": 8, "chance": chance, "best": True}
            )
        if i % 8 == 0 or i == 1:
            heads += [
                {
                    "step": step,
                    "layer": 0,
                    "head": h,
                    "kind": "lln",
                    "temperature": 1 + h,
                    "entropy": 5 - numbers.random(),
                    "entropy_limit": 6.2,
                    "gap": 0.9 * numbers.random() + 0.05,
                    "alpha": 2.0,
                    "beta": 2.0,
                }
                for h in (0, 1)
            ]
    write_lines(run / "metrics.jsonl", rows)
    write_lines(run / "instruments.jsonl", heads)
    checkpoint(run)


def train(options, sets, positional):
    run = pathlib.Path(options["--run"])
    if run.exists():
        sys.exit(f"lln: {run} is there already")
    start = pathlib.Path(sets.get("train.start_from", __file__))
    if not start.is_file() or (start.name == "weights.safetensors" and not ended(start.parents[2])):
        sys.exit("lln: it starts from a run that has not ended")
    config = tomllib.loads(pathlib.Path(positional[0]).read_text(encoding="utf-8"))
    code, wait = int(sets.get("fake.exit", 0)), float(sets.get("fake.sleep", 0))
    if code not in (0, 7):
        print("lln: warning: something small\nlln: it cannot work", file=sys.stderr)
        return code
    write_run(run, config, sets, share=0.5 if wait or code else 1.0)
    (run / "sets.json").write_text(json.dumps(sets), encoding="utf-8")
    if "fake.broken" in sets:
        (run / "run.json").write_text("{", encoding="utf-8")
    if code:
        print("lln: step 9: the loss is not finite", file=sys.stderr)
        return code
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN if "fake.deaf" in sets else lambda *_: sys.exit(STOPPED)
    )
    (run / "waits").touch()
    time.sleep(wait)
    return 0


def ended(run):
    return (run / "trained.json").exists()


def cost(options, sets):
    points, numbers = [], random.Random(json.dumps(sets, sort_keys=True))
    factor = 1 + numbers.random()
    for tokens in map(int, options["--tokens"].split(",")):
        time.sleep(60 if sets.get("fake.slow") == str(tokens) else 0)
        if tokens > 16384 and factor > 1.5:
            points.append(
                {"tokens": tokens, "rows": 1, "parameters": 1, "failure": "out of memory"}
            )
            break
        points.append(
            {
                "tokens": tokens,
                "rows": 1,
                "parameters": 1,
                "step_ms": tokens * factor / 99,
                "memory_bytes": int(1e9 + 1e5 * tokens),
            }
        )
    print(json.dumps({"points": points}))
    return 0


def main(words):
    verb = words[0]
    options, sets, positional = arguments(words[1:])
    if verb == "train":
        return train(options, sets, positional)
    if verb == "cost":
        return cost(options, sets)
    if verb in ("eval", "dump", "generate"):
        if options.get("--checkpoint") != "last":
            return 2
        sets = json.loads((pathlib.Path(positional[0]) / "sets.json").read_text(encoding="utf-8"))
        time.sleep(float(sets.get("fake.later", 0)))
    if verb == "eval":
        print(json.dumps({"metrics": {"loss": 4.0}}))
    elif verb == "generate":
        last = int(options["--tokens"])
        marks = [
            {"tokens": n, "seconds": n / 100, "memory_bytes": 1000} for n in (2, 4, 8, 16, last)
        ]
        print(json.dumps({"tokens_per_second": 100.0, "text": "a", "marks": marks}))
    elif verb in ("dump", "calibrate"):
        pathlib.Path(options["-o"]).write_text("{}", encoding="utf-8")
    else:
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
