"""Peers on a CUDA device: softmax attention and plain LLN in torch beside `lln bench`, problem by
problem in one run, with the JSON of `lln bench` as output and the name of the peer in every result.

    pip install torch
    python3 bench/peers/gpu.py --set bench/sets/h200-lln.txt --output bench/results/h200-lln.json
    python3 bench/peers/gpu.py --graph --set bench/sets/h200-short.txt \\
        --output bench/results/h200-short.json

All are timed alike: by events of the device, behind a kernel that waits so that the host is ahead,
on data that is in no cache. Peers that do not know a problem are left out of it: SDPA runs the
softmax attention of the same shapes; the LLN peers take bidirectional LLN with exp features. Where
the package lln_attention is installed, it is one more peer: what the same kernels take through
Python. None takes masks, packing or decoding. With --graph forward problems alone have peers.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import functools
import itertools
import json
import pathlib
import statistics
import subprocess
import sys

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    sys.exit("bench/peers/gpu.py needs torch with CUDA: pip install torch")

try:
    import lln_attention
except ImportError:
    lln_attention = None

from plain_attention import call_of, lln_features, lln_identity, softmax_attention
from problem_text import percentile, problem_pattern, read_problems, sizes_of

PROBLEM = problem_pattern("cuda(?::(?P<index>\\d+))?", r"lln|lln\+diag\d+|diag\d+|softmax")
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
CACHE_FACTOR = 4  # all sets of data together, over the last cache
MOST_SETS = 256
LEAST_SAMPLES = 5
BATCH_SECONDS = 0.02
GRAPH_CALLS = 64
WAIT_CYCLES = 4_000_000  # about 2 ms: the host puts a batch of calls behind it


def with_backend(backend):
    def attention(q, k, v, alpha, beta, causal):
        with sdpa_kernel(backend):
            return softmax_attention(q, k, v, alpha, beta, causal)

    return attention


@functools.cache
def compiled(function):
    return torch.compile(function, dynamic=False)


def through_python(kind):
    """The Python package of this library, for LLN or LLN+Diag."""
    block = int(kind.removeprefix("lln").removeprefix("+diag") or 0)

    def attention(q, k, v, alpha, beta, causal):
        return lln_attention.attention(
            q, k, v, causal=causal, diag_block=block, alpha=alpha, beta=beta
        )

    return attention


def peers_of(problem):
    """Name -> function, for what the peers know of this problem."""
    peers = {
        "torch-cudnn": with_backend(SDPBackend.CUDNN_ATTENTION),
        "torch-flash": with_backend(SDPBackend.FLASH_ATTENTION),
    }
    if problem["dtype"] == "f32":  # neither takes it
        peers = {"torch-sdpa": softmax_attention}
    if problem["kind"] == "lln" and not problem["causal"]:
        peers.update(
            {
                "torch-lln": lln_identity,
                "torch-lln-compiled": compiled(lln_identity),
                "torch-lln-features": lln_features,
                "torch-lln-features-compiled": compiled(lln_features),
            }
        )
    if lln_attention and problem["kind"].startswith("lln"):
        peers["lln_attention"] = through_python(problem["kind"])
    return peers


def make_call(function, problem, device):
    """One call on data of its own."""

    def gaussian(*shape):
        return torch.randn(*shape, device=device, dtype=DTYPES[problem["dtype"]])

    return call_of(function, problem, gaussian)


def data_bytes(problem):
    size = sizes_of(problem)
    rows = size["h"] * size["n"] + size["k"] * size["m"]
    element = torch.finfo(DTYPES[problem["dtype"]]).bits // 8
    return max(size["b"] * rows * (size["d"] + size["v"]) * element, 1)


def make_sets(function, problem, device):
    """Enough calls with data of their own that the next one finds nothing of it in a cache."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    count = min(-(-CACHE_FACTOR * cache // data_bytes(problem)), MOST_SETS)
    return [make_call(function, problem, device) for _ in range(max(count, 1))]


