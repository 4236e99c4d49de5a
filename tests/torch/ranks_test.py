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
from program import lln
from rank_jobs import EXACT, SGD, Job, Ranks, free_port, settings

KILLS = 10
TIMEOUT = 6  # seconds, --rank-timeout
SLACK = 40   # more than that, on a busy machine, until the others have ended


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

    def test_parts_of_batches(self):
        # Shares of 4 rows in 2 parts; of 2, 3 and 3 rows in 4, of which some have no row.
        self.one("one", SGD)
        for ranks, accumulate in ((2, 2), (3, 4)):
            run = f"parts{accumulate}"
            self.train(ranks, run, (*SGD, f"train.accumulate={accumulate}"))
            self.assert_same_weights("one", run, 50, 1e-5)
            self.assert_close(self.losses(run), self.losses("one"), 1e-5)

    def test_early_stop(self):
        # Evaluations of rank 0 end all.
        done = self.train(2, "run", (*SGD, "train.learning_rate=0", "train.patience=2",
                                     "train.evaluate_every=4"))
        self.assertIn("ended early at step 12", done.outputs[0])

    def test_threads_are_those_of_the_first(self):
        # As on machines with different numbers of cores.
        values = ("train.steps=20", "train.instruments_every=0")
        self.train(2, "own", values, threads=0, variables={
            0: {"OMP_NUM_THREADS": "1"}, 1: {"OMP_NUM_THREADS": "2"}})
        self.train(2, "told", values, threads=1)
        self.assert_same_run("own", "told", 20)
        job = self.job(2, "other", values, threads=0,
                       more={0: ("--threads", "1"), 1: ("--threads", "2")}).end()
        self.assertEqual(job.codes, [8, 2], job.errors)
        self.assertIn("--threads 2 of rank 1: rank 0 has 1", job.errors[1])

    def test_resumed_on_another_number_of_ranks(self):
        values = (*SGD, "train.steps=200", "train.log_every=1")
        self.one("one", values)
        job = self.job(2, "run", values)
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
                if not os.path.isdir(os.path.join(run, "checkpoints")):
                    self.assertNotIn("--resume", error)

    def test_killed_ranks(self):
        arguments = [self.config, "--resume", "--run"]
        begin = time.monotonic()
        self.assertEqual(Job(2, [*arguments, self.path("whole")]).end().codes, [0, 0])
        seconds = time.monotonic() - begin
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
            self.assert_same_run("whole", os.path.basename(run))
        # Otherwise all of them came before the first step.
        self.assertGreater(len(resumed), 0)

    def test_ranks_that_hang(self):
        for victim in (0, 2):
            run = f"run{victim}"
            job = self.job(3, run, ["train.steps=100000"], timeout=TIMEOUT)
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
                self.assertRegex(job.errors[rank], rf"rank {victim} \(pid .*is lost.*; --resume")

    def test_a_first_rank_that_hangs_before_they_meet(self):
        job = self.job(2, "run", timeout=2, started=1)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as store:
                if store.connect_ex(("127.0.0.1", job.port)) == 0:
                    break
            self.assertIsNone(job.processes[0].poll(), "it gave up before it was reached")
        job.processes[0].send_signal(signal.SIGSTOP)
        job.start(1)
        try:
            job.processes[1].wait(2 + SLACK)
        finally:
            for process in job.processes:
                process.kill()
            job.end()
        self.assertEqual(job.codes[1], 3, job.errors)
        self.assertRegex(job.errors[1], r"rank 0 at 127\.0\.0\.1:\d+ .*within")

    def test_a_job_that_was_suspended_goes_on(self):
        self.train(2, "whole")
        job = self.job(2, "run", timeout=TIMEOUT)
        self.wait_for_step("run", 10)
        for process in job.processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(TIMEOUT + 2)
        # Rank 0 is awake first, and finds an old sign of rank 1.
        for process in job.processes:
            process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        self.assertEqual(job.end().codes, [0, 0], job.errors)
        self.assert_same_run("whole", "run")

    def test_an_error_of_one_rank_ends_all(self):
        self.train(2, "run", (*EXACT, "train.steps=2", "train.warmup=1"))
        job = self.job(2, "run").end()
        self.assertEqual(job.codes, [2, 8], job.errors)
        self.assertIn("--resume goes on with it", job.errors[0])
        self.assertRegex(job.errors[1], r"rank 0 \(pid .* ended: .*is there already")
        self.assertNotIn("newest checkpoint", job.errors[1])
        job = self.job(2, "few", ["train.batch=1", "train.accumulate=1"]).end()
        self.assertEqual(job.codes[0], 3, job.errors)
        self.assertIn("a row at least for each of 2 ranks", job.errors[0])

    def test_ranks_with_other_data(self):
        for name, words in (("own", "alpha beta gamma delta"), ("other", "gamma alpha beta delta")):
            text = pathlib.Path(self.path(name + ".txt"))
            text.write_text(f"{words}\n" * 400, encoding="utf-8")
            lln("tokenize", text, "-o", self.path(name), "--tokenizer", "bytes", "--hold-out", 0.1)
        # Sizes are the same: it is their words that differ.
        data = {rank: ("--data", self.path(name)) for rank, name in enumerate(("own", "own",
                                                                               "other"))}
        config = small_training.CONFIG.replace('task = "mqar"', 'task = "mlm"')
        for key in ("pairs", "vocabulary", "train_rows", "validation_rows"):
            config = re.sub(rf"^{key} = .*\n", "", config, flags=re.MULTILINE)
        pathlib.Path(self.config).write_text(config, encoding="utf-8")
        job = self.job(3, "run", more=data).end()
        self.assertEqual(job.codes, [8, 8, 3], job.errors)
        for error in job.errors:
            self.assertIn("the data of rank 2 are not those of rank 0: mlm", error)
            self.assertNotIn("--resume", error)

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
            taken.bind(("127.0.0.1", free_port()))
            taken.listen()
            place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": str(taken.getsockname()[1])}
            error = self.error(**place)
            self.assertRegex(error, r"cannot listen on 127\.0\.0\.1:\d+.*address already in use")
        self.assertRegex(self.error(**place), r"did not come .* within 1\.0 s: rank 1\n")
        error = self.error(**{**place, "RANK": "1"})
        # Torch gives up, or our own limit of two seconds more does first: it pauses between tries.
        self.assertRegex(error, r"^lln: (rank 1 did not reach rank 0 at 127\.0\.0\.1:\d+|"
                                r"rank 0 at 127\.0\.0\.1:\d+ did not answer) within \d\.0 s")
        self.assertFalse(re.search("frame #", error))


if __name__ == "__main__":
    unittest.main()
