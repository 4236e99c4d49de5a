"""examples/sequence_pieces.cc on three processes.

    sequence_example_test.py PROGRAM

SPDX-License-Identifier: Apache-2.0
"""

import subprocess
import sys

import small_training  # first: it makes the next ones findable
from rank_jobs import PROGRAM, free_port

RANKS = 3


def main():
    assert small_training
    port = str(free_port())
    ranks = [subprocess.Popen([PROGRAM, str(rank), str(RANKS), port], stdout=subprocess.PIPE,
                              text=True) for rank in range(RANKS)]
    texts = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * RANKS, texts
    for rank, text in enumerate(texts):
        assert f"rank {rank} has tokens {512 * rank} to {512 * (rank + 1)} of 1536" in text, text
        assert "those of the whole" in text, text


if __name__ == "__main__":
    sys.exit(main())
