"""Attention in pieces on several processes. Processes start once; groups of one to four of them run
all cases until one fails, and each test looks at what became of one case in one group.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import datetime
import itertools
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distributed_cases
import distributed_rules
import processes
from lln_attention.distributed import Pieces, attention

ROOT = Path(__file__).parents[2]
PROCESSES = 4
CASES = {
    f.__name__: f
    for f in (
        distributed_cases.lln,
        distributed_cases.weights,
        distributed_cases.blocks_alone,
        distributed_cases.features,
        distributed_cases.masks,
        distributed_cases.masks_with_blocks,
        distributed_cases.lengths,
        distributed_cases.packed,
        distributed_cases.packed_with_blocks,
        distributed_cases.large_keys,
        distributed_cases.keys_far_away,
        distributed_cases.matching,
        distributed_cases.short_types,
        distributed_rules.bytes_moved,
        distributed_rules.same_bits,
        distributed_rules.cut_blocks,
        distributed_rules.wrong_pieces,
        distributed_rules.wrong_calls,
        distributed_rules.derivatives_that_are_not_there,
        distributed_rules.ways_of_training,
        distributed_rules.modules,
        distributed_rules.moments_of_refused_calls,
        distributed_rules.meshes,
    )
}


def _run_cases(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=30),
    )  # fmt: skip
    groups = [dist.new_group(list(range(size))) for size in range(1, PROCESSES + 1)]
    outcomes = {}
    try:
        for (name, case), (size, group) in itertools.product(CASES.items(), enumerate(groups, 1)):
            if rank < size:
                outcomes[name, size] = "it did not end"
                case(group)
                outcomes[name, size] = ""
        dist.barrier()
    except Exception:
        # Others that wait for this process see it end.
        outcomes[name, size] = traceback.format_exc()
    torch.save(outcomes, f"{folder}/outcomes{rank}.pt")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, int], str]]:
    """Of each process: what went wrong with a case in a group of a size, if anything did."""
    folder = tmp_path_factory.mktemp("processes")
    processes.run(_run_cases, folder, PROCESSES)
    return [torch.load(folder / f"outcomes{rank}.pt") for rank in range(PROCESSES)]


@pytest.mark.parametrize("size", range(1, PROCESSES + 1))
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, size: int, outcomes: list[dict[tuple[str, int], str]]) -> None:
    for rank in range(size):
        outcome = outcomes[rank].get((case, size), "not run, as another case failed")
        assert outcome == "", f"rank {rank}: {outcome}"


def test_compiled_code_stops_at_it() -> None:
    """torch.compile takes what is around the attention."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        pieces = Pieces(None, 20)
        x = torch.randn(1, 2, 20, 8, requires_grad=True)

        def call(x: torch.Tensor) -> torch.Tensor:
            return attention(2 * x, x, x, pieces) + 1

        expected = torch.autograd.grad(call(x).sum(), x)
        found = torch.autograd.grad(torch.compile(call, backend="eager")(x).sum(), x)
        torch.testing.assert_close(found, expected)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 2000), (3, 100)])
def test_example(ranks: int, tokens: int) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(ranks),
            str(ROOT / "examples/python/sequence_parallel.py"), "--tokens", str(tokens),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Lines of several processes may lack a newline between them.
    found = re.search(r"rows differ by ([\d.e+-]+), gradients by ([\d.e+-]+)", done.stdout)
    assert found is not None and all(float(x) < 1e-5 for x in found.groups()), done.stdout
