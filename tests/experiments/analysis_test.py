"""What the page says over several rows and experiments, from made-up records.

    analysis_test.py ROOT

SPDX-License-Identifier: Apache-2.0
"""

import itertools
import math
import unittest

from page_test import Pages, run
from small_experiment import WORDS

# isort: split
from harness import analysis, document, figures, grids, plan, summary, views


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
                    "one seed",
                ]
            ],
        )

    def test_verdicts(self):
        def cell(*losses, cut=False):
            records = [run("diag", i, loss, cut=cut) for i, loss in enumerate(losses)]
            return summary.Cell({"name": ""}, {"name": "diag"}, records)

        def said(ours, theirs, metric="loss"):
            return analysis.verdict(ours, theirs, metric)

        self.assertEqual(said(cell(3.0, 3.1), cell(2.0, 2.1)), "loses")
        self.assertEqual(said(cell(2.0, 2.1), cell(3.0, 3.1)), "wins")
        self.assertEqual(said(cell(2.0, 2.1), cell(3.0, 3.1), "accuracy"), "loses")
        close = "no difference beyond the spread"
        self.assertEqual(said(cell(3.0, 3.1), cell(3.01, 3.11)), close)
        self.assertEqual(said(cell(3.0), cell(3.0)), "equal")
        self.assertEqual(said(cell(3.0), cell(2.0, 2.1)), "one seed")
        self.assertEqual(said(cell(3.0, 3.1, cut=True), cell(2.0, 2.1)), "-")
        self.assertEqual(analysis.difference(cell(3.0), cell(2.0, cut=True), 1, 3), ["-", "-"])

    def test_pairs_held(self):
        def cell(accuracy, cut=False):
            record = run("diag", 0, 0.0, metric="accuracy", final={"accuracy": accuracy}, cut=cut)
            return summary.Cell({"name": ""}, {"name": "diag"}, [record])

        good, bad, none = cell(0.95), cell(0.5), summary.Cell({"name": ""}, {"name": "diag"})
        for cells, expected in (
            ((good, bad, good), "4"),  # what is held behind a failure does not count
            ((good, good, good), "16, all tried"),
            ((bad, good, good), "none"),
            ((good, none, good), "4, then not run"),
            ((good, cell(0.2, cut=True), bad), "4, then not run"),
            ((none, good, good), "-"),
        ):
            self.assertEqual(grids.held(list(zip((4, 8, 16), cells, strict=True))), expected)

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
            table.rows[1], ["softmax beside Diag", "3.350", "3.100 *", "-", "-", "2, 1"]
        )
        self.assertIn("unigram", table.rows[0][0])
        own[-1]["cut"] = False
        self.put("language", [{**r, "experiment": "language"} for r in own])
        results = [summary.Results(plan.read("language", self.folder), self.folder)]
        (table,) = [b for b in analysis.worth(results) if isinstance(b, document.Table)]
        self.assertEqual(table.rows[1][3], "-0.250")

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
        # A training that was cut is in the table, with its star, and not in the figure.
        whole = blocks[-1].svg
        own[1]["cut"] = True
        self.put("language", [{**r, "experiment": "language"} for r in own])
        blocks = analysis.sweeps([summary.Results(plan.read("language", self.folder), self.folder)])
        (table,) = [b for b in blocks if isinstance(b, document.Table)]
        self.assertEqual(table.rows[1][3], "3.600 (1) *")
        self.assertEqual(whole.count("M-3.3,0a") - blocks[-1].svg.count("M-3.3,0a"), 1)

    def test_distances_from_softmax(self):
        def measured(row, loss, entropy, gap, variance):
            found = run(row, 0, loss)
            found["instruments"][0].update(
                entropy=[entropy, 0.1], gap=[gap, 0.1], log_variance=[variance, 0.1]
            )
            return found

        names = ("softmax+diag", "lln+diag", "elu+diag", "softmax", "lln", "diag")
        rows = "".join(f'[[row]]\nname = "{n}"\nset = ["attention.name={n}"]\n' for n in names)
        self.write("words", 'title = "Words"\ngroup = 1\n' + rows)
        results = self.results(
            measured("softmax+diag", 3.0, 5.0, 0.5, 1.0),
            measured("lln+diag", 3.45, 5.31, 0.6, 0.5),
            measured("elu+diag", 3.9, 6.2, 0.9, 0.25),
            measured("softmax", 3.6, 4.0, 0.5, 1.0),
            measured("lln", 4.5, 4.62, 0.6, 0.5),
            measured("diag", 3.3, 2.0, 0.0, 0.5),
        )
        cut = self.results(*(dict(r, cut=True) for r in results[0].records))
        self.assertEqual(analysis.distances(cut)["Entropy"], [])
        found = analysis.distances(results)
        # With Diag from softmax + Diag, without from softmax; Diag alone from neither.
        groups = ["words, with Diag"] * 2 + ["words, without Diag"]
        for name, expected in (
            ("Entropy", [0.05, 1.2 / 6.2, 0.1]),
            ("Spectral gap", [0.1, 0.4, 0.1]),
            ("Log-variance", [math.log(2), math.log(4), math.log(2)]),
        ):
            self.assertEqual([point[0] for point in found[name]], groups)
            self.assertEqual([point[3] for point in found[name]], ["lln+diag", "elu+diag", "lln"])
            shares = [0.1, 0.2, 1 / 3]
            for point, distance, share in zip(found[name], expected, shares, strict=True):
                self.assertAlmostEqual(point[1], distance)
                self.assertAlmostEqual(point[2], share)
        blocks = analysis.prediction(results)
        self.assertIsInstance(blocks[-1], document.Picture)
        (table,) = [b for b in blocks if isinstance(b, document.Table)]
        self.assertEqual(table.rows[0], ["Entropy", "all", "3", "+0.50", "-"])  # no trend
        self.assertEqual(table.rows[1], ["Entropy", "words, with Diag", "2", "-", "-"])
        svg = blocks[-1].svg
        self.assertIn(">elu+diag</text>", svg)  # few points have their names
        self.assertIn(">Share lost to the best row</text>", svg)
        self.assertNotIn("h22", svg)  # points alone have no line in the legend
        self.assertIn("Share lost to the best row against Entropy", blocks[-1].alt)

    def test_names_do_not_cover_each_other(self):
        plot = figures.plot
        taken = []
        places = [plot.place_name(100, y, "lln+diag", 300, taken) for y in (50, 52, 53, 70)]
        self.assertEqual([p and p[1] for p in places], ["start", "end", None, "start"])
        places = [plot.place_name(20, y, "lln+diag", 300, taken) for y in (90, 92)]
        self.assertEqual([p and p[1] for p in places], ["start", None])  # no room to the left
        svg = "".join(
            plot.draw_series(
                plot.Series("a", [(1, 1), (1.01, 1), (2, 2)], names=["one", "two", "three"]),
                figures.STYLES[0],
                plot.Panel(figures.linear("x", [1, 2]), figures.linear("y", [1, 2]), []),
                300,
                [],
            )
        )
        self.assertLess(svg.index(">three<"), svg.index(">one<"))

    def test_one_best_for_experiments_of_one_setting(self):
        config = (self.folder / "words/config.toml").read_text(encoding="utf-8")
        for name, rows in (
            ("language", ("softmax+diag", "lln+diag")),
            ("ablation", ("elu+diag",)),
            ("beyond", ("lln+diag", "relu+diag")),
        ):
            text = "".join(f'[[row]]\nname = "{n}"\nset = ["attention.name={n}"]\n' for n in rows)
            self.write(name, f'title = "{name}"\ngroup = 1\n' + text)
            (self.folder / name / "config.toml").write_text(config, encoding="utf-8")
            loss = {"softmax+diag": 3.5, "lln+diag": 3.9, "elu+diag": 4.5, "relu+diag": 3.0}
            self.put(name, [run(row, 0, loss[row], experiment=name) for row in rows])
        names = ("language", "ablation", "beyond")
        results = [summary.Results(plan.read(name, self.folder), self.folder) for name in names]
        found = analysis.distances(results)["Entropy"]
        self.assertEqual(
            [(group.partition(",")[0], row) for group, _, _, row in found],
            [("language", "lln+diag"), ("ablation", "elu+diag"), ("beyond", "relu+diag")],
        )
        for point, share in zip(found, [0.2, 1 / 3, 0.0], strict=True):
            self.assertAlmostEqual(point[2], share)

    def test_the_beginning_says_what_there_is(self):
        rows = ("softmax+diag", "lln+diag-entropy", "diag")
        text = "".join(f'[[row]]\nname = "{n}"\nset = ["attention.name={n}"]\n' for n in rows)
        self.write("language", 'title = "Language"\ngroup = 1\n' + text)
        config = (self.folder / "words/config.toml").read_text(encoding="utf-8")
        (self.folder / "language/config.toml").write_text(config, encoding="utf-8")
        own = [run(row, 0, loss) for row, loss in zip(rows, (3.0, 3.3, 3.4), strict=True)]
        own = [{**r, "experiment": "language"} for r in own]
        text = " ".join(self.page(*own, name="language").split())
        # Three rows of language, three runs of words, two of tuned.
        self.assertIn("**3 of 8 planned runs have a record.**", text)
        self.assertIn("Diag 3.000 (one seed), LLN (entropy) + Diag 3.300 (one seed)", text)
        self.assertIn("LLN adds to Diag 25% of what softmax adds", text)
        self.assertIn("| 1. Language | 8 | 3 | 0 | 0 |", text)
        own[1].update(cut=True, status="cut")
        text = self.page(*own, name="language")
        self.assertNotIn("LLN adds to Diag", text)
        self.assertIn("softmax + Diag 3.000 (one seed), Diag alone 3.400 (one seed)", text)
        self.assertIn("| 1. Language | 8 | 3 | 1 | 0 |", text)
        # The small scale is no result.
        self.write("words", WORDS.replace("group = 1", "group = 9"))
        self.assertIn("**3 of 5 planned runs", self.page(*own, name="language"))

    def test_groups_have_marks_of_their_own(self):
        groups = [f"e{i}, with{out} Diag" for i in range(12) for out in ("", "out")]
        found = figures.marks_of(groups)
        self.assertEqual(len({(s.color, s.symbol, s.hollow) for s in found.values()}), 24)
        self.assertEqual({s.width for s in found.values()}, {0})

    def test_critical_correlations(self):
        """Those of few points, by all orders that there are."""
        for count in (5, 6, 7):
            order = list(range(count))
            sizes = sorted(
                abs(summary.spearman(order, other)) for other in itertools.permutations(order)
            )
            least = summary.critical(count)
            beyond = [size for size in sizes if size >= least - 0.0006]
            self.assertLess(len(beyond) / len(sizes), 0.05)
            more = [size for size in sizes if size >= max(s for s in sizes if s < beyond[0])]
            self.assertGreaterEqual(len(more) / len(sizes), 0.05)
        self.assertIsNone(summary.critical(4))
        self.assertAlmostEqual(summary.critical(30), 1.96 / math.sqrt(29), delta=0.003)
        self.assertAlmostEqual(summary.critical(101), 0.196)

    def test_the_training_begins_off_the_plateau(self):
        def cell(curve):
            record = run("diag", 0, curve[-1][1], curve=curve)
            return summary.Cell({"name": ""}, {"name": "diag"}, [record])

        early = cell([[1, 5.0], [2, 4.0], [3, 3.0], [4, 3.0], [5, 3.0]])
        late = cell([[1, 7.4], [2, 6.0], [3, 3.0], [4, 3.0], [5, 3.0]])
        latest = cell([[1, 7.4], [2, 7.4], [3, 7.4], [4, 7.4], [5, 3.0]])
        self.assertEqual(figures.off_the_plateau([early, late]), (3, True))
        self.assertEqual(figures.off_the_plateau([early]), (1, True))
        self.assertEqual(figures.off_the_plateau([early, latest]), (3, False))

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


if __name__ == "__main__":
    unittest.main()
