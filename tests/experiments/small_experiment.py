"""A folder of experiments for the tests: two rows of a training, and a third that starts from one.

SPDX-License-Identifier: Apache-2.0
"""

import json
import pathlib
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
FAKE = str(HERE / "fake_lln.py")
ROOT = pathlib.Path(sys.argv.pop(1)) if len(sys.argv) > 1 else HERE.parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

CONFIG = """
[data]
task = "mlm"
[train]
steps = 400
warmup = 40
"""
WORDS = """
title = "Words"
group = 1
about = "What is asked."
[[row]]
name = "diag"
label = "Diag"
set = ["attention.name=diag"]
seeds = 2
[[row]]
name = "lln+diag"
label = "LLN + Diag"
set = ["attention.name=lln+diag"]
"""
TUNED = """
title = "Tuned"
group = 1
place = 1
config = "../words/config.toml"
[[row]]
name = "diag"
from = "words:diag"
set = ["attention.name=diag"]
seeds = 2
[[part]]
name = "sst2"
set = ["data.task=sst2"]
"""


class Scratch(unittest.TestCase):
    """A folder of its own, with the experiments words and tuned in it."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        self.write("words", WORDS)
        self.write("tuned", TUNED)
        (self.folder / "words/config.toml").write_text(CONFIG, encoding="utf-8")

    def write(self, name, text):
        (self.folder / name).mkdir(exist_ok=True)
        (self.folder / name / "experiment.toml").write_text(text, encoding="utf-8")

    def records(self, name):
        path = self.folder / name / "records.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]