def graph_of(calls):
    """All calls in turn as one graph: (what replays it, how many calls it holds)."""
    count = max(GRAPH_CALLS, len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in itertools.islice(itertools.cycle(calls), count):
            call()
    return graph.replay, count


def timed(works, count, calls):
    """Seconds of one call for each of so many samples, by events of the device."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda._sleep(WAIT_CYCLES)
    events[0].record()
    for event in events[1:]:
        next(works)()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 / calls for a, b in itertools.pairwise(events)]


def sample(function, problem, device, arguments):
    """Milliseconds of calls, in order of size."""
    sets = make_sets(function, problem, device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for call in [sets[0]] * 3 + sets:  # compiles, tunes, fills the allocator
            call()
        torch.cuda.synchronize()
        works, calls = itertools.cycle(sets), 1
    if arguments.graph:
        replay, calls = graph_of(sets)
        works = itertools.repeat(replay)
    with torch.cuda.stream(stream):
        one = statistics.median(timed(works, LEAST_SAMPLES, calls)) * calls
        batch = max(LEAST_SAMPLES, min(200, int(BATCH_SECONDS / one)))
        times = []
        while sum(times) * calls < arguments.seconds:
            times += timed(works, batch, calls)
    return sorted(1e3 * t for t in times)


def measure_ours(arguments, problem):
    command = [arguments.program, "bench", problem, "--json", "--seconds", str(arguments.seconds)]
    command += ["--graph"] if arguments.graph else []
    torch.cuda.empty_cache()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout)


def measure_peer(name, function, problem, ours, arguments):
    """None where the peer refuses the problem."""
    device = torch.device("cuda", int(problem["index"] or 0))
    torch.compiler.reset()  # after a few shapes it would go on without compiling
    try:
        times = sample(function, problem, device, arguments)
    except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
        print(f"{ours['problem']}  {name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    finally:
        torch.cuda.empty_cache()
    median = statistics.median(times)
    return {
        **ours,
        "peer": name,
        "kernel": f"torch {torch.__version__}",
        "median_ms": median,
        "p10_ms": percentile(times, 10),
        "p90_ms": percentile(times, 90),
        "ratio": median / ours["floor_ms"],
        "workspace_bytes": None,
    }


def command_text(arguments):
    words = ["python3 bench/peers/gpu.py", *arguments.problem]
    words += ["--set", str(arguments.set)] if arguments.set else []
    words += ["--graph"] if arguments.graph else []
    words += ["--peer " + name for name in arguments.peer or []]
    return " ".join(words + ["--seconds", f"{arguments.seconds:g}"])


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problem", nargs="*", help="problem texts, as lln bench takes them")
    parser.add_argument("--set", type=pathlib.Path, help="file with one problem per line")
    parser.add_argument(
        "--program", default="build/release/bin/lln", help="the lln program (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each problem and peer")
    parser.add_argument("--graph", action="store_true", help="time calls inside a CUDA graph")
    parser.add_argument("--peer", action="append", help="only this peer; may be repeated")
    parser.add_argument(
        "--output", type=pathlib.Path, help="where the JSON goes (default: standard output)"
    )
    parser.add_argument("--note", help="a sentence about the run, for the page")
    arguments = parser.parse_args()
    if not pathlib.Path(arguments.program).is_file():
        parser.error(f"no program at {arguments.program}: make build, or --program PATH")
    return arguments


def write(arguments, machines, results):
    machine = {**machines[0], "torch": torch.__version__}
    machine["copy_gbs"] = statistics.median(m["copy_gbs"] for m in machines)
    report = {"command": command_text(arguments), "machine": machine, "results": results}
    if arguments.note:
        report["note"] = arguments.note
    text = json.dumps(report, indent=1) + "\n"
    if arguments.output:
        part = arguments.output.with_name(arguments.output.name + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(arguments.output)
    return text


def main():
    arguments = parse_arguments()
    machines, results = [], []
    for text in read_problems(arguments):
        report = measure_ours(arguments, text)
        machines.append(report["machine"])
        ours = {"peer": "lln", **report["results"][0]}
        results.append(ours)
        print(f"{ours['problem']}  lln {ours['median_ms']:.4f} ms", file=sys.stderr, flush=True)
        match = PROBLEM.fullmatch(ours["problem"])
        known = match and not (arguments.graph and match["op"] != "forward")
        for name, function in (peers_of(match.groupdict()) if known else {}).items():
            if arguments.peer and name not in arguments.peer:
                continue
            result = measure_peer(name, function, match.groupdict(), ours, arguments)
            if result is None:
                continue
            results.append(result)
            print(f"    {name} {result['median_ms']:.4f} ms", file=sys.stderr, flush=True)
        final = write(arguments, machines, results)  # after each, for a run that is cut short
    if not arguments.output:
        print(final, end="")


if __name__ == "__main__":
    main()
