"""lln train, eval, compare and dump as a user runs them.

    train_test.py LLN_TORCH [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import json
import os
import pathlib
import re
import shlex
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
        shown = lln("dump", run, "-o", output, "--rows", "2").stdout
        self.assertIn(f"as in the run: lln analyze {output} --causal --matching frozen\n", shown)
        names = sorted(safetensors_file.read(output)[0])
        self.assertEqual(names, sorted(f"layer.{i}.{part}" for i in (0, 1)
                                       for part in ("q", "k", "alpha", "beta")))
        analyzer = os.path.join(os.path.dirname(PROGRAM), "lln")
        if os.path.exists(analyzer):
            found = subprocess.run(
                [analyzer, "analyze", output, "--causal", "--matching", "frozen", "--kinds", "lln",
                 "--json"], check=True, stdout=subprocess.PIPE).stdout
            alpha = safetensors_file.read(output)[0]["layer.0.alpha"][2][0]
            self.assertTrue(any(abs(head["alpha"] - alpha) < 1e-4
                                for head in json.loads(found)))

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
        # Either a number, or the norm alone, which sums squares.
        self.assertRegex(done.stderr, r"the first (infinity|NaN) is in|of their squares overflows")
        self.assertNotIn("random", done.stderr)
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


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    pathlib.Path(path).write_text(text, encoding="utf-8")


def commands_of_the_page():
    """The words of every command of docs/training.md, in its order."""
    page = (small_training.ROOT / "docs/training.md").read_text(encoding="utf-8")
    joined = page.replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^    (lln .*)$", joined, re.MULTILINE)]


class Documentation(Scratch):
    # The page's commands as they stand, but for the length of runs.
    def test_the_commands_of_the_page(self):
        write(self.path("TEXT"), "\n\n".join(
            path.read_text(encoding="utf-8")
            for path in sorted((small_training.ROOT / "docs").glob("*.md"))))
        for name in ("train", "dev"):
            write(self.path(f"glue/SST-2/{name}.tsv"), "sentence\tlabel\n" + "".join(
                f"the {word} is here\t{i % 2}\n" for i, word in enumerate(("one", "two") * 4)))
        os.symlink(small_training.ROOT / "examples", self.path("examples"))
        verbs = set()
        for words in commands_of_the_page():
            verbs.add(words[1])
            if words[1] == "train" and "--resume" not in words:
                config = pathlib.Path(small_training.ROOT, words[2]).read_text(encoding="utf-8")
                short = ["train.warmup=1", "train.instruments_every=2",
                         "train.epochs=1" if "epochs" in config else "train.steps=4"]
                words += [word for s in short for word in ("--set", s)]
            program = PROGRAM if words[1] != "analyze" else os.path.join(
                os.path.dirname(PROGRAM), "lln")
            if not os.path.exists(program):
                continue  # only the programs of this layer were built
            done = subprocess.run([program, *words[1:]], cwd=self.folder, capture_output=True,
                                  text=True, timeout=300, check=False)
            self.assertEqual(done.returncode, 0, f"{' '.join(words)}\n{done.stderr}")
        self.assertEqual(verbs, {"tokenize", "train", "compare", "eval", "dump", "analyze",
                                 "generate"})
        found = json.loads(lln("eval", "runs/lln", "--json", cwd=self.folder).stdout)
        self.assertEqual(found["metric"], "loss")
        self.assertLess(found["chance"], found["metrics"]["loss"] + 5)
        self.assertIn("softmax", lln("compare", "runs/lln", "runs/softmax", cwd=self.folder).stdout)

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

    def test_tasks_that_read_files(self):
        header, pair = "g\tf\ty\t1\t", "A man plays a flute.\tA woman sings."
        for name in ("sts-train.csv", "sts-dev.csv"):
            write(self.path(f"glue/STS-B/{name}"), header + "2.5\t" + pair + "\n" + header
                  + "5\tA dog runs.\tA dog runs.\n")
        write(self.path("wiki.txt"), "".join(
            f"= Article {i} =\n" + f"word{i} and more of the article. " * 20 + "\n\n"
            for i in range(40)))
        tiny = ("model.layers=1", "model.dim=16", "model.heads=2", "train.warmup=0",
                "train.batch=2")
        for name, data, more in (
                ("stsb", "glue", ("data.tokenizer=bytes", "train.epochs=1")),
                ("stsb", "glue", ("data.tokenizer=bytes", "train.epochs=1", "data.apart=true",
                                  "name=apart")),
                ("wiki-pairs", "", ("data.files=wiki.txt", "data.tokens=64", "data.held_out=0.2",
                                    "train.steps=1", "train.evaluate_rows=2"))):
            lln("train", small_training.ROOT / f"examples/configs/{name}.toml", "--data",
                self.path(data), "--run", self.path("-".join((name, *more))),
                *(word for s in (*tiny, *more) for word in ("--set", s)))


class Cost(Scratch):
    CONFIG = small_training.ROOT / "examples/configs/roberta-base.toml"
    TINY = ("--set", "model.layers=1", "--set", "model.dim=32", "--set", "model.heads=2", "--set",
            "data.vocabulary=100", "--seconds", "0.05", "--threads", "1")

    def test_table(self):
        text = lln("cost", self.CONFIG, "--attention", "softmax,lln+diag", "--tokens", "128,64",
                   *self.TINY).stdout
        rows = [line.split()[:2] for line in text.splitlines()]
        self.assertEqual(rows, [["attention", "tokens"], ["softmax", "64"], ["lln+diag", "64"],
                                ["softmax", "128"], ["lln+diag", "128"]])

    def test_json(self):
        found = json.loads(lln("cost", self.CONFIG, "--set", "train.batch=3", *self.TINY,
                               "--json").stdout)
        self.assertIn("lln cost", found["command"])
        (point,) = found["points"]
        self.assertEqual((point["attention"], point["tokens"], point["rows"]),
                         ("lln+diag", 512, 3))
        self.assertGreater(point["step_ms"], 0)
        self.assertGreaterEqual(point["step_ms"], point["fastest_ms"])
        self.assertAlmostEqual(point["tokens_per_second"], 3 * 512e3 / point["step_ms"])

    def points(self, attention, tokens):
        return json.loads(lln("cost", self.CONFIG, *self.TINY, "--set", "data.vocabulary=10",
                              "--set", "train.precision=f32", "--attention", attention,
                              "--tokens", tokens, "--json").stdout)["points"]

    def test_memory(self):
        # The matrix of attention does not fit at the second length: the third is not tried.
        self.assertEqual([(p["tokens"], p.get("failure")) for p in
                          self.points("kvt", "64,300000,310000")],
                         [(64, None), (300000, "out of memory")])
        small, large = (p["memory_bytes"] for p in self.points("lln", "64,20000"))
        self.assertGreater(large - small, 20000 * 32 * 4 * 5)  # five of the tensors that it keeps

    def test_wrong_input(self):
        for arguments, code, text in (
                (("--attention", "softmax,softmx"), 3, "did you mean softmax"),
                (("--tokens", "0"), 2, "--tokens"),
                (("--device", "cuda"), 5, "no CUDA device")):
            with self.subTest(arguments=arguments):
                self.assertIn(text, lln("cost", self.CONFIG, *self.TINY, *arguments,
                                        expect=code).stderr)


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

        # Runs of other tasks, or on other validation sets, are not compared.
        facts = pathlib.Path(self.runs[1], "run.json")
        known = facts.read_text(encoding="utf-8")
        for key, value in (("task", "listops"), ("chance", 0.5)):
            facts.write_text(json.dumps({**json.loads(known), key: value}), encoding="utf-8")
            error = lln("compare", *self.runs, expect=2).stderr
            self.assertIn(f"the {key}", error)
            self.assertIn("are compared", error)

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
