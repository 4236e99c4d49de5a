"""examples/sequence_pieces.cc on three processes.

    sequence_example_test.py PROGRAM

SPDX-License-Identifier: Apache-2.0
"""

import subprocess
import unittest

import small_training  # first: it makes the next ones findable
from rank_jobs import PROGRAM, free_port

RANKS = 3


class Example(unittest.TestCase):
    def test_three_ranks(self):
        port = str(free_port())
        ranks = [subprocess.Popen([PROGRAM, str(rank), str(RANKS), port], stdout=subprocess.PIPE,
                                  text=True) for rank in range(RANKS)]
        try:
            texts = [process.communicate(timeout=120)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        self.assertEqual([process.returncode for process in ranks], [0] * RANKS, texts)
        for rank, text in enumerate(texts):
            begin, end = 512 * rank, 512 * (rank + 1)
            self.assertIn(f"rank {rank} has tokens {begin} to {end} of 1536", text)
            self.assertIn("those of the whole", text)

    def test_wrong_places(self):
        for words in (("0", "0", "29500"), ("3", "2", "29500")):
            done = subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 1)
            self.assertIn("expected one from 0 to the number of ranks - 1", done.stderr)


if __name__ == "__main__":
    unittest.main()
