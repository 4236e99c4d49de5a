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
from harness import analysis, document, figures, plan, record, summary, views

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
        # Diag has no matrix that the instruments measure.
        self.assertIn("| Diag | 2 | 0.5 | 1.5 | 2.5 | - | - | - | - | - |", text)

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
        self.assertIn("| Diag | 1 | 3.000 | 60 s | - | 4.5 GB |", text)
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
                    "8": {"tokens_per_second": 250.0, "memory_bytes": 1000},
                    "16": {"tokens_per_second": 240.0, "memory_bytes": 1000},
                },
            )
        )
        self.assertIn("| LLN + Diag | 1 | 7.389 | 20.09 |", text)
        self.assertIn("| LLN + Diag | 250/s, 1 KB | 240/s, 1 KB |", text)

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
        self.assertIn("| one of the values shown | 50.0 | 25.0 | - |", text)
        self.assertIn("| Diag | 95.0 (1) | 30.0 (1) | 2 |", text)
        self.assertIn("of those tried: Diag with 0 channels 2.", text)

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


class Analysis(Pages):
    def results(self, *records):
        self.put("words", records)
        return [summary.Results(plan.read("words", self.folder), self.folder)]

    def test_where_lln_loses(self):
        self.write(
            "words",
            WORDS.replace("seeds = 2", "seeds = 2")
            .replace('name = "diag"', 'name = "softmax+diag"')
            .replace("name=diag", "name=softmax+diag"),
        )
        soft = [run("softmax+diag", seed, 3.0 + seed / 10) for seed in (0, 1)]
        (table,) = [
            b
            for b in analysis.losses(self.results(*soft, run("lln+diag", 0, 3.25)))
            if isinstance(b, document.Table)
        ]
        self.assertEqual(
            table.rows,
            [
                [
                    "Words",
                    "LLN + Diag",
                    "loss",
                    "7.500",
                    "3.250",
                    "3.050",
                    "+0.200",
                    "-",
                    "1, 2",
                    "loses",
                ]
            ],
        )

    def test_what_a_component_is_worth(self):
        self.write(
            "language",
            WORDS.replace('"lln+diag"', '"softmax+diag"').replace(
                "name=lln+diag", "name=softmax+diag"
            ),
        )
        (self.folder / "language/config.toml").write_text(
            (self.folder / "words/config.toml").read_text(encoding="utf-8"), encoding="utf-8"
        )
        own = [run("diag", 0, 3.3), run("diag", 1, 3.4), run("softmax+diag", 0, 3.1, cut=True)]
        self.put("language", [{**r, "experiment": "language"} for r in own])
        results = [summary.Results(plan.read("language", self.folder), self.folder)]
        (table,) = [b for b in analysis.worth(results) if isinstance(b, document.Table)]
        self.assertEqual(
            table.rows[1], ["softmax beside Diag", "3.350", "3.100 *", "-0.250", "-", "2, 1"]
        )
        self.assertIn("unigram", table.rows[0][0])

    def test_sweeps(self):
        text = WORDS.replace('"lln+diag"', '"diag-block=16"').replace("name=lln+diag", "name=diag")
        self.write("language", text)
        config = (self.folder / "words/config.toml").read_text(encoding="utf-8")
        (self.folder / "language/config.toml").write_text(config, encoding="utf-8")
        own = [run("diag", 0, 3.3), run("diag-block=16", 0, 3.6, attention="diag")]
        self.put("language", [{**r, "experiment": "language"} for r in own])
        blocks = analysis.sweeps([summary.Results(plan.read("language", self.folder), self.folder)])
        (table,) = [b for b in blocks if isinstance(b, document.Table)]
        self.assertEqual(table.rows[1][:4], ["tokens of a block", "Diag", "16", "3.600 (1)"])
        self.assertEqual(table.rows[2][:4], ["tokens of a block", "Diag", "64", "3.300 (1)"])
        self.assertIsInstance(blocks[-1], document.Picture)

    def test_distances_from_softmax(self):
        def measured(row, loss, entropy, gap, variance):
            found = run(row, 0, loss)
            found["instruments"][0].update(
                entropy=[entropy, 0.1], gap=[gap, 0.1], log_variance=[variance, 0.1]
            )
            return found

        names = ("softmax+diag", "lln+diag", "elu+diag")
        rows = "".join(f'[[row]]\nname = "{n}"\nset = ["attention.name={n}"]\n' for n in names)
        self.write("words", 'title = "Words"\ngroup = 1\n' + rows)
        results = self.results(
            measured("softmax+diag", 3.0, 5.0, 0.5, 1.0),
            measured("lln+diag", 3.45, 5.31, 0.6, 0.5),
            measured("elu+diag", 3.9, 6.2, 0.9, 0.25),
        )
        cut = self.results(*(dict(r, cut=True) for r in results[0].records))
        self.assertEqual(analysis.distances(cut)["Entropy"], [])
        found = analysis.distances(results)
        for name, expected in (
            ("Entropy", [0.05, 1.2 / 6.2]),
            ("Spectral gap", [0.1, 0.4]),
            ("Log-variance", [math.log(2), math.log(4)]),
        ):
            self.assertEqual([point[0] for point in found[name]], ["words", "words"])
            for point, distance, share in zip(found[name], expected, [0.1, 0.2], strict=True):
                self.assertAlmostEqual(point[1], distance)
                self.assertAlmostEqual(point[2], share)
        blocks = analysis.prediction(results)
        self.assertIsInstance(blocks[-1], document.Picture)
        (table,) = [b for b in blocks if isinstance(b, document.Table)]
        self.assertEqual(table.rows[0], ["Entropy", "all", "2", "-"])  # two points are no trend

    def test_rank_correlation(self):
        self.assertEqual(summary.spearman([1, 2, 3, 9], [2, 4, 6, 7]), 1)
        self.assertEqual(summary.spearman([1, 2, 3], [3, 2, 1]), -1)
        self.assertAlmostEqual(summary.spearman([1, 2, 3, 4], [1, 1, 2, 2]), 2 / math.sqrt(5))
        self.assertIsNone(summary.spearman([1, 2], [1, 2]))
        self.assertIsNone(summary.spearman([1, 1, 1], [1, 2, 3]))

    def test_shares_lost(self):
        self.assertEqual(analysis.lost("loss", 3.0, 3.0, 7.0), 0)
        self.assertEqual(analysis.lost("loss", 7.0, 3.0, 7.0), 1)
        self.assertEqual(analysis.lost("accuracy", 0.5, 1.0, 0.0), 0.5)

    def test_equal_time(self):
        found = run("diag", 0, 3.0)  # 25 steps a second
        self.assertEqual(views.training_seconds(found), 16)
        self.assertEqual(views.loss_at(found, 12), 4.0)
        self.assertEqual(views.loss_at(found, 16), 3.0)
        self.assertIsNone(views.loss_at(found, 17))


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
