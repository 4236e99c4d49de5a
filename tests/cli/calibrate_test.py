"""Runs `lln calibrate` on dumped q and k: numbers against the definition, layers and names, faults.

    calibrate_test.py PROGRAM [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import json
import math
import os
import statistics
import struct
import unittest

import npy_file
import safetensors_file
from program import Scratch, lln

# a and b for 16 channels, as docs/matching.md has them.
A, B = 0.2145, -0.3745


def line_scales(q, k):
    """alpha and beta of mode per_head by its formula."""
    sigma_q, sigma_k = statistics.stdev(q), statistics.stdev(k)
    st = math.sqrt((sigma_q**2 * sigma_k**2 - B) / (2 * A))
    return st / sigma_q, st / sigma_k


class Calibration(Scratch):
    def calibrate(self, tensors, *arguments, expect=0):
        """The JSON written; with another exit code, the error text."""
        safetensors_file.write(self.path("in"), tensors)
        done = lln("calibrate", self.path("in"), "-o", self.path("out"), *arguments, expect=expect)
        if expect != 0:
            self.assertEqual(os.listdir(self.folder), ["in"])
            return done.stderr
        with open(self.path("out"), encoding="utf-8") as file:
            return json.load(file)


class Calibrate(Calibration):
    def test_per_head_is_the_formula(self):
        # Two sequences, two query heads that share a key head: all of them are pooled.
        q, k = self.normal(2, 2, 30, 16), self.normal(2, 1, 30, 16)
        found = self.calibrate({"q": q, "k": k}, "--matching", "per_head")
        self.assertEqual((found["format"], found["version"], found["mode"]),
                         ("lln-calibration", 1, "per_head"))
        (layer,) = found["layers"]
        self.assertEqual((layer["name"], layer["dim"], layer["tokens"]), ("", 16, 30))
        alpha, beta = line_scales(q[2], k[2])
        self.assert_close(layer["alpha"], [alpha, alpha], 1e-6)
        self.assert_close(layer["beta"], [beta], 1e-6)

    def test_entropy_is_the_default_and_below_exact(self):
        tensors = {"q": self.normal(1, 2, 60, 16), "k": self.normal(1, 2, 60, 16)}
        entropy = self.calibrate(tensors)
        exact = self.calibrate(tensors, "--matching", "exact")
        self.assertEqual((entropy["mode"], exact["mode"]), ("entropy", "exact"))
        for low, high in zip(entropy["layers"][0]["alpha"], exact["layers"][0]["alpha"]):
            self.assertTrue(1 < low < high < 3, (low, high))

    def test_layers_by_name_in_natural_order(self):
        tensors = {}
        for layer in ("enc.10", "enc.2", "enc.1"):
            tensors[f"{layer}.query"] = self.normal(1, 2, 20, 8)
            tensors[f"{layer}.key"] = self.normal(1, 2, 20, 8)
            tensors[f"{layer}.value"] = self.normal(1, 2, 20, 8)
        found = self.calibrate(tensors, "--q-name", "query", "--k-name", "key")
        self.assertEqual([layer["name"] for layer in found["layers"]], ["enc.1", "enc.2", "enc.10"])

    def test_shapes_layouts_and_dtypes_are_one(self):
        values = self.normal(2, 24, 8)[2], self.normal(2, 24, 8)[2]  # [head, token, channel]

        def tensors(dtype, shape, order=lambda v: v):
            return {name: (dtype, shape, order(v)) for name, v in zip("qk", values)}

        def by_token(v):
            return [v[(h * 24 + n) * 8 + c] for n in range(24) for h in range(2) for c in range(8)]

        plain = self.calibrate(tensors("F32", (1, 2, 24, 8)))["layers"][0]
        self.assertEqual(self.calibrate(tensors("F32", (2, 24, 8)))["layers"][0], plain)
        self.assertEqual(self.calibrate(tensors("F64", (2, 24, 8)))["layers"][0], plain)
        swapped = self.calibrate(tensors("F32", (24, 2, 8), by_token), "--layout", "bnhd")
        self.assertEqual(swapped["layers"][0], plain)
        one = {name: ("F32", (24, 8), v[: 24 * 8]) for name, v in zip("qk", values)}
        self.assert_close(self.calibrate(one)["layers"][0]["alpha"], plain["alpha"][:1], 0)
        for dtype, tolerance in (("F16", 1e-3), ("BF16", 1e-2)):
            half = self.calibrate(tensors(dtype, (1, 2, 24, 8)))["layers"][0]
            self.assert_close(half["alpha"], plain["alpha"], tolerance, dtype)

    def test_npy_pairs_are_layers(self):
        files = {}
        for name in ("q0", "k0", "q1", "k1"):
            _, shape, files[name] = self.normal(2, 20, 8)
            npy_file.write(self.path(name), "<f4", shape, files[name])
        done = lln("calibrate", "--q", self.path("q0"), self.path("q1"), "--k", self.path("k0"),
                   self.path("k1"), "-o", self.path("out"), "--json")
        result = json.loads(done.stdout)
        self.assertEqual([layer["name"] for layer in result["layers"]], ["0", "1"])
        single = self.calibrate({"q": ("F32", (2, 20, 8), files["q1"]),
                                 "k": ("F32", (2, 20, 8), files["k1"])})
        self.assert_close(result["layers"][1]["alpha"], single["layers"][0]["alpha"], 1e-8)

    def test_limits_are_reported(self):
        tensors = {"q": self.normal(1, 1, 10, 8), "k": ("F32", (1, 1, 10, 8), [0.0] * 80)}
        safetensors_file.write(self.path("in"), tensors)
        done = lln("calibrate", self.path("in"), "-o", self.path("out"), "--json")
        (clamped,) = json.loads(done.stdout)["layers"][0]["clamped"]
        self.assertEqual(clamped, {"sequence": -1, "head_k": 0, "sigma_q": False, "sigma_k": True,
                                   "target": True, "size": True})
        self.assertIn("warning: layer '': limits set alpha and beta of 1 pair", done.stderr)


    def test_run_takes_a_layer(self):
        q, k = self.normal(1, 2, 20, 8), self.normal(1, 1, 20, 8)
        found = self.calibrate({"a.q": q, "a.k": k})
        os.rename(self.path("out"), self.path("calibration"))
        safetensors_file.write(self.path("in"), {"q": q, "k": k, "v": k})
        command = ("run", self.path("in"), "-o", self.path("out"), "--calibration",
                   self.path("calibration"))
        done = lln(*command, "--layer", "a", "--json")
        self.assertEqual(json.loads(done.stdout)["matching"]["mode"], "frozen")
        written = safetensors_file.read(self.path("out"))[0]
        self.assert_close(written["alpha"][2], found["layers"][0]["alpha"], 1e-7)
        self.assert_close(written["beta"][2], found["layers"][0]["beta"], 1e-7)
        self.assertIn("has no layer 'b': found 'a'", lln(*command, "--layer", "b", expect=3).stderr)
        self.assertIn("has no layer ''", lln(*command, expect=3).stderr)
        for arguments in (("--alpha", 1), ("--matching", "exact"), ("--kind", "softmax")):
            self.assertIn("--calibration",
                          lln(*command, "--layer", "a", *arguments, expect=2).stderr)
        self.assertIn("--layer names a layer of --calibration",
                      lln(*command[:4], "--layer", "a", expect=2).stderr)
        self.assertIn("would replace the input",
                      lln("run", self.path("in"), "-o", self.path("calibration"), "--calibration",
                          self.path("calibration"), "--layer", "a", expect=2).stderr)
        wide = self.normal(1, 2, 20, 4)
        safetensors_file.write(self.path("in"), {"q": wide, "k": wide, "v": wide})
        self.assertIn("2 heads, 1 key heads and 8 channels: expected 2, 2 and 4",
                      lln(*command, "--layer", "a", expect=3).stderr)


class Dumps(Calibration):
    """What a dump may not be, with one error for each."""

    def refused(self, tensors, text, *arguments):
        error = self.calibrate(tensors, *arguments, expect=3)
        self.assertIn(text, error)
        self.assertEqual(error.count("\n"), 1)

    def good(self):
        return {"q": self.normal(2, 4, 6, 8), "k": self.normal(2, 2, 6, 8)}

    def test_names(self):
        self.refused({}, "no tensors are named q and k, or end in .q and .k: found none at all")
        self.refused({"x": self.normal(2), "y": self.normal(2)}, "found 'x', 'y'")
        self.refused({"a.q": self.normal(6, 8)}, "1 fault: 'a.k' is missing")
        both = {"a.q": self.normal(6, 8), "b.k": self.normal(6, 8)}
        self.refused(both, "2 faults: 'a.k' is missing; 'b.q' is missing")
        many = {f"{i}.q": self.normal(6, 8) for i in range(20)}
        self.refused(many, "20 faults: '0.k' is missing; '1.k' is missing; '2.k' is missing")
        self.refused(many, "'11.k' is missing; and 8 more")
        self.assertIn("--q-name and --k-name are both x",
                      self.calibrate(self.good(), "--q-name", "x", "--k-name", "x", expect=2))

    def test_shapes_and_dtypes(self):
        for change, text in (
            ({"q": self.normal(8)}, "'q' is [8]: expected 2 to 4 dimensions"),
            ({"q": self.normal(1, 2, 4, 6, 8)}, "'q' is [1, 2, 4, 6, 8]: expected 2 to 4"),
            ({"k": ("F32", (2, 2, 0, 8), [])}, "'k' is [2, 2, 0, 8]: there is nothing in it"),
            ({"k": ("I32", (2, 2, 6, 8), [1] * 192)},
             "'k' is 'I32': expected F32, F16, BF16 or F64"),
            ({"k": self.normal(2, 2, 6, 7)}, "expected as many channels"),
            ({"k": self.normal(2, 3, 6, 8)}, "heads of q that are a multiple of those of k"),
            ({"k": self.normal(3, 2, 6, 8)}, "expected one batch"),
            ({"k": self.normal(2, 6, 8)}, "expected as many dimensions and one batch"),
            ({"k": ("F16", (2, 2, 6, 8), [1.0] * 192)},
             "'q' is F32 [2, 4, 6, 8] and 'k' is F16 [2, 2, 6, 8]: expected one dtype"),
            ({"alpha": self.normal(3)}, "'alpha' is 'F32' [3]: expected F32 [4] or [2, 4]"),
        ):
            self.refused({**self.good(), **change}, text)

    def test_numbers(self):
        for dtype, bad in (("F32", math.nan), ("F32", math.inf), ("F16", math.nan),
                           ("BF16", -math.inf), ("F64", math.nan), ("F64", 1e300)):
            values = [0.5] * 192
            values[((1 * 2 + 0) * 6 + 3) * 8 + 5] = bad
            kind = "F32" if dtype == "F64" else dtype
            tensors = {"q": (dtype, (2, 4, 6, 8), [0.5] * 384), "k": (dtype, (2, 2, 6, 8), values)}
            self.refused(tensors, f"'k' holds an infinity or NaN (as {kind}) at [1, 0, 3, 5]")

    def test_files(self):
        safetensors_file.write(self.path("in"), self.good())
        with open(self.path("in"), "rb") as file:
            whole = file.read()
        for cut, text in ((3, "has 3 bytes"), (20, "claims a header"), (len(whole) - 1, "data")):
            with open(self.path("in"), "wb") as file:
                file.write(whole[:cut])
            done = lln("calibrate", self.path("in"), "-o", self.path("out"), expect=3)
            self.assertIn(text, done.stderr)
        with open(self.path("in"), "wb") as file:
            file.write(struct.pack("<Q", 4) + b"{]xx")
        done = lln("calibrate", self.path("in"), "-o", self.path("out"), expect=3)
        self.assertIn("the header is not valid JSON", done.stderr)
        self.assertIn("cannot be opened", lln("calibrate", self.path("none"), "-o",
                                              self.path("out"), expect=3).stderr)

    def test_usage(self):
        out = ["-o", self.path("out")]
        self.assertIn("either FILE or --q and --k", lln("calibrate", *out, expect=2).stderr)
        self.assertIn("--q has 2 files and --k 1",
                      lln("calibrate", "--q", "a", "b", "--k", "c", *out, expect=2).stderr)
        self.assertIn("FILE is a safetensors file",
                      lln("calibrate", "x.npy", *out, expect=2).stderr)
        safetensors_file.write(self.path("in"), self.good())
        self.assertIn("would replace the input",
                      lln("calibrate", self.path("in"), "-o", self.path("in"), expect=2).stderr)
        self.assertIn("ema", lln("calibrate", self.path("in"), *out, "--matching", "ema",
                                 expect=2).stderr)


if __name__ == "__main__":
    unittest.main()
