"""experiments/run with a stand-in for lln: runs that start from others, what is recorded of runs
that end early, and what is never replaced.

    stages_test.py ROOT

SPDX-License-Identifier: Apache-2.0
"""

import json
import os
import signal
import subprocess
import sys
import time
import unittest

from small_experiment import FAKE, ROOT, WORDS, Scratch

PROGRAM = [sys.executable, "-B", str(ROOT / "experiments/run")]
COSTS = WORDS.replace("seeds = 2", "").replace(
    "group", 'kind = "cost"\ntokens = [512, 1024, 2048]\ngroup'
)


class Runs(Scratch):
    def words(self, *arguments):
        places = {"--folder": self.folder, "--runs": self.folder / "runs", "--lln": FAKE}
        return [*PROGRAM, *(str(w) for at in places.items() for w in at), *arguments]

    def run_it(self, *arguments, expect=0):
        """With settings that only the stand-in knows, into the records of the small experiments."""
        words = self.words("--records", str(self.folder), *arguments)
        done = subprocess.run(words, capture_output=True, text=True, timeout=100)
        self.assertEqual(done.returncode, expect, done.stderr)
        return done

    def wait_for(self, *paths):
        limit = time.monotonic() + 60
        while not all((self.folder / path).exists() for path in paths):
            self.assertLess(time.monotonic(), limit)
            time.sleep(0.05)


class StartsFrom(Runs):
    def test_a_run_that_has_not_ended(self):
        # The stand-in has its checkpoint at once, as trainings have one after the first evaluation.
        self.run_it("tuned", "--jobs", "4", "--set", "fake.sleep=1")
        self.assertEqual({r["status"] for r in self.records("tuned")}, {"finished"})

    def test_a_run_that_was_cut(self):
        limited = ("--seeds", "0", "--set", "fake.sleep=60", "--limit", "0.5")
        said = self.run_it("tuned", *limited, expect=1).stderr
        self.assertIn("words diag-s0  cut", said)
        self.assertIn("not run: tuned sst2/diag-s0: what it starts from", said)
        self.assertEqual(self.records("tuned"), [])

    def test_a_run_of_other_settings(self):
        self.run_it("words", "--rows", "diag", "--seeds", "0", "--set", "train.steps=80")
        commands = self.run_it("tuned", "--seeds", "0", "--dry-run").stdout.splitlines()
        self.assertEqual(len(commands), 2)
        self.assertIn("runs/words/diag-s0 ", commands[0])
        self.run_it("tuned", "--seeds", "0")
        self.assertEqual(len(self.run_it("tuned", "--again", "--dry-run").stdout.splitlines()), 3)

    def test_what_it_started_from_is_recorded(self):
        self.run_it("tuned", "--seeds", "1")
        (one,) = self.records("tuned")
        self.assertEqual((one["start_from"]["row"], one["start_from"]["seed"]), ("diag", 1))
        self.assertEqual(one["start_from"]["settings"]["train.steps"], 400)
        # Where that has changed the record stands for nothing any more.
        self.write("words", WORDS.replace("name=diag", "name=elu+diag"))
        listed = self.run_it("tuned", "--seeds", "1", "--list").stdout
        self.assertIn("1 without a record", listed)


class Kept(Runs):
    def test_settings_of_ones_own_need_a_place(self):
        words = self.words("words", "--set", "train.steps=80")
        done = subprocess.run(words, capture_output=True, text=True, timeout=100)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--set: with --records DIR", done.stderr)
        self.assertEqual(self.records("words"), [])
        subprocess.run([*words, "--dry-run"], check=True, capture_output=True, timeout=100)
        subprocess.run(
            [*words, "--records", str(self.folder / "mine")], check=True, capture_output=True
        )
        self.assertEqual(self.records("words"), [])
        self.assertEqual(len(self.records("mine/words")), 3)

    def test_a_finished_run_stays(self):
        one = ("words", "--rows", "lln+diag")
        self.run_it(*one)
        before = self.records("words")
        said = self.run_it(*one, "--again", "--set", "fake.exit=3", expect=1).stderr
        self.assertIn("the record of the run that finished stays", said)
        self.assertEqual(self.records("words"), before)
        self.run_it(*one, "--again", "--set", "fake.sleep=60", "--limit", "0.5")
        self.assertEqual(self.records("words"), before)
        self.run_it(*one, "--again", "--revision", "new")
        self.assertEqual([r["revision"] for r in self.records("words")], ["new"])

    def test_not_that_of_another_plan(self):
        self.run_it("words", "--rows", "lln+diag")
        self.write("words", WORDS.replace("name=lln+diag", "name=elu+diag"))
        broken = self.folder / "broken"
        broken.write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
        broken.chmod(0o755)
        self.run_it("words", "--rows", "lln+diag", "--lln", str(broken), expect=1)
        self.assertEqual([r["status"] for r in self.records("words")], ["failed"])


