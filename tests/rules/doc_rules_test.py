"""Plants one violation of every sort in scratch documents and sees each rule find it, and clean
ones pass. The stand-in for the program refuses one problem text and takes the others.

SPDX-License-Identifier: Apache-2.0
"""

import pathlib
import tempfile
import unittest

import doc_programs
import doc_rules

PROGRAM = "#include <cstdio>\n\nint main() {}\n"
CLEAN = {
    "README.md": f"# Title\n\n```cpp\n{PROGRAM}```\n\nSee [theory](docs/theory.md#the-words).\n",
    "docs/theory.md": "# The words\n\n`make test`, `src/api`, `lln/lln.h`, `build/none`, `X.cc`\n",
    "src/api/a.cc": "",
    "include/lln/lln.h": "",
    "examples/hello.cc": f"// What is here.\n// SPDX\n\n{PROGRAM}",
    "Makefile": "test: build\n",
    "CMakePresets.json": '{"configurePresets": [{"name": "asan"}, {"name": "b", "hidden": true}]}',
}


class DocRulesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name, text in CLEAN.items():
            self.write(name, text)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def assert_found(self, rule, text, line):
        self.write("docs/planted.md", text)
        found = list(rule(self.root))
        self.assertEqual(len(found), 1, f"{text!r}: {found}")
        self.assertTrue(found[0].startswith(f"docs/planted.md:{line}: "), found)

    def test_clean_documents(self):
        for rule in doc_rules.RULES:
            self.assertEqual(list(rule(self.root)), [])

    def test_links(self):
        self.assert_found(doc_rules.check_links, "one\n[a](missing.md)\n", 2)
        self.assert_found(doc_rules.check_links, "[a](theory.md#no-such-heading)\n", 1)
        self.assert_found(doc_rules.check_links, "# Here\n[a](#there)\n", 2)

    def test_names(self):
        self.assert_found(doc_rules.check_names, "one\n\n`src/missing`\n", 3)
        self.assert_found(doc_rules.check_names, "see `missing.h`\n", 1)
        self.assert_found(doc_rules.check_names, "```\ncat docs/missing.md\n```\n", 2)

    def test_commands(self):
        self.assert_found(doc_rules.check_commands, "one\n`make missing`\n", 2)
        self.assert_found(doc_rules.check_commands, "```sh\ncmake --preset missing\n```\n", 2)
        self.assert_found(doc_rules.check_commands, "`cmake --preset b`\n", 1)

    def test_programs(self):
        self.assert_found(doc_rules.check_programs, "one\n```cpp\nint x;\n```\n", 2)
        self.assert_found(doc_rules.check_programs, "one\n```c\nint x;\n```\n", 2)
        self.write("docs/planted.md", "")
        self.write("examples/hello.cc", "// What is here.\n\nint main() {}\n")
        self.assertEqual(len(list(doc_rules.check_programs(self.root))), 1)

    def test_placeholders(self):
        self.assert_found(doc_rules.check_placeholders, "one\n@" + "@FORWARD@" + "@ ms\n", 2)

    def test_problems(self):
        program = self.root / "program"
        program.write_text('#!/bin/sh\ncase "$2" in *d0*) exit 3;; *v8*) exit 4;; esac\n')
        program.chmod(0o755)

        def rule(root):
            return doc_rules.check_problems(root, str(program))

        self.assertEqual(len(list(rule(self.root))), 1, "documents without any problem text")
        good = "`forward:f32:cpu:n8d4:lln:feature=power2`, forward:f32:cpu:n8d4v8:lln.\n"
        self.assert_found(rule, good + "forward:f32:cpu:n8d0:lln\n", 2)

    def test_options(self):
        program = self.root / "program"
        program.write_text(
            '#!/bin/sh\n'
            'case "$1" in\n'
            'run) printf "  --kind TEXT\n  --help\nExamples:\n  run --other";;\n'
            '*) printf "  --help\nSubcommands:\n  run   Runs --nothing";;\n'
            'esac\n')
        program.chmod(0o755)
        for text, expected in (
            ("`run`: `--kind`, `--help`\n", []),
            ("`run`: `--help`\n", ["docs/cli.md:1: --kind is in a help text but not here"]),
            ("`run`: `--kind` `--help`\n`--gone`\n", ["docs/cli.md:2: --gone is in no help text"]),
            ("`--kind` `--help`\n", ["docs/cli.md:1: the verb run is not described"]),
        ):
            with self.subTest(text=text):
                self.write("docs/cli.md", text)
                self.assertEqual(list(doc_rules.check_options(self.root, str(program))), expected)

    def test_programs_are_extracted(self):
        out = self.root / "out"
        names = doc_programs.extract(self.root, out)
        self.assertEqual(names, ["README_3.cc"])
        self.assertIn(PROGRAM, (out / "README_3.cc").read_text())
        before = (out / "README_3.cc").stat().st_mtime_ns
        self.write("docs/planted.md", f"```c\n{PROGRAM}```\n")
        self.assertEqual(doc_programs.extract(self.root, out), ["README_3.cc", "docs_planted_1.c"])
        self.assertEqual(before, (out / "README_3.cc").stat().st_mtime_ns, "rewritten in vain")


if __name__ == "__main__":
    unittest.main()
