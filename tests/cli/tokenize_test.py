"""Runs lln tokenize as a user does: own text in, a folder of token shards out.

    tokenize_test.py PROGRAM [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import json
import lzma
import os
import unittest

from program import Scratch, lln


class Tokenize(Scratch):
    def write_text(self, name, articles):
        words = ["attention", "linear", "normal", "kernel", "token", "state", "chain", "entropy"]
        lines = []
        for article in range(articles):
            lines.append(f"= Article {article} =")
            for _ in range(4):
                lines.append(" ".join(self.random.choice(words) for _ in range(20)))
            lines.append("")
        text = "\n".join(lines)
        if name.endswith(".xz"):
            with lzma.open(self.path(name), "wt", encoding="utf-8") as file:
                file.write(text)
        else:
            with open(self.path(name), "w", encoding="utf-8") as file:
                file.write(text)
        return self.path(name)

    def test_text_becomes_shards(self):
        files = [self.write_text("a.txt", 30), self.write_text("b.txt.xz", 20)]
        result = json.loads(lln("tokenize", *files, "-o", self.path("tokens"), "--vocab", 60,
                                "--coverage", 1, "--hold-out", 0.1, "--shard-tokens", 1000,
                                "--json").stdout)
        self.assertEqual(result["train"]["documents"], 45)
        self.assertEqual(result["validation"]["documents"], 5)
        self.assertEqual(result["vocabulary"], 60)
        self.assertEqual(result["train"]["unknown"], 0)
        shards = result["train"]["shards"] + result["validation"]["shards"]
        self.assertGreater(len(result["train"]["shards"]), 1)
        self.assertEqual(sorted(os.listdir(self.path("tokens"))),
                         sorted([*shards, "tokenizer.model", "tokens.json"]))
        # The same again gives the same bytes, with another number of threads too.
        lln("tokenize", *files, "-o", self.path("again"), "--vocab", 60, "--coverage", 1,
            "--hold-out", 0.1, "--shard-tokens", 1000, "--threads", 3)
        for name in os.listdir(self.path("tokens")):
            with open(self.path(f"tokens/{name}"), "rb") as a, \
                    open(self.path(f"again/{name}"), "rb") as b:
                self.assertEqual(a.read(), b.read(), name)

    def test_result_as_text(self):
        text = lln("tokenize", self.write_text("a.txt", 30), "-o", self.path("tokens"),
                   "--tokenizer", "bytes").stdout
        self.assertIn("tokenizer bytes, vocabulary 261", text)
        self.assertRegex(text, r"training +30 documents|training +29 documents")

    def test_faults(self):
        good = self.write_text("a.txt", 5)
        with open(self.path("latin.txt"), "wb") as file:
            file.write(b"fine\ncaf\xe9\n")
        error = lln("tokenize", self.path("latin.txt"), "-o", self.path("t"), expect=3).stderr
        self.assertIn("latin.txt:2: not UTF-8", error)
        error = json.loads(lln("tokenize", good, "-o", self.path("t"), "--vocab", 5000, "--json",
                               expect=3).stdout)["error"]
        self.assertIn("Vocabulary size too high", error["text"])
        self.assertEqual(os.listdir(self.path("t")), [])
        lln("tokenize", good, "-o", self.path("t"), "--tokenizer", "bytes")
        self.assertIn("--replace", lln("tokenize", good, "-o", self.path("t"), "--tokenizer",
                                       "bytes", expect=3).stderr)
        lln("tokenize", good, "-o", self.path("t"), "--tokenizer", "bytes", "--replace")
        lln("tokenize", good, expect=2)
        lln("tokenize", good, "-o", self.path("t"), "--tokenizer", "bytes", "--vocab", 9, expect=2)


if __name__ == "__main__":
    unittest.main()
