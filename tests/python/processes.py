"""Several processes of one test."""

# SPDX-License-Identifier: Apache-2.0
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch.multiprocessing as mp


def run(work: Callable[[int, str], None], folder: Path, processes: int) -> None:
    """Calls work(rank, folder) in so many processes; an exception in one ends all and is raised."""
    mp.start_processes(_run_one, (work, str(folder)), nprocs=processes, start_method="spawn")


def _run_one(rank: int, work: Callable[[int, str], None], folder: str) -> None:
    work(rank, folder)
    # Without Python's finalisation: a thread of Gloo that drops a tensor in the midst of it waits
    # for an interpreter that is gone, and the process aborts.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
