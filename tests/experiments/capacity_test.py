"""Pairs that a state holds: what the page makes of the records of experiments/capacity.

    capacity_test.py ROOT

SPDX-License-Identifier: Apache-2.0
"""

import math
import pathlib
import sys
import unittest

ROOT = pathlib.Path(sys.argv.pop(1) if len(sys.argv) > 1 else __file__).resolve()
ROOT = ROOT if ROOT.is_dir() else ROOT.parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from harness import capacity  # noqa: E402


def seeds(*tables, pairs=(2, 8, 32), scales=(1, 2)):
    """Seed -> record, of [scale][pairs] for each."""
    return {
        seed: {"pairs": list(pairs), "scales": list(scales), "accuracy": table}
        for seed, table in enumerate(tables)
    }


class Capacity(unittest.TestCase):
    # The first seed finds 2 the better factor for 2 and 8 pairs, 1 for 32.
    LINES = (
        [[0.5, 0.5, 0.4], [1, 0.8, 0.2]],
        [[0, 0, 0.1], [1, 0.7, 1]],
        [[0, 0, 0.3], [1, 0.9, 1]],
    )

    def test_the_seed_that_chooses_is_not_shown(self):
        own = seeds(*self.LINES)
        self.assertEqual(capacity.shares(own, 8), [0.7, 0.9])
        self.assertEqual(capacity.shares(own, 32), [0.1, 0.3])
        self.assertEqual(
            [(p, round(y, 6)) for p, y in capacity.curve(own)], [(2, 1), (8, 0.8), (32, 0.2)]
        )

    def test_where_a_share_is_crossed(self):
        own = seeds(*self.LINES)
        self.assertAlmostEqual(capacity.held(own, 0.9), 4)  # half of the way from 2 to 8
        self.assertAlmostEqual(capacity.held(own, 0.5), 16)
        self.assertEqual(capacity.held(own, 0.1), math.inf)
        self.assertEqual(capacity.held_text(own, 0.1), "over 32")
        self.assertEqual(capacity.held_text(own, 0.5), "16")
        low = seeds([[0.5, 0, 0]], [[0.5, 0, 0]], scales=(None,))
        self.assertIsNone(capacity.held(low, 0.9))
        self.assertEqual(capacity.held_text(low, 0.9), "under 2")

    def test_the_records(self):
        found = capacity.read(ROOT / "experiments")
        self.assertEqual({name for name, _ in found}, set(capacity.LABELS))
        for own in found.values():
            self.assertEqual(sorted(own), [0, 1, 2, 3])
        # Chance for one pair of many, everything for few, and wider states hold more.
        for name in ("lln", "elu", "quadratic"):
            points = dict(capacity.curve(found[name, 32]))
            self.assertGreater(points[2], 0.9)
            self.assertGreater(points[2], points[1024])
            self.assertLess(
                capacity.held(found[name, 16], 0.5), capacity.held(found[name, 32], 0.5)
            )

    def test_no_records(self):
        self.assertEqual(capacity.blocks(ROOT / "docs"), [])


if __name__ == "__main__":
    unittest.main()
