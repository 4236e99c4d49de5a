"""The page of benchmarks from made-up results: what a reader relies on is in it, and other results
make another page.

    benchmarks_page_test.py ROOT

SPDX-License-Identifier: Apache-2.0
"""

import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(sys.argv.pop(1)) / "bench"))
import page  # noqa: E402  (the path is an argument)

MACHINE = {
    "cpu": "An Abacus",
    "target": "wood",
    "threads": 2,
    "fma_peak_gflops": 100,
    "copy_gbs": 10,
}


def result(problem, peer, median):
    return {
        "problem": problem,
        "peer": peer,
        "median_ms": median,
        "p10_ms": median / 2,
        "p90_ms": median * 2,
        "floor_ms": 4.0,
        "ratio": median / 4,
    }


class PageTest(unittest.TestCase):
    def page_of(self, results, machine=MACHINE, **more):
        with tempfile.TemporaryDirectory() as folder:
            target = pathlib.Path(folder) / "bench/results/cpu.json"
            target.parent.mkdir(parents=True)
            target.write_text(
                json.dumps(
                    {"command": "the command", "machine": machine, "results": results, **more}
                )
            )
            return page.page(pathlib.Path(folder))

    def test_machine_command_and_rows(self):
        text = self.page_of(
            [result("p", "lln", 6.0), result("p", "torch-sdpa", 60.0), result("q", "lln", 8.0)],
            note="Noted.",
        )
        self.assertIn("An Abacus, wood, 2 threads: 100 GFLOP/s multiply-add, 10.0 GB/s copy.", text)
        self.assertIn("\n    the command\n", text)
        self.assertIn("\nNoted.\n", text)
        self.assertIn("| `p` | 4.00 | 6.00 | 3.00 to 12.0 | 1.50 | 60.0 (10.0x) |", text)
        self.assertIn("| `q` | 4.00 | 8.00 | 4.00 to 16.0 | 2.00 | - |", text)

    def test_machine_with_a_device(self):
        machine = {"device": "A GPU", "multiprocessors": 7, "cuda": "13.0", "copy_gbs": 4321.4}
        text = self.page_of(
            [result("p", "lln", 6.0), result("p", "torch-cudnn", 9.0)], machine=machine
        )
        self.assertIn(
            "A GPU, 7 multiprocessors, CUDA 13.0: 4321 GB/s copy inside the device.", text
        )
        self.assertIn("- torch-cudnn: softmax attention by cuDNN", text)

    def test_cost_per_token(self):
        text = self.page_of(
            [
                result("forward:f32:cpu:b1h1n1000d64:lln", "lln", 1.0),
                result("forward:f32:cpu:b1h1n2000d64:lln", "lln", 3.0),
            ]
        )
        self.assertIn("| 1000 | 1000 | 1.00 |\n| 2000 | 1500 | 1.50 |", text)

    def test_other_results_make_another_page(self):
        self.assertNotEqual(
            self.page_of([result("p", "lln", 6.0)]), self.page_of([result("p", "lln", 6.5)])
        )


if __name__ == "__main__":
    unittest.main()
