"""Runs the program lln as a user does: help, exit codes, JSON, files in and out, interruption.

    cli_test.py PROGRAM [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import json
import math
import os
import pty
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import plain_attention
import safetensors_file

PROGRAM = ""
VERBS = ["info", "check", "explain", "run", "demo"]


def lln(*arguments, expect=0, **options):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)
    if expect is not None and done.returncode != expect:
        raise AssertionError(
            f"lln {' '.join(map(str, arguments))}: exit code {done.returncode}, expected {expect}\n"
            f"{done.stdout}{done.stderr}"
        )
    return done


class Scratch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lln_cli_")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.random = random.Random(1)

    def path(self, name):
        return os.path.join(self.folder, name)

    def normal(self, *shape):
        return ("F32", shape, [self.random.gauss(0, 1) for _ in range(math.prod(shape))])

    def run_file(self, tensors, *arguments, expect=0):
        """Returns the tensors written; with another exit code, the error text."""
        safetensors_file.write(self.path("in"), tensors)
        done = lln("run", self.path("in"), "-o", self.path("out"), *arguments, expect=expect)
        if expect != 0:
            self.assertEqual(os.listdir(self.folder), ["in"])
            return done.stderr
        self.assertEqual(sorted(os.listdir(self.folder)), ["in", "out"])
        return safetensors_file.read(self.path("out"))[0]

    def assert_close(self, found, expected, tolerance, what=""):
        self.assertEqual(len(found), len(expected), what)
        for i, (a, b) in enumerate(zip(found, expected)):
            if not abs(a - b) <= tolerance * (1 + abs(b)):
                self.fail(f"{what}[{i}]: {a}, expected {b} within {tolerance}")


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
        self.assertIn("'' is no verb: expected info, check", lln(expect=2).stderr)
        self.assert_error(2, "usage", "sing")
        self.assert_error(2, "usage", "info", "--loudly")
        self.assert_error(2, "usage", "run", "in.safetensors")
        self.assert_error(2, "usage", "explain", "forward:f32:cpu:b1h1:lln")
        self.assert_error(2, "usage", "check", "no case has this text")
        self.assert_error(2, "usage", "demo", "--max-n", "many")
        self.assert_error(2, "usage", "demo", "--max-n", 16)
        for option, value in [("--kind", "lln+diag"), ("--feature", "cosine"), ("--alpha", "big"),
                              ("--layout", "dnhb"), ("--threads", -1)]:
            self.assert_error(2, "usage", "run", "in", "-o", self.path("out"), option, value)

    def test_flags_that_play_no_part(self):
        for arguments in [("--kind", "lln", "--mix", 0.5), ("--kind", "softmax", "--alpha", 1),
                          ("--kind", "diag8", "--beta", 1), ("--kind", "softmax", "--feature", "elu")]:
            self.assert_error(2, "usage", "run", "in", "-o", self.path("out"), *arguments)

    def test_input(self):
        missing, out = self.path("missing"), self.path("out")
        self.assert_error(3, "io", "run", missing, "-o", out)
        self.assert_error(3, "io", "run", missing, "-o", self.path("no/folder/out"))
        self.assert_error(3, "io", "run", missing, "-o", "/dev/null")
        self.assert_error(3, "invalid_argument", "check", "--kernel", "abacus")

    def test_unsupported(self):
        text = lln("explain", "forward:f32:cuda:b1h1n8d8:lln", expect=4).stdout
        self.assertIn("reference", text)
        result = json.loads(lln("explain", "forward:f32:cuda:b1h1n8d8:lln", "--json", expect=4).stdout)
        self.assertIsNone(result["kernel"])

    def test_memory(self):
        def limited():
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

        if lln("info", expect=None, preexec_fn=limited).returncode != 0:
            self.skipTest("this build does not start in 1 GiB of address space")
        header = {"q": {"dtype": "F32", "shape": [1, 1, 1 << 20, 256], "data_offsets": [0, 1 << 30]}}
        for name, begin in (("k", 1 << 30), ("v", 1 << 31)):
            header[name] = {**header["q"], "data_offsets": [begin, begin + (1 << 30)]}
        text = json.dumps(header).encode()
        with open(self.path("sparse"), "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + (3 << 30))
        done = lln("run", self.path("sparse"), "-o", self.path("out"), "--kind", "softmax", "--json", expect=5,
                   preexec_fn=limited)
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
        self.assertEqual(lines[-1], f"{result['passed']} passed, 0 failed, {result['skipped']} skipped")
        self.assertEqual(len(result["results"]), result["passed"] + result["skipped"])
        self.assertEqual(json.loads(lln(*arguments, "--json").stdout)["results"], [])
        for entry in result["results"]:
            self.assertIn("softmax", entry["case"])
            self.assertEqual(entry["kernel"], "reference")


class Demo(unittest.TestCase):
    def test_small_demo(self):
        text = lln("demo", "--max-n", 1500).stdout
        self.assertRegex(text, r"\n +512 .*\n +1024 .*\n\n")
        self.assertIn("What to try next", text)
        self.assertLessEqual(max(map(len, text.splitlines())), 100 + len(PROGRAM))
        for command in re.findall(re.escape(PROGRAM) + r" (explain .*)", text):
            lln(*command.split())

    def test_json(self):
        result = json.loads(lln("demo", "--max-n", 512, "--threads", 1, "--json").stdout)
        self.assertEqual([row["tokens"] for row in result["rows"]], [512])
        self.assertEqual(result["threads"], 1)
        for kind in ("lln_diag", "softmax"):
            self.assertLess(result["relative_error"][kind], 1e-5)
            self.assertGreater(result["rows"][0][kind]["seconds"], 0)
            self.assertGreaterEqual(result["rows"][0][kind]["bytes"], 4 * 4 * 512 * 64 * 4)
        self.assertEqual(result["rows"][0]["matrix_bytes"], 4 * 512 * 512 * 4)


class RunForward(Scratch):
    def setUp(self):
        super().setUp()
        self.shape = (2, 2, 5, 3)
        self.tensors = {"q": self.normal(*self.shape), "k": self.normal(*self.shape), "v": self.normal(2, 2, 5, 4)}

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
        self.assertEqual(list(found), ["o"])
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
                self.assert_output(self.run_file(self.tensors, "--kind", "lln+diag2", "--mix", 0.3, *scales, *flag),
                                   self.expected("lln+diag", mix=0.3, block=2, causal=causal))

    def test_default_is_the_average_of_lln_and_diag64(self):
        found = self.run_file(self.tensors, "--alpha", 1.25, "--beta", 0.75)
        self.assert_output(found, self.expected("lln+diag"))

    def test_parameters_from_the_file(self):
        for shape, alpha in (([2], lambda b, h: 1 + h), ([2, 2], lambda b, h: 1 + b - h / 2)):
            pairs = [(b, h) for b in range(2) for h in range(2)] if len(shape) == 2 else [(0, 0), (0, 1)]
            self.tensors["alpha"] = ("F32", shape, [alpha(b, h) for b, h in pairs])
            found = self.run_file(self.tensors, "--kind", "lln", "--beta", 0.75)
            self.assert_output(found, self.expected("lln", alpha=alpha))

    def test_key_lengths_and_masks(self):
        lengths, valid = [3, 0], [[True] * 3 + [False] * 2, [False] * 5]
        mask = ("BOOL", [2, 5], [int(x) for row in valid for x in row])
        for name, tensor in (("key_lengths", ("I64", [2], lengths)), ("key_lengths", ("I32", [2], lengths)),
                             ("key_mask", mask), ("key_mask", ("U8", *mask[1:]))):
            with self.subTest(name=name, dtype=tensor[0]):
                found = self.run_file({**self.tensors, name: tensor}, "--alpha", 1.25, "--beta", 0.75)
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
        other = self.run_file({n: swapped(t) for n, t in self.tensors.items()}, *scales, "--layout", "bnhd")["o"]
        self.assertEqual(other, swapped(plain))

    def test_packed_sequences(self):
        packed, outputs = {n: [] for n in "qkv"}, []
        for tokens in (3, 0, 2):
            part = {n: [self.random.gauss(0, 1) for _ in range(tokens * 3)] for n in "qkv"}
            for n in "qkv":
                packed[n] += part[n]
            q, k, v = (plain_attention.rows(part[n], (1, 1, tokens, 3)) if tokens else [[[]]] for n in "qkv")
            if tokens:
                outputs += plain_attention.flat([[plain_attention.attend("lln", q[0][0], k[0][0], v[0][0], 2, 1)]])
        tensors = {n: ("F32", [1, 1, 5, 3], packed[n]) for n in "qkv"}
        cu = ("I32", [4], [0, 3, 3, 5])
        for names in (["cu_seqlens"], ["cu_seqlens_q", "cu_seqlens_k"]):
            found = self.run_file({**tensors, **{n: cu for n in names}}, "--kind", "lln", "--alpha", 2, "--beta", 1)
            self.assert_close(found["o"][2], outputs, 1e-6, "o")

    def test_report_metadata_and_warnings(self):
        self.tensors["colour"] = ("U8", [1], [3])
        self.tensors["g"] = self.normal(2, 2, 5, 4)
        safetensors_file.write(self.path("in"), self.tensors)
        done = lln("run", self.path("in"), "-o", self.path("out"), "--kind", "softmax", "--threads", 1, "--json")
        result = json.loads(done.stdout)
        self.assertEqual(result["tensors"], ["o"])
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


class RunBackward(Scratch):
    SHAPES = {"q": (1, 2, 5, 3), "k": (1, 2, 5, 3), "v": (1, 2, 5, 2), "g": (1, 2, 5, 2)}
    STEP = 1e-5

    def setUp(self):
        super().setUp()
        self.tensors = {name: self.normal(*shape) for name, shape in self.SHAPES.items()}

    def loss(self, values, causal):
        q, k, v = (plain_attention.rows(values[n], self.SHAPES[n]) for n in "qkv")
        out = [[plain_attention.attend("lln+diag", q[0][h], k[0][h], v[0][h], values["alpha"][h], values["beta"][h],
                                       values["mix"][h], block=2, causal=causal) for h in range(2)]]
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
            found = self.run_file(self.tensors, "--kind", "lln+diag2", "--backward", *(["--causal"] if causal else []))
            self.assertEqual(sorted(found), ["dalpha", "dbeta", "dk", "dmix", "dq", "dv", "o"])
            for name in ("q", "k", "v", "alpha", "beta", "mix"):
                self.assertEqual(found["d" + name][:2], ("F32", list(self.tensors[name][1])))
                self.assert_close(found["d" + name][2], self.differences(name, values, causal), 2e-5, "d" + name)

    def test_flags_give_gradients_per_head(self):
        tensors = {**self.tensors, "alpha": ("F32", [2], [1.5] * 2), "beta": ("F32", [2], [0.5] * 2),
                   "mix": ("F32", [2], [0.25] * 2)}
        from_file = self.run_file(tensors, "--kind", "lln+diag2", "--backward")
        from_flags = self.run_file(self.tensors, "--kind", "lln+diag2", "--backward", "--alpha", 1.5, "--beta", 0.5,
                                   "--mix", 0.25)
        self.assertEqual(from_flags, from_file)

    def test_gradients_of_weights_have_the_shapes_of_the_weights(self):
        scales = ("--alpha", 1.5, "--beta", 0.5, "--kind", "lln+diag2", "--backward")
        for shape in ([], [1], [2], [2, 2], [1, 2, 5]):
            with self.subTest(shape=shape):
                weight = ("F32", shape, [0.5] * math.prod(shape))
                one = self.run_file({**self.tensors, "mix": weight}, *scales)
                two = self.run_file({**self.tensors, "lln_weight": weight, "diag_weight": weight}, *scales)
                self.assertEqual(one["dmix"][:2], ("F32", shape))
                difference = [a - b for a, b in zip(two["dlln_weight"][2], two["ddiag_weight"][2])]
                self.assertEqual(two["ddiag_weight"][1], shape)
                self.assert_close(one["dmix"][2], difference, 1e-5, "dmix")
                self.assertNotIn("dmix", two)

    def test_kinds_without_parameters_have_no_gradients_of_them(self):
        self.assertEqual(sorted(self.run_file(self.tensors, "--kind", "diag2", "--backward")), ["dk", "dq", "dv", "o"])
        self.assertEqual(sorted(self.run_file(self.tensors, "--kind", "softmax", "--backward")), ["dk", "dq", "dv", "o"])

    def test_metadata_and_report_name_both_passes(self):
        self.run_file(self.tensors, "--kind", "softmax", "--backward")
        metadata = safetensors_file.read(self.path("out"))[1]
        result = json.loads(lln("run", self.path("in"), "-o", self.path("out"), "--kind", "softmax", "--backward",
                                "--json").stdout)
        for op in ("forward", "backward"):
            self.assertTrue(metadata[op + "_problem"].startswith(op + ":f32:cpu:b1h2n5d3v2:softmax"))
            self.assertEqual(metadata[op + "_kernel"], result[op]["kernel"])
            self.assertGreater(result[op]["seconds"], 0)


class RunFaults(Scratch):
    def setUp(self):
        super().setUp()
        self.tensors = {"q": self.normal(1, 2, 5, 3), "k": self.normal(1, 2, 5, 3), "v": self.normal(1, 2, 5, 4)}

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
            ({"k": ("F16", [1, 2, 5, 3], [0] * 30)}, "k is F16 [1, 2, 5, 3]: expected F32 [1, *, *, 3]"),
            ({"mix": self.normal(3)}, "mix is F32 [3]: expected F32 [] or [1] or [2] or [2, 4] or [1, 2, 5]"),
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
        self.assertIn("alpha", self.refused("--kind", "lln", "--alpha", "nan", "--beta", 1))
        self.assertIn("alpha", self.refused("--kind", "lln", "--beta", 1, alpha=("F32", [2], [1, math.inf])))
        self.assertIn("cu_seqlens_q[1] is 9", self.refused(*scales, cu_seqlens=("I32", [3], [0, 9, 5])))
        self.assertIn("unknown kernel 'abacus'", self.refused(*scales, "--kernel", "abacus"))
        self.tensors = {n: ("F32", [1, 2, 5, 0], []) for n in "qkv"}
        self.assertIn("d", self.refused(*scales))

    def test_damaged_files(self):
        safetensors_file.write(self.path("in"), self.tensors)
        with open(self.path("in"), "rb") as file:
            whole = file.read()
        for size in (0, 5, 8, 50, len(whole) - 1):
            with open(self.path("in"), "wb") as file:
                file.write(whole[:size])
            done = lln("run", self.path("in"), "-o", self.path("out"), "--kind", "softmax", "--json", expect=3)
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

        return subprocess.Popen([PROGRAM, "run", self.path("in"), "-o", self.path("out"), *arguments],
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=default_signals)

    def write_zeros(self, tokens, dim):
        zeros = bytes(4 * tokens * dim)
        safetensors_file.write(self.path("in"), {n: ("F32", [1, 1, tokens, dim], zeros) for n in "qkv"})

    def test_while_writing(self):
        self.write_zeros(200000, 64)
        interrupted = 0
        for attempt in range(8):
            number = (signal.SIGINT, signal.SIGTERM)[attempt % 2]
            process = self.start("--kind", "diag1")
            while process.poll() is None and not any(n.endswith(".part") for n in os.listdir(self.folder)):
                pass
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
        process = self.start("--kind", "lln", "--alpha", "1", "--beta", "1", "--kernel", "reference")
        time.sleep(0.5)
        self.assertIsNone(process.poll(), "the run ended before it could be interrupted")
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=60), -signal.SIGINT)
        self.assertEqual(os.listdir(self.folder), ["in"])


class Terminal(Scratch):
    def test_progress_is_shown_on_a_terminal_after_two_seconds(self):
        tokens = 3000
        values = bytes(4 * tokens * 64)
        safetensors_file.write(self.path("in"), {n: ("F32", [1, 1, tokens, 64], values) for n in "qkv"})
        ours, theirs = pty.openpty()
        command = [PROGRAM, "run", self.path("in"), "-o", self.path("out"), "--kind", "lln", "--alpha", "1", "--beta",
                   "1", "--kernel", "reference", "--threads", "1", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process:
            os.close(theirs)
            seen = b""
            while b" s" not in seen:
                try:
                    seen += os.read(ours, 1024)
                except OSError:  # the program ended
                    break
            process.terminate()
            stdout = process.stdout.read()
        os.close(ours)
        self.assertRegex(seen, rb"lln run: forward.*  \d+ s")
        self.assertEqual(stdout, b"")

    def test_nothing_is_shown_elsewhere(self):
        done = lln("demo", "--max-n", 1024, "--json")
        self.assertEqual(done.stderr, "")


if __name__ == "__main__":
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    unittest.main()
