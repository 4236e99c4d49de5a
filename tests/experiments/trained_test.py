"""Other attentions in a trained model: what the page makes of the records of experiments/trained.

    trained_test.py ROOT

SPDX-License-Identifier: Apache-2.0
"""

import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else __file__).resolve()
ROOT = ROOT if ROOT.is_dir() else ROOT.parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from harness import document, machine, trained, trained_page, trained_plan  # noqa: E402

ROWS = trained_plan.rows()
ALL = ROWS | trained_plan.idea_rows()
MAPPED = [f"{name}+diag" for name in trained_plan.MAPS]


def record(name, error, stage="swapped", seed=0, sts=0.8, entropy=None, **more):
    found = {"hidden_errors": [0.0, error / 2, error], "mean_cosine": 0.9, "sts": sts}
    if entropy is not None:
        found["instruments"] = {"entropy": entropy, "gap": [0.5, 0.5], "log_variance": [1, 1]}
    return {
        "stage": stage,
        "row": name,
        "seed": seed,
        "settings": trained_plan.settings_of(stage, ALL[name]),
        "found": found,
        "seconds": 60.0,
        "revision": "0123456789ab",
        "machine": {"cpu": "An Abacus", "cores": 2},
        "threads": 1,
        "torch": "2.0",
        **more,
    }


