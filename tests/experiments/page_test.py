"""The page of results from made-up records: what a reader relies on is in it.

    page_test.py ROOT

SPDX-License-Identifier: Apache-2.0
"""

import html.parser
import json
import math
import re
import unittest

from small_experiment import ROOT, WORDS, Scratch

# isort: split
import page
from harness import document, figures, record

SETTINGS = {"data.task": "mlm", "train.steps": 400, "train.warmup": 40}


def run(row, seed, loss, **more):
    """A record of the experiment words."""
    name = more.pop("attention", row)
    made = {
        "experiment": "words",
        "part": "",
        "row": row,
        "seed": seed,
        "status": "finished",
        "cut": False,
        "cut_by": "",
        "machine": {"gpu": "An Abacus", "cpu": "wood", "cores": 2},
        "jobs": 1,
        "revision": "abc",
        "torch": "2.0",
        "seconds": 60.0,
        "device": "cuda",
        "settings": {
            **SETTINGS,
            "attention.name": name,
            "train.seed": seed,
            "data.seed": seed,
            "model.seed": seed,
        },
        "metric": "loss",
        "chance": 7.5,
        "chance_text": "unigram",
        "steps": 400,
        "batch": 4,
        "step": 400,
        "final_step": 400,
        "final": {"loss": loss},
        "best": {"loss": loss - 1},
        "best_step": 300,
        "curve": [[200, 5.0], [400, loss]],
        "spikes": 2,
        "gradient_norm_after_warmup": {"median": 0.5, "p99": 1.5, "max": 2.5},
        "tokens_per_second": 123456.0,
        "rows_per_second": 100.0,
        "memory_bytes": 4.5e9,
        "instruments": [
            {
                "step": 400,
                "kind": "lln",
                "heads": 2,
                "entropy": [4.25, 0.1],
                "entropy_limit": 6.2,
                "gap": [0.75, 0.1],
                "log_variance": [0.5, 0.1],
                "alpha": [2.5, 0.1],
                "beta": [2.25, 0.1],
            }
        ],
    }
    return {**made, **more}


class Pages(Scratch):
    def put(self, name, records):
        path = self.folder / name / "records.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")

    def page(self, *records, name="words"):
        self.put(name, records)
        return document.markdown(page.blocks(self.folder))


