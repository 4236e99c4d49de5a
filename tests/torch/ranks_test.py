"""lln train on several ranks, as torchrun starts it: equal to one process, resumed on another
number of ranks, and ended by a rank that is lost.

    ranks_test.py LLN_TORCH [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import time
import unittest

import small_training  # first: it makes the next ones findable
import safetensors_file
from program import PROGRAM, Scratch, lln

# Without what differs between parts of a batch: dropout, and running moments.
EXACT = ("model.dropout=0", "attention.matching=learned", "train.accumulate=1", "train.steps=50",
         "train.checkpoint_every=10", "train.instruments_every=0")
SGD = (*EXACT, "train.optimizer=sgd", "train.learning_rate=0.1")
KILLS = 10
TIMEOUT = 6  # seconds, --rank-timeout
SLACK = 40   # more than that, on a busy machine, until the others have ended
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
    """The processes of one job; `codes` and `errors` of each once they have ended."""

    def __init__(self, ranks, arguments, timeout=60):
        port = free_port()
        command = [PROGRAM, "train", "--threads", "1", "--rank-timeout", str(timeout), *arguments]
        self.processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks),
                                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
            for rank in range(ranks)]

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

    def train(self, ranks, run, values=(), expect=0):
        done = Job(ranks, [self.config, "--run", self.path(run), *settings(values)]).end()
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


class Equal(Ranks):
    def test_sgd_on_one_two_and_three_ranks(self):
        # 8 rows on 3 ranks: 2, 3 and 3; a row has 4 predictions, so ranks count differently.
        self.one("one", SGD)
        for ranks in (2, 3):
            done = self.train(ranks, f"{ranks}", SGD)
            self.assert_same_weights("one", f"{ranks}", 50, 1e-5)
            self.assert_close(self.losses(f"{ranks}"), self.losses("one"), 1e-5)
            self.assertIn(f"on {ranks} ranks", done.errors[0])
            # Rank 0 alone speaks.
            self.assertEqual(done.errors[1:], [""] * (ranks - 1))
            self.assertEqual(done.outputs[1:], [""] * (ranks - 1))
        self.train(2, "again", SGD)
        self.assertEqual(small_training.files_of(self.path("again"), 50),
                         small_training.files_of(self.path("2"), 50))

    def test_adamw(self):
        values = (*EXACT, "attention.matching=ema", "train.learning_rate=3e-3")
        self.one("one", values)
        self.train(2, "two", values)
        self.assert_close(self.losses("two"), self.losses("one"), 1e-3)
        self.assertLess(self.losses("one")[-1], self.losses("one")[0] - 0.3)

    def test_parts_of_batches_and_early_stop(self):
        # Four parts of a share of 4 rows; evaluations of rank 0 end all.
        values = (*SGD, "train.accumulate=4", "train.learning_rate=0", "train.patience=2",
                  "train.evaluate_every=4")
        done = self.train(2, "run", values)
        self.assertIn("ended early at step 12", done.outputs[0])

    def test_resumed_on_another_number_of_ranks(self):
        values = (*SGD, "train.steps=200", "train.log_every=1")
        self.one("one", values)
        job = Job(2, [self.config, "--run", self.path("run"), *settings(values)])
        self.wait_for_step("run", 12)
        job.processes[1].send_signal(signal.SIGTERM)
        job.end()
        self.assertEqual(job.codes, [6, 6], job.errors)
        self.assertIn("stopped and saved at step", job.errors[0])
        steps = sorted(os.listdir(os.path.join(self.path("run"), "checkpoints")))
        self.assertLess(steps[-1], "step-00000200")
        job = Job(3, ["--resume", "--run", self.path("run")])
        self.wait_for_step("run", 30)
        job.processes[0].send_signal(signal.SIGINT)
        self.assertEqual(job.end().codes, [6, 6, 6], job.errors)
        lln("train", "--resume", "--run", self.path("run"))
        self.assert_same_weights("one", "run", 200, 1e-4)
        self.assert_close(self.losses("run"), self.losses("one"), 1e-4)


class Lost(Ranks):
    def end_without(self, job, victim, run):
        """The others end in time, and name the one that is lost."""
        begin = time.monotonic()
        others = [p for rank, p in enumerate(job.processes) if rank != victim]
        for process in others:
            process.wait(TIMEOUT + SLACK)
        self.assertLess(time.monotonic() - begin, TIMEOUT + SLACK)
        job.end()
        for rank, (code, error) in enumerate(zip(job.codes, job.errors)):
            if code == 0:  # it came after the last step
                self.assertTrue(os.path.isdir(small_training.checkpoint(run, 60)), error)
            elif rank != victim:
                # 3: before they had met.
                self.assertIn(code, (3, 8), error)
                self.assertRegex(error, rf"\brank {victim}\b")

    def test_killed_ranks(self):
        arguments = [self.config, "--resume", "--run"]
        begin = time.monotonic()
        self.assertEqual(Job(2, [*arguments, self.path("whole")]).end().codes, [0, 0])
        seconds = time.monotonic() - begin
        expected = small_training.files_of(self.path("whole"), 60)
        moments, kills, runs, resumed = random.Random(9), 0, 0, set()
        while kills < KILLS:
            run = self.path(f"killed{runs}")
            runs += 1
            while True:
                job = Job(2, [*arguments, run], timeout=TIMEOUT)
                share = moments.uniform(0.05, 0.9) if kills < KILLS else 1000.0
                try:
                    job.processes[0].wait(share * seconds)
                    self.assertEqual(job.end().codes, [0, 0], job.errors)
                    break
                except subprocess.TimeoutExpired:
                    victim = moments.randrange(2)
                    job.processes[victim].kill()
                    kills += 1
                    self.end_without(job, victim, run)
                    folder = os.path.join(run, "checkpoints")
                    if os.path.isdir(folder):
                        resumed.update(n for n in os.listdir(folder) if n.startswith("step-"))
            self.assertEqual(small_training.files_of(run, 60), expected)
            for log in ("metrics.jsonl", "instruments.jsonl"):
                self.assertEqual(small_training.rows(run, log),
                                 small_training.rows(self.path("whole"), log))
        # Otherwise all of them came before the first step.
        self.assertGreater(len(resumed), 0)

    def test_ranks_that_hang(self):
        for victim in (0, 2):
            run = f"run{victim}"
            job = Job(3, [self.config, "--run", self.path(run), *settings(["train.steps=100000"])],
                      timeout=TIMEOUT)
            self.wait_for_step(run, 10)
            job.processes[victim].send_signal(signal.SIGSTOP)
            try:
                for rank, process in enumerate(job.processes):
                    if rank != victim:
                        process.wait(TIMEOUT + SLACK)
            finally:
                job.processes[victim].kill()
            job.end()
            for rank in {0, 1, 2} - {victim}:
                self.assertEqual(job.codes[rank], 8)
                self.assertRegex(job.errors[rank], rf"rank {victim} \(pid .*is lost")

    def test_an_error_of_one_rank_ends_all(self):
        self.train(2, "run", (*EXACT, "train.steps=2", "train.warmup=1"))
        job = Job(2, [self.config, "--run", self.path("run")]).end()
        self.assertEqual(job.codes, [2, 8], job.errors)
        self.assertIn("--resume goes on with it", job.errors[0])
        self.assertRegex(job.errors[1], r"rank 0 \(pid .* ended: .*is there already")
        job = Job(2, [self.config, "--run", self.path("few"), *settings(
            ["train.batch=1", "train.accumulate=1"])]).end()
        self.assertEqual(job.codes[0], 3, job.errors)
        self.assertIn("a row at least for each of 2 ranks", job.errors[0])

    def test_a_loss_that_is_not_finite(self):
        done = self.train(2, "run", ("train.learning_rate=10", "train.weight_decay=10",
                                     "train.warmup=0", "train.schedule=constant"), expect=7)
        self.assertIn("the first ids", done.errors[0])
        self.assertEqual(done.errors[1], "")


class Environment(Ranks):
    def error(self, expect=3, **variables):
        return lln("train", self.config, "--run", self.path("run"), "--rank-timeout", "1",
                   expect=expect, env={**os.environ, **variables}).stderr

    def test_variables(self):
        self.assertIn("WORLD_SIZE is not set", self.error(RANK="0"))
        self.assertIn("RANK is not set", self.error(WORLD_SIZE="2"))
        both = {"RANK": "1", "WORLD_SIZE": "2"}
        self.assertIn("MASTER_ADDR is not set", self.error(**both))
        self.assertIn("MASTER_PORT is not set", self.error(**both, MASTER_ADDR="127.0.0.1"))
        place = {**both, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        self.assertIn("RANK=2 in the environment: expected a whole number from 0 to 1",
                      self.error(**{**place, "RANK": "2"}))
        self.assertIn("WORLD_SIZE=two", self.error(**{**place, "WORLD_SIZE": "two"}))
        self.assertIn("MASTER_PORT=99999", self.error(**{**place, "MASTER_PORT": "99999"}))

    def test_a_port_that_is_taken_and_ranks_that_do_not_come(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": str(taken.getsockname()[1])}
            error = self.error(**place)
            self.assertRegex(error, r"cannot listen on 127\.0\.0\.1:\d+.*address already in use")
        self.assertRegex(self.error(**place), r"did not come .* within 1\.0 s: rank 1\n")
        error = self.error(**{**place, "RANK": "1"})
        self.assertRegex(error, r"^lln: rank 1 did not reach rank 0 at 127\.0\.0\.1:\d+ within")
        self.assertFalse(re.search("frame #", error))


if __name__ == "__main__":
    unittest.main()