def page(*records):
    """What is read of the records, and the text that is made of them."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / trained.NAME / "records.jsonl"
        path.parent.mkdir()
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        return trained.read(path.parents[1]), document.markdown(
            trained_page.blocks(path.parents[1])
        )


SOFTMAX = record("softmax", 0.0, sts=0.9, entropy=[2.0, 4.0])
DIAG = record("diag", 0.5)


class Plan(unittest.TestCase):
    def test_rows(self):
        self.assertEqual(len({row.label for row in ALL.values()}), len(ALL))
        self.assertTrue(set(trained_plan.RECOVERED) < set(ROWS))
        self.assertEqual(ROWS["lln+diag-entropy-block=8"].block, 8)
        self.assertEqual(ROWS["lln+diag-alpha=0.5"].factor, 0.5)
        self.assertTrue(ROWS["elu+diag"].diag)

    def test_all_first_seeds_come_before_the_second_ones(self):
        jobs = trained_plan.jobs(stages=("recovered",))
        self.assertEqual([seed for *_, seed in jobs], sorted(seed for *_, seed in jobs))
        chosen = trained_plan.jobs(["diag", "elu"], seeds=(1,))
        self.assertEqual(
            [(stage, row.name, seed) for stage, row, seed in chosen],
            [
                ("outputs", "elu", 0),
                ("outputs", "diag", 0),
                ("swapped", "elu", 0),
                ("swapped", "diag", 0),
                ("recovered", "diag", 1),
                ("recovered", "elu", 1),
            ],
        )


class Page(unittest.TestCase):
    def test_tables(self):
        _, text = page(
            SOFTMAX,
            record("lln-none", 0, "outputs", found={"output_errors": [0.2, 0.3]}),
            record("lln-none", 0.8, entropy=[3.0, 4.5]),
            record("lln+diag-none", 0.6, entropy=[3.0, 4.5]),
            DIAG,
            record("diag-block=8", 0.7),
            *(record("diag", x, "recovered", i) for i, x in enumerate((0.2, 0.3, 0.4))),
            *(record("elu", x, "recovered", i) for i, x in enumerate((0.6, 0.8))),
            record("lln-none", 0.1, "recovered"),
        )
        self.assertIn(
            "| LLN (alpha = beta = 1) | 0.250 | 0.800 | 0.600 | 0.900 | .8000 | - | 0.600 |", text
        )
        self.assertIn("| nothing (Diag alone) | - | - | - | - | - | - | 0.500 | 0.375 |", text)
        self.assertIn("| 8 | - | 0.700 | 0.525 | 0.900 | .8000 | - | - | - | - | - |", text)
        # A spread of three seeds or more, which is not rounded to nothing.
        self.assertIn(
            "| Diag alone | 0.500 | 0.300 ± 0.100 (3) | 0.225 ± 0.075 (3) | 0.900 ± < 0.001 (3) | "
            ".8000 ± < .0001 (3) |",
            text,
        )
        self.assertIn("| ELU | - | 0.700 (2) | 0.525 (2) | 0.900 (2) | .8000 (2) |", text)
        # The best first, behind softmax.
        lines = text[text.index("| attention | error, swapped |") :].splitlines()
        self.assertEqual(
            [line.split("|")[1].strip() for line in lines[2:5]],
            ["softmax", "LLN (alpha = beta = 1)", "Diag alone"],
        )
        self.assertIn(
            "An Abacus, 2 cores of which 1 used, torch 2.0; runs by revision: 0123456 (12).", text
        )

    def test_runs_by_revision(self):
        _, text = page(
            record("elu", 0.8, revision="89abcdef0123+"),
            record("relu", 0.8, machine={"cpu": "Another", "cores": 4}),
            SOFTMAX,
            DIAG,
        )
        self.assertIn(
            "An Abacus, 2 cores of which 1 used, torch 2.0; runs by revision: 0123456 (2), "
            "89abcde+ (1); Another, 4 cores of which 1 used, torch 2.0; runs by revision: 0123456 "
            "(1).",
            " ".join(text.split()),
        )

    def test_the_best_of_a_kind_is_chosen_among_so_many(self):
        _, text = page(SOFTMAX, record("elu", 0.7), record("relu", 0.8), record("lln-none", 0.9))
        text = " ".join(text.split())
        self.assertIn("A kind with more rows has more chances of a good one; ", text)
        self.assertIn("the numbers of rows: no matching 1, another map 2. ", text)
        self.assertIn("Without Diag. Error: no matching 0.900, another map 0.700 (ELU). ", text)

    def test_one_change_at_a_time(self):
        errors = {
            "diag": (0.5, 0.51, 0.52),
            "softmax+diag": (0.3, 0.31, 0.32),
            "lln+diag-entropy": (0.46, 0.46),
            "lln+diag-none": (0.48,),
            "elu+diag": (0.5,),
        }
        found, text = page(
            SOFTMAX,
            *(
                record(name, x, "recovered", seed)
                for name, own in errors.items()
                for seed, x in enumerate(own)
            ),
        )
        self.assertAlmostEqual(
            trained.share_added(found, "lln+diag-entropy", trained.last_error), 0.05 / 0.2
        )
        self.assertRegex(text, r"\| LLN \(entropy\) \+ Diag \| .* \| 25% \| 25% \|")
        self.assertIn(
            "| softmax beside Diag | 0.510 | 0.310 | -0.2000 ± 0.0082 | -0.1500 ± 0.0061 | "
            "+0.0000 ± < 0.0001 | 3, 3 |",
            text,
        )
        self.assertIn(
            "| LLN (entropy) beside Diag | 0.510 | 0.460 | -0.0500 | -0.0375 | +0.0000 | 3, 2 |",
            text,
        )
        # The maps have alpha = beta = 1, and so has what they are compared with.
        self.assertIn(
            "| beside Diag: ELU in place of exp (alpha = beta = 1) | 0.480 | 0.500 | +0.0200 |",
            text,
        )
        for what, before, after in trained.WORTH:
            if " in place of exp " in what:
                self.assertEqual((ROWS[before].mode, ROWS[before].long), ("none", "lln"), what)
                self.assertEqual(ROWS[before].diag, ROWS[after].diag, what)

    def test_records_of_other_settings_are_left_out(self):
        other = record("lln-none", 0.8)
        other["settings"]["tokens"] = 32
        found, text = page(SOFTMAX, DIAG, other, record("diag", 0.1, "recovered", row="gone"))
        self.assertEqual(set(found), {("swapped", "softmax"), ("swapped", "diag")})
        self.assertNotIn("0.800 |", text)

    def test_no_records(self):
        self.assertEqual(trained_page.blocks(ROOT / "docs"), [])


class Prediction(unittest.TestCase):
    def test_a_distance_is_the_mean_over_heads(self):
        found, _ = page(SOFTMAX, record("elu", 0.8, entropy=[3.0, 2.0]), DIAG)
        own, softmax = (trained.swapped(found, name) for name in ("elu", "softmax"))
        tokens = trained_plan.SETTINGS["tokens"]
        self.assertAlmostEqual(
            trained.distance(own, softmax, "Entropy"), (1 + 2) / 2 / math.log(tokens)
        )

    def test_rows_that_are_compared(self):
        softmax_diag = record("softmax+diag", 0.1, entropy=[2.0, 4.0])
        records = [SOFTMAX, softmax_diag, DIAG]
        for i, scale in enumerate(("0.5", "1.5", "2", "2.5", "3")):
            entropy = [2.0, 4.0 - i / 10]  # farther and farther, and better and better
            records.append(record(f"lln-alpha={scale}", 0.9 - i / 10, entropy=entropy))
        records.append(record("lln+diag-entropy-block=8", 0.9, entropy=[2.0, 4.0]))
        found, text = page(*records)
        points = trained.points(found, trained.qualities(found)[0][1])
        self.assertEqual(
            {(group, row) for group, _, _, row in points["Entropy"]},
            {("LLN, without Diag", f"lln-alpha={x}") for x in ("0.5", "1.5", "2", "2.5", "3")},
        )
        self.assertIn("| Entropy | all without Diag | 5 | -1.00 | - | - | 1.00 |", text)
        self.assertIn(
            "Error, swapped, all without Diag: the closer to softmax, the worse (entropy)", text
        )
        self.assertNotIn("all with Diag |", text)
        # Rows of LLN are no independent ones.
        self.assertIn("| Entropy | LLN, without Diag | 5 | -1.00 | - | - | - |", text)
        self.assertIn("LLN, without Diag: on nearly one curve, so that", text)
        self.assertIn("(entropy -1.00, spectral gap -,", " ".join(text.split()))

    def test_uniform_has_what_is_defined(self):
        uniform = record("uniform", 0.7)
        outputs = record("uniform", 0, "outputs", found={"output_errors": [0.2, 0.4]})
        found, _ = page(SOFTMAX, uniform, outputs)
        points = trained.points(found, trained.qualities(found)[0][1])
        limit = math.log(trained_plan.SETTINGS["tokens"])
        apart = (limit - 2 + limit - 4) / 2 / limit
        expected = {"Entropy": apart, "Spectral gap": 0.5, "Output of heads": 0.3}
        self.assertEqual(points.pop("Log-variance"), [])
        for name, [(group, own, error, row)] in points.items():
            self.assertEqual((group, error, row), ("uniform, without Diag", 0.7, "uniform"))
            self.assertAlmostEqual(own, expected[name])

    def recovered(self, *errors):
        """Maps whose entropy is farther and farther, recovered to these errors of two layers."""
        records = [SOFTMAX]
        for i, (name, own) in enumerate(zip(MAPPED, errors, strict=True)):
            records.append(record(name, 0.5 + i / 10, entropy=[2.0, 4.0 - i / 10]))
            records.append(record(name, 0, "recovered"))
            records[-1]["found"]["hidden_errors"] = [0, *own]
        return " ".join(page(*records)[1].split())

    def test_no_verdict_where_two_measures_disagree(self):
        rising = [0.1, 0.2, 0.3, 0.4, 0.5]
        falling = [1 - 3 * x / 2 for x in rising]
        text = self.recovered(*zip(falling, rising, strict=True))
        self.assertIn("Recovered, all with Diag: the two measures of the error disagree (", text)
        self.assertIn("Error, recovered, all with Diag: not to be told from chance (sp", text)
        self.assertIn("The table has ", text)
        text = self.recovered(*zip(rising, rising, strict=True))
        self.assertIn(
            "Error, recovered, all with Diag: the closer to softmax, the better (entropy", text
        )
        self.assertNotIn("disagree (", text)


@unittest.skipUnless(shutil.which("git"), "there is no git")
class Revision(unittest.TestCase):
    def test_sources_of_the_records_that_were_changed(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)

            def git(*words):
                who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
                subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)

            program = folder / "experiments/trained/run"
            package = folder / "python/lln_attention/module.py"
            records = folder / "experiments/trained/records.jsonl"
            other = folder / "docs/page.md"
            for path in (program, package, records, other):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("one", encoding="utf-8")
            git("init")
            git("add", ".")
            git("commit", "-m", "one")
            with unittest.mock.patch.object(machine, "ROOT", folder):
                clean = machine.revision()
                self.assertRegex(clean, "^[0-9a-f]{12}$")
                for path, end in ((records, ""), (other, ""), (program, "+"), (package, "+")):
                    path.write_text("two", encoding="utf-8")
                    self.assertEqual(machine.revision(), clean + end, path.name)
                    git("checkout", ".")


class Records(unittest.TestCase):
    def setUp(self):
        self.found = trained.read(ROOT / "experiments")

    def test_every_row_was_swapped_on_the_same_texts(self):
        self.assertEqual({row for stage, row in self.found if stage == "swapped"}, set(ROWS))
        texts = {r["texts"] for seeds in self.found.values() for r in seeds.values()}
        self.assertEqual(len(texts), 1)
        for (stage, name), seeds in self.found.items():
            instruments = seeds[min(seeds)]["found"].get("instruments")
            measured = stage == "swapped" and ROWS[name].long not in ("", "uniform")
            self.assertEqual(bool(instruments), measured, name)
            if measured:
                self.assertEqual({len(x) for x in instruments.values()}, {72})

    def test_softmax_is_the_teacher(self):
        own = trained.swapped(self.found, "softmax")
        self.assertLess(max(own["hidden_errors"]), 1e-4)
        self.assertAlmostEqual(own["sts"], 0.8672, delta=0.0005)  # as in docs/minilm.md

    def test_a_recovery_is_better_than_the_swap(self):
        self.assertTrue(any(stage == "recovered" for stage, _ in self.found))
        for stage, name in self.found:
            if stage == "recovered":
                before = trained.last_error(trained.swapped(self.found, name))
                after = trained.recovered_mean(self.found, name, trained.last_error)
                self.assertLess(after, before, name)


if __name__ == "__main__":
    unittest.main()
