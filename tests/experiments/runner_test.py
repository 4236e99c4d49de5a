"""experiments/run with a stand-in for lln: records, going on, limits, failures, several at a time,
Ctrl-C, runs that start from others.

    runner_test.py ROOT

SPDX-License-Identifier: Apache-2.0
"""

import json
import signal
import subprocess
import sys
import time
import unittest

from small_experiment import FAKE, ROOT, TUNED, WORDS, Scratch

# isort: split
from harness import compare, plan

PROGRAM = [sys.executable, "-B", str(ROOT / "experiments/run")]


class Runner(Scratch):
    def words(self, *arguments):
        return [
            *PROGRAM,
            "--folder",
            str(self.folder),
            "--records",
            str(self.folder),
            "--runs",
            str(self.folder / "runs"),
            "--lln",
            FAKE,
            *arguments,
        ]

    def run_it(self, *arguments, expect=0):
        done = subprocess.run(self.words(*arguments), capture_output=True, text=True, timeout=100)
        self.assertEqual(done.returncode, expect, done.stderr)
        return done

    def test_records(self):
        shown = self.run_it("words", "--revision", "abc").stderr
        self.assertIn("3/3  words diag-s1  finished", shown)
        found = self.records("words")
        self.assertEqual(
            [(r["row"], r["seed"]) for r in found], [("diag", 0), ("lln+diag", 0), ("diag", 1)]
        )
        one = found[1]
        self.assertEqual(
            (one["status"], one["cut"], one["revision"], one["jobs"]), ("finished", False, "abc", 1)
        )
        self.assertEqual(one["settings"]["attention.name"], "lln+diag")
        self.assertEqual(one["settings"]["train.steps"], 400)
        self.assertEqual(
            (one["metric"], one["chance"], one["step"], one["steps"]), ("loss", 7.5, 400, 400)
        )
        self.assertEqual(one["final"], one["best"])
        self.assertEqual(len(one["curve"]), 5)
        norms = one["gradient_norm_after_warmup"]
        self.assertLess(0, norms["median"])
        self.assertLessEqual(norms["p99"], norms["max"])
        self.assertEqual(norms["steps"], 36)  # of 40 lines; the warm-up has 4
        self.assertEqual(one["instruments"][-1]["log_variance"], [0.625, 0.375])  # of 1 and 1/4
        self.assertIn("cpu", one["machine"])
        self.assertTrue(all(len(json.dumps(r)) < 20000 for r in found))

    def test_goes_on(self):
        self.run_it("words", "--rows", "lln+diag")
        self.assertEqual(len(self.records("words")), 1)
        shown = self.run_it("words").stderr
        self.assertIn("2/2", shown)
        self.assertNotIn("lln+diag", shown)
        self.assertEqual(self.run_it("words").stderr, "")
        self.assertIn("3/3", self.run_it("words", "--again").stderr)
        # Other settings are another run.
        self.write("words", WORDS.replace("name=diag", "name=elu+diag"))
        self.assertIn("2/2", self.run_it("words").stderr)
        self.assertIn("0 without a record", self.run_it("words", "--list").stdout)
        self.assertIn("3/3", self.run_it("words", "--set", "train.steps=80").stderr)
        self.assertIn("3 without a record", self.run_it("words", "--list").stdout)

    def test_cut_short(self):
        shown = self.run_it("words", "--rows", "lln+diag", "--set", "fake.sleep=60", "--limit", "3")
        self.assertIn("cut", shown.stderr)
        (one,) = self.records("words")
        self.assertEqual((one["status"], one["cut"], one["cut_by"]), ("cut", True, "limit"))
        self.assertEqual((one["step"], one["final_step"]), (200, 160))
        self.assertEqual(
            self.run_it("words", "--rows", "lln+diag", "--set", "fake.sleep=60").stderr, ""
        )

    def test_the_end_of_all(self):
        self.run_it("words", "--set", "fake.sleep=60", "--total", "0.5")
        found = self.records("words")
        self.assertEqual([(r["row"], r["cut_by"]) for r in found], [("diag", "total")])
        # What this cut is run again, where a limit of its own is a result.
        self.run_it("words", "--set", "fake.sleep=60", "--limit", "0.2", "--jobs", "3")
        self.assertEqual([r["cut_by"] for r in self.records("words")], ["limit"] * 3)

    def test_failures(self):
        shown = self.run_it("words", "--set", "fake.exit=3", expect=1).stderr
        self.assertIn("failed", shown)
        self.assertIn("it cannot work", shown)
        self.assertEqual(
            {(r["status"], r["message"]) for r in self.records("words")},
            {("failed", "lln: it cannot work")},
        )
        self.assertIn("3/3", self.run_it("words", "--set", "fake.exit=3", expect=1).stderr)

    def test_not_finite_is_a_result(self):
        self.run_it("words", "--set", "fake.exit=7", expect=1)
        self.assertEqual({r["status"] for r in self.records("words")}, {"not_finite"})
        self.assertEqual(self.records("words")[0]["step"], 200)
        self.assertEqual(self.run_it("words", "--set", "fake.exit=7").stderr, "")

    def test_several_at_a_time(self):
        begin = time.monotonic()
        self.run_it("words", "--set", "fake.sleep=6", "--jobs", "3", "--limit", "60")
        self.assertLess(time.monotonic() - begin, 14)  # 18 one after the other
        self.assertEqual([r["jobs"] for r in self.records("words")], [3, 3, 3])

    def test_ctrl_c(self):
        self.run_it("words", "--rows", "lln+diag", "--set", "fake.sleep=0")
        process = subprocess.Popen(
            self.words("words", "--set", "fake.sleep=0", "--set", "fake.sleep=60", "--jobs", "3"),
            stderr=subprocess.PIPE,
            text=True,
        )
        waits = [
            self.folder / f"runs/words/{name}/waits"
            for name in ("diag-s0", "diag-s1", "lln+diag-s0")
        ]
        limit = time.monotonic() + 60
        while not all(path.exists() for path in waits) and time.monotonic() < limit:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        _, said = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130)
        self.assertLess(time.monotonic() - begin, 15)  # they were asked, not killed
        self.assertIn("stopped", said)
        self.assertEqual([r["row"] for r in self.records("words")], ["lln+diag"])
        still = subprocess.run(["pgrep", "-f", str(self.folder)], capture_output=True, text=True)
        self.assertEqual(still.stdout, "")

    def test_one_that_hears_nothing_is_killed(self):
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); from harness import runner; "
            "runner.GRACE = 0.5; sys.argv = ['run', *sys.argv[2:]]; "
            "import runpy; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
        )
        words = self.words(
            "words",
            "--rows",
            "lln+diag",
            "--set",
            "fake.sleep=60",
            "--set",
            "fake.deaf=1",
            "--limit",
            "0.5",
        )
        done = subprocess.run(
            [sys.executable, "-B", "-c", code, str(ROOT / "experiments"), *words[2:]],
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([r["cut_by"] for r in self.records("words")], ["limit"])

    def test_starts_from_another(self):
        shown = self.run_it("tuned").stderr
        self.assertEqual(
            [line.split()[1:3] for line in shown.splitlines()],
            [
                ["words", "diag-s0"],
                ["tuned", "sst2/diag-s0"],
                ["words", "diag-s1"],
                ["tuned", "sst2/diag-s1"],
            ],
        )
        self.assertEqual(len(self.records("words")), 2)
        words = self.run_it("tuned", "--again", "--dry-run").stdout.splitlines()
        self.assertEqual(len(words), 2)  # what they start from is still there
        self.assertIn("train.start_from=" + str(self.folder / "runs/words/diag-s1"), words[1])

    def test_calibrated_by_another(self):
        self.write("tuned", TUNED.replace('from = "words:diag"', 'calibrated = "words:diag"'))
        self.run_it("words", "--rows", "diag", "--seeds", "0")
        dump, calibrate, train = self.run_it(
            "tuned", "--seeds", "0", "--dry-run"
        ).stdout.splitlines()
        self.assertIn(" dump " + str(self.folder / "runs/words/diag-s0"), dump)
        file = str(self.folder / "runs/tuned/sst2/diag-s0.calibration.json")
        self.assertIn(" -o " + file, calibrate)
        self.assertIn(f"--set attention.calibration={file}", train)
        self.run_it("tuned", "--seeds", "0")
        self.assertEqual([r["status"] for r in self.records("tuned")], ["finished"])

    def test_a_start_that_fails(self):
        shown = self.run_it("tuned", "--set", "fake.exit=3", "--seeds", "0", expect=1).stderr
        self.assertIn(
            "not run: tuned sst2/diag-s0: what it starts from has not been trained", shown
        )
        self.assertEqual(self.records("tuned"), [])

    def test_checkpoints(self):
        self.run_it("words")
        left = sorted(
            p.parent.parent.parent.name for p in self.folder.glob("runs/*/*/checkpoints/*/*")
        )
        self.assertEqual(left, ["diag-s0", "diag-s1"])  # another experiment starts from them

    def test_copies(self):
        self.run_it("words", "--rows", "diag", "--copy", str(self.folder / "copy"))
        self.assertEqual(
            (self.folder / "copy/words/records.jsonl").read_text(encoding="utf-8"),
            (self.folder / "words/records.jsonl").read_text(encoding="utf-8"),
        )

    def test_check(self):
        self.run_it("words")
        before = self.records("words")
        self.assertIn("3 runs, 0 of them not as recorded", self.run_it("words", "--check").stdout)
        path = self.folder / "words/records.jsonl"
        before[1]["final"]["loss"] += 0.1
        path.write_text("".join(json.dumps(r) + "\n" for r in before), encoding="utf-8")
        said = self.run_it("words", "--check", expect=1).stdout
        self.assertIn("differs", said)
        self.assertIn("1 of them not as recorded", said)
        self.assertEqual(self.records("words"), before)
        # What was cut is no result that a whole run could repeat.
        before[1].update(status="cut", cut=True)
        path.write_text("".join(json.dumps(r) + "\n" for r in before), encoding="utf-8")
        self.assertIn("2 runs, 0 of them not as recorded", self.run_it("words", "--check").stdout)
        before[1].update(status="finished", cut=False)
        path.write_text("".join(json.dumps(r) + "\n" for r in before), encoding="utf-8")
        failed = self.run_it("words", "--check", "--set", "fake.exit=3", expect=1).stdout
        self.assertIn("3 of them not as recorded", failed)

    def test_a_rerun_that_was_cut_is_not_as_recorded(self):
        self.run_it("words", "--rows", "lln+diag")
        (one,) = self.records("words")
        own = plan.read("words", self.folder)
        (job,) = [job for job in own.jobs if job.row == "lln+diag"]
        self.assertTrue(compare.comparison(own, job, one, one).fine)
        self.assertEqual(compare.comparison(own, job, one, {**one, "status": "cut"}).fault, "cut")
        slow = {**one, "seconds": 301.0}
        self.assertTrue(compare.comparison(own, job, one, slow).fine)
        own.table["view"] = "smoke"
        self.assertEqual(compare.comparison(own, job, one, slow).fault, "too slow")
        self.assertEqual(compare.comparison(own, job, one, None).fault, "not run")

    def test_usage(self):
        self.assertIn("no row 'daig'", self.run_it("words", "--rows", "daig", expect=2).stderr)
        self.assertIn("no experiment 'wards'", self.run_it("wards", expect=2).stderr)
        self.assertIn("expected names", self.run_it(expect=2).stderr)
        self.write("words", 'data = ["tokens"]\n' + WORDS)
        self.assertIn("--data DIR with tokens", self.run_it("words", expect=2).stderr)
        self.assertIn(
            "tokens is not there", self.run_it("words", "--data", str(self.folder), expect=2).stderr
        )
        self.assertIn("is not there", self.run_it("words", "--lln", "/no/lln", expect=2).stderr)

    def test_costs(self):
        self.write(
            "words",
            WORDS.replace("seeds = 2", "").replace(
                "group", 'kind = "cost"\ntokens = [512, 1024]\ngroup'
            ),
        )
        self.run_it("words")
        self.assertEqual([p["tokens"] for p in self.records("words")[0]["cost"]], [512, 1024])


if __name__ == "__main__":
    unittest.main()
