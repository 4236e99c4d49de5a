"""Runs `lln run` on .npy files: the same numbers as with safetensors, and what is refused.

    npy_test.py PROGRAM [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import json
import os
import unittest

import npy_file
import safetensors_file
from program import Scratch, lln


class Npy(Scratch):
    SCALES = ("--alpha", 1.25, "--beta", 0.75)

    def setUp(self):
        super().setUp()
        self.tensors = {
            "q": self.normal(1, 2, 5, 3),
            "k": self.normal(1, 2, 5, 3),
            "v": self.normal(1, 2, 5, 4),
            "g": self.normal(1, 2, 5, 4),
        }
        for name, (_, shape, values) in self.tensors.items():
            npy_file.write(self.path(name + ".npy"), "<f4", shape, values)
        self.inputs = [word for name in "qkv" for word in ("--" + name, self.path(name + ".npy"))]
        safetensors_file.write(self.path("in"), self.tensors)

    def refused(self, *arguments, expect=2):
        done = lln("run", *arguments, *self.SCALES, expect=expect)
        self.assertFalse(os.path.exists(self.path("o.npy")))
        return done.stderr

    def test_same_numbers_as_safetensors(self):
        lln("run", *self.inputs, "-o", self.path("o.npy"), *self.SCALES)
        descr, shape, values = npy_file.read(self.path("o.npy"))
        self.assertEqual((descr, shape), ("<f4", [1, 2, 5, 4]))
        lln("run", self.path("in"), "-o", self.path("out"), *self.SCALES)
        self.assertEqual(values, safetensors_file.read(self.path("out"))[0]["o"][2])
        lln("run", self.path("in"), "-o", self.path("p.npy"), *self.SCALES)
        self.assertEqual(npy_file.read(self.path("p.npy"))[2], values)

    def test_gradients_go_to_safetensors(self):
        gradient = ("--g", self.path("g.npy"), "--backward")
        lln("run", *self.inputs, *gradient, "-o", self.path("a"), *self.SCALES)
        lln("run", self.path("in"), "--backward", "-o", self.path("b"), *self.SCALES)
        self.assertEqual(
            safetensors_file.read(self.path("a"))[0], safetensors_file.read(self.path("b"))[0]
        )
        text = self.refused(*self.inputs, *gradient, "-o", self.path("o.npy"))
        self.assertIn("holds one tensor, --backward writes several: use a safetensors file", text)

    def test_half_precision(self):
        for name in "qkv":
            npy_file.write(self.path(name + ".npy"), "<f2", *self.tensors[name][1:])
        done = lln("run", *self.inputs, "-o", self.path("o.npy"), *self.SCALES, "--json")
        self.assertTrue(json.loads(done.stdout)["forward"]["problem"].startswith("forward:f16:"))
        self.assertEqual(npy_file.read(self.path("o.npy"))[0], "<f2")

    def test_what_npy_cannot_hold(self):
        for name in "qkv":
            self.tensors[name] = ("BF16", *self.tensors[name][1:])
        safetensors_file.write(self.path("in"), self.tensors)
        self.assertIn(
            ".npy has no bf16: write a safetensors file",
            self.refused(self.path("in"), "-o", self.path("o.npy"), expect=3),
        )

    def test_faults(self):
        out = ("-o", self.path("o.npy"))
        self.assertIn("expected either IN or --q, --k and --v", self.refused(*out))
        self.assertIn(
            "expected either IN or --q, --k and --v",
            self.refused(self.path("in"), *self.inputs, *out),
        )
        self.assertIn("given together", self.refused(*self.inputs[:4], *out))
        self.assertIn("IN is a safetensors file", self.refused(self.path("q.npy"), *out))
        self.assertIn(
            "would replace the input", self.refused(*self.inputs, "-o", self.path("v.npy"))
        )
        npy_file.write(self.path("k.npy"), "<f8", *self.tensors["k"][1:])
        self.assertIn(
            "k is F64 [1, 2, 5, 3]: expected F32", self.refused(*self.inputs, *out, expect=3)
        )
        with open(self.path("k.npy"), "r+b") as file:
            file.truncate(100)
        self.assertIn(self.path("k.npy") + ": ", self.refused(*self.inputs, *out, expect=3))


if __name__ == "__main__":
    unittest.main()
