"""Writes docs/benchmarks.md, and README.md's table of the GPU, from the recorded results in
bench/results.

    page.py            writes both
    page.py --check    fails when one is not what the results give
    page.py --table FILE    prints one file of results as a table

SPDX-License-Identifier: Apache-2.0
"""

import json
import pathlib
import re
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = "lln"
REGENERATE = "python3 bench/page.py"

INTRODUCTION = f"""# Benchmarks

Generated from the JSON files in `bench/results` by `{REGENERATE}`; a test fails when page and files
differ. Each table has the command that measured it above it, ours and the peers problem by problem
in one run of it.

- **floor** is max(bytes / copy bandwidth, FLOPs / multiply-add peak): bytes and FLOPs are the least
  that any implementation needs (`lln explain` prints them), an exponential counts nothing, and
  bandwidth and peak are measured on the same threads in the same run. The peak is that of f32, for
  problems in bf16 that of bf16 pairs where the CPU multiplies these. **ratio** is time over
  floor. The peak is measured in turn with the calls, because a machine that is slow for a second
  should slow both; the ratio is the median over all calls.
- On a GPU the floor is bytes / copy bandwidth of the device, measured in turn with the calls:
  arithmetic is no limit there. Calls are timed by events of the device on data that is in no cache;
  a table whose command has `--graph` holds times of calls inside a CUDA graph.
- Times are medians in ms, with the 10th and 90th percentile of ours behind them.
- A bandwidth is that of memory: problems that stay in the cache may be faster than the first term
  of the floor says.
- Tables of `lln cost` hold whole steps of training a model, not calls of an attention.
- `lln bench --compare FILE` holds a machine against its own recorded results and fails where a
  ratio is worse by more than 1.25 times (`--tolerance`).

To measure this machine: `make bench`, and `tools/gpu_check` on one with a GPU.
"""

PEERS = {
    OURS: "this library",
    "torch-sdpa": "`scaled_dot_product_attention` of torch: softmax attention, whatever the kind "
    "of the problem",
    "torch-lln": "LLN in plain torch by the identity that this library uses: softmax over keys, "
    "softmax over channels",
    "torch-lln-features": "LLN in plain torch as textbooks write it: exp features, products, a "
    "division",
    "torch-cudnn": "softmax attention by cuDNN, from torch, whatever the kind of the problem",
    "torch-flash": "softmax attention by torch's flash kernels, whatever the kind of the problem",
    "torch-lln-compiled": "torch-lln by `torch.compile`",
    "torch-lln-features-compiled": "torch-lln-features by `torch.compile`",
    "lln_attention": "this library through its Python package",
}


