"""Times of attention over pieces of a sequence on processes of this machine, exchanged by Gloo, and
of the bare operations that it exchanges with, as JSON.

    python3 bench/scale/measure.py --output bench/results/scale/cpu-gloo.json

Needs torch and the package lln_attention. Every process has one thread. A time is that of the
slowest process. Of the bare operations many follow each other and the mean of a run counts; of
attention each call, from a barrier on.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "peers"))
from problem_text import percentile

HEADS, DIM = 12, 64  # f32, as the problems of bench/sets/cpu.txt
MESSAGE_BYTES = [4**power for power in range(3, 13)]  # 64 B to 16 MiB
RUNS = 9  # of bare operations, each long enough to be timed
FORMS = ("bidirectional", "causal")


def operations(count):
    """Name -> call on `count` numbers, for what attention exchanges with."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers, received = torch.zeros(count), torch.empty(count)

    def shift():
        sending = dist.isend(numbers, (rank + 1) % ranks)
        dist.recv(received, (rank - 1) % ranks)
        sending.wait()

    return {"all_reduce": lambda: dist.all_reduce(numbers), "shift": shift}


def seconds_of(call, times=1):
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def of_slowest(samples):
    """Every sample becomes that of the slowest process."""
    numbers = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return sorted((1e3 * numbers).tolist())


def repetitions(call, seconds, least):
    """How often a call fits into so many seconds, the same number on all processes."""
    call()
    return max(least, min(10000, int(seconds / (of_slowest([seconds_of(call)])[0] / 1e3))))


def summary(samples):
    return {
        "median_ms": statistics.median(samples),
        "p10_ms": percentile(samples, 10),
        "p90_ms": percentile(samples, 90),
    }


def measure_operations(seconds):
    for size in MESSAGE_BYTES:
        for name, call in operations(size // 4).items():
            times = repetitions(call, seconds / RUNS, 3)
            samples = of_slowest([seconds_of(call, times) for _ in range(RUNS)])
            yield {"operation": name, "bytes": size, **summary(samples)}


def measure_attention(form, tokens, seconds):
    """Forward and backward of this process's piece, as the steps of a training make them."""
    from lln_attention import distributed

    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = tokens * (rank + 1) // ranks - tokens * rank // ranks
    generator = torch.Generator().manual_seed(1 + rank)
    q, k, v = (
        torch.randn(1, HEADS, own, DIM, generator=generator).requires_grad_() for _ in range(3)
    )
    g = torch.randn(1, HEADS, own, DIM, generator=generator)
    pieces = distributed.Pieces(dist.group.WORLD, own)
    outputs = []

    def forward():
        outputs[:] = [
            distributed.attention(q, k, v, pieces, causal=form == "causal", alpha=1.5, beta=1.5)
        ]

    def backward():
        torch.autograd.grad(outputs[0], (q, k, v), g)

    def train():
        forward()
        backward()

    times = repetitions(train, seconds, 5)
    pairs = [(seconds_of(forward), seconds_of(backward)) for _ in range(times)]
    passes = {
        "forward": of_slowest([pair[0] for pair in pairs]),
        "backward": of_slowest([pair[1] for pair in pairs]),
        "train": of_slowest([sum(pair) for pair in pairs]),
    }
    for name, samples in passes.items():
        yield {"form": form, "tokens": tokens, "pass": name, **summary(samples)}


def run_process(rank, ranks, arguments, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    found = {"operations": [], "attention": []}
    if ranks > 1 and "operations" in arguments.only:
        found["operations"] = list(measure_operations(arguments.seconds))
    if "attention" in arguments.only:
        for form in FORMS:
            for tokens in arguments.tokens:
                found["attention"] += measure_attention(form, tokens, arguments.seconds)
    if rank == 0:
        text = json.dumps({key: [{"ranks": ranks, **r} for r in v] for key, v in found.items()})
        pathlib.Path(folder, "found.json").write_text(text, encoding="utf-8")
    dist.destroy_process_group()


def measure(ranks, arguments):
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_process, (ranks, arguments, folder), ranks)
        return json.loads(pathlib.Path(folder, "found.json").read_text(encoding="utf-8"))


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return "unknown CPU"


def numbers(text):
    return [int(word) for word in text.split(",")]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=numbers, default=[1, 2, 4], help="1,2,4")
    parser.add_argument("--tokens", type=numbers, default=[4096, 16384, 65536, 262144])
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measurement")
    parser.add_argument(
        "--only", nargs="+", choices=("operations", "attention"),
        default=["operations", "attention"],
    )  # fmt: skip
    parser.add_argument("--output", type=pathlib.Path, help="default: standard output")
    parser.add_argument("--note", help="a sentence about the run, for the page")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    report = {
        "command": f"python3 bench/scale/measure.py --seconds {arguments.seconds:g}",
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "torch": torch.__version__},
        "layer": {"heads": HEADS, "dim": DIM, "dtype": "f32"},
        "operations": [],
        "attention": [],
    }
    for ranks in arguments.processes:
        for key, found in measure(ranks, arguments).items():
            report[key] += found
            print(f"{ranks} processes: {len(found)} times of {key}", file=sys.stderr, flush=True)
    if arguments.note:
        report["note"] = arguments.note
    text = json.dumps(report, indent=1) + "\n"
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
