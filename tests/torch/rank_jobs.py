"""lln train on several ranks: the processes of a job, and what the tests of them share.

SPDX-License-Identifier: Apache-2.0
"""

import os
import pathlib
import random
import socket
import subprocess
import time

import small_training  # first: it makes the next ones findable
import safetensors_file
from program import PROGRAM, Scratch, lln

# Without what differs between parts of a batch: dropout, and running moments.
EXACT = ("model.dropout=0", "attention.matching=learned", "train.accumulate=1", "train.steps=50",
         "train.checkpoint_every=10", "train.instruments_every=0")
SGD = (*EXACT, "train.optimizer=sgd", "train.learning_rate=0.1")
PORTS = (20000, 30000)  # below those that the system gives to connections


def settings(values):
    return [word for value in values for word in ("--set", value)]


def free_port():
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


class Job:
    """The processes of one job; `codes`, `outputs` and `errors` of each once they have ended.

    `more` has arguments, and `variables` the environment, of single ranks.
    """

    def __init__(self, ranks, arguments, timeout=60, threads=1, more=None, variables=None,
                 started=None):
        self.port = free_port()
        self.command = [PROGRAM, "train", "--rank-timeout", str(timeout), *arguments]
        if threads:
            self.command += ["--threads", str(threads)]
        self.more, self.variables, self.ranks = more or {}, variables or {}, ranks
        self.processes = []
        for rank in range(ranks if started is None else started):
            self.start(rank)

    def start(self, rank):
        self.processes.append(subprocess.Popen(
            [*self.command, *self.more.get(rank, ())],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **self.variables.get(rank, {}), "RANK": str(rank),
                 "WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(self.port)}))

    def end(self, limit=240):
        deadline = time.monotonic() + limit
        self.errors, self.outputs = [], []
        try:
            for process in self.processes:
                output, error = process.communicate(timeout=deadline - time.monotonic())
                self.outputs.append(output)
                self.errors.append(error)
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        self.codes = [process.returncode for process in self.processes]
        return self


class Ranks(Scratch):
    def setUp(self):
        super().setUp()
        self.config = self.path("small.toml")
        pathlib.Path(self.config).write_text(small_training.CONFIG, encoding="utf-8")

    def job(self, ranks, run, values=(), **options):
        return Job(ranks, [self.config, "--run", self.path(run), *settings(values)], **options)

    def train(self, ranks, run, values=(), expect=0, **options):
        done = self.job(ranks, run, values, **options).end()
        self.assertEqual(done.codes, [expect] * ranks, done.errors)
        return done

    def one(self, run, values):
        lln("train", self.config, "--run", self.path(run), "--threads", "1", *settings(values))

    def assert_same_weights(self, first, second, step, tolerance):
        a, b = (safetensors_file.read(os.path.join(
            small_training.checkpoint(self.path(run), step), "weights.safetensors"))[0]
            for run in (first, second))
        self.assertEqual(sorted(a), sorted(b))
        for name, (_, _, values) in a.items():
            self.assert_close(b[name][2], values, tolerance, name)

    def assert_same_run(self, first, second, step=60):
        """Bit for bit, with the same logs."""
        first, second = self.path(first), self.path(second)
        self.assertEqual(small_training.files_of(first, step),
                         small_training.files_of(second, step))
        for log in ("metrics.jsonl", "instruments.jsonl"):
            self.assertEqual(small_training.rows(first, log), small_training.rows(second, log))

    def losses(self, run):
        rows = small_training.rows(self.path(run), "metrics.jsonl")
        return [r.get("loss", r.get("evaluation", {}).get("loss")) for r in rows]

    def wait_for_step(self, run, step):
        log = pathlib.Path(self.path(run), "metrics.jsonl")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if log.exists() and f'"step":{step},' in log.read_text(encoding="utf-8"):
                return
            time.sleep(0.02)
        self.fail(f"step {step} was not reached")