def number(value):
    """Three significant digits without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    digits = 2 if value >= 1 else 3 if value >= 0.1 else 4
    return f"{value:.{digits}f}" if value < 10 else f"{value:.1f}"


def by_problem(results):
    """Problem -> name of the peer -> result, in the order of the file."""
    table = {}
    for result in results:
        table.setdefault(result["problem"], {})[result.get("peer", OURS)] = result
    return table


def row(problem, entries, peers):
    ours = entries.get(OURS)
    cells = [f"`{problem}`"]
    if ours:
        spread = f"{number(ours['p10_ms'])} to {number(ours['p90_ms'])}"
        cells += [
            number(ours["floor_ms"]),
            number(ours["median_ms"]),
            spread,
            f"{ours['ratio']:.2f}",
        ]
    else:
        cells += ["-"] * 4
    for peer in peers:
        other = entries.get(peer)
        if other is None:
            cells.append("-")
        elif ours is None:
            cells.append(number(other["median_ms"]))
        else:
            cells.append(
                f"{number(other['median_ms'])} ({other['median_ms'] / ours['median_ms']:.1f}x)"
            )
    return "| " + " | ".join(cells) + " |"


def table(report):
    results = by_problem(report["results"])
    peers = [p for p in PEERS if p != OURS and any(p in entries for entries in results.values())]
    head = ["problem", "floor", "lln", "p10 to p90", "ratio", *peers]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return lines + [row(problem, entries, peers) for problem, entries in results.items()]


def per_token(report):
    """One head at growing length: the cost of a token, relative to the shortest."""
    rows = []
    for problem, entries in by_problem(report["results"]).items():
        match = re.fullmatch(r"forward:f32:cpu:b1h1n(\d+)d64:lln", problem)
        if match and OURS in entries:
            rows.append((int(match[1]), entries[OURS]["median_ms"] * 1e6 / int(match[1])))
    if len(rows) < 2:
        return []
    lines = [
        "",
        "Cost per token of one head, the same results:",
        "",
        "| tokens | ns per token | against the shortest |",
        "|---|---|---|",
    ]
    return lines + [f"| {tokens} | {number(ns)} | {ns / rows[0][1]:.2f} |" for tokens, ns in rows]


def first_calls(report):
    """What the first call of a problem takes, where that was measured."""
    firsts = [(r["first_ms"], r["problem"]) for r in report["results"] if "first_ms" in r]
    if not firsts:
        return []
    longest, problem = max(firsts)
    middle = statistics.median(ms for ms, _ in firsts)
    return [
        "",
        f"The first call of a problem, until it is done as the host sees it: {number(middle)} ms "
        f"(median of all), at most {number(longest)} ms, `{problem}`.",
    ]


def machine_text(machine):
    if "device" in machine:
        text = (
            f"{machine['device']}, {machine['multiprocessors']} multiprocessors, CUDA "
            f"{machine['cuda']}: {machine['copy_gbs']:.0f} GB/s copy inside the device"
        )
        return text + (f"; torch {machine['torch']}" if "torch" in machine else "")
    peaks = {"fma_peak_gflops": "multiply-add", "bf16_peak_gflops": "multiply-add of bf16"}
    text = f"{machine['cpu']}, {machine['target']}, {machine['threads']} threads: " + ", ".join(
        [f"{machine[key]:.0f} GFLOP/s {name}" for key, name in peaks.items() if key in machine]
        + [f"{machine['copy_gbs']:.1f} GB/s copy"]
    )
    return text + (f"; torch {machine['torch']}" if "torch" in machine else "")


def section(name, report):
    peers = {r.get("peer", OURS) for r in report["results"]}
    lines = [
        f"## {name}",
        "",
        machine_text(report["machine"]) + ".",
        "",
        f"    {report['command']}",
        "",
    ]
    lines += [report["note"], ""] if "note" in report else []
    lines += table(report)
    if peers - {OURS}:
        lines += ["", "Behind each peer its time over ours.", ""]
        lines += [f"- {peer}: {text}." for peer, text in PEERS.items() if peer in peers]
    return lines + first_calls(report) + per_token(report)


def steps_section(name, report):
    """Results of `lln cost`: one row for each length, attentions beside each other."""
    attentions = list(dict.fromkeys(point["attention"] for point in report["points"]))
    first = attentions[0]
    by_tokens = {}
    for point in report["points"]:
        by_tokens.setdefault(point["tokens"], {})[point["attention"]] = point
    head = ["tokens", *attentions]
    lines = [
        f"## {name}",
        "",
        f"{report['machine']}; torch {report['torch']}.",
        "",
        f"    {report['command'].replace(' --json', '')}",
        "",
        "A step of training, forward, backward and update: ms, peak memory in GB, and behind them "
        f"how many times faster than {first}; * is the time of one step, others are medians.",
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
    ]
    for tokens, points in by_tokens.items():
        cells = [str(tokens)]
        for attention in attentions:
            point = points.get(attention, {"failure": "-"})
            if "failure" in point:
                cells.append(point["failure"].replace("|", "/"))
                continue
            once = "*" if point["steps"] == 1 else ""
            text = f"{number(point['step_ms'])}{once}, {point['memory_bytes'] / 1e9:.3f}"
            if attention != first and "step_ms" in points.get(first, {}):
                text += f" ({points[first]['step_ms'] / point['step_ms']:.2f}x)"
            cells.append(text)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def page(root):
    lines = [INTRODUCTION.rstrip()]
    paths = sorted((root / "bench/results").glob("*.json"))
    if not paths:
        lines += [
            "",
            "No results are recorded for this version; `bench/results/README.md` says how.",
        ]
    for path in paths:
        report = json.loads(path.read_text(encoding="utf-8"))
        write = steps_section if "points" in report else section
        lines += ["", *write(path.stem, report)]
    return "\n".join(lines) + "\n"


def headline(root):
    """The rows of README.md's table of the GPU."""
    peers, ours, steps = (
        json.loads((root / f"bench/results/h200-{name}.json").read_text(encoding="utf-8"))
        for name in ("peers", "lln", "steps-roberta-base")
    )
    lengths = {1024: "b64h16n1024d64", 16384: "b4h16n16384d64"}

    def times(op, tokens):
        found = by_problem(peers["results"])[f"{op}:bf16:cuda:{lengths[tokens]}:lln"]
        softmax = min(found[name]["median_ms"] for name in ("torch-cudnn", "torch-flash"))
        return number(softmax / found[OURS]["median_ms"])

    def ratios(op):
        found = [r["ratio"] for r in ours["results"] if r["problem"].startswith(f"{op}:")]
        return f"{min(found):.2f} to {max(found):.2f}"

    tokens = [int(re.search(r"n(\d+)d", r["problem"])[1]) for r in ours["results"]]

    milliseconds = {(p["attention"], p["tokens"]): p["step_ms"] for p in steps["points"]}

    def step(tokens):
        return number(milliseconds["softmax", tokens] / milliseconds["lln+diag", tokens])

    rows = [
        (f"{peers['machine']['device']}, bf16", "", "measured by"),
        ("---",) * 3,
        *(
            (
                f"{what} of LLN, heads of 64, against the faster softmax of torch (cuDNN, flash)",
                f"{times(op, 1024)} times as fast at 1024 tokens, {times(op, 16384)} at 16384",
                f"`{peers['command']}`",
            )
            for what, op in (("forward", "forward"), ("forward and backward", "train"))
        ),
        (
            "time of LLN over that of moving its tensors once, heads of 64 and 128, "
            f"{min(tokens)} to {max(tokens)} tokens",
            f"forward {ratios('forward')}, with backward {ratios('train')}",
            f"`{ours['command']}`",
        ),
        (
            "training step of RoBERTa-base, LLN+Diag against torch's softmax, one row of text",
            f"{step(512)} times as fast at 512 tokens, {step(8192)} at 8192, "
            f"{step(131072)} at 131072",
            f"`{steps['command']}`",
        ),
    ]
    return [re.sub(" +", " ", "| " + " | ".join(row) + " |") for row in rows]


def readme(root):
    """README.md with the table that the results give."""
    text = (root / "README.md").read_text(encoding="utf-8")
    begin = text.index("| NVIDIA H200")
    end = text.index("\n\n", begin)
    return text[:begin] + "\n".join(headline(root)) + text[end:]


def main(arguments):
    pages = {ROOT / "docs/benchmarks.md": page, ROOT / "README.md": readme}
    if arguments[:1] == ["--table"] and len(arguments) == 2:
        report = json.loads(pathlib.Path(arguments[1]).read_text(encoding="utf-8"))
        print("\n".join([machine_text(report["machine"]), "", *table(report)]))
    elif arguments == ["--check"]:
        for target, make in pages.items():
            if not target.exists() or target.read_text(encoding="utf-8") != make(ROOT):
                sys.exit(f"{target.name} is not what bench/results gives: {REGENERATE}")
    elif not arguments:
        for target, make in pages.items():
            target.write_text(make(ROOT), encoding="utf-8")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