class Page(Pages):
    def test_not_run_yet(self):
        text = self.page()
        self.assertIn("### Words\n\nWhat is asked.\n\n    experiments/run words --runs DIR", text)
        self.assertIn("**Not run yet** (3 runs).", text)

    def test_mean_spread_and_seeds(self):
        text = self.page(run("diag", 0, 3.0), run("diag", 1, 3.1), run("lln+diag", 0, 2.9))
        self.assertIn("| nothing learned: unigram | - | 7.500 |", text)
        self.assertIn("| Diag | 2 | 3.050 ± 0.071 | 60 s | 123k | 4.5 GB |", text)
        self.assertIn("| LLN + Diag | 1 | 2.900 | 60 s |", text)
        self.assertIn("3 runs. An Abacus, torch 2.0, revision abc (3 runs).", text)
        self.assertIn(
            "| LLN + Diag | 2 | 0.5 | 1.5 | 2.5 | 4.25 | 0.750 | 0.50 | 2.50 | 2.25 |", text
        )
        # Blocks have no gap.
        self.assertIn("| Diag | 2 | 0.5 | 1.5 | 2.5 | 4.25 | - | 0.50 | 2.50 | 2.25 |", text)

    def test_norms_of_older_records_are_marked(self):
        old = run("diag", 0, 3.0, gradient_norm={"median": 0.25, "p99": 1.25, "max": 2.25})
        del old["gradient_norm_after_warmup"]
        text = self.page(old, run("lln+diag", 0, 2.9))
        self.assertIn("| Diag | 2 | 0.25 w | 1.25 w | 2.25 w |", text)
        self.assertIn("| LLN + Diag | 2 | 0.5 | 1.5 | 2.5 |", text)
        self.assertIn("w: with the steps of the warm-up", text)
        self.assertIn("one of 10", text)
        self.assertNotIn("warm-up, where", self.page(run("lln+diag", 0, 2.9)))

    def test_rows_of_the_validation_set(self):
        text = self.page(run("diag", 0, 3.0, data_rows=322), run("lln+diag", 0, 3.0, data_rows=322))
        self.assertIn("Evaluated on 322 rows.", text)
        self.assertNotIn("Evaluated", self.page(run("diag", 0, 3.0)))

    def test_what_came_after_the_training(self):
        later = {"stage": "generate", "status": "cut", "cut_by": "limit"}
        text = self.page(run("diag", 0, 3.0, later=later))
        self.assertIn("| Diag | 1 | 3.000 | 60 s |", text)  # no star
        self.assertIn("after the training, generate cut short |", text)

    def test_remarks_of_a_row(self):
        self.write("words", WORDS + 'note = "a remark"\n')
        text = self.page(run("diag", 0, 3.0), run("lln+diag", 0, 3.0))
        self.assertIn("4.5 GB | a remark |", text)
        self.assertEqual(text.count("a remark"), 1)

    def test_cut_and_failed(self):
        cut = run("diag", 0, 4.0, status="cut", cut=True, cut_by="limit", step=170, final_step=160)
        failed = run(
            "diag",
            1,
            0.0,
            status="failed",
            message="lln: out | of memory\nmore",
            final=None,
            best=None,
        )
        text = self.page(cut, failed)
        self.assertIn("2 of 3 runs.", text)
        self.assertIn("| Diag | 1 | 4.000 * |", text)
        self.assertIn("cut short: step 160 of 400; 1 of 2 runs failed: out / of memory |", text)

    def test_a_row_that_only_failed_is_there(self):
        text = self.page(
            run(
                "diag",
                0,
                0.0,
                status="not_finite",
                message="lln: not finite",
                final=None,
                best=None,
            )
        )
        self.assertIn("| Diag | 0 | - |", text)
        self.assertIn("1 of 1 runs not finite: not finite", text)

    def test_shared_machines_have_no_speed(self):
        text = self.page(run("diag", 0, 3.0, jobs=4))
        self.assertIn("| Diag | 1 | 3.000 | - | - | 4.5 GB |", text)
        self.assertIn("4 runs at a time", text)

    def test_other_settings_are_left_out(self):
        old = run("diag", 0, 3.0)
        old["settings"] = {**old["settings"], "train.steps": 8}
        text = self.page(old, run("lln+diag", 0, 2.9), run("gone", 0, 2.0))
        self.assertIn("1 of 3 runs; 2 records of other settings are left out.", text)
        self.assertNotIn("3.000", text)
        self.assertNotIn("2.000", text)

    def test_parts(self):
        tuned = run(
            "diag",
            0,
            0.0,
            experiment="tuned",
            part="sst2",
            metric="accuracy",
            chance=0.5,
            final={"accuracy": 0.8125, "loss": 1.0},
        )
        tuned["settings"]["data.task"] = "sst2"
        self.assertIn("(2 runs); 1 records of other settings", self.page(tuned, name="tuned"))
        source = {"experiment": "words", "row": "diag", "seed": 0}
        tuned["start_from"] = {**source, "settings": run("diag", 0, 0.0)["settings"]}
        text = self.page(tuned, name="tuned")
        self.assertIn(
            "| attention | sst2: accuracy, % |\n| --- | --- |\n| nothing learned | 50.0 |\n"
            "| diag | 81.2 (1) |",
            text,
        )

    def test_small_scale(self):
        self.write("words", 'view = "smoke"\ntolerance = 0.25\n' + WORDS)
        text = self.page(run("diag", 0, 3.0, seconds=12.0))
        self.assertIn("    make experiments-smoke\n", text)
        self.assertIn("| Diag | loss | 7.500 | 3.000 | 0.250 | 12 s |", text)

    def test_costs(self):
        self.write(
            "words",
            'kind = "cost"\ntokens = [512, 1024, 2048]\n'
            + WORDS
            + """
[[published]]
label = "Theirs"
source = "a paper"
values = { 1024 = "1 GB, 2 s" }
""",
        )
        made = run(
            "lln+diag",
            0,
            0.0,
            final=None,
            cost=[
                {"tokens": 512, "step_ms": 12.5, "memory_bytes": 2e9},
                {"tokens": 1024, "failure": "out of memory: tried"},
            ],
        )
        made["settings"] = {**SETTINGS, "attention.name": "lln+diag"}
        text = self.page(made)
        self.assertIn("| LLN + Diag | 12.5 ms | out of memory | - |", text)
        self.assertIn("| LLN + Diag | 2 GB | out of memory | - |", text)
        self.assertNotIn("12.5 ms", self.page({**made, "jobs": 2}))
        self.assertIn("cut short after 2 lengths", self.page({**made, "cut": True}))
        self.assertIn("| Theirs (a paper) | 1 GB, 2 s |", text)

    def test_generation(self):
        self.write("words", 'generate = [8, 16]\nevaluate_on = ["other"]\n' + WORDS)
        text = self.page(
            run(
                "lln+diag",
                0,
                2.0,
                evaluated_on={"other": {"loss": 3.0}},
                generated={
                    "8": {"seconds": 0.028, "memory_bytes": 1000},
                    "16": {"seconds": 0.0625, "memory_bytes": 1000},
                },
            )
        )
        self.assertIn("| LLN + Diag | 1 | 7.389 | 20.09 |", text)
        # 7 tokens in 0.028 s, 8 in 0.0345 s.
        self.assertIn("| attention | 1 to 8 | 8 to 16 |", text)
        self.assertIn("| LLN + Diag | 250/s, 1 KB | 232/s, 1 KB |", text)

    def test_a_grid(self):
        self.write(
            "words",
            WORDS.replace("seeds = 2", "")
            + """
[[part]]
name = "n"
label = "N = 8"
grid = { data.pairs = [2, 4] }
""",
        )
        made = []
        for pairs, accuracy in ((2, 0.95), (4, 0.3)):
            one = run(
                "diag",
                0,
                0.0,
                part=f"n-pairs={pairs}",
                metric="accuracy",
                chance=0.1,
                final={"accuracy": accuracy},
            )
            one["settings"]["data.pairs"] = pairs
            made.append(one)
        text = self.page(*made)
        self.assertIn("| one of the values shown | 50.0 | 25.0 |", text)
        self.assertIn("| Diag | 95.0 (1) | 30.0 (1) |", text)
        self.assertIn("| pairs held | N = 8 |\n| --- | --- |\n| Diag | 2 |", text)

    def test_loss_at_equal_time(self):
        self.write(
            "words",
            'view = "equal-time"\n'
            + WORDS.replace("seeds = 2", "")
            + '[[part]]\nname = "n"\nlabel = "N = 8"\n',
        )
        slow = run("diag", 0, 3.0, part="n", rows_per_second=50.0)  # 32 s
        fast = run("lln+diag", 0, 3.5, part="n")  # 16 s
        text = self.page(slow, fast)
        self.assertIn("| N = 8 | Diag | 80 ms | 3.000 (1) | 16 s | 5.000 |", text)
        self.assertIn("| N = 8 | LLN + Diag | 40 ms | 3.500 (1) | 16 s | 3.500 |", text)
        text = self.page(slow, {**fast, "jobs": 2})  # its time says nothing
        self.assertIn("| N = 8 | Diag | 80 ms | 3.000 (1) | 32 s | 3.000 |", text)
        self.assertIn("| N = 8 | LLN + Diag | - | 3.500 (1) | 32 s | - |", text)

    def test_other_records_make_another_page(self):
        self.assertNotEqual(self.page(run("diag", 0, 3.0)), self.page(run("diag", 0, 3.1)))
        self.assertEqual(self.page(run("diag", 0, 3.0)), self.page(run("diag", 0, 3.0)))

    def test_html(self):
        self.put("words", [run("diag", 0, 3.0), run("lln+diag", 0, 2.9)])
        blocks = page.blocks(self.folder)
        text = document.html("a & b", blocks)
        self.assertIn("<title>a &amp; b</title>", text)
        self.assertIn("prefers-color-scheme: dark", text)
        self.assertIn("<td>3.000</td>", text)
        self.assertEqual(len(re.findall("<svg", text)), 1)
        # Nothing is loaded, and figures take the colours of the page.
        outside = re.sub(r"http://www.w3.org/2000/svg", "", text)
        self.assertNotRegex(outside, r"https?:|src=|@import|<script")
        self.assertNotIn("#1b1f24", text.partition("</style>")[2])
        open_tags = []

        class Balance(html.parser.HTMLParser):
            def handle_starttag(self, tag, attributes):
                if tag not in ("meta", "path", "rect", "br"):
                    open_tags.append(tag)

            def handle_startendtag(self, tag, attributes):
                pass

            def handle_endtag(self, tag):
                assert open_tags.pop() == tag, tag

        Balance().feed(text)
        self.assertEqual(open_tags, [])

    def test_of_the_project_every_file_is_named(self):
        made = page.files(ROOT / "experiments")
        self.assertIn("docs/results.md", made)
        for path in made:
            self.assertTrue((ROOT / path).exists(), path)


