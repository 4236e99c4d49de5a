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

    def test_first_calls(self):
        first = [{**result(name, "lln", 6.0), "first_ms": ms} for name, ms in zip("pqr", (1, 9, 2))]
        text = self.page_of([*first, result("p", "torch-sdpa", 60.0)])
        self.assertIn("2.00 ms (median of all), at most 9.00 ms, `q`.", text)
        self.assertNotIn("The first call", self.page_of([result("p", "lln", 6.0)]))

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

    def test_the_readme_has_what_was_measured(self):
        def peers(op, shape, *milliseconds):
            names = ("lln", "torch-cudnn", "torch-flash")
            problem = f"{op}:bf16:cuda:{shape}:lln"
            return [result(problem, *pair) for pair in zip(names, milliseconds)]

        gpu = {"command": "c", "machine": {"device": "NVIDIA H200"}}
        shapes = ("b64h16n1024d64", "b4h16n16384d64")
        records = {
            "peers": [
                *peers("forward", shapes[0], 1.0, 4.0, 5.0),
                *peers("train", shapes[0], 1.0, 7.0, 6.0),
                *peers("forward", shapes[1], 1.0, 40.0, 50.0),
                *peers("train", shapes[1], 1.0, 70.0, 60.0),
            ],
            "lln": [
                result("forward:bf16:cuda:b1h1n9d64:lln", "lln", 5.0),
                result("train:bf16:cuda:b1h1n9d64:lln", "lln", 6.0),
                result("train:bf16:cuda:b1h1n20d128:lln", "lln", 8.0),
            ],
        }
        points = [
            {"attention": name, "tokens": tokens, "step_ms": tokens * times}
            for name, times in (("softmax", 3.0), ("lln+diag", 2.0))
            for tokens in (512, 8192, 131072)
        ]
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "bench/results").mkdir(parents=True)
            for name, results in records.items():
                (root / f"bench/results/h200-{name}.json").write_text(
                    json.dumps({**gpu, "results": results})
                )
            (root / "bench/results/h200-steps-roberta-base.json").write_text(
                json.dumps({**gpu, "points": points})
            )
            (root / "README.md").write_text("Before.\n\n| NVIDIA H200 | old |\n\nBehind.\n")
            text = page.readme(root)
        self.assertTrue(text.startswith("Before.\n\n| NVIDIA H200, bf16 |"), text)
        self.assertTrue(text.endswith(" |\n\nBehind.\n"), text)
        self.assertIn("| 4.00 times as fast at 1024 tokens, 40.0 at 16384 | `c` |", text)
        self.assertIn("| 6.00 times as fast at 1024 tokens, 60.0 at 16384 | `c` |", text)
        self.assertIn("| forward 1.25 to 1.25, with backward 1.50 to 2.00 | `c` |", text)
        self.assertIn("9 to 20 tokens", text)
        self.assertIn(
            "| 1.50 times as fast at 512 tokens, 1.50 at 8192, 1.50 at 131072 | `c` |", text
        )


if __name__ == "__main__":
    unittest.main()
