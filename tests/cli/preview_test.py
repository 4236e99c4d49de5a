"""Runs lln preview as a user does: tasks that need no files, pictures as files, and mistakes.

    preview_test.py PROGRAM [unittest arguments]

SPDX-License-Identifier: Apache-2.0
"""

import json
import os
import unittest

from program import Scratch, lln


class Preview(Scratch):
    def test_expressions_as_text(self):
        text = lln("preview", "listops", "--rows", 2).stdout
        self.assertIn("96000 rows to train on, 2000 to validate", text)
        self.assertIn("by chance: always class", text)
        result = json.loads(lln("preview", "listops", "--rows", 2, "--json").stdout)
        self.assertEqual(len(result["rows"]), 2)
        for row in result["rows"]:
            self.assertEqual(row["text"].count("["), row["text"].count("]"))
            self.assertIn(row["text"], text)
        later = json.loads(lln("preview", "listops", "--rows", 2, "--step", 5, "--json").stdout)
        self.assertNotEqual(later["rows"], result["rows"])

    def test_pictures_as_files(self):
        folder = self.path("look")
        result = json.loads(lln("preview", "pathfinder32", "--rows", 3, "--validation",
                                "--pictures", folder, "--json").stdout)
        self.assertEqual(sorted(os.listdir(folder)), [f"validation-{i}.pgm" for i in range(3)])
        for row in result["rows"]:
            self.assertEqual(row["shape"], [1, 32, 32])
            self.assertIn(row["label"], ("apart (0)", "connected (1)"))
            with open(row["picture"], "rb") as file:
                content = file.read()
            self.assertTrue(content.startswith(b"P5\n32 32\n255\n"))
            self.assertEqual(len(content), 13 + 1024)

    def test_a_config_and_settings(self):
        config = self.path("run.toml")
        with open(config, "w", encoding="utf-8") as file:
            file.write("[data]\ntask = 'mqar'\ntokens = 32\npairs = 4\n[train]\nsteps = 10\n")
        row = json.loads(lln("preview", config, "--rows", 1, "--json").stdout)["rows"][0]
        self.assertEqual(row["tokens"], 32)
        self.assertEqual(len(row["label"].split(",")), 4)
        row = json.loads(lln("preview", config, "--rows", 1, "--set", "data.pairs=2",
                             "--set", "tokens=64", "--json").stdout)["rows"][0]
        self.assertEqual(row["tokens"], 64)
        self.assertEqual(len(row["label"].split(",")), 2)

    def test_mistakes(self):
        error = lln("preview", "listop", expect=3).stderr
        self.assertIn("listops", error)
        self.assertIn("mqar", error)
        error = lln("preview", "listops", "--set", "depths=3", expect=3).stderr
        self.assertIn("did you mean depth", error)
        error = lln("preview", "cifar10-grey", "--data", self.path(""), expect=3).stderr
        self.assertIn("cifar10_gray_train.bin", error)
        lln("preview", "listops", "--rows", 0, expect=2)


if __name__ == "__main__":
    unittest.main()
