"""Peers on the CPU: softmax attention and plain LLN in torch beside `lln bench`, problem by problem
in one run, with the JSON of `lln bench` as output and the name of the peer in every result.

    pip install torch
    python3 bench/peers/cpu.py --set bench/sets/cpu.txt --output bench/results/cpu.json

Peers that do not know a problem are left out of it: SDPA runs the softmax attention of the same
shapes, where that takes seconds and not minutes; the LLN peers take bidirectional LLN with exp
features. Neither takes masks or packing.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

try:
    import torch
except ImportError:
    sys.exit("bench/peers/cpu.py needs torch: pip install torch (the CPU build is enough)")

from plain_attention import call_of, lln_features, lln_identity, softmax_attention
from problem_text import percentile, problem_pattern, read_problems, sizes_of, softmax_flops

PROBLEM = problem_pattern("cpu", "lln|softmax")
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
LONG_CALL = 2.0  # seconds: a call that takes longer is measured once, without a warm-up
SETTLE = 0.5  # seconds: torch's threads spin for a while after the last peer
MOST_FLOPS = 1e12  # of softmax attention: more than ten seconds on a small machine


def peers_of(problem):
    """Name -> function, for what the peers know of this problem and can do in reasonable time."""
    peers = {}
    if softmax_flops(sizes_of(problem), problem["op"] != "forward") <= MOST_FLOPS:
        peers["torch-sdpa"] = softmax_attention
    if problem["kind"] == "lln" and not problem["causal"]:
        peers.update({"torch-lln": lln_identity, "torch-lln-features": lln_features})
    return peers


def make_call(function, problem):
    dtype = DTYPES[problem["dtype"]]
    generator = torch.Generator().manual_seed(1)

    def gaussian(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return call_of(function, problem, gaussian)


def sample(call, seconds):
    """Milliseconds of calls after a warm-up, in order of size."""

    def timed():
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    first = timed()
    if first > LONG_CALL:
        return [1e3 * first]
    times, start = [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        times.append(timed())
    return sorted(1e3 * t for t in times)


def measure_ours(program, problems, arguments):
    command = [
        program,
        "bench",
        *problems,
        "--json",
        "--threads",
        str(arguments.threads),
        "--seconds",
        str(arguments.seconds),
    ]
    time.sleep(SETTLE)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout)


def measure_peer(name, function, problem, ours, arguments):
    times = sample(make_call(function, problem), arguments.seconds)
    median = statistics.median(times)
    return {
        **ours,
        "peer": name,
        "kernel": f"torch {torch.__version__}",
        "threads": torch.get_num_threads(),
        "median_ms": median,
        "p10_ms": percentile(times, 10),
        "p90_ms": percentile(times, 90),
        "ratio": median / ours["floor_ms"],
        "workspace_bytes": None,
    }


def command_text(arguments):
    words = ["python3 bench/peers/cpu.py", *arguments.problem]
    words += ["--set", str(arguments.set)] if arguments.set else []
    return " ".join(words + ["--seconds", f"{arguments.seconds:g}"])


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problem", nargs="*", help="problem texts, as lln bench takes them")
    parser.add_argument("--set", type=pathlib.Path, help="file with one problem per line")
    parser.add_argument(
        "--program", default="build/release/bin/lln", help="the lln program (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=0, help="0: one per hardware thread")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each problem and peer")
    parser.add_argument(
        "--output", type=pathlib.Path, help="where the JSON goes (default: standard output)"
    )
    parser.add_argument("--note", help="a sentence about the run, for the page")
    arguments = parser.parse_args()
    if not pathlib.Path(arguments.program).is_file():
        parser.error(f"no program at {arguments.program}: make build, or --program PATH")
    return arguments


def main():
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    problems, machines, results = read_problems(arguments), [], []
    for text in problems:
        report = measure_ours(arguments.program, [text], arguments)
        machines.append(report["machine"])
        ours = {"peer": "lln", **report["results"][0]}
        results.append(ours)
        match = PROBLEM.fullmatch(ours["problem"])
        for name, function in (peers_of(match.groupdict()) if match else {}).items():
            results.append(measure_peer(name, function, match.groupdict(), ours, arguments))
            print(
                f"{ours['problem']}  lln {ours['median_ms']:.3f} ms  "
                f"{name} {results[-1]['median_ms']:.3f} ms",
                file=sys.stderr,
                flush=True,
            )
    machine = {**machines[0], "torch": torch.__version__}
    for key in ("fma_peak_gflops", "bf16_peak_gflops", "copy_gbs"):
        if values := [m[key] for m in machines if key in m]:
            machine[key] = statistics.median(values)
    report = {"command": command_text(arguments), "machine": machine, "results": results}
    if arguments.note:
        report["note"] = arguments.note
    text = json.dumps(report, indent=1) + "\n"
    if arguments.output:
        part = arguments.output.with_name(arguments.output.name + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(arguments.output)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
