"""tools/gpu_check on a build folder whose programs only pretend: every part is run and recorded,
and what fails is not lost among what passes.

    gpu_check_test.py ROOT

SPDX-License-Identifier: Apache-2.0
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()

PROGRAM = """\
    #!{python}
    import json, sys
    verb = sys.argv[1]
    if verb == "info":
        print(json.dumps({{"cuda": {{"devices": [{{"usable": {usable}}}]}}}}))
    elif verb == "check":
        print(json.dumps({{"passed": 3, "failed": {failed}, "skipped": 1, "results": []}}))
        sys.exit({failed})
    else:
        result = {{"problem": "p", "graph": "--graph" in sys.argv}}
        print(json.dumps({{"machine": {{"device": "d"}}, "results": [result]}}))
    """
TEST = """\
    #!/bin/sh
    echo '{"tests": 2, "failures": 0, "testsuites": [{"testsuite": [
        {"result": "%s"}, {"result": "SKIPPED"}]}]}' >"${1#--gtest_output=json:}"
    """


RACES = """\
    #!/bin/sh
    case "$*" in *racecheck*) ;; *) exit 0 ;; esac
    place="access at void lln::cuda::sm90::{kernel}<(int)64>(lln::cuda::TiledCall)+0x9f80"
    echo "========= Error: Race reported between Write $place"
    echo "=========     and Read $place [672 hazards]"
    echo "========= Warning: Race reported between Write access at void {other}<4>(int)+0x10"
    echo "{passed} passed, {failed} failed, 18 skipped"
    echo "========= RACECHECK SUMMARY: 2 hazards displayed ({errors} errors, 1 warnings)"
    exit 77
    """


class GpuCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name in ("one", "large", "conformance"):
            self.write(f"tests/cuda/cuda_{name}_test", TEST % "COMPLETED")

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        path.chmod(0o755)

    def run_check(self, *arguments, failed=0, usable=True):
        self.write("bin/lln", PROGRAM.format(python=sys.executable, failed=failed, usable=usable))
        output = self.folder / "out.json"
        command = [ROOT / "tools/gpu_check", "--build", self.folder, "--output", output]
        paths = os.pathsep.join([str(self.folder), os.environ["PATH"]])
        done = subprocess.run([sys.executable, *command, *arguments], capture_output=True,
                              text=True, env={**os.environ, "PATH": paths})
        report = json.loads(output.read_text())
        self.assertEqual(done.returncode, 0 if report["passed"] else 1, done.stderr)
        return report, {step["name"]: step for step in report["steps"]}

    def test_every_part(self):
        report, steps = self.run_check("--quick", "--record", self.folder)
        self.assertTrue(report["passed"])
        self.assertEqual(steps["check"]["result"]["passed"], 3)
        self.assertEqual(steps["cuda_one_test"]["tests"], 2)
        self.assertEqual(steps["cuda_large_test"]["verdict"], "skipped")
        self.assertEqual(steps["cuda_conformance_test"]["verdict"], "skipped")  # check has it
        self.assertEqual(steps["tests of torch"]["verdict"], "skipped")  # there are none
        self.assertIn("memcheck, quick", steps)
        self.assertIn("memcheck, causal pieces", steps)
        self.assertIn("python", steps)
        # Torch was not measured, and what is recorded of it stays.
        self.assertEqual(steps["h200-peers"]["verdict"], "skipped")
        self.assertFalse((self.folder / "h200-peers.json").exists())
        for path in (ROOT / "bench/sets").glob("h200-[!p]*.txt"):
            recorded = json.loads((self.folder / f"{path.stem}.json").read_text())
            graph = path.stem == "h200-short"
            self.assertIn(f"--set bench/sets/{path.name}", recorded["command"])
            self.assertEqual("--graph" in recorded["command"], graph)
            learned = path.stem == "h200-learned"
            self.assertEqual("--parameters" in recorded["command"], learned)
            self.assertEqual(recorded["results"][0]["graph"], graph)

    def test_tests_that_skip_everything_have_not_passed(self):
        self.write("tests/torch/torch_cuda_test", TEST % "SKIPPED")
        self.write("tests/torch/torch_sequence_cuda_test", TEST % "COMPLETED")
        _, steps = self.run_check("--only", "tests")
        self.assertEqual(steps["torch_cuda_test"]["verdict"], "skipped")
        self.assertIn("no device", steps["torch_cuda_test"]["reason"])
        self.assertEqual(steps["torch_sequence_cuda_test"]["verdict"], "passed")

    def test_a_failure_is_kept(self):
        report, steps = self.run_check("--only", "check", "--only", "tests", failed=1)
        self.assertFalse(report["passed"])
        self.assertEqual(steps["check"]["verdict"], "failed")
        self.assertEqual(steps["check"]["result"]["failed"], 1)
        self.assertEqual(steps["cuda_large_test"]["verdict"], "passed")
        self.assertNotIn("h200-lln", steps)

    def test_programs_beside_each_other(self):
        report, steps = self.run_check("--quick", "--jobs", "3", "--only", "check", "--only",
                                       "tests", "--random", "7", "--seed", "4")
        self.assertTrue(report["passed"])
        self.assertNotIn("check", steps)
        for i in range(3):
            command = steps[f"check, slice {i} of 3"]["command"]
            self.assertIn(f"--random 7 --seed 4 --slice {i}/3 --threads 1", command)
        self.assertEqual(steps["cuda_one_test"]["tests"], 2)
        report, steps = self.run_check("--jobs", "2", "--only", "check", failed=1)
        self.assertFalse(report["passed"])
        self.assertEqual(steps["check, slice 1 of 2"]["verdict"], "failed")

    def test_a_test_without_a_result_fails(self):
        self.write("tests/cuda/cuda_one_test", "#!/bin/sh\nexit 0\n")
        _, steps = self.run_check("--only", "tests")
        self.assertEqual(steps["cuda_one_test"]["verdict"], "failed")
        self.assertEqual(steps["cuda_conformance_test"]["verdict"], "passed")

    def test_reports_of_races_that_are_known(self):
        known = {"kernel": "short_forward", "other": "short_forward", "passed": 12, "failed": 0,
                 "errors": 1}
        for change in ({}, {"kernel": "key_sums"}, {"other": "key_sums"}, {"failed": 1},
                       {"errors": 101}):  # more than are shown
            self.write("compute-sanitizer", RACES.format(**{**known, **change}))
            report, steps = self.run_check("--only", "sanitizers")
            self.assertEqual(report["passed"], not change, change)
            self.assertEqual(steps["racecheck, few tokens"]["verdict"],
                             "failed" if change else "passed", change)
            self.assertEqual(steps["memcheck, few tokens"]["verdict"], "passed")

    def test_no_device(self):
        report, _ = self.run_check(usable=False)
        self.assertFalse(report["passed"])
        self.assertEqual(len(report["steps"]), 1)


if __name__ == "__main__":
    unittest.main()
