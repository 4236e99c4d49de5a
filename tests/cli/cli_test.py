"""Runs the verbs of lln as a user does: help, exit codes, JSON, the terminal.

    cli_test.py PROGRAM [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import json
import os
import pty
import re
import resource
import subprocess
import tempfile
import unittest

import safetensors_file
from program import PROGRAM, Scratch, lln

VERBS = ["info", "check", "explain", "bench", "run", "fit", "calibrate", "analyze", "demo"]


def one_gib():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))


def skip_unless_small(test):
    if lln("--version", expect=None, preexec_fn=one_gib).returncode != 0:
        test.skipTest("this build does not start in 1 GiB of address space")


class Help(unittest.TestCase):
    def test_every_verb_has_help_with_an_example(self):
        text = lln("--help").stdout
        for verb in VERBS:
            self.assertRegex(text, rf"(?m)^  {verb} ")
            help_text = lln(verb, "--help").stdout
            self.assertRegex(help_text, rf"Examples:\n  lln {verb}")
            self.assertIn("--json", help_text)
            self.assertIn("Exit codes: 0 ok", help_text)

    def test_help_fits_a_terminal(self):
        for verb in VERBS:
            longest = max(lln(verb, "--help").stdout.splitlines(), key=len)
            self.assertLessEqual(len(longest), 100, longest)

    def test_info_says_what_is_there(self):
        info = json.loads(lln("info", "--json").stdout)
        text = lln("info").stdout
        self.assertEqual(info["version"], lln("--version").stdout.strip())
        self.assertEqual(info["kernels"]["forward"][-1], "reference")
        self.assertIn(info["cpu_target"], info["cpu_targets"])
        for part in info["parts"]:
            self.assertTrue(part["built"] or part["reason"], part)
            self.assertIn(part["name"], text)
        for word in (info["version"], info["compiler"], info["cpu_target"]):
            self.assertIn(word, text)
        built = {part["name"]: part["built"] for part in info["parts"]}
        self.assertEqual("cuda" in info, built["cuda"])
        if built["cuda"]:
            cuda = info["cuda"]
            self.assertTrue(cuda["devices"] or cuda["no_devices"], cuda)
            for word in (cuda["toolkit"], cuda["architectures"], cuda["no_devices"],
                         *(device["name"] for device in cuda["devices"])):
                self.assertIn(word, text)

    def test_verbs_of_the_torch_layer(self):
        parts = json.loads(lln("info", "--json").stdout)["parts"]
        torch = next(part for part in parts if part["name"] == "torch")
        listed = lln("--help").stdout.partition("Training (LibTorch layer):\n")[2]
        verbs = re.findall(r"(?m)^  (\w+) ", listed.partition("\n\n")[0])
        self.assertIn("train", verbs)
        if not torch["built"]:
            error = json.loads(lln("train", "--json", expect=4).stdout)["error"]
            self.assertIn(torch["reason"], error["text"])
            return
        other = os.path.join(os.path.dirname(PROGRAM), "lln-torch")
        text = subprocess.run([other, "--help"], capture_output=True, text=True).stdout
        there = text.partition("Subcommands:\n")[2].partition("\n\n")[0]
        self.assertEqual(re.findall(r"(?m)^  (\w+) ", there), verbs)
        for verb in verbs:
            help_text = lln(verb, "--help").stdout
            self.assertRegex(help_text, rf"Examples:\n  lln {verb}")
            self.assertIn("--json", help_text)
            longest = max(help_text.splitlines(), key=len)
            self.assertLessEqual(len(longest), 100, longest)

    def test_zoo_lists_attentions(self):
        parts = json.loads(lln("info", "--json").stdout)["parts"]
        if not next(part for part in parts if part["name"] == "torch")["built"]:
            self.skipTest("the LibTorch layer is not built in")
        entries = json.loads(lln("zoo", "--json").stdout)["attentions"]
        names = [entry["name"] for entry in entries]
        self.assertLessEqual({"softmax", "lln", "diag", "lln+diag", "performer"}, set(names))
        table = lln("zoo").stdout
        text = lln("zoo", *names).stdout
        for entry in entries:
            self.assertRegex(table, rf"(?m)^{re.escape(entry['name'])} ")
            for field in ("summary", "cost", "parameters", "padding"):
                self.assertIn(entry[field], text)
        longest = max(table.splitlines(), key=len)
        self.assertLessEqual(len(longest), 110, longest)
        error = json.loads(lln("zoo", "sofmax", "--json", expect=3).stdout)["error"]
        self.assertIn("did you mean softmax?", error["text"])


class ExitCodes(Scratch):
    def assert_error(self, expect, code, *arguments):
        plain = lln(*arguments, expect=expect)
        self.assertEqual(plain.stdout, "")
        self.assertTrue(plain.stderr.startswith("lln: "), plain.stderr)
        as_json = lln(*arguments, "--json", expect=expect)
        error = json.loads(as_json.stdout)["error"]
        self.assertEqual(error["code"], code)
        self.assertIn(error["text"], plain.stderr)
        self.assertEqual(as_json.stderr, "")

    def test_usage(self):
        self.assertIn("'' is no verb: expected info, check", lln("", expect=2).stderr)
        self.assert_error(2, "usage", "sing")
        self.assert_error(2, "usage", "info", "--loudly")
        self.assert_error(2, "usage", "run", "in.safetensors")
        self.assert_error(2, "usage", "explain", "forward:f32:cpu:b1h1:lln")
        self.assert_error(2, "usage", "check", "no case has this text")
        self.assert_error(2, "usage", "demo", "--max-n", "many")
        self.assert_error(2, "usage", "demo", "--max-n", 16)
        self.assert_error(2, "usage", "fit", "--dim", 0)
        self.assert_error(2, "usage", "fit", "--range", 2, 1)
        self.assert_error(2, "usage", "fit", "--samples", 2)
        for option, value in [("--kind", "lln+diag"), ("--feature", "cosine"), ("--alpha", "big"),
                              ("--layout", "dnhb"), ("--threads", -1), ("--matching", "ema")]:
            self.assert_error(2, "usage", "run", "in", "-o", self.path("out"), option, value)

    def test_no_verb_shows_the_help(self):
        done = lln(expect=2)
        self.assertEqual(done.stdout, "")
        self.assertEqual(done.stderr, lln("--help").stdout)

    def test_flags_that_play_no_part(self):
        for arguments in [("--kind", "lln", "--mix", 0.5), ("--kind", "softmax", "--alpha", 1),
                          ("--kind", "diag8", "--beta", 1),
                          ("--kind", "softmax", "--feature", "elu"),
                          ("--kind", "diag8", "--matching", "none")]:
            self.assert_error(2, "usage", "run", "in", "-o", self.path("out"), *arguments)

    def test_input(self):
        missing, out = self.path("missing"), self.path("out")
        self.assert_error(3, "io", "run", missing, "-o", out)
        self.assert_error(3, "io", "run", missing, "-o", self.path("no/folder/out"))
        self.assert_error(3, "io", "run", missing, "-o", "/dev/null")
        self.assert_error(3, "invalid_argument", "check", "--kernel", "abacus")

    def test_device(self):
        self.assert_error(2, "usage", "check", "--device", "gpu")
        self.assert_error(5, "device", "check", "--device", "cuda:900")

    def test_unsupported(self):
        text = lln("explain", "forward:f32:cuda:900:b1h1n8d8:lln", expect=4).stdout
        self.assertIn("reference", text)
        done = lln("explain", "forward:f32:cuda:900:b1h1n8d8:lln", "--json", expect=4)
        self.assertIsNone(json.loads(done.stdout)["kernel"])

    def test_memory(self):
        skip_unless_small(self)
        shape = [1, 1, 1 << 20, 256]
        header = {"q": {"dtype": "F32", "shape": shape, "data_offsets": [0, 1 << 30]}}
        for name, begin in (("k", 1 << 30), ("v", 1 << 31)):
            header[name] = {**header["q"], "data_offsets": [begin, begin + (1 << 30)]}
        text = json.dumps(header).encode()
        with open(self.path("sparse"), "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + (3 << 30))
        done = lln("run", self.path("sparse"), "-o", self.path("out"), "--kind", "softmax",
                   "--json", expect=5, preexec_fn=one_gib)
        self.assertEqual(json.loads(done.stdout)["error"]["code"], "out_of_memory")


class Explain(unittest.TestCase):
    def test_text_and_json_agree(self):
        problem = "backward:bf16:cpu:b2h16k4n4096m4096d64v64:lln+diag64:causal"
        text = lln("explain", problem, "--threads", 2).stdout
        result = json.loads(lln("explain", problem, "--threads", 2, "--json").stdout)
        self.assertIn(result["problem"], text)
        self.assertIn(f"workspace  {result['workspace_bytes']} bytes", text)
        takes_it = [c["kernel"] for c in result["candidates"] if c["takes_it"]]
        self.assertEqual(result["kernel"], takes_it[0])
        self.assertEqual(result["candidates"][-1]["kernel"], "reference")
        for candidate in result["candidates"]:
            self.assertEqual(candidate["takes_it"], candidate["refusal"] == "")
            self.assertIn(candidate["kernel"], text)

    def test_verdicts_stand_below_each_other(self):
        text = lln("explain", "train:bf16:cuda:900:b1h1n8d64:lln:causal", expect=4).stdout
        rows = [line for line in text.splitlines() if line.startswith("kernel ")]
        places = {re.search(r" (no|runs|could) ", row).start() for row in rows}
        self.assertEqual(len(places), 1, text)

    def test_threads_are_counted_and_not_started(self):
        def explain(threads, **options):
            return lln("explain", "forward:f32:cpu:h64n4096d64:lln", "--threads", threads,
                       **options).stdout

        self.assertNotEqual(explain(1), explain(1024))
        self.assertEqual(explain(0), explain(len(os.sched_getaffinity(0))))
        skip_unless_small(self)
        self.assertEqual(explain(1024, preexec_fn=one_gib), explain(1024))

    def test_absurd_lengths_are_answered_at_once(self):
        for op in ("forward", "backward"):
            problem = f"{op}:f32:cpu:h1n1000000000000d64:lln+diag64:causal"
            done = lln("explain", problem, expect=None, timeout=10)
            self.assertIn(done.returncode, (0, 2, 4))


class Check(unittest.TestCase):
    def test_quick_passes_and_counts(self):
        text = lln("check", "--quick").stdout
        counts = re.fullmatch(r"(\d+) passed, 0 failed, (\d+) skipped", text.splitlines()[-1])
        self.assertIsNotNone(counts, text)
        self.assertGreater(int(counts[1]), 0)

    def test_filter_kernel_and_verbose(self):
        arguments = ["check", "--quick", "softmax", "--kernel", "reference"]
        lines = lln(*arguments, "--verbose").stdout.splitlines()
        result = json.loads(lln(*arguments, "--verbose", "--json").stdout)
        self.assertEqual(lines[-1],
                         f"{result['passed']} passed, 0 failed, {result['skipped']} skipped")
        self.assertEqual(len(result["results"]), result["passed"] + result["skipped"])
        self.assertEqual(json.loads(lln(*arguments, "--json").stdout)["results"], [])
        for entry in result["results"]:
            self.assertIn("softmax", entry["case"])
            self.assertEqual(entry["kernel"], "reference")

    def test_random_cases_are_found_again(self):
        arguments = ["check", "--random", 8, "--seed", 3, "--kernel", "reference", "--verbose",
                     "--json"]
        cases = [entry["case"] for entry in json.loads(lln(*arguments).stdout)["results"]]
        self.assertEqual(len(set(cases)), 8)
        again = json.loads(lln(*arguments, cases[5]).stdout)["results"]
        self.assertEqual([entry["case"] for entry in again], [cases[5]])
        self.assertIn("excludes", lln("check", "--random", 8, "--quick", expect=2).stderr)
        self.assertIn("requires", lln("check", "--seed", 3, expect=2).stderr)
        lln("check", "--random", 0, expect=2)

    def test_slices_are_the_table_once(self):
        def cases(*slice_of):
            said = lln("check", "--quick", "--kernel", "reference", "--verbose", "--json",
                       *slice_of)
            return [one["case"] for one in json.loads(said.stdout)["results"]]

        slices = [cases("--slice", f"{i}/3") for i in range(3)]
        self.assertEqual(cases()[::3][0], slices[0][0])
        self.assertCountEqual(cases(), sum(slices, []))
        self.assertEqual(len(set(map(tuple, slices))), 3)
        for text in ("3/3", "1", "a/2", "1/2x", "-1/2", "/"):
            said = lln("check", f"--slice={text}", expect=2).stderr
            self.assertIn(f"unknown slice '{text}': expected I/N", said)


class Demo(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        """One run of each sort: a demo takes its time."""
        with tempfile.TemporaryDirectory(prefix="lln_cli_") as folder:
            cls.report = os.path.join(folder, "demo.html")
            run = ("demo", "--report", cls.report, "--max-n")
            cls.text = lln(*run, 1500).stdout
            cls.files = os.listdir(folder)
            with open(cls.report, encoding="utf-8") as file:
                cls.page = file.read()
            cls.json = json.loads(lln(*run, 2048, "--threads", 1, "--json").stdout)

    def test_small_demo(self):
        text = self.text
        self.assertRegex(text, r"\n +512 .*\n +1024 .*\n\n")
        self.assertRegex(text, r"\nDecoding: .*\n(.*\n)+ +512 .*\n\nLargest difference")
        self.assertRegex(text, r"\nMoment matching: .*\n(.*\n)+ +1\.0 .*\n")
        self.assertIn(f"\nReport: {self.report}\n", text)
        self.assertIn("What to try next", text)
        self.assertLessEqual(max(map(len, text.splitlines())), 100 + len(PROGRAM))
        for command in re.findall(re.escape(PROGRAM) + r" (explain .*)", text):
            lln(*command.split())

    def test_report(self):
        self.assertEqual(self.files, ["demo.html"])
        start = self.page.index('type="application/json">') + len('type="application/json">')
        data = json.loads(self.page[start : self.page.index("</script>", start)])
        self.assertEqual(len({e["kind"] for e in data["sweep"]}), 7)
        self.assertEqual([row["tokens"] for row in data["cost"]["rows"]], [512, 1024])

    def test_json(self):
        result = self.json
        self.assertEqual([row["tokens"] for row in result["rows"]], [512, 1024, 2048])
        self.assertEqual(result["threads"], 1)
        self.assertEqual(result["report"], self.report)
        self.assertGreater(result["rows"][0]["lln"]["seconds"], 0)
        for kind in ("lln_diag", "softmax"):
            self.assertLess(result["relative_error"][kind], 1e-5)
            self.assertGreater(result["rows"][0][kind]["seconds"], 0)
            self.assertGreaterEqual(result["rows"][0][kind]["bytes"], 4 * 4 * 512 * 64 * 4)
        self.assertEqual(result["rows"][0]["matrix_bytes"], 4 * 512 * 512 * 4)

    def test_json_of_decoding(self):
        result = self.json["decoding"]
        self.assertLess(result["relative_difference"], 1e-5)
        self.assertGreater(result["state_bytes"], 4 * 64 * 64 * 4)
        self.assertEqual([row["tokens"] for row in result["rows"]], [512, 2048])
        for row in result["rows"]:
            self.assertGreater(row["step_seconds"], 0)
            self.assertGreater(row["softmax_seconds"], 0)
            self.assertEqual(row["cache_bytes"], row["tokens"] * 4 * 2 * 64 * 4)

    def test_json_of_matching(self):
        result = self.json["matching"]
        self.assertEqual((result["tokens"], result["dim"]), (512, 64))
        for row in result["rows"]:
            self.assertAlmostEqual(row["target"] / row["sigma"] ** 4, 1, delta=0.05)
            self.assertAlmostEqual(row["softmax"] / row["target"], 1, delta=0.1)
            # A line is a line: docs/matching.md has the distance.
            self.assertAlmostEqual(row["lln"] / row["target"], 1, delta=0.4)
            self.assertLess(row["lln_unmatched"], row["lln"])


class Fit(unittest.TestCase):
    FEW = ["fit", "--dim", 32, "--samples", 48, "--seed", 5]

    def test_the_line_is_that_of_the_library(self):
        result = json.loads(lln(*self.FEW, "--json").stdout)
        self.assertEqual((result["tokens"], result["range"], result["samples"]),
                         (512, [0.75, 3], 48))
        fit = result["results"][0]
        self.assertEqual(fit["dim"], 32)
        # Seeds differ by about 3% at this number of samples.
        self.assertAlmostEqual(fit["a"] / fit["library"]["a"], 1, delta=0.08)
        self.assertAlmostEqual(fit["b"], fit["library"]["b"], delta=0.06)
        points = fit["points"]
        self.assertEqual(len(points), 48)
        self.assertTrue(all(2 * 0.74**2 < p["t"] < 2 * 3.02**2 for p in points))
        squares = [(p["variance"] - fit["a"] * p["t"] - fit["b"]) ** 2 for p in points]
        self.assertAlmostEqual(fit["residual"], (sum(squares) / 48) ** 0.5, places=9)
        slope_error = sum((p["variance"] - fit["a"] * p["t"] - fit["b"]) * p["t"] for p in points)
        self.assertAlmostEqual(slope_error, 0, places=6)  # the least squares

    def test_seed_decides_and_threads_do_not(self):
        few = ["fit", "--dim", 8, "--samples", 10, "--tokens", 300, "--json"]
        one = lln(*few, "--threads", 1).stdout
        self.assertEqual(lln(*few, "--threads", 3).stdout, one)
        self.assertNotEqual(lln(*few, "--seed", 2).stdout, one)

    def test_table_and_plot(self):
        text = lln("fit", "--dim", 16, 40, "--samples", 12, "--tokens", 64).stdout
        self.assertRegex(text, r"\n   dim +a +b +residual .*\n +16 .*\n +40 .*\n\n")
        self.assertIn("a dim 16, b dim 40", text)
        self.assertLessEqual(max(map(len, text.splitlines())), 100)

    def test_weights_below_f32_are_an_error(self):
        done = lln("fit", "--dim", 1, "--samples", 4, "--tokens", 64, "--range", 15, 20, expect=3)
        self.assertIn("dim 1: a weight fell below what f32 holds", done.stderr)


class Tables(Scratch):
    def assert_promises(self, result, points):
        self.assertEqual([(r["dim"], r["tokens"], r["sigma"]) for r in result["results"]], points)
        for r in result["results"]:
            with self.subTest(dim=r["dim"], tokens=r["tokens"], sigma=r["sigma"]):
                variance, entropy = r["exact_variance_miss"], r["entropy_miss"]
                self.assertLess(variance["standard_error"], 0.03)
                self.assertLess(entropy["standard_error"], 0.02)
                self.assertLessEqual(abs(variance["mean"]), 0.03)
                self.assertLessEqual(abs(entropy["mean"]), 0.02)

    def test_exact_and_entropy_keep_their_promises(self):
        # A part of the table in docs/matching.md, which has all dims.
        part = ["fit", "--verify", "--dim", 16, 64, "--samples", 256, "--json"]
        result = json.loads(lln(*part, timeout=1200).stdout)
        sigmas = (0.6, 0.8, 1.0, 1.2, 1.4)
        self.assert_promises(result, [(d, n, s) for d in (16, 64) for n in (256, 4096)
                                      for s in sigmas])

    def test_between_the_sizes_of_the_tables(self):
        between = ["fit", "--verify", "--dim", 48, "--tokens", 1000, "--samples", 256, "--json"]
        self.assert_promises(json.loads(lln(*between).stdout),
                             [(48, 1000, s) for s in (0.6, 0.8, 1.0, 1.2, 1.4)])

    def test_seed_decides_and_threads_do_not(self):
        few = ["fit", "--verify", "--dim", 16, "--tokens", 64, "--samples", 16, "--json"]
        one = lln(*few, "--threads", 1, expect=None).stdout
        self.assertEqual(lln(*few, "--threads", 3, expect=None).stdout, one)
        self.assertNotEqual(lln(*few, "--seed", 2, expect=None).stdout, one)

    def test_what_misses_is_a_failed_check(self):
        # Far below the tables: 4 channels count as 8.
        done = lln("fit", "--verify", "--dim", 4, "--tokens", 64, "--samples", 64, expect=1)
        self.assertIn("failed", done.stdout)

    def test_a_table_needs_a_place_and_no_sizes(self):
        done = lln("fit", "--table", self.path("none/table.h"), expect=3)
        self.assertIn("there is no folder", done.stderr)
        self.assertIn("excludes", lln("fit", "--table", "x", "--dim", 8, expect=2).stderr)


class Terminal(Scratch):
    def write_zeros(self, tokens):
        values = bytes(4 * tokens * 64)
        tensors = {name: ("F32", [1, 1, tokens, 64], values) for name in "qkv"}
        safetensors_file.write(self.path("in"), tensors)

    def start(self, *arguments):
        """The run with its stderr on a terminal, and our end of that terminal."""
        ours, theirs = pty.openpty()
        command = [PROGRAM, "run", self.path("in"), "-o", self.path("out"), "--json", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs)
        os.close(theirs)
        return process, ours

    @staticmethod
    def read_until(terminal, text):
        seen = b""
        while text not in seen:
            try:
                seen += os.read(terminal, 1024)
            except OSError:  # the program ended
                break
        os.close(terminal)
        return seen

    def test_progress_is_shown_on_a_terminal_after_two_seconds(self):
        self.write_zeros(3000)
        process, terminal = self.start("--kind", "lln", "--alpha", "1", "--beta", "1", "--kernel",
                                       "reference", "--threads", "1")
        with process:
            seen = self.read_until(terminal, b" s")
            process.terminate()
            stdout = process.stdout.read()
        self.assertRegex(seen, rb"lln run: forward.*  \d+ s")
        self.assertEqual(stdout, b"")

    def test_nothing_is_shown_elsewhere(self):
        done = lln("demo", "--max-n", 1024, "--json")
        self.assertEqual(done.stderr, "")


if __name__ == "__main__":
    unittest.main()
