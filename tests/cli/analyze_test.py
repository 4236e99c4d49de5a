"""lln analyze as a user runs it: the form of its JSON, its numbers against a plain evaluation and
against published ones, its errors, its report.

    analyze_test.py PROGRAM [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import json
import math
import os
import signal
import subprocess
import time
import unittest

import npy_file
import safetensors_file
from program import PROGRAM, Scratch, lln

# The list form that other programs read.
FIELDS = ["layer", "head", "kind", "n", "d", "sigma_q", "sigma_k", "alpha", "beta", "temperature",
          "entropy_nats", "entropy_bits", "spectral_gap", "log_mean", "log_var", "ks", "skew",
          "theory", "verdict"]
DEFAULT_KINDS = ["softmax", "lln", "lln+diag64", "elu", "relu", "quadratic", "performer"]


def analyze(*arguments, **options):
    return json.loads(lln("analyze", *arguments, "--json", **options).stdout)


def softmax_rows(q, k, dim):
    """P of one head by plain loops."""
    rows = []
    for i in range(0, len(q), dim):
        scores = [sum(a * b for a, b in zip(q[i : i + dim], k[j : j + dim])) / math.sqrt(dim)
                  for j in range(0, len(k), dim)]
        top = max(scores)
        weights = [math.exp(s - top) for s in scores]
        total = sum(weights)
        rows.append([w / total for w in weights])
    return rows


def mean_entropy(rows):
    return -sum(p * math.log(p) for row in rows for p in row) / len(rows)


def second_eigenvalue(rows):
    """|lambda_2| by powers of P on vectors that the stationary distribution is taken out of."""
    n = len(rows)
    pi = [1 / n] * n
    for _ in range(200):
        pi = [sum(pi[i] * rows[i][j] for i in range(n)) for j in range(n)]
    size, steps, total = 0.0, 60, 1.0
    x = [math.sin(1.7 * i + 0.3) for i in range(n)]
    for step in range(steps):
        shift = sum(p * v for p, v in zip(pi, x))
        x = [v - shift for v in x]
        x = [sum(p * v for p, v in zip(row, x)) for row in rows]
        size = math.sqrt(sum(v * v for v in x))
        x = [v / size for v in x]
        if step >= steps - 40:  # a pair of complex eigenvalues turns; its mean growth is |lambda|
            total *= size
    return total ** (1 / 40)


class AnalyzeGaussian(Scratch):
    def test_the_published_table(self):
        """D = 64, N = 512, means of 8 seeds: entropy within 1%, gap within 0.02; within its
        spread for LLN at sigma 1, whose gap scatters by 0.05 from seed to seed."""
        expected = {
            0.6: {"softmax": (6.175, 0.983), "lln": (6.153, 0.981), "elu": (6.236, 0.999),
                  "relu": (6.187, 0.988), "quadratic": (5.51, 0.935)},
            1.0: {"softmax": (5.742, 0.934), "lln": (5.396, 0.841), "elu": (6.233, 0.997),
                  "relu": (6.186, 0.988), "quadratic": (5.51, 0.936)},
        }
        for sigma, kinds in expected.items():
            found = analyze("--gaussian", f"sigma_q={sigma},sigma_k={sigma},n=512,d=64,seeds=8",
                            "--kinds", ",".join(kinds), "--matching", "paper")
            self.assertEqual([e["kind"] for e in found], list(kinds))
            for e in found:
                entropy, gap = kinds[e["kind"]]
                self.assertAlmostEqual(e["entropy_nats"] / entropy, 1, delta=0.01, msg=e["kind"])
                spread = 0.06 if e["kind"] == "lln" and sigma == 1 else 0.02
                self.assertAlmostEqual(e["spectral_gap"], gap, delta=spread, msg=e["kind"])
                self.assertEqual(e["samples"], 8)

    def test_form(self):
        found = analyze("--gaussian", "n=48,d=8,seeds=2")
        self.assertEqual([e["kind"] for e in found], DEFAULT_KINDS)
        for e in found:
            self.assertEqual(list(e)[: len(FIELDS)], FIELDS)
            self.assertEqual((e["layer"], e["head"], e["n"], e["d"]), (None, None, 48, 8))
            self.assertAlmostEqual(e["entropy_bits"], e["entropy_nats"] / math.log(2))
            self.assertAlmostEqual(e["spectral_gap"], 1 - e["lambda_2"], places=9)
            self.assertIn(e["verdict"], ("biased", "unbiased", "diffuse"))
            scaled = e["kind"].startswith("lln")
            self.assertEqual(e["alpha"] is not None, scaled)
            self.assertEqual(e["matching"], "per_head" if scaled else None)
            self.assertGreater(e["entropy_deviation"], 0)
            self.assertAlmostEqual(sum(e["histogram"]["share"]), 1, delta=0.01)
        theory = found[0]["theory"]["entropy"]
        self.assertAlmostEqual(theory["measured"], found[0]["entropy_nats"])
        self.assertAlmostEqual(theory["error"], theory["predicted"] - theory["measured"])
        self.assertGreater(found[1]["theory"]["fenton_wilkinson"]["predicted"], 0)

    def test_limits_are_told(self):
        clamped = "sigma_q=0.1,sigma_k=0.5,d=16,n=64,seeds=2"
        for mode, text in (("exact", "outside 1/64 to 16 and counts as the nearest"),
                           ("per_head", "")):
            done = lln("analyze", "--gaussian", clamped, "--kinds", "softmax,lln", "--matching",
                       mode, "--json")
            softmax, found = json.loads(done.stdout)
            self.assertIsNone(softmax["clamped"])
            self.assertEqual(found["clamped"], text != "")
            self.assertEqual("warning: Gaussian input: limits set" in done.stderr, text != "")
            self.assertIn(text, done.stderr)

    def test_the_spectrum_speaks_of_all_samples(self):
        one, three = (analyze("--gaussian", f"n=1024,d=8,seeds={seeds}", "--kinds", "softmax",
                              "--rows", 16)[0] for seeds in (1, 3))
        self.assertEqual(one["spectrum"]["method"], "arnoldi")
        self.assertGreaterEqual(three["spectrum"]["applications"],
                                one["spectrum"]["applications"] + 100)
        self.assertGreaterEqual(three["spectrum"]["residual"], one["spectrum"]["residual"])
        self.assertIs(three["chain"]["stationary_converged"], True)
        self.assertLess(three["chain"]["stationary_residual"], 1e-3)

    def test_threads_change_nothing(self):
        command = ("--gaussian", "n=200,d=16,seeds=1", "--kinds", "softmax,lln,lln+diag16")
        self.assertEqual(analyze(*command, "--threads", 1), analyze(*command, "--threads", 3))

    def test_modes(self):
        for mode in ("none", "paper", "per_head", "exact", "entropy"):
            (e,) = analyze("--gaussian", "n=256,d=16,seeds=1", "--kinds", "lln", "--matching", mode)
            self.assertEqual(e["matching"], mode)
            if mode == "none":
                self.assertEqual((e["alpha"], e["beta"]), (1, 1))
            else:
                self.assertGreater(e["alpha"], 1)

    def test_causal(self):
        softmax, lln_entry = analyze("--gaussian", "n=96,d=8,seeds=1", "--kinds", "softmax,lln",
                                     "--causal")
        for e in (softmax, lln_entry):
            self.assertIsNone(e["spectral_gap"])
            self.assertIsNone(e["verdict"])
            self.assertIn("diagonal", e["spectrum"]["refused"])
            self.assertEqual(e["by_position"][0]["entropy_nats"], 0)
            for p in e["by_position"]:
                self.assertLessEqual(p["entropy_nats"], p["limit"] + 1e-9)
        self.assertEqual(lln_entry["matching"], "none")
        text = lln("analyze", "--gaussian", "n=96,d=8,seeds=1", "--kinds", "softmax,lln",
                   "--causal").stdout
        self.assertIn("No spectral gap: " + softmax["spectrum"]["refused"], text)
        last = softmax["by_position"][-1]
        self.assertRegex(text, rf"(?m)^softmax +1: 0\.000( +\d+: \d\.\d+){{3}} +"
                         rf"{(last['first'] + last['last']) // 2 + 1}: "
                         rf"{last['entropy_nats']:.3f}$")

    def test_table(self):
        text = lln("analyze", "--gaussian", "n=48,d=8,seeds=2").stdout
        self.assertRegex(text, r"Gaussian q and k: tokens 48, channels 8, .*seeds 2\n")
        for kind in DEFAULT_KINDS:
            self.assertRegex(text, rf"(?m)^{kind.replace('+', '.')} .*\d\.\d\d\d ")
        self.assertLessEqual(max(map(len, text.splitlines())), 100)


class Dumps(Scratch):
    def dump(self, **tensors):
        safetensors_file.write(self.path("in"), tensors)
        return self.path("in")


class AnalyzeFiles(Dumps):
    def test_plain_evaluation(self):
        q, k = self.normal(1, 2, 24, 8), self.normal(1, 2, 24, 8)
        found = analyze(self.dump(q=q, k=k), "--kinds", "softmax")
        self.assertEqual([(e["layer"], e["head"]) for e in found], [(0, 0), (0, 1)])
        for head, e in enumerate(found):
            part = slice(head * 24 * 8, (head + 1) * 24 * 8)
            rows = softmax_rows(q[2][part], k[2][part], 8)
            logs = [math.log(p) for row in rows for p in row]
            mean = sum(logs) / len(logs)
            self.assertAlmostEqual(e["entropy_nats"], mean_entropy(rows), places=5)
            self.assertAlmostEqual(e["log_mean"], mean, places=5)
            self.assertAlmostEqual(e["log_var"], sum((x - mean) ** 2 for x in logs) / len(logs),
                                   delta=0.01 * e["log_var"])
            self.assertAlmostEqual(e["lambda_2"], second_eigenvalue(rows), delta=0.01)

    def test_layers_heads_and_dtypes(self):
        q, k = self.normal(2, 4, 16, 8), self.normal(2, 2, 16, 8)
        whole = analyze(self.dump(**{"layer.2.q": q, "layer.2.k": k, "layer.10.q": q,
                                     "layer.10.k": k}), "--kinds", "softmax,lln")
        self.assertEqual(len(whole), 2 * 4 * 2)
        self.assertEqual([e["layer_name"] for e in whole[::8]], ["layer.2", "layer.10"])
        self.assertEqual([e["head"] for e in whole[:8:2]], [0, 1, 2, 3])
        self.assertTrue(all(e["samples"] == 2 for e in whole))
        for dtype, tolerance in (("F16", 2e-3), ("BF16", 2e-2)):
            half = analyze(self.dump(q=(dtype, *q[1:]), k=(dtype, *k[1:])), "--kinds", "softmax")
            for a, b in zip(half, whole[:8:2]):
                self.assertAlmostEqual(a["entropy_nats"], b["entropy_nats"], delta=tolerance)

    def test_rows_without_weights_are_told(self):
        q, k = self.normal(1, 2, 40, 8), self.normal(1, 2, 40, 8)
        q[2][: 10 * 8] = [0.0] * (10 * 8)  # of the first head
        first, second = analyze(self.dump(q=q, k=k), "--kinds", "quadratic")
        self.assertEqual([e["entropy"]["empty_rows"] for e in (first, second)], [10, 0])
        self.assertIn("no weights", first["spectrum"]["refused"])
        self.assertIsNone(first["verdict"])
        self.assertIsNotNone(second["verdict"])
        self.assertGreater(first["entropy_nats"], 1)
        text = lln("analyze", self.path("in"), "--kinds", "quadratic").stdout
        self.assertIn("No spectral gap of quadratic: row 0 has no weights", text)

    def test_names(self):
        q, k = self.normal(16, 8), self.normal(16, 8)
        path = self.dump(**{"a.query": q, "a.key": k, "other": q})
        found = analyze(path, "--q-name", "query", "--k-name", "key", "--kinds", "softmax")
        self.assertEqual([e["layer_name"] for e in found], ["a"])

    def test_npy(self):
        q, k = self.normal(1, 1, 16, 8), self.normal(1, 1, 16, 8)
        for name, tensor in (("q.npy", q), ("k.npy", k)):
            npy_file.write(self.path(name), "<f4", tensor[1], tensor[2])
        found = analyze("--q", self.path("q.npy"), "--k", self.path("k.npy"), "--kinds", "softmax")
        same = analyze(self.dump(q=q, k=k), "--kinds", "softmax")
        self.assertEqual(found[0]["entropy_nats"], same[0]["entropy_nats"])

    def test_frozen_takes_the_scales_of_the_file(self):
        q, k = self.normal(1, 2, 16, 8), self.normal(1, 1, 16, 8)
        path = self.dump(q=q, k=k, alpha=("F32", [2], [1.5, 2.5]), beta=("F32", [1], [3.0]))
        found = analyze(path, "--kinds", "lln", "--matching", "frozen")
        self.assertEqual([(e["alpha"], e["beta"]) for e in found], [(1.5, 3.0), (2.5, 3.0)])

    def test_frozen_scales_are_above_zero(self):
        q, k = self.normal(1, 2, 16, 8), self.normal(1, 1, 16, 8)
        for bad in (0.0, -1.0):
            path = self.dump(q=q, k=k, alpha=("F32", [2], [1.5, bad]), beta=("F32", [1], [3.0]))
            self.assertRegex(lln("analyze", path, "--matching", "frozen", expect=3).stderr,
                             r"in: 'alpha' holds -?[01] at \[1\]: expected numbers above zero")
            analyze(path, "--kinds", "lln")

    def test_a_calibration_gives_the_scales(self):
        q, k = self.normal(1, 2, 32, 8), self.normal(1, 1, 32, 8)
        path = self.dump(**{"a.q": q, "a.k": k})
        calibration = self.path("calibration.json")
        lln("calibrate", path, "-o", calibration)
        with open(calibration, encoding="utf-8") as file:
            (layer,) = json.load(file)["layers"]
        found = analyze(path, "--kinds", "lln", "--calibration", calibration)
        self.assertEqual([e["matching"] for e in found], ["frozen"] * 2)
        for e, alpha in zip(found, layer["alpha"]):
            self.assertAlmostEqual(e["alpha"], alpha, places=6)
            self.assertAlmostEqual(e["beta"], layer["beta"][0], places=6)
        for tensors, text in (
            ({"b.q": q, "b.k": k}, "the calibration has no layer 'b'"),
            ({"a.q": self.normal(1, 4, 32, 8), "a.k": k},
             "calibration of layer 'a': 2 heads, 1 key heads and 8 channels: expected 4, 1 and 8"),
            ({"a.q": self.normal(1, 2, 32, 4), "a.k": self.normal(1, 1, 32, 4)},
             "and 8 channels: expected 2, 1 and 4"),
        ):
            error = lln("analyze", self.dump(**tensors), "--calibration", calibration, expect=3)
            self.assertIn(text, error.stderr)
        for arguments in ((path, "--matching", "exact"), ("--gaussian", "n=32"),
                          (path, "--report", calibration)):
            lln("analyze", *arguments, "--calibration", calibration, expect=2)

    def test_table_names_layers(self):
        q, k = self.normal(1, 1, 16, 8), self.normal(1, 1, 16, 8)
        path = self.dump(**{"enc.2.q": q, "enc.2.k": k, "enc.10.q": q, "enc.10.k": k})
        text = lln("analyze", path, "--kinds", "softmax, lln").stdout
        self.assertEqual([line for line in text.splitlines() if line.startswith("layer")],
                         ["layer 0, 'enc.2'", "layer 1, 'enc.10'"])

    def test_one_unconverged_sample_is_told(self):
        """The second sample is a permutation of one cycle: all eigenvalues on the unit circle."""
        n, d = 600, 16
        rows = [self.normal(d)[2] for _ in range(n)]
        cycle = [[40 * x / math.hypot(*row) for x in row] for row in rows]
        shifted = cycle[1:] + cycle[:1]
        path = self.dump(**{name: ("F32", [2, 1, n, d], sum(rows + other, []))
                            for name, other in (("q", cycle), ("k", shifted))})
        (found,) = analyze(path, "--kinds", "softmax", "--rows", 16)
        self.assertEqual((found["spectrum"]["method"], found["spectrum"]["converged"]),
                         ("arnoldi", False))
        self.assertGreater(found["spectrum"]["residual"], 0.01)
        text = lln("analyze", path, "--kinds", "softmax", "--rows", 16).stdout
        self.assertRegex(text, r"(?m)^ +0  softmax .* \d\.\d+\? ")
        self.assertIn("had not converged", text)

    def test_rows(self):
        q, k = self.normal(1, 1, 400, 8), self.normal(1, 1, 400, 8)
        (e,) = analyze(self.dump(q=q, k=k), "--kinds", "softmax", "--rows", 100)
        (whole,) = analyze(self.path("in"), "--kinds", "softmax")
        self.assertEqual((e["entropy"]["rows"], whole["entropy"]["rows"]), (100, 400))
        self.assertGreater(e["entropy"]["standard_error"], 0)
        self.assertEqual(whole["entropy"]["standard_error"], 0)
        self.assertLess(abs(e["entropy_nats"] - whole["entropy_nats"]),
                        5 * e["entropy"]["standard_error"])


class AnalyzeFaults(Dumps):
    def fault(self, *arguments, expect, text):
        error = lln("analyze", *arguments, expect=expect).stderr
        self.assertRegex(error, text)
        self.assertEqual(error.count("lln: "), 1, error)
        found = json.loads(lln("analyze", *arguments, "--json", expect=expect).stdout)
        self.assertRegex(found["error"]["text"], text)

    def test_usage(self):
        path = self.dump(q=self.normal(16, 8), k=self.normal(16, 8))
        for arguments, text in (
            ((), "either FILE or --q and --k"),
            ((path, "--gaussian", "n=64"), "makes its own q and k"),
            (("--gaussian", "n=64", "--matching", "frozen"), "frozen takes alpha and beta"),
            (("--gaussian", "n=1"), r"n=1: expected a number from 2"),
            (("--gaussian", "m=3,sigma_q=x"), r"'m=3': expected sigma_q.*sigma_q=x: expected"),
            ((path, "--kinds", "softmax,sing"), "sing"),
            ((path, "--kinds", "lln,lln"), "lln is there twice"),
            ((path, "--matching", "sing"), "sing"),
            ((path, "--rows", "-1"), "--rows: Value -1 not in range 0 to 1073741824"),
            ((path, "--causal", "--matching", "per_head"), "depend on its future"),
            ((path, "--report", path), "--report .* would replace the input"),
        ):
            self.fault(*arguments, expect=2, text=text)

    def test_a_report_never_replaces_npy_inputs(self):
        q, k = self.path("q.npy"), self.path("k.npy")
        for path in (q, k):
            npy_file.write(path, "<f4", (16, 8), self.normal(16, 8)[2])
        for path in (q, k):
            self.fault("--q", q, "--k", k, "--report", path, expect=2,
                       text="--report .* would replace the input")

    def test_input(self):
        q, k = self.normal(1, 2, 16, 8), self.normal(1, 2, 16, 8)
        bad = ("F32", [1, 2, 16, 8], [*q[2][:-1], math.nan])
        for tensors, text in (
            (dict(q=q), "'k' is missing"),
            (dict(v=q), "no tensors are named q and k"),
            (dict(q=q, k=self.normal(1, 2, 16, 4)), "as many channels"),
            (dict(q=bad, k=k), r"'q' holds an infinity or NaN .*at \[0, 1, 15, 7\]"),
            (dict(q=("I64", [16, 8], [1] * 128), k=k), "'q' is 'I64'"),
            (dict(q=q, k=self.normal(1, 2, 12, 8)),
             r"in: 1 fault: 'q' is F32 \[1, 2, 16, 8\] and 'k' is F32 \[1, 2, 12, 8\]: "
             "expected as many tokens"),
            ({"0.q": q, "0.k": k, "1.q": q, "1.k": self.normal(1, 2, 12, 8)}, "'1.k' is F32"),
        ):
            self.fault(self.dump(**tensors), expect=3, text=text)
        path = self.dump(q=q, k=k)
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) - 10)
        self.fault(path, expect=3, text="in")
        self.fault(self.path("absent"), expect=3, text="absent")
        self.fault("--gaussian", "n=64", "--report", self.path("no/where.html"), expect=3,
                   text="there is no folder")


class AnalyzeReport(Scratch):
    def test_written_and_named(self):
        path = self.path("out.html")
        text = lln("analyze", "--gaussian", "n=48,d=8,seeds=2", "--kinds", "softmax,lln",
                   "--report", path).stdout
        self.assertIn(f"wrote {path}", text)
        with open(path, encoding="utf-8") as file:
            page = file.read()
        self.assertNotIn("@DATA@", page)
        start = page.index('type="application/json">') + len('type="application/json">')
        data = json.loads(page[start : page.index("</script>", start)])
        self.assertEqual({e["kind"] for e in data["results"]}, {"softmax", "lln"})
        modes = {e["matching"] for e in data["sweep"] if e["kind"] == "lln"}
        self.assertEqual(modes, {"none", "paper", "per_head", "exact", "entropy"})
        self.assertGreaterEqual(len({round(e["input_temperature"], 1) for e in data["sweep"]}), 8)
        tokens = [row["tokens"] for row in data["cost"]["rows"]]
        self.assertEqual(tokens, [512 * 2**i for i in range(len(tokens))])
        self.assertIn("--gaussian n=48,d=8,seeds=2", data["command"])

    def test_interrupted(self):
        def default_signals():  # a test runner in the background may have them ignored
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        command = [PROGRAM, "analyze", "--gaussian", "n=4096,seeds=64", "--report",
                   self.path("out.html")]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   preexec_fn=default_signals)
        time.sleep(0.5)
        self.assertIsNone(process.poll(), "the run ended before it could be interrupted")
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=60), -signal.SIGINT)
        self.assertEqual(os.listdir(self.folder), [])


if __name__ == "__main__":
    unittest.main()
