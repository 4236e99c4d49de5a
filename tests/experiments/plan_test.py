"""experiment.toml files: what is refused and how it is said, the order of jobs, and that those of
the project are all right.

    plan_test.py ROOT

SPDX-License-Identifier: Apache-2.0
"""

import unittest

from small_experiment import ROOT, WORDS, Scratch

# isort: split
from harness import analysis, plan


class Plan(Scratch):
    def refused(self, text, config=None):
        self.write("words", text)
        with self.assertRaises(plan.PlanError) as caught:
            plan.read("words", self.folder)
        self.assertIn("words", str(caught.exception))
        return str(caught.exception)

    def test_jobs(self):
        jobs = plan.read("words", self.folder).jobs
        self.assertEqual([job.name for job in jobs], ["diag-s0", "lln+diag-s0", "diag-s1"])
        self.assertEqual(jobs[2].settings["train.seed"], 1)
        self.assertEqual(jobs[2].settings["data.seed"], 1)
        self.assertEqual(jobs[0].settings["train.steps"], 400)
        self.assertIn("attention.name=diag", jobs[0].sets)

    def test_a_row_in_place_of_the_config(self):
        self.write(
            "words", WORDS + 'seconds = 5\n[[row]]\nname = "short"\nset = ["train.steps=7"]\n'
        )
        self.assertEqual(plan.read("words", self.folder).jobs[-2].settings["train.steps"], 7)

    def test_parts_multiply_rows(self):
        self.write(
            "words",
            WORDS + '[[part]]\nname = "a"\nset = ["data.tokens=8"]\n'
            '[[part]]\nname = "b"\nrows = ["diag"]\nseeds = 1\n',
        )
        jobs = plan.read("words", self.folder).jobs
        self.assertEqual(
            [job.name for job in jobs], ["a/diag-s0", "a/lln+diag-s0", "b/diag-s0", "a/diag-s1"]
        )
        self.assertEqual(jobs[0].settings["data.tokens"], 8)
        self.assertNotIn("data.tokens", jobs[2].settings)

    def test_a_grid(self):
        self.write(
            "words",
            WORDS + '[[part]]\nname = "n"\nset = ["data.tokens=8"]\n'
            "grid = { data.pairs = [2, 4], model.dim = [16, 32] }\n",
        )
        found = plan.read("words", self.folder)
        self.assertEqual(
            [p["name"] for p in found.parts],
            ["n-pairs=2-dim=16", "n-pairs=2-dim=32", "n-pairs=4-dim=16", "n-pairs=4-dim=32"],
        )
        self.assertEqual(found.jobs[0].settings["data.pairs"], 2)
        self.assertEqual(found.jobs[0].settings["model.dim"], 16)

    def test_settings_for_diag_alone(self):
        self.write(
            "words",
            WORDS.replace("name=lln+diag", "name=lln")
            + '[[part]]\nname = "a"\nset_diag = ["attention.diag_block=8"]\n',
        )
        jobs = {job.row: job for job in plan.read("words", self.folder).jobs}
        self.assertEqual(jobs["diag"].settings["attention.diag_block"], 8)
        self.assertNotIn("attention.diag_block", jobs["lln+diag"].settings)

    def test_unknown_keys(self):
        self.assertIn(
            "unknown key 'sedes', did you mean 'seeds'?", self.refused("sedes = 3\n" + WORDS)
        )
        self.assertIn("did you mean 'label'?", self.refused(WORDS + 'lable = "x"\n'))
        self.assertIn(
            "did you mean 'grid'?", self.refused(WORDS + '[[part]]\nname = "a"\ngird = {}\n')
        )

    def test_wrong_values(self):
        self.assertIn("expected a int", self.refused('seeds = "3"\n' + WORDS))
        self.assertIn("not KEY=VALUE", self.refused('set = ["train.steps"]\n' + WORDS))
        self.assertIn("kind 'cots'", self.refused('kind = "cots"\n' + WORDS))
        self.assertIn("'title' is missing", self.refused(WORDS.replace("title", "note")))
        self.assertIn(
            "two of them are named 'diag'", self.refused(WORDS.replace("lln+diag", "diag"))
        )
        self.assertIn("expected small letters", self.refused(WORDS.replace('"diag"', '"../diag"')))
        self.assertIn(
            "did you mean 'diag'?", self.refused(WORDS + '[[part]]\nname = "a"\nrows = ["daig"]\n')
        )
        self.assertIn("expected EXPERIMENT:ROW", self.refused(WORDS + 'from = "language"\n'))
        self.assertIn(
            "missing.toml does not exist", self.refused('config = "missing.toml"\n' + WORDS)
        )
        self.assertIn("Invalid", self.refused("title = \n"))

    def test_no_such_experiment(self):
        with self.assertRaisesRegex(plan.PlanError, "there are words, tuned"):
            plan.read("nothing", self.folder)

    def test_those_of_the_project(self):
        names = plan.names(ROOT / "experiments")
        self.assertGreater(len(names), 12)
        groups = set()
        known = {}
        for name in names:
            found = plan.read(name, ROOT / "experiments")
            groups.add(found.table["group"])
            known[name] = {row["name"] for row in found.rows}
            folders = {(job.part, job.row, job.seed) for job in found.jobs}
            self.assertEqual(len(folders), len(found.jobs), name)
        self.assertEqual(groups, set(range(1, 10)))
        for experiment, row in plan.starting_points(ROOT / "experiments"):
            self.assertIn(row, known[experiment])
        # Rows that the page looks for by their names.
        rows = set().union(*(known[name] for name in analysis.ONE_SETTING))
        wanted = {row for _, *pair in analysis.WORTH for row in pair}
        for _, _, numbers, pattern, others in analysis.SWEEPS:
            wanted |= {others.get(number, pattern.format(number)) for number in numbers}
        self.assertEqual(wanted - rows, set())


if __name__ == "__main__":
    unittest.main()
