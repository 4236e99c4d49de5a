"""Ideas beside LLN + Diag in a trained model: their plan, and what the page makes of the records.

    ideas_test.py ROOT

SPDX-License-Identifier: Apache-2.0
"""

import json
import pathlib
import tempfile
import unittest

import trained_test

# isort: split
from harness import document, ideas, ideas_page, trained, trained_page, trained_plan

ROOT = trained_test.ROOT
OURS, THEIRS = "lln+diag-entropy", "softmax+diag"
IDEAS = trained_plan.idea_rows()


def recovered(name, error, seed, upper=None, cosine=0.9, **more):
    """upper: the error of the one layer below the last, half of that by default."""
    made = trained_test.record(name, error, "recovered", seed)
    made["found"] |= {"mean_cosine": cosine, **more}
    if upper is not None:
        made["found"]["hidden_errors"][1] = upper
    return made


def three(name, error, **more):
    return [recovered(name, error + 0.001 * seed, seed, **more) for seed in range(3)]


def page(*records):
    """What is read of the records, the text made of them, and what the page begins with."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        path = folder / trained.NAME / "records.jsonl"
        path.parent.mkdir()
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        text = document.markdown(ideas_page.blocks(folder))
        return ideas.read(folder), text, ideas_page.so_far(folder)


def flat(text):
    return " ".join(text.split())


GATE = {"learned": {}, "gate_mean": [0.25, 0.75], "gate_deviation": [0.1, 0.3]}
ENDS = [*three("diag", 0.6), *three(OURS, 0.5), *three(THEIRS, 0.4)]


class Plan(unittest.TestCase):
    def test_rows(self):
        self.assertLessEqual({ideas.THREE, ideas.FOUR, *ideas.GATED}, set(IDEAS))
        alone = [row for row in IDEAS.values() if len(row.ideas) == 1]
        self.assertEqual({row.ideas[0] for row in alone}, set(trained_plan.IDEAS))
        self.assertEqual(IDEAS[f"{OURS}-gate"].label, "LLN (entropy) + Diag, gated")
        self.assertFalse(set(IDEAS) & set(trained_plan.rows()))
        for row in IDEAS.values():
            self.assertEqual((row.diag, row.block), (True, trained_plan.BLOCK))
            self.assertEqual(row.mode, "entropy" if row.long == "lln" else "")

    def test_settings_are_those_of_the_row_and_the_ideas(self):
        for stage in trained_plan.STAGES:
            own = trained_plan.settings_of(stage, IDEAS[f"{OURS}-gate"])
            plain = trained_plan.settings_of(stage, trained_plan.rows()[OURS])
            self.assertEqual(own.pop("ideas"), ["gate"])
            if stage == "recovered":
                self.assertEqual(own.pop("rates"), {"gate": trained_plan.MATRIX})
            self.assertEqual(own, plain)

    def test_what_only_training_changes_is_not_swapped(self):
        jobs = {(stage, row.name) for stage, row, _ in trained_plan.jobs(list(IDEAS))}
        for name in IDEAS:
            self.assertIn(("recovered", name), jobs)
            waits = IDEAS[name].ideas in (("gate",), ("mix",), ("scales",))
            for stage in ("outputs", "swapped"):
                self.assertEqual((stage, name) in jobs, not waits, name)


class Page(unittest.TestCase):
    def test_shares_of_the_gap(self):
        found, text, begin = page(
            *ENDS,
            *three(f"{OURS}-gate", 0.44, cosine=0.95, added_parameters=27720, **GATE),
            *three(f"{THEIRS}-gate", 0.32, cosine=0.95, added_parameters=27720, **GATE),
            trained_test.record(f"{OURS}-centred", 0.7),
            *three(f"{OURS}-centred", 0.52, cosine=0.85, added_parameters=0, learned={}),
            # A smaller error after the last layer, and a larger one below.
            *three(f"{OURS}-two-sided", 0.48, upper=0.4, added_parameters=0, learned={}),
            recovered(f"{OURS}-mix", 0.49, 0, learned={"mix": [0.4, 0.1, -0.2, 0.9]}),
        )
        self.assertAlmostEqual(ideas.closed(found, f"{OURS}-gate", trained.last_error), 0.06 / 0.1)
        self.assertIn(
            "| LLN (entropy) + Diag: gated | 0.501 | 0.441 | -0.0600 ± 0.0008 | -0.0450 ± 0.0006 | "
            "+0.0500 ± < 0.0001 | 60% | 60% | 3, 3 |",
            text,
        )
        self.assertIn("| LLN (entropy) + Diag: learned mix | 0.501 | 0.490 | -0.0110 |", text)
        self.assertIn("| -0.0800 ± 0.0008 | -0.0600 ± 0.0006 | +0.0500 ± < 0.0001 | - | - |", text)
        # Beside Diag alone: what softmax adds without a gate is the whole.
        self.assertRegex(text, r"\| softmax \+ Diag, gated \| 27720 \| - \| .* \| 140% \|")
        self.assertIn("| LLN (entropy) + Diag, centred keys | 0 | 0.700 | 0.521 ±", text)
        lines = text[text.index("| attention | numbers added |") :].splitlines()[2:]
        self.assertTrue(lines[0].startswith("| softmax + Diag, gated |"))

        said = flat(text)
        self.assertIn("- Better by all three measures: gated (60% and 60%).", said)
        self.assertIn("- Worse by all three measures: centred keys (-20% and -20%).", said)
        self.assertRegex(said, r"- The measures disagree: two-sided features \(20% and -\d+%\)\.")
        self.assertIn("Too few seeds to say: learned mix (11% and 11%).", said)
        self.assertIn("A gate takes 0.060 from the error after the last layer beside LLN", said)
        self.assertIn("give LLN a share of 0.50 and softmax one of 0.50.", said)
        self.assertIn(
            "| softmax + Diag, gated | gate of a head | 0.50 | 0.25 | 0.75 | 0.20 |", text
        )
        self.assertIn("| share of LLN, a number a channel | 0.40 | -0.20 | 0.90 | - |", text)
        self.assertEqual(len(begin), 1)
        self.assertIn("(1 to 3 seeds): of the 0.100 by which", begin[0])
        self.assertIn(
            "so much: gated 60%; two-sided features 20%; learned mix 11%; centred keys -20%.",
            begin[0],
        )

    def test_a_difference_within_its_error_is_none(self):
        found, text, _ = page(
            *ENDS,
            *three(f"{OURS}-gate", 0.499, **GATE),
            *three(f"{OURS}-contrast", 0.51, cosine=0.9, learned={"chain": [0, 0.1, -1, 1]}),
        )
        self.assertEqual(ideas.verdict(found, f"{OURS}-gate"), (0, 0))
        self.assertNotIn("Better by", text)
        self.assertIn("- Not to be told apart: gated (1% and 1%).", flat(text))
        # Two measures of three.
        self.assertEqual(ideas.verdict(found, f"{OURS}-contrast"), (0, 2))
        self.assertIn(
            "- Worse by some measures, and better by none: contrast of the chain (-10% and -10%).",
            flat(text),
        )

    def test_what_was_learned_is_shown_as_what_it_is(self):
        own = {"log_alpha": [0.0, 0.1, -0.5, 0.5], "log_beta": [0.1, 0.1, 0.0, 0.7]}
        _, text, _ = page(
            *ENDS,
            recovered(f"{OURS}-contrast", 0.49, 0, learned={"chain": [0.0, 0.1, -1.0, 1.0]}),
            recovered(f"{OURS}-scales", 0.49, 0, learned=own),
        )
        self.assertIn("| l of the contrast | 0.50 | 0.27 | 0.73 | - |", text)
        self.assertIn("| alpha over the calibrated one | 1.00 | 0.61 | 1.65 | - |", text)

    def test_features_are_taken_apart(self):
        _, text, begin = page(
            *ENDS,
            recovered(f"{OURS}-rotations", 0.481, 0, learned={}),
            recovered(f"{OURS}-narrow", 0.471, 0, learned={}),
            *three(f"{OURS}-wide", 0.45, learned={}),
            recovered(ideas.THREE, 0.42, 0, learned={}, gate_mean=[0.5], gate_deviation=[0.1]),
        )
        self.assertIn(
            "alone (frozen) make up for 20% of the gap after the last layer, and a map that "
            "learns, which alone (32 features) makes up for 30%; together it is 50% (seeds: 1, 1, "
            "3).",
            flat(text),
        )
        self.assertIn("(3 seeds): of the 0.100 by which", begin[0])
        # A row with fewer seeds than the sentence says is not in it.
        self.assertTrue(begin[0].endswith("so much: 128 features 50%."), begin[0])

    def test_other_sections_are_not_of_ideas(self):
        with tempfile.TemporaryDirectory() as name:
            path = pathlib.Path(name) / trained.NAME / "records.jsonl"
            path.parent.mkdir()
            own = [*ENDS, *three(f"{OURS}-gate", 0.4, **GATE), trained_test.record("softmax", 0.0)]
            path.write_text("".join(json.dumps(r) + "\n" for r in own), encoding="utf-8")
            text = document.markdown(trained_page.blocks(path.parents[1]))
        self.assertNotIn("gated", text)
        self.assertIn("runs by revision: 0123456 (10).", flat(text))

    def test_no_records(self):
        self.assertEqual(page(*ENDS)[1:], ("\n", []))
        self.assertEqual(ideas_page.blocks(ROOT / "docs"), [])


class Records(unittest.TestCase):
    def setUp(self):
        self.found = ideas.read(ROOT / "experiments")

    def test_they_are_of_the_same_texts_as_the_other_rows(self):
        texts = {r["texts"] for seeds in self.found.values() for r in seeds.values()}
        self.assertEqual(len(texts), 1)

    def test_every_row_was_measured(self):
        for name, row in IDEAS.items():
            seeds = self.found["recovered", name]
            self.assertIn(0, seeds, name)
            for record in seeds.values():
                own = record["found"]
                self.assertEqual(own["added_parameters"] > 0, bool(trained_plan.rates(row)), name)
                self.assertEqual(len(own.get("gate_mean", [])), 72 * ("gate" in row.ideas), name)
            if trained_plan.untrained(row):
                after = trained.recovered_mean(self.found, name, trained.last_error)
                before = trained.last_error(trained.swapped(self.found, name))
                self.assertLess(after, before, name)

    def test_what_is_learned_left_its_beginning(self):
        for name in IDEAS:
            for record in self.found["recovered", name].values():
                for parameter, (_, deviation, *_) in record["found"]["learned"].items():
                    self.assertGreater(deviation, 1e-4, (name, parameter))


if __name__ == "__main__":
    unittest.main()
