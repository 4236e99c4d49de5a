"""The library through Python's ctypes, with nothing but the standard library: the structs of
lln/c.h as a binding writes them, attention against plain loops, decoding against the causal
forward, and errors of each thread.

    ctypes_test.py LIBRARY [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import ctypes
import math
import random
import sys
import threading
import unittest
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p

LIBRARY = ctypes.CDLL(sys.argv.pop(1))
OK, INVALID_ARGUMENT, UNSUPPORTED = 0, 1, 2
LLN, LLN_DIAG = 0, 2
PER_HEAD = 2


class Device(ctypes.Structure):
    _fields_ = [("kind", c_int32), ("index", c_int32)]


class View(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("shape", c_int64 * 4), ("stride", c_int64 * 4),
                ("dtype", c_int32), ("device", Device)]


class IndexView(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("count", c_int64), ("wide", c_int32), ("device", Device)]


class MaskView(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("shape", c_int64 * 2), ("stride", c_int64 * 2),
                ("device", Device)]


class Exec(ctypes.Structure):
    _fields_ = [("threads", c_void_p), ("workspace", c_void_p), ("workspace_bytes", c_size_t),
                ("kernel", c_char_p), ("stream", c_void_p)]


class Options(ctypes.Structure):
    _fields_ = [("kind", c_int32), ("feature", c_int32), ("diag_block", c_int64),
                ("causal", c_int32), ("power", c_float), ("mix", c_float)]


class Inputs(ctypes.Structure):
    _fields_ = [(name, View) for name in ("q", "k", "v", "alpha", "beta", "mix", "lln_weight",
                                          "diag_weight")] + [
        ("key_lengths", IndexView), ("key_mask", MaskView), ("cu_seqlens_q", IndexView),
        ("cu_seqlens_k", IndexView)]


class Saved(ctypes.Structure):
    _fields_ = [("key_lse", View), ("channel_values", View)]


class Outputs(ctypes.Structure):
    _fields_ = [("o", View), ("saved", Saved)]


class MatchingInputs(ctypes.Structure):
    _fields_ = [(name, View) for name in ("q", "k", "alpha", "beta")] + [
        ("key_lengths", IndexView), ("key_mask", MaskView), ("query_mask", MaskView),
        ("cu_seqlens_q", IndexView), ("cu_seqlens_k", IndexView), ("cross", c_int32)]


class MatchingOutputs(ctypes.Structure):
    _fields_ = [("alpha", View), ("beta", View)]


class Constants(ctypes.Structure):
    _fields_ = [("a", c_double), ("b", c_double)]


class MatchingOptions(ctypes.Structure):
    _fields_ = [("mode", c_int32), ("feature", c_int32), ("causal", c_int32),
                ("constants", POINTER(Constants)), ("running", c_void_p),
                ("running_on_device", c_void_p)]


class Report(ctypes.Structure):
    _fields_ = [("constants", Constants), ("clamped", c_void_p), ("capacity", c_size_t),
                ("count", c_size_t)]


class DecodeConfig(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("batch", "heads", "heads_k", "dim", "dim_v",
                                             "diag_block")] + [
        ("kind", c_int32), ("feature", c_int32), ("power", c_float), ("mix", c_float)]


def declare(name, *arguments, result=c_int32):
    function = getattr(LIBRARY, f"lln_{name}")
    function.restype = result
    function.argtypes = arguments
    return function


text = (c_char_p, c_size_t, POINTER(c_size_t))
version = declare("version", result=c_char_p)
last_error = declare("last_error", result=c_char_p)
options_init = declare("attention_options_init", POINTER(Options))
forward = declare("attention_forward", POINTER(Inputs), POINTER(Outputs), POINTER(Options),
                  POINTER(Exec))
explain = declare("explain", c_char_p, POINTER(Exec), *text)
threads_create = declare("threads_create", c_int32, POINTER(c_void_p))
threads_destroy = declare("threads_destroy", c_void_p, result=None)
constants_of = declare("matching_constants_of", c_int64, POINTER(Constants))
matching_options_init = declare("matching_options_init", POINTER(MatchingOptions))
match_moments = declare("match_moments", POINTER(MatchingInputs), POINTER(MatchingOutputs),
                        POINTER(MatchingOptions), POINTER(Report), POINTER(Exec))
config_init = declare("decode_config_init", POINTER(DecodeConfig))
state_bytes = declare("decode_state_bytes", POINTER(DecodeConfig), POINTER(c_size_t))
decode_create = declare("decode_create", POINTER(DecodeConfig), c_void_p, c_size_t,
                        POINTER(c_void_p))
decode_destroy = declare("decode_destroy", c_void_p, result=None)
decode_tokens = declare("decode_tokens", c_void_p, c_int64, POINTER(c_int64))
append = declare("decode_append", c_void_p, POINTER(Inputs), POINTER(View), POINTER(Exec))
step = declare("decode_step", c_void_p, POINTER(Inputs), POINTER(View), POINTER(Exec))


class Tensor:
    """Floats of [batch, heads, tokens, channels] and a view of some of the tokens."""

    def __init__(self, shape, values=None):
        self.shape = shape
        values = values or [0.0] * math.prod(shape)
        self.data = (c_float * len(values))(*values)

    def view(self, first=0, count=None):
        b, h, n, d = self.shape
        stride = (h * n * d, n * d, d, 1)
        shape = (b, h, n if count is None else count, d)
        return View(ctypes.addressof(self.data) + 4 * first * d, (c_int64 * 4)(*shape),
                    (c_int64 * 4)(*stride), 0, Device(0, 0))


def gaussian(generator, *shape):
    return Tensor(shape, [generator.gauss(0, 1) for _ in range(math.prod(shape))])


class Ctypes(unittest.TestCase):
    def setUp(self):
        generator = random.Random(1)
        self.shape = (1, 2, 40, 8)
        self.q, self.k, self.v = (gaussian(generator, *self.shape) for _ in range(3))
        self.scale = Tensor((1, 1, 1, 1), [1.5])

    def ok(self, status):
        self.assertEqual(status, OK, last_error())

    def inputs(self, first=0, count=None):
        return Inputs(q=self.q.view(first, count), k=self.k.view(first, count),
                      v=self.v.view(first, count), alpha=self.scale.view(), beta=self.scale.view())

    def options(self, **fields):
        options = Options()
        self.ok(options_init(options))
        for name, value in fields.items():
            setattr(options, name, value)
        return options

    def test_forward_against_loops(self):
        o = Tensor(self.shape)
        self.ok(forward(self.inputs(), Outputs(o=o.view()), None, None))
        _, heads, tokens, dim = self.shape
        for h in range(heads):
            def row(x, i):
                return x.data[(h * tokens + i) * dim:(h * tokens + i + 1) * dim]
            for i in range(0, tokens, 7):
                weights = [sum(math.exp(1.5 * a + 1.5 * b) for a, b in zip(row(self.q, i),
                                                                           row(self.k, j)))
                           for j in range(tokens)]
                for c in range(dim):
                    mean = sum(w * row(self.v, j)[c] for j, w in enumerate(weights)) / sum(weights)
                    self.assertAlmostEqual(row(o, i)[c], mean, places=5)

    def test_threads_change_nothing(self):
        one, several = Tensor(self.shape), Tensor(self.shape)
        threads = c_void_p()
        self.ok(threads_create(2, threads))
        options = self.options(kind=LLN_DIAG, diag_block=16)
        self.ok(forward(self.inputs(), Outputs(o=one.view()), options, None))
        self.ok(forward(self.inputs(), Outputs(o=several.view()), options,
                        Exec(threads=threads)))
        threads_destroy(threads)
        self.assertEqual(list(one.data), list(several.data))

    def test_matching(self):
        _, heads, tokens, dim = self.shape
        alpha, beta = Tensor((1, heads, 1, 1)), Tensor((1, heads, 1, 1))
        options, report, constants = MatchingOptions(), Report(), Constants()
        self.ok(matching_options_init(options))
        self.assertEqual(options.mode, PER_HEAD)
        self.ok(match_moments(MatchingInputs(q=self.q.view(), k=self.k.view()),
                              MatchingOutputs(alpha.view(), beta.view()), options, report, None))
        self.ok(constants_of(dim, constants))
        self.assertEqual((report.constants.a, report.constants.b, report.count),
                         (constants.a, constants.b, 0))

        def variance(x):
            values = x.data[:tokens * dim]
            mean = sum(values) / len(values)
            return sum((value - mean) ** 2 for value in values) / (len(values) - 1)

        product = variance(self.q) * variance(self.k)
        expected = math.sqrt((product - constants.b) / (2 * constants.a) / variance(self.q))
        self.assertAlmostEqual(alpha.data[0], expected, places=5)

    def test_decoding_is_the_causal_forward(self):
        _, heads, tokens, dim = self.shape
        for kind in (LLN, LLN_DIAG):
            causal, decoded = Tensor(self.shape), Tensor(self.shape)
            options = self.options(kind=kind, causal=1, diag_block=16)
            self.ok(forward(self.inputs(), Outputs(o=causal.view()), options, None))
            config, size, state, count = DecodeConfig(), c_size_t(), c_void_p(), c_int64()
            self.ok(config_init(config))
            config.heads = config.heads_k = heads
            config.dim = config.dim_v = dim
            config.kind, config.diag_block = kind, 16
            self.ok(state_bytes(config, size))
            block = ctypes.create_string_buffer(size.value + 64)
            memory = (ctypes.addressof(block) + 63) // 64 * 64
            self.ok(decode_create(config, memory, size, state))
            self.ok(append(state, self.inputs(0, 25), decoded.view(0, 25), None))
            for token in range(25, tokens):
                self.ok(step(state, self.inputs(token, 1), decoded.view(token, 1), None))
            self.ok(decode_tokens(state, 0, count))
            self.assertEqual(count.value, tokens)
            decode_destroy(state)
            for found, expected in zip(decoded.data, causal.data):
                self.assertAlmostEqual(found, expected, places=5)

    def test_texts(self):
        self.assertRegex(version(), rb"^\d+\.\d+\.\d+$")
        length = c_size_t()
        problem = b"forward:f32:cpu:b1h2n40d8:lln"
        self.ok(explain(problem, None, None, 0, length))
        whole = ctypes.create_string_buffer(length.value + 1)
        self.ok(explain(problem, None, whole, len(whole), None))
        self.assertEqual(len(whole.value), length.value)
        self.assertIn(b"kernel     reference", whole.value)

    def test_errors_of_each_thread(self):
        self.assertEqual(forward(None, None, None, None), INVALID_ARGUMENT)
        self.assertIn(b"in is null; out is null", last_error())
        seen = []

        def elsewhere():
            seen.append(last_error())
            seen.append(explain(b"nothing", None, None, 0, None))
            seen.append(last_error())

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        self.assertEqual(seen[:2], [b"", INVALID_ARGUMENT])
        self.assertIn(b"nothing", seen[2])
        self.assertIn(b"in is null; out is null", last_error())

    def test_unsupported(self):
        status = explain(b"forward:f32:cpu:b1h2n40d8:lln", Exec(kernel=b"abacus"), None, 0, None)
        self.assertEqual(status, INVALID_ARGUMENT)
        self.assertIn(b"unknown kernel 'abacus'", last_error())
        inputs, o = self.inputs(), Tensor(self.shape)
        for view in (inputs.q, inputs.k, inputs.v, inputs.alpha, inputs.beta):
            view.device = Device(1, 0)
        out = Outputs(o=o.view())
        out.o.device = Device(1, 0)
        self.assertEqual(forward(inputs, out, None, None), UNSUPPORTED)


if __name__ == "__main__":
    unittest.main()
