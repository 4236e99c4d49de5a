"""lln train, eval, compare and dump as a user runs them.

    train_test.py LLN_TORCH [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import unittest

import small_training  # first: it makes the next ones findable
import safetensors_file
from program import PROGRAM, Scratch, lln

sys.path.insert(0, str(small_training.ROOT / "tools"))
import headless_browser  # noqa: E402


class Training(Scratch):
    def setUp(self):
        super().setUp()
        self.config = self.path("small.toml")
        pathlib.Path(self.config).write_text(small_training.CONFIG, encoding="utf-8")

    def train(self, run, *arguments, **options):
        return lln("train", self.config, "--run", self.path(run), "--threads", "1", *arguments,
                   **options)


class Train(Training):
    def test_a_run(self):
        done = json.loads(self.train("run", "--json").stdout)
        self.assertEqual(done["end"], "finished")
        self.assertEqual(done["step"], 60)
        run = self.path("run")
        self.assertEqual(pathlib.Path(run, "config.toml").read_text(encoding="utf-8"),
                         small_training.CONFIG)
        resolved = json.loads(pathlib.Path(run, "config.json").read_text(encoding="utf-8"))
        self.assertEqual(resolved["train"]["beta2"], 0.999)
        self.assertEqual(resolved["attention"]["diag_block"], 16)
        rows = small_training.rows(run, "metrics.jsonl")
        self.assertEqual([r["step"] for r in rows if "evaluation" in r], [20, 40, 60])
        self.assertTrue(all(0 < r["chance"] < 1 for r in rows if "evaluation" in r))
        heads = small_training.rows(run, "instruments.jsonl")
        self.assertEqual(sorted({(r["step"], r["layer"], r["head"]) for r in heads}),
                         [(s, l, h) for s in (0, 30, 60) for l in (0, 1) for h in (0, 1)])
        self.assertTrue(all(r["alpha"] > 0 and r["entropy"] > 0 for r in heads))

        # What was there is neither overwritten nor trained again.
        error = self.train("run", expect=2).stderr
        self.assertIn("--resume goes on with it", error)
        before = small_training.files_of(run, 60)
        self.train("run", "--resume")
        self.assertEqual(small_training.files_of(run, 60), before)
        error = self.train("run", "--resume", "--set", "train.steps=70", expect=2).stderr
        self.assertIn("begun with another config", error)

        # The evaluation says what the log says.
        found = json.loads(lln("eval", run, "--checkpoint", "last", "--threads", "1",
                               "--json").stdout)
        logged = [r["evaluation"] for r in rows if "evaluation" in r][-1]
        self.assertEqual(found["metrics"], logged)
        error = lln("eval", run, "--checkpoint", "7", expect=3).stderr
        self.assertIn("no checkpoint '7'", error)

        output = self.path("dump.safetensors")
        lln("dump", run, "-o", output, "--rows", "2")
        names = sorted(safetensors_file.read(output)[0])
        self.assertEqual(names, sorted(f"layer.{i}.{part}" for i in (0, 1)
                                       for part in ("q", "k", "alpha", "beta")))
        analyzer = os.path.join(os.path.dirname(PROGRAM), "lln")
        if os.path.exists(analyzer):
            subprocess.run([analyzer, "analyze", output, "--json"], check=True,
                           stdout=subprocess.DEVNULL)

    def test_signals_save_and_end(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            run = self.path(f"run{number}")
            process = subprocess.Popen(
                [PROGRAM, "train", self.config, "--run", run, "--threads", "1", "--set",
                 "train.steps=100000", "--set", "train.evaluate_every=0"],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            log = pathlib.Path(run, "metrics.jsonl")
            deadline = time.monotonic() + 120
            while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(number)
            _, error = process.communicate(timeout=120)
            self.assertEqual(process.returncode, 6, error)
            self.assertIn("stopped and saved at step", error)
            self.assertTrue(any(name.startswith("step-")
                                for name in os.listdir(os.path.join(run, "checkpoints"))))

    def test_a_loss_that_is_not_finite(self):
        # Every step multiplies the weights by 1 - 10 * 10.
        done = self.train("run", "--set", "train.learning_rate=10", "--set",
                          "train.weight_decay=10", "--set", "train.warmup=0", "--set",
                          "train.schedule=constant", expect=7)
        self.assertIn("batch: 8 rows of 32 tokens, the first ids", done.stderr)
        self.assertRegex(done.stderr, r"the first (infinity|NaN) is in")
        self.assertIn("layer 0 (lln+diag): largest |q|", done.stderr)
        found = json.loads(self.train("again", "--set", "train.learning_rate=10", "--set",
                                      "train.weight_decay=10", "--set", "train.warmup=0", "--set",
                                      "train.schedule=constant", "--json", expect=7).stdout)
        self.assertEqual(found["error"]["code"], "not_finite")

    def test_faults(self):
        error = self.train("run", "--set", "train.stpes=3", expect=3).stderr
        self.assertIn("steps", error)
        self.assertFalse(os.path.exists(self.path("run")))
        error = self.train("run", "--set", "attention.name=softmx", expect=3).stderr
        self.assertIn("softmax", error)
        error = lln("train", "--resume", "--run", self.path("none"), expect=2).stderr
        self.assertIn("no run to go on with", error)
        pathlib.Path(self.path("file")).write_text("", encoding="utf-8")
        error = self.train("file/run", expect=3).stderr
        self.assertIn("file/run", error)
        error = lln("train", self.config, "--run", self.path("gpu"), "--device", "cuda",
                    expect=None)
        if error.returncode != 0:
            self.assertIn("CUDA", error.stderr)


class Documentation(unittest.TestCase):
    ASKED = re.compile(
        r"\.(?:integer|number|flag|choice|texts?|required_text|table)\(\s*\"(\w+)\"")

    def test_every_key_of_a_config_is_described(self):
        text = "".join((small_training.ROOT / "docs" / name).read_text(encoding="utf-8")
                       for name in ("training.md", "zoo.md", "data.md", "data_images.md"))
        described = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", text))))
        described |= set(re.findall(r"^### \[(\w+)\]", text, re.MULTILINE))
        for folder in ("train", "models", "data", "zoo"):
            for path in sorted((small_training.ROOT / "lln_torch" / folder).glob("*.cc")):
                for key in self.ASKED.findall(path.read_text(encoding="utf-8")):
                    self.assertIn(key, described, f"{path.name}: no page has this key")

    def test_keys_of_the_configs_are_described(self):
        text = (small_training.ROOT / "docs/training.md").read_text(encoding="utf-8")
        for path in sorted((small_training.ROOT / "examples/configs").glob("*.toml")):
            keys = re.findall(r"^(\w+) = ", path.read_text(encoding="utf-8"), re.MULTILINE)
            self.assertIn("task", keys)
            for key in keys:
                self.assertIn(f"`{key}`", text, path.name)


class Configs(Scratch):
    def test_generated_tasks(self):
        for name in ("listops", "mqar", "pathfinder32"):
            settings = ("train.steps=1", "train.batch=1", "train.warmup=0", "train.evaluate_rows=1",
                        "data.train_rows=4", "data.validation_rows=2", "train.instruments_every=0",
                        f"name={name}")
            lln("train", small_training.ROOT / f"examples/configs/{name}.toml", "--run",
                self.path(name), *(word for s in settings for word in ("--set", s)))

    def test_the_first_page_of_the_documentation(self):
        text = "\n\n".join(path.read_text(encoding="utf-8")
                           for path in sorted((small_training.ROOT / "docs").glob("*.md")))
        pathlib.Path(self.path("TEXT")).write_text(text, encoding="utf-8")
        tokens, runs = self.path("tokens"), [self.path("lln"), self.path("softmax")]
        lln("tokenize", self.path("TEXT"), "-o", tokens, "--vocab", "2000")
        for run, name in zip(runs, ("lln+diag", "softmax")):
            lln("train", small_training.ROOT / "examples/configs/mlm-tiny.toml", "--data", tokens,
                "--run", run, "--set", f"attention.name={name}", "--set", "train.steps=4", "--set",
                "train.warmup=1", "--set", "data.validation_rows=4")
        found = json.loads(lln("eval", runs[0], "--json").stdout)
        self.assertEqual(found["metric"], "loss")
        self.assertLess(found["chance"], found["metrics"]["loss"] + 5)
        self.assertIn("softmax", lln("compare", *runs).stdout)


class Compare(Training):
    def setUp(self):
        super().setUp()
        short = ("--set", "train.steps=20", "--set", "train.evaluate_every=10", "--set",
                 "train.instruments_every=5")
        self.train("lln", *short)
        self.train("soft", *short, "--set", "attention.name=softmax+diag")
        self.runs = [self.path("lln"), self.path("soft")]

    def test_table_and_json(self):
        text = lln("compare", *self.runs).stdout
        for word in ("lln+diag", "softmax+diag", "chance", "tokens/s", "parameters", "final loss"):
            self.assertIn(word, text)
        found = json.loads(lln("compare", *self.runs, "--json").stdout)
        self.assertEqual([r["attention"] for r in found["runs"]], ["lln+diag", "softmax+diag"])
        self.assertTrue(all(r["tokens_per_second"] > 0 for r in found["runs"]))

        # Runs of other tasks are not compared.
        facts = pathlib.Path(self.runs[1], "run.json")
        facts.write_text(facts.read_text(encoding="utf-8").replace('"mqar"', '"listops"'),
                         encoding="utf-8")
        self.assertIn("one task", lln("compare", *self.runs, expect=2).stderr)

    def test_the_page(self):
        page = self.path("page.html")
        lln("compare", *self.runs, "--report", page)
        browser = headless_browser.find_browser()
        if browser is None:
            if os.environ.get("CI"):
                raise RuntimeError("continuous integration tests the report: no browser found")
            self.skipTest("no headless browser: install chromium-headless-shell")
        document, console = headless_browser.Browser(browser).load(page)
        self.assertEqual(console, [])
        sections = [e.attributes["id"] for e in document.all("section")]
        self.assertEqual(sections, ["summary", "training", "concentration", "concentration-loss"])
        marks = document.all(css="mark")
        for panel in document.all("g", "panel"):
            own = [m for m in marks if any(a is panel for a in m.ancestors)]
            self.assertGreaterEqual(len(own), 2)
        for element in document.all("text") + document.all("tspan") + document.all("td"):
            self.assertNotRegex(element.text, r"\b(NaN|undefined|null|Infinity)\b")
        phone, _ = headless_browser.Browser(browser).load(page, (390, 844))
        root = phone.all("html")[0].attributes
        self.assertLessEqual(int(root["data-content-width"]), 390)


if __name__ == "__main__":
    unittest.main()
