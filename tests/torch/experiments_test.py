"""Every row of every experiment starts: the program takes its settings, trains two steps of a small
model on made-up data, and evaluates. So a row does not fail on a GPU for a name that was misspelt.

    experiments_test.py LLN GROUP

SPDX-License-Identifier: Apache-2.0
"""

import base64
import dataclasses
import functools
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM, GROUP = os.path.abspath(sys.argv.pop(1)), int(sys.argv.pop(1))
sys.dont_write_bytecode = True
for folder in ("experiments", "experiments/smoke"):
    sys.path.insert(0, str(ROOT / folder))
import make_data  # noqa: E402  (made findable above)
from harness import plan  # noqa: E402
from harness.record import Records  # noqa: E402
from harness.runner import Options, Runner  # noqa: E402

# A JPEG of 8 x 8 pixels of one colour.
JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDACgcHiMeGSgjISMtKygwPGRBPDc3PHtYXUlkkYCZlo+AjIqgtObDoKra"
    "rYqMyP/L2u71////m8H////6/+b9//j/2wBDASstLTw1PHZBQXb4pYyl+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4"
    "+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj4+Pj/wAARCAAIAAgDASIAAhEBAxEB/8QAFQABAQAAAAAAAAAAAAAAAAAA"
    "AAP/xAAUEAEAAAAAAAAAAAAAAAAAAAAA/8QAFQEBAQAAAAAAAAAAAAAAAAAAAgP/xAAUEQEAAAAAAAAAAAAAAAAA"
    "AAAA/9oADAMBAAIRAxEAPwCICZv/2Q=="
)
TASKS = {
    "SST-2": ("train.tsv", "dev.tsv", "sentence\tlabel", "{0}\t{2}"),
    "CoLA": ("train.tsv", "dev.tsv", "", "gj04\t{2}\t\t{0}"),
    "RTE": ("train.tsv", "dev.tsv", "index\tsentence1\tsentence2\tlabel", "{3}\t{0}\t{1}\t{4}"),
    "MRPC": (
        "msr_paraphrase_train.txt",
        "msr_paraphrase_test.txt",
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "{2}\t1\t2\t{0}\t{1}",
    ),
    "STS-B": ("sts-train.csv", "sts-dev.csv", "", "a\tb\tc\t{3}\t{2}.5\t{0}\t{1}"),
    "MNLI": (
        "train_subset.tsv",
        "dev_matched.tsv",
        "premise\thypothesis\tlabel",
        "{0}\t{1}\tneutral",
    ),
    "QNLI": (
        "train_reconstructed.tsv",
        "dev.tsv",
        "index\tquestion\tsentence\tlabel",
        "{3}\t{0}\t{1}\t{4}",
    ),
    "QQP": (
        "train_subset.tsv",
        "dev_subset.tsv",
        "question1\tquestion2\tis_duplicate",
        "{0}\t{1}\t{2}",
    ),
}
SMALL = [
    "train.warmup=1",
    "train.batch=4",
    "train.log_every=1",
    "train.evaluate_rows=4",
    "train.precision=f32",
    "train.cuda_graph=false",
    "model.layers=1",
    "model.dim=96",
    "train.evaluate_every=1000",
]
STEPS = ["train.steps=2", "train.instruments_every=2"]
WORDS = [*SMALL, *STEPS, "data.tokens=64", "model.max_tokens=512"]
# What makes each of them small; grids and lengths stay what they are.
SETTINGS = {
    "glue": [*SMALL, "train.epochs=0.07", "data.tokens=64"],
    "vision": [*SMALL, "train.epochs=0.1", "train.instruments_every=0"],
    "lra": [*SMALL, *STEPS, "train.instruments_every=0"],
    "recall": [*SMALL, *STEPS],
    "cost": [
        "train.precision=f32",
        "train.cuda_graph=false",
        "model.layers=1",
        "model.dim=96",
        "model.heads=2",
        "data.vocabulary=64",
    ],
    "lra-cost": [
        "train.precision=f32",
        "train.cuda_graph=false",
        "model.layers=1",
        "train.batch=1",
    ],
    "smoke": ["train.steps=2", "train.warmup=1"],
}
LENGTHS = (64,)  # of costs