class Parts(unittest.TestCase):
    def test_spikes(self):
        smooth = [10 - 0.1 * i for i in range(40)]
        self.assertEqual(record.spikes(smooth), 0)
        self.assertEqual(record.spikes([*smooth[:20], 11.0, *smooth[21:]]), 1)
        self.assertEqual(record.spikes([5.0] * 20 + [5.05] + [5.0] * 20), 0)  # less than 2%
        self.assertEqual(record.spikes([1.0, 9.0]), 0)

    def test_thinned(self):
        points = list(range(1, 101))
        self.assertEqual(len(record.thinned(points, 40)), 40)
        self.assertEqual(record.thinned(points, 40)[-1], 100)
        self.assertEqual(record.thinned([1, 2], 40), [1, 2])

    def test_rounded(self):
        self.assertEqual(
            record.rounded({"a": [1.23456789, 2], "b": math.nan, "c": "x", "d": True}),
            {"a": [1.23457, 2], "b": None, "c": "x", "d": True},
        )

    def test_ticks(self):
        axis = figures.linear("x", [0.3, 4.1])
        self.assertEqual(axis.ticks, [1, 2, 3, 4])
        self.assertAlmostEqual(figures.linear("x", [2, 2]).at(2, 100), 50)


if __name__ == "__main__":
    unittest.main()