class Early(Runs):
    def test_the_limit_is_of_the_whole_run(self):
        self.write("words", 'evaluate_on = ["other"]\ngenerate = [8, 16]\n' + WORDS)
        (self.folder / "other").mkdir()
        words = ("words", "--rows", "lln+diag", "--data", str(self.folder))
        begin = time.monotonic()
        self.run_it(*words, "--set", "fake.later=5", "--limit", "8")
        self.assertLess(time.monotonic() - begin, 14)
        (one,) = self.records("words")
        # The training's result stays, and what is missing is said.
        self.assertEqual((one["status"], one["cut"], one["final_step"]), ("finished", False, 400))
        self.assertEqual(one["later"], {"stage": "generate", "status": "cut", "cut_by": "limit"})
        self.assertEqual(one["evaluated_on"], {"other": {"loss": 4.0}})
        self.assertNotIn("generated", one)

    def test_one_text_is_timed_at_positions(self):
        self.write("words", "generate = [8, 32]\n" + WORDS)
        self.run_it("words", "--rows", "lln+diag")
        marks = {str(n): {"seconds": n / 100, "memory_bytes": 1000} for n in (8, 32)}
        self.assertTrue(all(one["generated"] == marks for one in self.records("words")))

    def test_a_cost_that_was_cut_keeps_its_points(self):
        self.write("words", COSTS)
        self.run_it("words", "--rows", "diag", "--set", "fake.slow=1024", "--limit", "1.5")
        (one,) = self.records("words")
        self.assertEqual((one["status"], [p["tokens"] for p in one["cost"]]), ("cut", [512]))

    def test_times_are_measured_alone(self):
        self.write("words", COSTS)
        self.assertIn("measures time", self.run_it("words", "--jobs", "2", expect=2).stderr)
        self.write("words", 'view = "equal-time"\n' + WORDS)
        self.assertIn("measures time", self.run_it("words", "--jobs", "2", expect=2).stderr)
        self.assertEqual(self.records("words"), [])

    def test_a_folder_that_cannot_be_read(self):
        self.run_it("words", "--rows", "lln+diag", "--set", "fake.broken=1", expect=1)
        (one,) = self.records("words")
        self.assertEqual((one["status"], one["stage"]), ("failed", "record"))
        self.assertIn("its folder cannot be read: JSONDecodeError", one["message"])

    def test_an_exception_ends_the_children(self):
        # The first that ends cannot be recorded; the other one is in the middle of its training.
        self.write("words", WORDS.replace('name=lln+diag"', 'name=lln+diag", "fake.sleep=60"'))
        (self.folder / "words/.records.jsonl.part").mkdir()
        words = self.words("words", "--jobs", "2", "--seeds", "0")
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        self.assertIn("IsADirectoryError", done.stderr)
        self.assert_no_children()

    def assert_no_children(self):
        still = subprocess.run(["pgrep", "-f", str(self.folder)], capture_output=True, text=True)
        self.assertEqual(still.stdout, "")

    def test_ctrl_c_twice_kills(self):
        words = self.words("words", "--jobs", "2", "--set", "fake.sleep=60", "--set", "fake.deaf=1")
        process = subprocess.Popen([*words, "--records", str(self.folder)], stderr=subprocess.PIPE)
        self.wait_for("runs/words/diag-s0/waits", "runs/words/lln+diag-s0/waits")
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        self.assertIsNone(process.poll())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        self.assertLess(time.monotonic() - begin, 15)  # they would have had 30 s
        self.assertEqual(process.returncode, 130)
        self.assert_no_children()

    def test_a_reader_that_has_seen_enough(self):
        reading, writing = os.pipe()
        os.close(reading)
        words = self.words("words", "--list")
        done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True)
        os.close(writing)
        self.assertEqual(done.stderr, "")

    def test_a_page_of_ones_own(self):
        self.run_it("words", "--records", str(self.folder / "mine"))
        own = ["--records", str(self.folder / "mine"), "--out", str(self.folder / "page")]
        page = [
            sys.executable,
            "-B",
            str(ROOT / "experiments/page.py"),
            "--folder",
            str(self.folder),
        ]
        subprocess.run([*page, *own], check=True)
        text = (self.folder / "page/docs/results.md").read_text(encoding="utf-8")
        self.assertIn("| Diag | 2 |", text)
        subprocess.run([*page, *own, "--check"], check=True)
        path = self.folder / "mine/words/records.jsonl"
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        path.write_text(json.dumps(lines[0]) + "\n", encoding="utf-8")
        done = subprocess.run([*page, *own, "--check"], capture_output=True, text=True)
        self.assertIn("not what the records give", done.stderr)
        self.assertEqual(done.returncode, 1)


if __name__ == "__main__":
    unittest.main()
