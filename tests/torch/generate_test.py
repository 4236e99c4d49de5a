"""lln generate on a decoder that learned a short text by heart, byte by byte.

    generate_test.py LLN_TORCH [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import json
import pathlib
import unittest

import small_training  # first: it makes the next ones findable
from program import Scratch, lln

SENTENCE = "The river runs to the sea, and the sea is never full. "

CONFIG = """
[data]
task = "lm"
tokens = 48
validation_rows = 4

[model]
layers = 2
dim = 48
heads = 2
positions = "rotary"

[train]
steps = 120
batch = 8
warmup = 10
learning_rate = 1e-2
"""


class Generate(Scratch):
    def train(self, name, attention, *arguments):
        text = self.path("text.txt")
        if not pathlib.Path(text).exists():
            pathlib.Path(text).write_text((SENTENCE * 20 + "\n") * 20, encoding="utf-8")
            lln("tokenize", text, "--output", self.path("tokens"), "--tokenizer", "bytes",
                "--hold-out", "0.2")
        config = self.path("lm.toml")
        pathlib.Path(config).write_text(CONFIG + attention, encoding="utf-8")
        run = self.path(name)
        lln("train", config, "--data", self.path("tokens"), "--run", run, "--threads", "1",
            *arguments)
        return run

    def generate(self, run, *arguments):
        return json.loads(lln("generate", run, "--threads", "1", "--json", *arguments).stdout)

    def test_constant_memory(self):
        run = self.train("lln", "[attention]\nname = 'lln+diag'\ndiag_block = 16\n")
        short = self.generate(run, "--prompt", "The river", "--tokens", "20", "--temperature", "0")
        self.assertEqual(short["memory"], "state")
        self.assertEqual(len(short["ids"]), 20)
        self.assertTrue(short["text"].startswith("The river"), short["text"])
        self.assertIn(short["text"], SENTENCE * 2)  # learned by heart
        self.assertGreater(short["tokens_per_second"], 0)
        # Far beyond the 48 tokens of a row, in as much memory; the same beginning.
        options = ("--prompt", "The river", "--tokens", "200", "--temperature", "0")
        longer = self.generate(run, *options)
        self.assertEqual(longer["memory_bytes"], short["memory_bytes"])
        self.assertEqual(longer["ids"][:20], short["ids"])
        # When it had come how far: at powers of two, and at the end.
        marks = longer["marks"]
        self.assertEqual([m["tokens"] for m in marks], [2, 4, 8, 16, 32, 64, 128, 200])
        self.assertEqual({m["memory_bytes"] for m in marks}, {short["memory_bytes"]})
        seconds = [m["seconds"] for m in marks]
        self.assertEqual(seconds, sorted(seconds))
        self.assertAlmostEqual(199 / seconds[-1], longer["tokens_per_second"], delta=5)
        # Chance is that of the seed.
        options = ("--prompt", "The", "--temperature", "3", "--tokens", "30", "--seed")
        first = self.generate(run, *options, "1")
        self.assertEqual(first["ids"], self.generate(run, *options, "1")["ids"])
        self.assertNotEqual(first["ids"], self.generate(run, *options, "2")["ids"])
        best = self.generate(run, *options, "1", "--top-k", "1")
        greedy = self.generate(run, "--prompt", "The", "--temperature", "0", "--tokens", "30")
        self.assertEqual(best["ids"], greedy["ids"])
        # Other data under the same run are not gone on with.
        pathlib.Path(self.path("other.txt")).write_text((SENTENCE[::-1] + "\n") * 400,
                                                        encoding="utf-8")
        lln("tokenize", self.path("other.txt"), "--output", self.path("other"), "--tokenizer",
            "bytes", "--hold-out", "0.2")
        error = lln("train", "--resume", "--run", run, "--data", self.path("other"), expect=3)
        self.assertIn("the data are not those that the run began with", error.stderr)
        lln("train", "--resume", "--run", run)
        shown = lln("generate", run, "--prompt", "The river", "--tokens", "20", "--temperature",
                    "0")
        self.assertEqual(shown.stdout, short["text"] + "\n")
        self.assertIn("tokens/s", shown.stderr)

    def test_softmax_keeps_keys_and_values(self):
        run = self.train("softmax", "[attention]\nname = 'softmax'\n")
        found = self.generate(run, "--prompt", "The sea", "--tokens", "10")
        self.assertEqual(found["memory"], "keys and values")
        self.assertEqual(len(self.generate(run, "--tokens", "5")["ids"]), 5)  # without a prompt

    def test_learned_positions_end(self):
        run = self.train("learned", "[attention]\nname = 'lln+diag'\n", "--set",
                         "model.positions=learned", "--set", "train.steps=2", "--set",
                         "train.warmup=0")
        # 3 bytes of a prompt and 45 tokens are read, the 46th is only written.
        self.assertEqual(len(self.generate(run, "--prompt", "The", "--tokens", "46")["ids"]), 46)
        error = lln("generate", run, "--prompt", "The", "--tokens", "47", expect=3).stderr
        self.assertIn("after a prompt of 3 tokens expected at most 46", error)

    def test_a_task_without_text(self):
        config = self.path("mqar.toml")
        pathlib.Path(config).write_text(small_training.CONFIG, encoding="utf-8")
        run = self.path("mqar")
        lln("train", config, "--run", run, "--threads", "1", "--set", "train.steps=1",
            "--set", "train.warmup=0")
        error = json.loads(lln("generate", run, "--json", expect=3).stdout)["error"]
        self.assertIn("the task mqar has no text to continue", error["text"])


if __name__ == "__main__":
    unittest.main()
