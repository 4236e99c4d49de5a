"""lln train under torchrun: its store, exit codes, signals, and restarts.

    torchrun_test.py LLN_TORCH PYTHON [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import os
import pathlib
import signal
import subprocess
import sys
import time
import unittest

from rank_jobs import PROGRAM, Ranks, free_port, settings

PYTHON = sys.argv.pop(1)
LIMIT = 120  # seconds
# Long enough to be disturbed.
LONG = ("train.steps=150",)


class Torchrun(Ranks):
    def start(self, run, *arguments, options=(), values=()):
        return subprocess.Popen(
            [PYTHON, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2",
             "--master-port", str(free_port()), *options, "--", PROGRAM, "train", self.config,
             "--run", self.path(run), "--threads", "1", *settings(values), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self, torchrun):
        try:
            output, error = torchrun.communicate(timeout=LIMIT)
        finally:
            torchrun.kill()
            torchrun.wait()
        return torchrun.returncode, output + error

    def pid_of(self, torchrun, rank):
        children = pathlib.Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children")
        for pid in children.read_text(encoding="ascii").split():
            if f"RANK={rank}\0".encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes():
                return int(pid)
        self.fail(f"torchrun has no rank {rank}")

    def test_a_run_is_that_of_plain_processes(self):
        self.train(2, "plain")
        code, text = self.end(self.start("run"))
        self.assertEqual(code, 0, text)
        self.assertIn("finished at step 60", text)
        self.assert_same_run("plain", "run")

    def test_a_signal_to_torchrun_saves(self):
        self.train(2, "whole", LONG)
        torchrun = self.start("run", values=LONG)
        self.wait_for_step("run", 10)
        begin = time.monotonic()
        torchrun.send_signal(signal.SIGTERM)
        code, text = self.end(torchrun)
        self.assertNotEqual(code, 0)
        self.assertIn("stopped and saved at step", text)
        # Otherwise torchrun had to kill them.
        self.assertLess(time.monotonic() - begin, 25)
        code, text = self.end(self.start("run", "--resume", values=LONG))
        self.assertEqual(code, 0, text)
        self.assert_same_run("whole", "run", 150)

    def test_a_signal_to_one_rank_ends_all_with_their_code(self):
        torchrun = self.start("run", values=LONG)
        self.wait_for_step("run", 10)
        os.kill(self.pid_of(torchrun, 1), signal.SIGTERM)
        code, text = self.end(torchrun)
        self.assertNotEqual(code, 0)
        self.assertIn("stopped and saved at step", text)
        self.assertRegex(text, r"exitcode +: 6 ")
        self.assertNotRegex(text, r"exitcode +: -")

    def test_a_killed_rank_is_named_and_the_job_restarted(self):
        self.train(2, "whole", LONG)
        torchrun = self.start("run", "--resume", options=("--max-restarts", "1"), values=LONG)
        self.wait_for_step("run", 10)
        pid = self.pid_of(torchrun, 1)
        os.kill(pid, signal.SIGKILL)
        code, text = self.end(torchrun)
        self.assertEqual(code, 0, text)
        self.assertRegex(text, rf"rank 1 \(pid {pid} on .*; --resume goes on from the newest")
        self.assert_same_run("whole", "run", 150)


if __name__ == "__main__":
    unittest.main()
