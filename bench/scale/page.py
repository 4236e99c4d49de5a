"""Writes the figures of docs/scale_model.md and what stands between its marks, from the model and
the recorded results.

    page.py            writes them
    page.py --check    fails when one is not what model and results give

SPDX-License-Identifier: Apache-2.0
"""

import pathlib
import re
import sys
import textwrap

import cluster
import figures
import plot
from cluster import ETHERNET, INFINIBAND, LAYER, MILLION, NVLINK
from compute import RECORDED, recorded
from measured import FORMS, Machine
from methods import METHODS, PASSES

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGE = "docs/scale_model.md"
REGENERATE = "python3 bench/scale/page.py"
BLOCK = re.compile(r"(<!-- written: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rounded(value, text):
    """Two significant digits and a unit."""
    return text(float(f"{value:.2g}"))


def time(seconds):
    return rounded(seconds, plot.time_text).replace("µ", "u")


def size(count):
    return rounded(count, plot.bytes_text)


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def formulas(root):
    head = ["", "bytes, forward", "bytes, backward", "rounds, forward", "rounds, backward"]
    rows = [
        [m.name, *(f"`{m.sent[p]}`" for p in PASSES), *(f"`{m.rounds[p]}`" for p in PASSES)]
        for m in METHODS.values()
    ]
    return table(head, rows)


def exchange(root):
    places = [(8, NVLINK), (16, INFINIBAND), (128, INFINIBAND), (1024, INFINIBAND),
              (1024, ETHERNET)]  # fmt: skip
    head = ["", *(f"{ranks}, {link.name}" for ranks, link in places), "bytes at 1024"]
    rows = []
    for name, method in METHODS.items():
        lengths = (MILLION, 100 * MILLION) if name in ("ring", "ulysses") else (MILLION,)
        for tokens in lengths:
            many = f", {tokens // MILLION}M tokens" if len(lengths) > 1 else ""
            cells = [
                time(method.seconds(LAYER, tokens, ranks, link))
                if method.takes(LAYER, ranks) else "-"
                for ranks, link in places
            ]  # fmt: skip
            sent = method.leanest(LAYER, tokens, 1024).sent
            rows.append(
                [method.name + many, *cells, size(sent) if method.takes(LAYER, 1024) else "-"]
            )
    return table(head, rows)


def layers(root):
    shown = {"lln": "LLN", "lln_causal": "LLN, causal"}
    head = ["tokens", "GPUs"]
    for text in shown.values():
        head += [f"{text}: arithmetic", "exchange", "both"]
    rows = []
    for tokens in (MILLION, 100 * MILLION):
        for ranks in (16, 128, 1024):
            row = [f"{tokens // MILLION}M", str(ranks)]
            for name in shown:
                alone = cluster.arithmetic_seconds(root, name, tokens, ranks)
                exchanged = cluster.exchange_seconds(name, tokens, ranks)
                row += [time(sum(part.values())) for part in (alone, exchanged)]
                row.append(time(cluster.layer_seconds(root, name, tokens, ranks)))
            rows.append([*row, time(cluster.layer_seconds(root, "ring", tokens, ranks))])
    return table([*head, "softmax in a ring: both"], rows)


def even(root):
    rows = [
        [str(ranks)] + [
            f"{float(f'{cluster.even_tokens(root, name, ranks):.2g}'):.0f}"
            for name in ("lln", "lln_causal", "ring")
        ]
        for ranks in (16, 128, 1024)
    ]  # fmt: skip
    return table(["GPUs", "LLN", "LLN, causal", "softmax in a ring"], rows)


def best_gpus(root, name, tokens):
    return min(cluster.GPUS, key=lambda ranks: cluster.layer_seconds(root, name, tokens, ranks))


def findings(root):
    most = cluster.GPUS[-1]

    def layer(name, tokens, ranks):
        return cluster.layer_seconds(root, name, tokens, ranks)

    def exchanged(network):
        return sum(cluster.exchange_seconds("lln", 100 * MILLION, most, network).values())

    whole = layer("lln", 100 * MILLION, most)
    alone = sum(cluster.arithmetic_seconds(root, "lln", 100 * MILLION, most).values())
    best, ring_best = (best_gpus(root, name, MILLION) for name in ("lln", "ring"))
    halves = " and ".join(
        f"{time(layer('lln', 100 * MILLION, ranks))} on {ranks} GPUs instead of "
        f"{time(cluster.undivided_seconds(root, 100 * MILLION, ranks))}"
        for ranks in (128, most)
    )
    points = [
        f"**100M tokens on {most} GPUs** take LLN {time(whole)} a layer, of which {time(alone)} "
        f"are arithmetic, and softmax in a ring {time(layer('ring', 100 * MILLION, most))}, with "
        f"the exchange hidden.",
        f"**1M tokens** are too few for {most} GPUs: LLN is fastest on {best}, with "
        f"{time(layer('lln', MILLION, best))}; on more, messages take longer than the arithmetic "
        f"that is saved. Softmax in a ring is fastest on {ring_best}, with "
        f"{time(layer('ring', MILLION, ring_best))}.",
        f"**Halves of heads** hide the exchange while there is enough arithmetic, and double its "
        f"latency where there is not: 100M tokens take {halves}.",
        "LLN needs more tokens a GPU than a ring to keep it busy, not because it sends much, but "
        "because it computes so little.",
        f"A slower network costs latency, hardly bytes: by 100 Gb/s Ethernet, a quarter as fast, "
        f"the exchange of {most} GPUs takes {exchanged(ETHERNET) / exchanged(INFINIBAND):.1f} "
        f"times as long as by InfiniBand; the latency that is assumed is "
        f"{ETHERNET.latency / INFINIBAND.latency:.1f} times as long.",
    ]
    return "".join(
        textwrap.fill("- " + point, 100, subsequent_indent="  ") + "\n" for point in points
    )


def arithmetic(root):
    rows = []
    for name, (file, peer, problem) in RECORDED.items():
        found = recorded(root, name)
        ratio = f"{found.ratio:.2f}" if peer == "lln" else "-"
        median = f"{1e3 * found.seconds:.3g} ms"
        rows.append([f"`{problem}`", peer, median, ratio, f"`bench/results/{file}`"])
    return table(["problem", "by", "median", "over the floor", "recorded in"], rows)


def machine(root):
    report = Machine(root).report
    about, sizes = report["machine"], report["layer"]
    text = (
        f"{about['cpu']}, {about['cores']} cores; torch {about['torch']}; {sizes['heads']} heads "
        f"of {sizes['dim']} channels in {sizes['dtype']}, one thread a process."
    )
    note = f"\n{report['note']}\n" if "note" in report else ""
    return f"{text}\n\n    {report['command']}\n{note}"


def links(root):
    fitted = Machine(root)
    rows = [
        [str(ranks), time(link.latency), f"{link.bandwidth / 1e9:.2g} GB/s"]
        for ranks, link in ((ranks, fitted.link(ranks)) for ranks in fitted.ranks())
    ]
    return table(["processes", "latency", "bandwidth"], rows)


def attention(root):
    measured = Machine(root)
    head = ["form", "tokens", "1 process"]
    head += [f"{n}: {what}" for n in measured.ranks() for what in ("measured", "model")]
    rows, ratios = [], []
    for form in FORMS:
        columns = [dict(measured.attention(form, 1))]
        for ranks in measured.ranks():
            columns += [dict(measured.attention(form, ranks)), dict(measured.model(form, ranks))]
        for tokens in columns[0]:
            rows.append([form, str(tokens), *(time(column[tokens]) for column in columns)])
            pairs = zip(columns[1::2], columns[2::2])
            ratios += [found[tokens] / modelled[tokens] for found, modelled in pairs]
    spread = f"Measured over model: {min(ratios):.2f} to {max(ratios):.2f}."
    return f"{table(head, rows)}\n{spread}\n"


PARTS = {
    "formulas": formulas,
    "exchange": exchange,
    "layers": layers,
    "even": even,
    "findings": findings,
    "arithmetic": arithmetic,
    "machine": machine,
    "links": links,
    "attention": attention,
}


def with_parts(root, text):
    return BLOCK.sub(lambda m: f"{m[1]}\n{PARTS[m[2]](root)}\n{m[3]}", text)


def files(root):
    """Path from the root -> what should be in it."""
    text = (root / PAGE).read_text(encoding="utf-8")
    return {
        PAGE: with_parts(root, text),
        "docs/pictures/scale_time.svg": plot.draw(figures.time_figure(root)),
        "docs/pictures/scale_bytes.svg": plot.draw(figures.bytes_figure()),
        "docs/pictures/scale_machine.svg": plot.draw(figures.machine_figure(root)),
    }


def main(arguments):
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    for path, text in files(ROOT).items():
        file = ROOT / path
        if not arguments:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what model and results give: {REGENERATE}")


if __name__ == "__main__":
    main(sys.argv[1:])
