"""Runs `lln bench`: the form of its results, sets of problems, comparison with doctored files.

    bench_test.py PROGRAM [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import json
import unittest

from program import Scratch, lln

FAST = ("--seconds", 0.01, "--threads", 1)
LLN = "forward:f32:cpu:b1h2n64d16:lln"
TRAIN = "train:bf16:cpu:b1h2n64d16:lln+diag16:causal"
RESULT_KEYS = [
    "problem",
    "kernel",
    "threads",
    "median_ms",
    "p10_ms",
    "p90_ms",
    "bytes",
    "flops",
    "floor_ms",
    "ratio",
    "workspace_bytes",
]


class Report(Scratch):
    def test_a_kernel_can_be_forced(self):
        for problem in (LLN, "train:bf16:cpu:b1h2n64d16:lln+diag16"):
            report = json.loads(
                lln("bench", problem, *FAST, "--kernel", "cpu-scalar", "--json").stdout
            )
            self.assertEqual([r["kernel"] for r in report["results"]], ["cpu-scalar"])
        matched = lln("bench", LLN, *FAST, "--matched", "--kernel", "cpu-scalar", "--json")
        self.assertEqual(json.loads(matched.stdout)["results"][0]["kernel"], "cpu-scalar")
        unknown = lln("bench", LLN, *FAST, "--kernel", "cpu-avx1024", expect=3)
        self.assertIn("unknown kernel 'cpu-avx1024'", unknown.stderr)
        refused = lln("bench", LLN, *FAST, "--kernel", "cuda-plain", expect=4)
        self.assertIn("cuda-plain", refused.stderr)

    def test_json_has_the_documented_form(self):
        report = json.loads(
            lln("bench", "forward:f32:cpu:h2n64d16:lln", TRAIN, *FAST, "--json").stdout
        )
        self.assertEqual(list(report), ["machine", "results"])
        self.assertEqual(
            list(report["machine"]),
            ["cpu", "target", "threads", "fma_peak_gflops", "bf16_peak_gflops", "copy_gbs"],
        )
        self.assertEqual(report["machine"]["threads"], 1)
        self.assertEqual(
            report["machine"]["target"], json.loads(lln("info", "--json").stdout)["cpu_target"]
        )
        self.assertEqual([r["problem"] for r in report["results"]], [LLN, TRAIN])
        for result in report["results"]:
            self.assertEqual(list(result), RESULT_KEYS)
            explained = json.loads(
                lln("explain", result["problem"], "--threads", 1, "--json").stdout
            )
            self.assertEqual(result["kernel"], explained["kernel"])
            self.assertEqual(result["workspace_bytes"], explained["workspace_bytes"])
            self.assertEqual(result["bytes"], explained["minimal_bytes"])
            self.assertEqual(result["flops"], explained["minimal_flops"])
            self.assertLessEqual(result["p10_ms"], result["median_ms"])
            self.assertLessEqual(result["median_ms"], result["p90_ms"])
            self.assertAlmostEqual(
                result["ratio"],
                result["median_ms"] / result["floor_ms"],
                delta=1e-6 * result["ratio"],
            )

    def test_text_has_a_line_per_problem(self):
        done = lln("bench", LLN, TRAIN, *FAST)
        self.assertRegex(done.stdout, r"GFLOP/s multiply-add, .*[\d.]+ GB/s copy\n")
        for problem in (LLN, TRAIN):
            self.assertRegex(done.stdout, rf"(?m)^{problem.replace('+', '[+]')} +[\d.e-]+ ")
        self.assertEqual(done.stderr, "")

    def test_decoding(self):
        problems = [
            "append:f32:cpu:b1h2n40d8:lln+diag16",
            "append:bf16:cpu:b1h2n0m40d8:lln",
            "step:f32:cpu:b2h2k1n1d8:lln+diag16",
            "step:f16:cpu:b1h2n3m0d8:lln",
        ]
        report = json.loads(lln("bench", *problems, *FAST, "--json").stdout)
        self.assertEqual([r["problem"] for r in report["results"]], problems)

    def test_parameters(self):
        for kind in ("lln", "lln+diag16"):
            problem = f"train:f32:cpu:h2n64d16:{kind}"
            report = json.loads(lln("bench", problem, "--parameters", *FAST, "--json").stdout)
            self.assertEqual(list(report["results"][0]), RESULT_KEYS + ["parameters"])
        error = lln("bench", LLN, "--parameters", expect=3).stderr
        self.assertIn("gradients of alpha, beta and mix are those of backward and train", error)

    def test_matched(self):
        report = json.loads(lln("bench", LLN, "--matched", *FAST, "--json").stdout)
        self.assertEqual(list(report["results"][0]), RESULT_KEYS + ["matched"])
        error = lln("bench", "forward:f32:cpu:n8d8:lln:causal", "--matched", expect=3).stderr
        self.assertIn("alpha and beta are matched in a bidirectional forward", error)

    def test_devices(self):
        self.assertIn("--graph is for", lln("bench", LLN, "--graph", expect=2).stderr)
        error = lln("bench", LLN, LLN.replace(":cpu:", ":cuda:"), expect=2).stderr
        self.assertIn("problems on cpu and on cuda", error)

    def test_what_cannot_be_measured(self):
        self.assertIn("nothing to measure", lln("bench", expect=2).stderr)
        self.assertIn(
            "unknown op 'sideways'", lln("bench", "sideways:f32:cpu:n8d8:lln", expect=2).stderr
        )
        for op in ("append", "step"):
            text = lln("bench", LLN, f"{op}:f32:cpu:n1d8:softmax", expect=4).stderr
            self.assertIn("decoding is of lln and lln+diagB alone", text)
        for option in (("--seconds", 0), ("--tolerance", 0.5), ("--threads", -1)):
            lln("bench", LLN, *option, expect=2)


class Sets(Scratch):
    def measured(self, text, expect=0):
        with open(self.path("set.txt"), "w", encoding="utf-8") as file:
            file.write(text)
        return lln("bench", "--set", self.path("set.txt"), *FAST, "--json", expect=expect).stdout

    def test_comments_and_empty_lines(self):
        report = json.loads(self.measured(f"# a set\n\n{LLN}  # short\n{TRAIN}\n"))
        self.assertEqual([r["problem"] for r in report["results"]], [LLN, TRAIN])

    def test_wrong_sets(self):
        error = json.loads(self.measured(f"{LLN}\nforward:f33:cpu:n8d8:lln\n", expect=3))["error"]
        self.assertIn(self.path("set.txt") + ":2: ", error["text"])
        self.assertIn("unknown dtype 'f33'", error["text"])
        error = json.loads(self.measured("# empty\n", expect=3))["error"]
        self.assertIn("holds no problem", error["text"])
        self.assertIn(
            "cannot be opened", lln("bench", "--set", self.path("missing"), expect=3).stderr
        )


class Compare(Scratch):
    def setUp(self):
        super().setUp()
        self.report = json.loads(lln("bench", LLN, TRAIN, *FAST, "--json").stdout)

    def compared(self, report, *arguments, expect=0):
        with open(self.path("old.json"), "w", encoding="utf-8") as file:
            file.write(report if isinstance(report, str) else json.dumps(report))
        return lln("bench", "--compare", self.path("old.json"), *FAST, *arguments, expect=expect)

    def test_a_slow_past_is_no_regression(self):
        for result in self.report["results"]:
            result["ratio"] *= 1000
        text = self.compared(self.report).stdout
        self.assertIn("0 of 2 worse by more than 1.25", text)

    def test_a_fast_past_is_a_regression(self):
        self.report["results"][0]["ratio"] *= 1000
        self.report["results"][1]["ratio"] /= 1000
        done = self.compared(self.report, "--json", expect=1)
        comparison = json.loads(done.stdout)["comparison"]
        self.assertEqual([r["verdict"] for r in comparison["results"]], ["ok", "regressed"])
        self.assertEqual(comparison["results"][1]["old_ratio"], self.report["results"][1]["ratio"])
        self.assertEqual(comparison["tolerance"], 1.25)
        # A factor of 1000 passes where 1000 is allowed and measured ones differ by far less.
        self.report["results"][1]["ratio"] *= 100
        self.compared(self.report, "--tolerance", 1000)

    def test_only_common_problems_count(self):
        self.report["results"] = self.report["results"][:1]
        self.report["results"][0]["ratio"] *= 1000
        text = self.compared(self.report, LLN, TRAIN).stdout
        self.assertRegex(text, r"(?m) - +[\d.]+ +-  new$")
        self.assertIn(
            "holds none of the 1 problems", self.compared(self.report, TRAIN, expect=3).stderr
        )

    def test_results_of_others_are_left_out(self):
        ours, other = self.report["results"]
        ours.update(peer="lln", ratio=1e6)
        other.update(peer="torch-sdpa", ratio=1e-6)
        self.assertIn("0 of 1 worse", self.compared(self.report).stdout)

    def test_damaged_files(self):
        for text, expected in (
            ("{", "is not JSON"),
            ("[]", 'has no list "results"'),
            ('{"results": []}', "holds no result"),
            ('{"results": [{"problem": "x"}]}', "results[0] has no"),
            ('{"results": [{"problem": "x", "ratio": 1}]}', "problem 'x'"),
            (json.dumps({"results": [{"problem": LLN, "ratio": -1}]}), "is -1"),
        ):
            with self.subTest(text=text):
                self.assertIn(expected, self.compared(text, expect=3).stderr)
        lln("bench", "--compare", self.path("missing"), expect=3)


if __name__ == "__main__":
    unittest.main()
