"""The numbers of docs/minilm.md are those of the records of experiments/minilm.

    converted_test.py ROOT

SPDX-License-Identifier: Apache-2.0
"""

import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else __file__).resolve()
ROOT = ROOT if ROOT.is_dir() else ROOT.parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from harness import converted  # noqa: E402


class Converted(unittest.TestCase):
    def setUp(self):
        self.records = converted.read(ROOT / "experiments")

    def recorded(self):
        """All scores of the records, as documents write them."""
        numbers = set()
        for record in self.records.values():
            found = record["found"]
            numbers |= {converted.score(row["sts"]) for row in found.get("swaps", [])}
            for stage in found.get("stages", []):
                numbers |= {converted.score(number) for number in stage["scores"].values()}
        return numbers

    def test_the_page_has_no_other_scores(self):
        text = (ROOT / "docs/minilm.md").read_text(encoding="utf-8")
        said = set(re.findall(r"(?<![\d.])\.\d{4}(?!\d)", text))
        self.assertGreater(len(said), 20)
        self.assertEqual(said - self.recorded(), set())

    def test_tables(self):
        lines = {line[0]: line[1:] for line in converted.swapped(self.records["swapped-test"])}
        self.assertEqual(set(lines), {*converted.MODES, "Diag alone", "softmax"})
        self.assertRegex(lines["entropy"][2], r"^\.\d{4} \(0\.\d\)$")
        lines = converted.recovered(self.records)
        self.assertEqual(len(lines), 4)
        for _, swapped, recovered, softmax in lines:
            self.assertLess(float(swapped), float(recovered))
            self.assertAlmostEqual(float(recovered), float(softmax), delta=0.02)

    def test_no_records(self):
        self.assertEqual(converted.blocks(ROOT / "docs"), [])


if __name__ == "__main__":
    unittest.main()
