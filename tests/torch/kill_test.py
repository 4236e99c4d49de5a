"""kill -9 at 20 random moments of a training on the CPU: every time it resumes, and in the end
weights, optimiser and logs are those of a run that nobody disturbed.

    kill_test.py LLN_TORCH

SPDX-License-Identifier: Apache-2.0
"""

import os
import pathlib
import random
import signal
import subprocess
import time
import unittest

import small_training  # first: it makes the next one findable
from program import PROGRAM, Scratch, lln

KILLS = 20
STEPS = 60


class Kill(Scratch):
    def train(self, run):
        return [PROGRAM, "train", self.path("config.toml"), "--run", run, "--threads", "1",
                "--resume"]

    def test_killed_runs_end_as_others_do(self):
        pathlib.Path(self.path("config.toml")).write_text(small_training.CONFIG, encoding="utf-8")
        whole = self.path("whole")
        begin = time.monotonic()
        lln(*self.train(whole)[1:])
        seconds = time.monotonic() - begin
        expected = small_training.files_of(whole, STEPS)
        # The seed decides; a moment is a share of the time that the whole run takes here.
        moments, kills, runs = random.Random(8), 0, 0
        resumed_steps = set()
        while kills < KILLS:
            run = self.path(f"killed{runs}")
            runs += 1
            while True:
                process = subprocess.Popen(self.train(run), stdout=subprocess.DEVNULL,
                                           stderr=subprocess.DEVNULL)
                share = moments.uniform(0.05, 1.0) if kills < KILLS else 1000.0
                try:
                    code = process.wait(share * seconds)
                    self.assertEqual(code, 0)
                    break
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    kills += 1
                    folder = os.path.join(run, "checkpoints")
                    if os.path.isdir(folder):
                        resumed_steps.update(name for name in os.listdir(folder)
                                             if name.startswith("step-"))
            self.assertEqual(small_training.files_of(run, STEPS), expected)
            for log in ("metrics.jsonl", "instruments.jsonl"):
                self.assertEqual(small_training.rows(run, log), small_training.rows(whole, log))
            left = [name for name in os.listdir(os.path.join(run, "checkpoints"))
                    if not name.startswith("step-")]
            self.assertEqual(left, [])
        self.assertEqual(kills, KILLS)
        # Otherwise all of them came before the first step, and nothing was tried.
        self.assertGreater(len(resumed_steps), 2)


if __name__ == "__main__":
    unittest.main()
