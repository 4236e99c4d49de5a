"""Plants one violation of every sort in a scratch tree and sees each rule find it, and a clean tree
pass: a rule that cannot fail guards nothing.

SPDX-License-Identifier: Apache-2.0
"""

import pathlib
import tempfile
import unittest

import tree_rules

OPENING = "// What is here.\n// SPDX-License-Identifier: Apache-2.0\n"


class TreeRulesTest(unittest.TestCase):
    def violations(self, rule, files):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return list(rule(root))

    def assert_found(self, rule, name, text, line):
        found = self.violations(rule, {name: text})
        self.assertEqual(len(found), 1, f"{name}: {text!r}: {found}")
        self.assertTrue(found[0].startswith(f"{name}:{line}: "), found)

    def assert_clean(self, rule, name, text):
        self.assertEqual(self.violations(rule, {name: text}), [])

    def test_includes_that_break_the_layers(self):
        for name, target in (
            ("include/lln/a.h", '"math/half.h"'),
            ("include/lln/a.h", "<fmt/format.h>"),
            ("include/lln/a.h", "<unistd.h>"),
            ("src/api/a.cc", "<sys/stat.h>"),
            ("src/math/a.h", '"api/kernel.h"'),
            ("src/math/a.h", "<fmt/format.h>"),
            ("src/cpu/a.cc", '"reference/kernels.h"'),
            ("src/cpu/a.cc", '"api/validate.h"'),
            ("src/reference/a.cc", '"cpu/kernels.h"'),
            ("src/reference/a.cc", '"hwy/highway.h"'),
            ("src/cuda/a.cuh", '"cpu/kernels.h"'),
            ("src/cpu/a.cc", '"cuda/kernels.h"'),
            ("include/lln/c.h", '"lln/tensor.h"'),
            ("include/lln/c.h", "<cstdint>"),
            ("include/lln/c.h", "<stdio.h>"),
            ("include/lln/a.h", "<stdint.h>"),
            ("src/c/a.cc", '"cpu/kernels.h"'),
            ("src/c/a.cc", '"api/kernel.h"'),
            ("src/api/a.cc", '"c/arguments.h"'),
            ("src/io/a.cc", '"math/half.h"'),
            ("src/io/a.cc", '"api/kernel.h"'),
            ("src/api/a.cc", '"io/safetensors.h"'),
            ("conformance/a.cc", '"reference/kernels.h"'),
            ("bench/a.cc", '"cpu/kernels.h"'),
            ("bench/a.cc", "<nlohmann/json.hpp>"),
            ("conformance/a.cc", "<unistd.h>"),
            ("conformance/a.cc", '"cuda/device.h"'),
            ("src/api/a.cc", "<cuda_runtime.h>"),
            ("cli/a.cc", '"cpu/kernels.h"'),
            ("cli/a.cc", '"api/kernel.h"'),
            ("cli/a.cc", "<torch/torch.h>"),
            ("src/api/a.cc", "<ATen/ATen.h>"),
            ("include/lln/a.h", "<c10/core/Device.h>"),
            ("tests/a.cc", '"../src/api/kernel.h"'),
            ("lln_torch/binding/a.cc", "<ATen/ATen.h>"),
            ("lln_torch/binding/a.cc", "<torch/csrc/autograd/custom_function.h>"),
            ("lln_torch/binding/a.cc", '"lln_torch/ops/attention.h"'),
            ("python/ops/a.cc", "<torch/torch.h>"),
            ("python/ops/a.cc", '"lln_torch/ops/attention.h"'),
            ("lln_torch/ops/a.cc", '"lln_torch/zoo/attention.h"'),
            ("lln_torch/ops/a.cc", '"report/findings.h"'),
        ):
            with self.subTest(name=name, target=target):
                text = f"{OPENING}\n#include {target}\n"
                self.assert_found(tree_rules.check_includes, name, text, 4)

    def test_includes_that_keep_the_layers(self):
        for name, target in (
            ("include/lln/a.h", '"lln/tensor.h"'),
            ("include/lln/a.h", "<cstdint>"),
            ("include/lln/c.h", "<stdint.h>"),
            ("lln_torch/binding/a.cc", "<torch/csrc/stable/tensor.h>"),
            ("lln_torch/ops/a.cc", '"lln_torch/binding/tensors.h"'),
            ("lln_torch/ops/a.cc", "<ATen/core/Tensor.h>"),
            ("python/ops/a.cc", '"lln_torch/binding/tensors.h"'),
            ("src/c/a.cc", '"api/faults.h"'),
            ("src/math/a.h", '"lln/problem.h"'),
            ("src/cpu/a.cc", '"api/kernel.h"'),
            ("src/cpu/a.cc", '"hwy/foreach_target.h"'),
            ("src/api/a.cc", '"cpu/kernels.h"'),
            ("src/io/a.cc", "<nlohmann/json.hpp>"),
            ("src/io/a.cc", "<sys/stat.h>"),
            ("bench/a.cc", '"cpu/highway.h"'),
            ("bench/a.cu", "<cuda_runtime.h>"),
            ("conformance/a.cc", "<cuda_runtime.h>"),
            ("src/cuda/a.cc", "<cuda_runtime.h>"),
            ("cli/a.cc", '"bench/measure.h"'),
            ("cli/a.cc", "<unistd.h>"),
            ("tests/a.cc", '"reference/kernels.h"'),
        ):
            with self.subTest(name=name, target=target):
                self.assert_clean(tree_rules.check_includes, name, f"{OPENING}#include {target}\n")

    def test_core_that_is_not_silent(self):
        for call in ("std::cout << 1;", "printf(x);", "std::fprintf(f, x);", "std::abort();",
                     "exit(1);", "std::getenv(name);", "fmt::print(x);", "std::cerr << 1;",
                     "HWY_ASSERT(x);"):
            for name in ("src/api/a.cc", "include/lln/a.h"):
                with self.subTest(call=call, name=name):
                    text = f"{OPENING}void f() {{\n  {call}\n}}\n"
                    self.assert_found(tree_rules.check_silence, name, text, 4)

    def test_silence_ignores_comments_literals_and_programs(self):
        text = '// never calls abort()\nauto s = "printf(x)"; /* exit(1) */\nat_exit(1);\n'
        self.assert_clean(tree_rules.check_silence, "src/api/a.cc", text)
        self.assert_clean(tree_rules.check_silence, "src/api/a.cc", "std::snprintf(b, n, x);\n")
        self.assert_clean(tree_rules.check_silence, "cli/a.cc", "std::printf(x);\n")

    def test_kernels_that_the_emulated_device_cannot_have(self):
        rule = tree_rules.check_kernels
        for line in ('asm("nop;");', "kernel<<<1, 32>>>();"):
            self.assert_found(rule, "src/cuda/sm90/a.cuh", f"{OPENING}\n{line}\n", 4)
            self.assert_clean(rule, "src/cuda/sm90/instructions.cuh", f"{OPENING}\n{line}\n")
            self.assert_clean(rule, "tests/cuda/a.cc", f"{OPENING}\n{line}\n")
        self.assert_clean(rule, "src/cuda/a.cu", f"{OPENING}// asm and <<<\nint basm = 1 << 2;\n")

    def test_size(self):
        limit = tree_rules.LINE_LIMIT
        self.assert_found(tree_rules.check_size, "src/cpu/a.cc", "x\n" * (limit + 1), limit + 1)
        self.assert_clean(tree_rules.check_size, "src/cpu/a.cc", "x\n" * limit)
        self.assert_clean(tree_rules.check_size, "docs/a.md", "x\n" * (limit + 1))
        self.assert_found(tree_rules.check_size, "bench/a.py", "x\n" * (limit + 1), limit + 1)
        self.assert_clean(tree_rules.check_size, "bench/results/a.json", "x\n" * (limit + 1))

    def test_width(self):
        self.assert_found(tree_rules.check_width, "tests/a.py", "x\n" + "x" * 101, 2)
        self.assert_found(tree_rules.check_width, "report/a.js", "x\n" + "x" * 101, 2)
        self.assert_clean(tree_rules.check_width, "tests/a.py", "x" * 100)
        self.assert_clean(tree_rules.check_width, "docs/a.md", "x" * 101)

    def test_opening_comment(self):
        rule = tree_rules.check_opening
        self.assert_found(rule, "src/api/a.cc", "// What is here.\n#include <span>\n", 1)
        self.assert_found(rule, "tests/c/a.c", "// What is here.\n#include <math.h>\n", 1)
        licence = "// SPDX-License-Identifier: Apache-2.0\n"
        self.assert_found(rule, "src/api/a.cc", licence + "int x;\n", 1)
        self.assert_found(rule, "tests/rules/a.py", '"""What is here."""\nimport re\n', 1)
        self.assert_found(rule, "report/a.js", "// What is here.\n", 1)
        self.assert_found(rule, "tools/a.sh", "#!/bin/sh\n# What is here.\n", 1)
        bare = "# SPDX-License-Identifier: Apache-2.0\nimport re\n"
        self.assertEqual(len(self.violations(rule, {"tests/rules/a.py": bare})), 2)
        late = "#pragma once\n" + OPENING
        self.assertEqual(len(self.violations(rule, {"include/lln/a.h": late})), 2)
        self.assert_clean(rule, "src/api/a.cc", OPENING)
        docstring = '"""What is here.\n\nSPDX-License-Identifier: Apache-2.0\n"""\n'
        self.assert_clean(rule, "tests/rules/a.py", docstring)

    def test_names(self):
        self.assert_found(tree_rules.check_names, "src/utils/a.cc", OPENING, 1)
        self.assert_found(tree_rules.check_names, "src/api/helpers.h", OPENING, 1)
        self.assert_clean(tree_rules.check_names, "src/api/commonplace.h", OPENING)

    def test_words(self):
        self.assert_found(tree_rules.check_words, "docs/a.md", "one\nTO" + "DO: two\n", 2)
        for path in ("/ro" + "ot/x", "/ho" + "me/someone/x", "/wo" + "rk/x", "../sh" + "ared/x"):
            with self.subTest(path=path):
                self.assert_found(tree_rules.check_words, "cmake/a.cmake", f"# see {path}\n", 1)
        self.assert_clean(tree_rules.check_words, "docs/a.md", "net/ho" + "me/x\n")

    def test_hidden_folders_and_builds_are_left_out(self):
        files = {"build/a.cc": "x", ".git/a.cc": "x", "src/api/a.cc": OPENING}
        found = [path for path, _ in self.violations(tree_rules.text_files, files)]
        self.assertEqual(found, ["src/api/a.cc"])


if __name__ == "__main__":
    unittest.main()
