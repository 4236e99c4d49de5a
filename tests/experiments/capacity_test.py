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

    def test_of_factors_that_do_about_the_same_the_smallest(self):
        own = seeds([[0.9, 0.5, 0.4], [0.904, 0.51, 0.4]], scales=(3, 5))
        self.assertEqual(capacity.factor(own, 2), 3)
        self.assertEqual(capacity.factor(own, 8), 5)
        own[0]["alpha"] = [1.5, 1.6, 1.7]  # matched
        self.assertEqual(capacity.factor(own, 32), 1.7)

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

    def test_deviations_over_seeds(self):
        own = {("lln", capacity.USUAL): seeds(*self.LINES)}
        # The seeds cross 0.9 at a third of the way from 2 to 8, and at 8; 0.5 not so far apart.
        ends = [2 * 4 ** (1 / 3), 8]
        middle = sum(ends) / 2
        self.assertAlmostEqual(
            capacity.held_spread(own), math.sqrt(2) * (ends[1] - middle) / middle
        )

    def test_the_records(self):
        found = capacity.read(ROOT / "experiments")
        self.assertEqual({name for name, _ in found}, set(capacity.LABELS))
        for (name, _), own in found.items():
            self.assertEqual(sorted(own), [0, 1, 2, 3])
            # Theirs is at no end of those that were tried, once there are more than two pairs.
            if name in ("softmax", "lln", "lln-two-sided"):
                for pairs in capacity.SHOWN:
                    self.assertIn(capacity.factor(own, pairs), own[0]["scales"][1:-1])
        # Few pairs are held by all, and a thousand of them by chance in a narrow head.
        for name in ("lln", "elu", "quadratic"):
            self.assertGreater(capacity.mean(found[name, 32], 2), 0.9)
        self.assertAlmostEqual(capacity.mean(found["elu", 16], 1024), 0, delta=0.01)

    def test_what_the_page_says_of_them(self):
        found = capacity.read(ROOT / "experiments")
        for dim in (16, 32, 64, 128):
            none, per_head, entropy, best = (
                capacity.mean(found[name, dim], 256)
                for name in ("lln-none", "lln-per_head", "lln-entropy", "lln")
            )
            self.assertGreater(min(per_head, entropy), none + 0.5 * (best - none), dim)
        few = {name: capacity.mean(own, 8) for (name, dim), own in found.items() if dim == 128}
        self.assertGreater(few["lln-none"], few["lln-per_head"])

    def test_no_records(self):
        self.assertEqual(capacity.blocks(ROOT / "docs"), [])


if __name__ == "__main__":
    unittest.main()
