"""The program under test, and the folder that each test has for itself.

SPDX-License-Identifier: Apache-2.0
"""

import math
import os
import random
import subprocess
import sys
import tempfile
import unittest

import safetensors_file

PROGRAM = os.path.abspath(sys.argv.pop(1))


def lln(*arguments, expect=0, timeout=300, **options):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True,
                          timeout=timeout, **options)
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