def write_glue(folder):
    for name, (train, dev, header, line) in TASKS.items():
        (folder / name).mkdir(parents=True)
        for file in (train, dev):
            rows = [header] if header else []
            for i in range(40):
                answer = "entailment" if i % 2 else "not_entailment"
                rows.append(line.format(f"mine {i} soka pama", f"mene {i} mine", i % 2, i, answer))
            (folder / name / file).write_text("\n".join(rows) + "\n", encoding="utf-8")


def write_data(folder):
    """One folder with all that experiments/README.md names."""
    text = make_data.text(40, 1)
    (folder / "words.txt").write_text(text, encoding="utf-8")
    for target, more in (
        ("tokens", ["--vocab", "200"]),
        ("wikitext2/tokens", ["--tokenizer", folder / "tokens/tokenizer.model"]),
    ):
        subprocess.run(
            [
                PROGRAM,
                "tokenize",
                folder / "words.txt",
                "--hold-out",
                "0.3",
                "-o",
                folder / target,
                *more,
            ],
            check=True,
            capture_output=True,
        )
    write_glue(folder / "glue")
    for name in ("train", "test"):
        rows = ["label\trating\tid\ttext", *(f"{i % 2}\t1\t{i}\tmine soka {i}" for i in range(8))]
        (folder / f"imdb.{name}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
        pixels = b"".join(bytes([i % 10]) + bytes(1024) for i in range(400))
        (folder / f"cifar10_gray_{name}.bin").write_bytes(pixels)
    articles = [
        f"= Title {i} =\n\n" + text[40 * i : 40 * i + 9000].replace("\n", " ") + "\n\n"
        for i in range(200)
    ]
    (folder / "enwiki2015.train.0.txt").write_text("".join(articles), encoding="utf-8")
    picture = folder / "picture.jpg"
    picture.write_bytes(JPEG)
    with tarfile.open(folder / "catsdogs96.tar", "w") as archive:
        for i in range(40):
            archive.add(picture, f"train/{('cat', 'dog')[i % 2]}/{i}.jpg")


def covering(experiment):
    """The first seed of every row and of every part, not of each with each."""
    chosen, rows, parts = [], set(), set()
    for job in experiment.jobs:
        if job.seed == 0 and (job.row not in rows or job.part not in parts):
            chosen.append(job)
            rows.add(job.row)
            parts.add(job.part)
    return chosen


@functools.cache
def small(name):
    """The experiment with its own small settings: what starts from another's run finds it."""
    found, extra = plan.read(name), SETTINGS.get(name, WORDS)
    for i, job in enumerate(found.jobs):
        own = {"sets": (*job.sets, *extra)}
        own["settings"] = {**job.settings, **plan.parsed_sets(extra)}
        own["generate"] = tuple(n for n in job.generate if n <= 512)
        own["tokens"] = LENGTHS if job.kind == "cost" else ()
        found.jobs[i] = dataclasses.replace(job, **own)
    return found


class Start(unittest.TestCase):
    def test_rows_start(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        folder = pathlib.Path(scratch.name)
        write_data(folder)
        stores = {}

        def store(name):
            return stores.setdefault(name, Records(folder / "records" / name / "records.jsonl"))

        options = Options(
            lln=PROGRAM,
            data=folder,
            runs=folder / "runs",
            threads=1,
            jobs=2,
            limit=200,
            kept=frozenset(plan.starting_points()),
        )
        said, count = [], 0
        names = [n for n in plan.names() if plan.read(n).table["group"] == GROUP]
        if GROUP != 1:  # a row starts from it
            first = [j for j in small("language").jobs if j.row == "lln+diag-entropy"][:1]
            Runner(options, small, store, said.append).run(first)
        for name in names:
            jobs = covering(small(name))
            count += len(jobs)
            runner = Runner(options, small, store, said.append)
            self.assertTrue(runner.run(jobs), "\n".join(said[-20:]))
        done = [r for name in names for r in store(name).lines.values()]
        self.assertEqual(len(done), count, "\n".join(said))
        for record in done:
            self.assertEqual(record["status"], "finished", record)
            self.assertTrue(record.get("final") or record.get("cost"), record)


if __name__ == "__main__":
    unittest.main()
