"""Runs `lln run` on files: outputs and gradients against the definition, faults, interruption.

    run_test.py PROGRAM [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import json
import math
import os
import signal
import statistics
import subprocess
import time
import unittest

import plain_attention
import safetensors_file
from program import PROGRAM, Scratch, lln


class Forward(Scratch):
    def setUp(self):
        super().setUp()
        self.shape = (2, 2, 5, 3)
        self.tensors = {"q": self.normal(*self.shape), "k": self.normal(*self.shape),
                        "v": self.normal(2, 2, 5, 4)}

    def expected(self, kind, alpha=lambda b, h: 1.25, beta=lambda b, h: 0.75, valid=None, **rules):
        q, k, v = (plain_attention.rows(self.tensors[n][2], self.tensors[n][1]) for n in "qkv")
        return plain_attention.flat(
            [
                [
                    plain_attention.attend(kind, q[b][h], k[b][h], v[b][h], alpha(b, h), beta(b, h),
                                           valid=valid and valid[b], **rules)
                    for h in range(2)
                ]
                for b in range(2)
            ]
        )

    def assert_output(self, found, expected, dtype="F32", tolerance=1e-6):
        self.assertIn(sorted(found), (["o"], ["alpha", "beta", "o"]))
        self.assertEqual(found["o"][:2], (dtype, [2, 2, 5, 4]))
        self.assert_close(found["o"][2], expected, tolerance, "o")

    def test_every_kind(self):
        scales = ("--alpha", 1.25, "--beta", 0.75)
        for causal in (False, True):
            flag = ["--causal"] if causal else []
            with self.subTest(causal=causal):
                self.assert_output(self.run_file(self.tensors, "--kind", "lln", *scales, *flag),
                                   self.expected("lln", causal=causal))
                self.assert_output(self.run_file(self.tensors, "--kind", "diag2", *flag),
                                   self.expected("diag", block=2, causal=causal))
                self.assert_output(self.run_file(self.tensors, "--kind", "softmax", *flag),
                                   self.expected("softmax", causal=causal))
                mixed = self.run_file(self.tensors, "--kind", "lln+diag2", "--mix", 0.3, *scales,
                                      *flag)
                self.assert_output(mixed,
                                   self.expected("lln+diag", mix=0.3, block=2, causal=causal))

    def test_default_is_the_average_of_lln_and_diag64(self):
        found = self.run_file(self.tensors, "--alpha", 1.25, "--beta", 0.75)
        self.assert_output(found, self.expected("lln+diag"))

    def test_parameters_from_the_file(self):
        for shape, alpha in (([2], lambda b, h: 1 + h), ([2, 2], lambda b, h: 1 + b - h / 2)):
            pairs = [(b, h) for b in range(len(shape)) for h in range(2)]
            self.tensors["alpha"] = ("F32", shape, [alpha(b, h) for b, h in pairs])
            found = self.run_file(self.tensors, "--kind", "lln", "--beta", 0.75)
            self.assert_output(found, self.expected("lln", alpha=alpha))

    def test_key_lengths_and_masks(self):
        lengths, valid = [3, 0], [[True] * 3 + [False] * 2, [False] * 5]
        mask = ("BOOL", [2, 5], [int(x) for row in valid for x in row])
        for name, tensor in (("key_lengths", ("I64", [2], lengths)),
                             ("key_lengths", ("I32", [2], lengths)),
                             ("key_mask", mask), ("key_mask", ("U8", *mask[1:]))):
            with self.subTest(name=name, dtype=tensor[0]):
                tensors = {**self.tensors, name: tensor}
                found = self.run_file(tensors, "--alpha", 1.25, "--beta", 0.75)
                self.assert_output(found, self.expected("lln+diag", valid=valid))

    def test_half_precision(self):
        for dtype, tolerance in (("F16", 2e-3), ("BF16", 2e-2)):
            for name in "qkv":
                shape, values = self.tensors[name][1:]
                rounded = safetensors_file.unpack(dtype, safetensors_file.pack(dtype, values))
                self.tensors[name] = (dtype, shape, rounded)
            found = self.run_file(self.tensors, "--alpha", 1.25, "--beta", 0.75)
            self.assert_output(found, self.expected("lln+diag"), dtype, tolerance)

    def test_layout_changes_nothing_but_the_order(self):
        def swapped(tensor):
            dtype, (b, h, n, d), values = tensor
            rows = plain_attention.rows(values, (b, h, n, d))
            order = [rows[i][j][t] for i in range(b) for t in range(n) for j in range(h)]
            return (dtype, [b, n, h, d], [x for row in order for x in row])

        scales = ("--alpha", 1.25, "--beta", 0.75)
        plain = self.run_file(self.tensors, *scales)["o"]
        tensors = {n: swapped(t) for n, t in self.tensors.items()}
        other = self.run_file(tensors, *scales, "--layout", "bnhd")["o"]
        self.assertEqual(other, swapped(plain))

    def test_packed_sequences(self):
        packed, outputs = {n: [] for n in "qkv"}, []
        for tokens in (3, 0, 2):
            part = {n: [self.random.gauss(0, 1) for _ in range(tokens * 3)] for n in "qkv"}
            for n in "qkv":
                packed[n] += part[n]
            q, k, v = (plain_attention.rows(part[n], (1, 1, tokens, 3)) if tokens else [[[]]]
                       for n in "qkv")
            if tokens:
                outputs += plain_attention.flat(
                    [[plain_attention.attend("lln", q[0][0], k[0][0], v[0][0], 2, 1)]])
        tensors = {n: ("F32", [1, 1, 5, 3], packed[n]) for n in "qkv"}
        cu = ("I32", [4], [0, 3, 3, 5])
        for names in (["cu_seqlens"], ["cu_seqlens_q", "cu_seqlens_k"]):
            found = self.run_file({**tensors, **{n: cu for n in names}}, "--kind", "lln",
                                  "--alpha", 2, "--beta", 1)
            self.assert_close(found["o"][2], outputs, 1e-6, "o")

    def test_report_metadata_and_warnings(self):
        self.tensors["colour"] = ("U8", [1], [3])
        self.tensors["g"] = self.normal(2, 2, 5, 4)
        safetensors_file.write(self.path("in"), self.tensors)
        done = lln("run", self.path("in"), "-o", self.path("out"), "--kind", "softmax", "--threads",
                   1, "--json")
        result = json.loads(done.stdout)
        self.assertEqual(result["tensors"], ["o"])
        self.assertIsNone(result["matching"])
        self.assertEqual(len(result["warnings"]), 2)
        self.assertIn("warning: ", done.stderr)
        self.assertIn("tensor 'colour' is not known", done.stderr)
        self.assertIn("tensor 'g' plays no part without --backward", done.stderr)
        metadata = safetensors_file.read(self.path("out"))[1]
        self.assertEqual(metadata["forward_problem"], "forward:f32:cpu:b2h2n5d3v4:softmax")
        self.assertEqual(metadata["forward_problem"], result["forward"]["problem"])
        self.assertEqual(metadata["forward_kernel"], result["forward"]["kernel"])
        self.assertEqual(metadata["producer"], "lln " + lln("--version").stdout.strip())
        text = lln("run", self.path("in"), "-o", self.path("out"), "--kind", "softmax").stdout
        self.assertIn(metadata["forward_problem"], text)
        self.assertIn("wrote " + self.path("out") + ": o\n", text)


class Matching(Scratch):
    AUTHORS = (0.14855178144710912, -0.35487039130661086)

    def setUp(self):
        super().setUp()
        self.tensors = {"q": self.normal(2, 4, 6, 3), "k": self.normal(2, 2, 6, 3),
                        "v": self.normal(2, 2, 6, 4)}

    def report(self, *arguments, **changes):
        safetensors_file.write(self.path("in"), {**self.tensors, **changes})
        done = lln("run", self.path("in"), "-o", self.path("out"), *arguments, "--json")
        tensors, metadata = safetensors_file.read(self.path("out"))
        result = json.loads(done.stdout)
        self.assertEqual(metadata["matching"], result["matching"]["mode"])
        return tensors, result

    def scales(self, q, k, a, b):
        share = math.sqrt((statistics.variance(q) * statistics.variance(k) - b) / (2 * a))
        return share / statistics.stdev(q), share / statistics.stdev(k)

    def test_per_head_is_the_default_and_is_written(self):
        found, result = self.report("--kind", "lln")
        self.assertEqual(result["matching"]["mode"], "per_head")
        self.assertEqual(result["matching"]["clamped"], [])
        constants = result["matching"]["constants"]
        self.assertEqual(found["alpha"][:2], ("F32", [2, 4]))
        self.assertEqual(found["beta"][:2], ("F32", [2, 2]))
        q, k = self.tensors["q"][2], self.tensors["k"][2]
        for pair in range(4):  # (sequence, key head); two query heads share it
            alpha, beta = self.scales(q[pair * 36 : pair * 36 + 36], k[pair * 18 : pair * 18 + 18],
                                      constants["a"], constants["b"])
            self.assert_close(found["alpha"][2][2 * pair : 2 * pair + 2], [alpha, alpha], 1e-5,
                              "alpha")
            self.assert_close(found["beta"][2][pair : pair + 1], [beta], 1e-5, "beta")
        scales = {"alpha": found["alpha"], "beta": found["beta"]}
        again = self.run_file({**self.tensors, **scales}, "--kind", "lln")
        self.assertEqual(again, found)

    def test_paper_and_none(self):
        found, result = self.report("--matching", "paper")
        alpha, beta = self.scales(self.tensors["q"][2], self.tensors["k"][2], *self.AUTHORS)
        self.assert_close(found["alpha"][2], [alpha] * 8, 1e-5, "alpha")
        self.assert_close(found["beta"][2], [beta] * 4, 1e-5, "beta")
        self.assertEqual(result["matching"]["constants"], dict(zip("ab", self.AUTHORS)))
        found, result = self.report("--matching", "none", "--causal", "--feature", "elu")
        self.assertEqual((found["alpha"][2], found["beta"][2]), ([1] * 8, [1] * 4))
        self.assertIsNone(result["matching"]["constants"])
        given = self.run_file(self.tensors, "--alpha", 1, "--beta", 1, "--causal", "--feature",
                              "elu")
        self.assertEqual(found["o"], given["o"])

    def test_exact_and_entropy_follow_tables(self):
        tensors = {name: self.normal(1, 2, 40, 16) for name in "qkv"}
        high, low = (self.report("--matching", mode, **tensors) for mode in ("exact", "entropy"))
        self.assertEqual(high[1]["matching"], {"mode": "exact", "constants": None, "clamped": []})
        ratio = low[0]["alpha"][2][0] / high[0]["alpha"][2][0]
        self.assertTrue(0.7 < ratio < 0.97, ratio)
        _, small = self.report("--matching", "exact")  # six tokens of three channels
        self.assertIn("dim is outside 8 to 256 or tokens outside", small["warnings"][-1])

    def test_frozen_is_what_is_given(self):
        for flag in ([], ["--matching", "frozen"]):
            found, result = self.report("--alpha", 1.5, *flag, "--causal",
                                        beta=("F32", [2], [2, 3]))
            self.assertEqual(result["matching"]["mode"], "frozen")
            self.assertEqual(found["alpha"], ("F32", [4], [1.5] * 4))
            self.assertEqual(found["beta"], ("F32", [2], [2, 3]))

    def test_frozen_needs_both(self):
        text = self.run_file(self.tensors, "--matching", "frozen", expect=3)
        self.assertIn("2 faults: alpha is missing: expected F32 [4] or [2, 4], or --alpha; "
                      "beta is missing", text)

    def test_padding_and_packing(self):
        padded, _ = self.report(key_lengths=("I32", [2], [6, 4]))
        whole, _ = self.report()
        self.assertEqual(padded["alpha"][2][:4], whole["alpha"][2][:4])
        self.assertNotEqual(padded["alpha"][2][4:], whole["alpha"][2][4:])
        tensors = {n: ("F32", [1, 1, 6, 3], self.normal(1, 1, 6, 3)[2]) for n in "qkv"}
        found = self.run_file({**tensors, "cu_seqlens": ("I32", [3], [0, 4, 6])}, "--kind", "lln")
        self.assertEqual((found["alpha"][1], found["beta"][1]), ([2, 1], [2, 1]))

    def test_gradients_of_matched_scales(self):
        found, _ = self.report("--backward", g=self.normal(2, 4, 6, 4))
        self.assertEqual((found["dalpha"][1], found["dbeta"][1]), ([2, 4], [2, 2]))
        given, _ = self.report("--backward", g=self.normal(2, 4, 6, 4), alpha=found["alpha"],
                               beta=found["beta"])
        self.assertEqual(sorted(given), sorted(found))

    def test_heads_that_meet_a_limit_are_named(self):
        k = list(self.tensors["k"][2])
        k[54:72] = [0.25] * 18
        _, result = self.report(k=("F32", [2, 2, 6, 3], k))
        self.assertEqual(result["matching"]["clamped"],
                         [{"sequence": 1, "head_k": 1, "sigma_q": False, "sigma_k": True,
                           "target": False, "size": False}])
        self.assertIn("limits set alpha and beta of 1 pair, first sequence 1, key head 1: "
                      "sigma of k counts as 1e-4", result["warnings"][-1])

    def test_contradictions_are_usage_errors(self):
        beta = {**self.tensors, "beta": ("F32", [2], [1, 1])}
        for tensors, arguments, expected in [
            (self.tensors, ["--alpha", 1],
             "per_head sets alpha and beta itself: leave out --alpha"),
            (self.tensors, ["--causal"],
             "reads the whole sequence, so with --causal a row would depend on its"),
            (self.tensors, ["--feature", "relu"],
             "is for --feature exp, found relu: give alpha and beta, or use"),
            (beta, [], "tensor beta contradicts --matching per_head: use --matching frozen"),
        ]:
            text = self.run_file(tensors, "--matching", "per_head", *arguments, expect=2)
            self.assertIn(expected, text)

    def test_causal_and_other_features_ask_for_scales(self):
        text = self.run_file(self.tensors, "--causal", expect=3)
        self.assertIn("alpha and beta are missing: their default, --matching per_head, reads the "
                      "whole sequence", text)
        self.assertIn("expected F32 [4] or [2, 4] and [2] or [2, 2], or --alpha and --beta, or "
                      "--matching none", text)
        text = self.run_file(self.tensors, "--feature", "elu", expect=3)
        self.assertIn("is for --feature exp", text)


class Backward(Scratch):
    SHAPES = {"q": (1, 2, 5, 3), "k": (1, 2, 5, 3), "v": (1, 2, 5, 2), "g": (1, 2, 5, 2)}
    STEP = 1e-5

    def setUp(self):
        super().setUp()
        self.tensors = {name: self.normal(*shape) for name, shape in self.SHAPES.items()}

    def loss(self, values, causal):
        q, k, v = (plain_attention.rows(values[n], self.SHAPES[n]) for n in "qkv")
        out = [[plain_attention.attend("lln+diag", q[0][h], k[0][h], v[0][h], values["alpha"][h],
                                       values["beta"][h], values["mix"][h], block=2, causal=causal)
                for h in range(2)]]
        return sum(a * b for a, b in zip(plain_attention.flat(out), values["g"]))

    def differences(self, name, values, causal):
        gradient = []
        for i, centre in enumerate(values[name]):
            sides = []
            for step in (self.STEP, -self.STEP):
                values[name][i] = centre + step
                sides.append(self.loss(values, causal))
            values[name][i] = centre
            gradient.append((sides[0] - sides[1]) / (2 * self.STEP))
        return gradient

    def test_gradients_are_those_of_the_definition(self):
        values = {name: list(safetensors_file.unpack("F32", safetensors_file.pack("F32", t[2])))
                  for name, t in self.tensors.items()}
        values.update(alpha=[0.75, 1.5], beta=[1.25, 0.5], mix=[0.25, 0.75])
        for name in ("alpha", "beta", "mix"):
            self.tensors[name] = ("F32", [2], values[name])
        for causal in (False, True):
            found = self.run_file(self.tensors, "--kind", "lln+diag2", "--backward",
                                  *(["--causal"] if causal else []))
            self.assertEqual(sorted(found), ["alpha", "beta", "dalpha", "dbeta", "dk", "dmix", "dq",
                                             "dv", "o"])
            for name in ("q", "k", "v", "alpha", "beta", "mix"):
                self.assertEqual(found["d" + name][:2], ("F32", list(self.tensors[name][1])))
                self.assert_close(found["d" + name][2], self.differences(name, values, causal),
                                  2e-5, "d" + name)

    def test_flags_give_gradients_per_head(self):
        tensors = {**self.tensors, "alpha": ("F32", [2], [1.5] * 2),
                   "beta": ("F32", [2], [0.5] * 2), "mix": ("F32", [2], [0.25] * 2)}
        from_file = self.run_file(tensors, "--kind", "lln+diag2", "--backward")
        from_flags = self.run_file(self.tensors, "--kind", "lln+diag2", "--backward", "--alpha",
                                   1.5, "--beta", 0.5, "--mix", 0.25)
        self.assertEqual(from_flags, from_file)

    def test_gradients_of_weights_have_the_shapes_of_the_weights(self):
        scales = ("--alpha", 1.5, "--beta", 0.5, "--kind", "lln+diag2", "--backward")
        for shape in ([], [1], [2], [2, 2], [1, 2, 5]):
            with self.subTest(shape=shape):
                weight = ("F32", shape, [0.5] * math.prod(shape))
                one = self.run_file({**self.tensors, "mix": weight}, *scales)
                both = {"lln_weight": weight, "diag_weight": weight}
                two = self.run_file({**self.tensors, **both}, *scales)
                self.assertEqual(one["dmix"][:2], ("F32", shape))
                difference = [a - b for a, b in zip(two["dlln_weight"][2], two["ddiag_weight"][2])]
                self.assertEqual(two["ddiag_weight"][1], shape)
                self.assert_close(one["dmix"][2], difference, 1e-5, "dmix")
                self.assertNotIn("dmix", two)

    def test_kinds_without_parameters_have_no_gradients_of_them(self):
        for kind in ("diag2", "softmax"):
            found = self.run_file(self.tensors, "--kind", kind, "--backward")
            self.assertEqual(sorted(found), ["dk", "dq", "dv", "o"])

    def test_metadata_and_report_name_both_passes(self):
        self.run_file(self.tensors, "--kind", "softmax", "--backward")
        metadata = safetensors_file.read(self.path("out"))[1]
        done = lln("run", self.path("in"), "-o", self.path("out"), "--kind", "softmax",
                   "--backward", "--json")
        result = json.loads(done.stdout)
        for op in ("forward", "backward"):
            self.assertEqual(metadata[op + "_problem"], op + ":f32:cpu:b1h2n5d3v2:softmax")
            self.assertEqual(metadata[op + "_kernel"], result[op]["kernel"])
            self.assertGreater(result[op]["seconds"], 0)


class Faults(Scratch):
    def setUp(self):
        super().setUp()
        self.tensors = {"q": self.normal(1, 2, 5, 3), "k": self.normal(1, 2, 5, 3),
                        "v": self.normal(1, 2, 5, 4)}

    def refused(self, *arguments, expect=3, **changes):
        return self.run_file({**self.tensors, **changes}, *arguments, expect=expect)

    def test_all_faults_in_one_error(self):
        del self.tensors["k"]
        text = self.refused("--backward", q=self.normal(2, 5, 3), alpha=("F64", [2], [1, 1]),
                            key_mask=("F32", [5], [1] * 5))
        self.assertEqual(
            text.split(": ", 2)[2].strip(),
            "6 faults: q is F32 [2, 5, 3]: expected F32/F16/BF16 [*, *, *, *]; "
            "k is missing: expected F32 [*, *, *, *]; g is missing: expected F32 [*, *, *, 4]; "
            "alpha is F64 [2]: expected F32 [*] or [*, *]; "
            "beta is missing: expected F32 [*] or [*, *], or --beta; "
            "key_mask is F32 [5]: expected BOOL/U8 [*, *]",
        )

    def test_mismatched_shapes(self):
        scales = ("--alpha", 1, "--beta", 1)
        for changes, expected in [
            ({"k": self.normal(1, 2, 5, 4)}, "k is F32 [1, 2, 5, 4]: expected F32 [1, *, *, 3]"),
            ({"v": self.normal(1, 2, 6, 4)}, "v is F32 [1, 2, 6, 4]: expected F32 [1, 2, 5, *]"),
            ({"k": ("F16", [1, 2, 5, 3], [0] * 30)},
             "k is F16 [1, 2, 5, 3]: expected F32 [1, *, *, 3]"),
            ({"mix": self.normal(3)},
             "mix is F32 [3]: expected F32 [] or [1] or [2] or [2, 4] or [1, 2, 5]"),
            ({"key_lengths": ("I32", [2], [1, 1])}, "key_lengths is I32 [2]: expected I32/I64 [1]"),
        ]:
            self.assertIn(expected, self.refused(*scales, **changes))
        self.assertIn("k is F32 [1, 2, 5, 4]: expected F32 [1, *, *, 3]",
                      self.refused(*scales, "--layout", "bnhd", k=self.normal(1, 2, 5, 4)))

    def test_a_thing_given_twice(self):
        self.assertIn("alpha is given by the file and by --alpha",
                      self.refused("--alpha", 1, "--beta", 1, alpha=("F32", [2], [1, 1])))
        self.assertIn("mix is given by the file together with --mix",
                      self.refused("--alpha", 1, "--beta", 1, "--mix", 0.5, mix=("F32", [], [0.5])))
        cu = ("I32", [2], [0, 5])
        self.assertIn("cu_seqlens is given together with",
                      self.refused("--alpha", 1, "--beta", 1, cu_seqlens=cu, cu_seqlens_q=cu))

    def test_values_that_the_library_refuses(self):
        scales = ("--kind", "lln", "--alpha", 1, "--beta", 1)
        self.assertIn("alpha[0, 1, 0, 0] is inf: expected a finite number",
                      self.refused("--kind", "lln", "--beta", 1, alpha=("F32", [2], [1, math.inf])))
        self.assertIn("cu_seqlens_q[1] is 9",
                      self.refused(*scales, cu_seqlens=("I32", [3], [0, 9, 5])))
        self.assertIn("unknown kernel 'abacus'", self.refused(*scales, "--kernel", "abacus"))
        # Named before a pass over q and k is spent on moments, which these would refuse.
        endless = ("F32", self.tensors["q"][1], [math.inf] * len(self.tensors["q"][2]))
        self.assertIn("holds an infinity", self.refused("--kind", "lln", q=endless))
        self.assertIn("unknown kernel 'abacus'",
                      self.refused("--kind", "lln", "--kernel", "abacus", q=endless))
        self.tensors = {n: ("F32", [1, 2, 5, 0], []) for n in "qkv"}
        self.assertIn("channels of q and k must be 1 to 256: 0", self.refused(*scales))

    def test_numbers_that_are_not_finite(self):
        for value, shown in (("nan", "nan"), ("inf", "inf"), ("-inf", "-inf"), ("1e39", "inf")):
            for flag in ("alpha", "beta", "mix"):
                flags = {"alpha": 1, "beta": 1, "mix": 0.5, flag: value}
                arguments = [f"--{name}={number}" for name, number in flags.items()]
                for backward in ([], ["--backward"]):
                    text = self.refused(*arguments, *backward, g=self.normal(1, 2, 5, 4))
                    expected = rf"{flag}\[[0, ]*\] is {shown}: expected a finite number"
                    self.assertRegex(text, expected)

    def test_damaged_files(self):
        safetensors_file.write(self.path("in"), self.tensors)
        with open(self.path("in"), "rb") as file:
            whole = file.read()
        for size in (0, 5, 8, 50, len(whole) - 1):
            with open(self.path("in"), "wb") as file:
                file.write(whole[:size])
            done = lln("run", self.path("in"), "-o", self.path("out"), "--kind", "softmax",
                       "--json", expect=3)
            self.assertIn(self.path("in"), json.loads(done.stdout)["error"]["text"])
            self.assertEqual(os.listdir(self.folder), ["in"])

    def test_a_failing_run_leaves_the_old_output(self):
        with open(self.path("out"), "w", encoding="utf-8") as file:
            file.write("before")
        safetensors_file.write(self.path("in"), self.tensors)
        lln("run", self.path("in"), "-o", self.path("out"), "--alpha", "nan", "--beta", 1, expect=3)
        with open(self.path("out"), encoding="utf-8") as file:
            self.assertEqual(file.read(), "before")

    def test_the_input_is_never_replaced(self):
        safetensors_file.write(self.path("in"), self.tensors)
        done = lln("run", self.path("in"), "-o", self.path("in"), "--kind", "softmax", expect=2)
        self.assertIn("would replace the input", done.stderr)


class Interruption(Scratch):
    def start(self, *arguments):
        def default_signals():  # a test runner in the background may have them ignored
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

        command = [PROGRAM, "run", self.path("in"), "-o", self.path("out"), *arguments]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                preexec_fn=default_signals)

    def write_zeros(self, tokens, dim):
        zeros = bytes(4 * tokens * dim)
        safetensors_file.write(self.path("in"),
                               {n: ("F32", [1, 1, tokens, dim], zeros) for n in "qkv"})

    def test_while_writing(self):
        self.write_zeros(200000, 64)
        interrupted = 0
        for attempt in range(8):
            number = (signal.SIGINT, signal.SIGTERM)[attempt % 2]
            process = self.start("--kind", "diag1")
            while process.poll() is None:
                if any(name.endswith(".part") for name in os.listdir(self.folder)):
                    break
            process.send_signal(number)
            code = process.wait(timeout=60)
            left = sorted(os.listdir(self.folder))
            if left == ["in"]:
                self.assertEqual(code, -number)
                interrupted += 1
            else:  # the signal came after the rename: the file is whole
                self.assertEqual(left, ["in", "out"])
                self.assertEqual(os.path.getsize(self.path("out")) % 8, 0)
                self.assertGreater(os.path.getsize(self.path("out")), 4 * 200000 * 64)
                os.remove(self.path("out"))
            if interrupted == 2:
                return
        self.assertGreater(interrupted, 0, "the signal never arrived in time")

    def test_while_computing(self):
        self.write_zeros(8000, 64)
        process = self.start("--kind", "lln", "--alpha", "1", "--beta", "1", "--kernel",
                             "reference")
        time.sleep(0.5)
        self.assertIsNone(process.poll(), "the run ended before it could be interrupted")
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=60), -signal.SIGINT)
        self.assertEqual(os.listdir(self.folder), ["in"])


if __name__ == "__main__":
    unittest.main()
