"""The figures of docs/scale_model.md.

SPDX-License-Identifier: Apache-2.0
"""

from cluster import GPUS, LAYER, MILLION, arithmetic_seconds, fits, layer_seconds
from measured import FORMS, Machine
from methods import METHODS
from plot import (
    Axis,
    Figure,
    Panel,
    Series,
    Style,
    binary_text,
    bytes_text,
    count_text,
    decades,
    time_text,
)

# Colours as in report/style.css.
BLUE, BLACK, ORANGE, PURPLE, GREEN, GREY = (
    "#0072b2",
    "#1b1f24",
    "#c27a00",
    "#b0478f",
    "#00835f",
    "#8a929b",
)
STYLES = {
    "lln": Style(BLUE, "diamond", width=2.25),
    "lln_causal": Style(GREEN, "square", "7 3"),
    "ring": Style(BLACK, "circle", width=2.5),
    "ulysses": Style(ORANGE, "triangle"),
    "delta_rule": Style(PURPLE, "cross", "2 3"),
    "alone": Style(GREY, "", "5 4", 1.5),
}
PROCESS_STYLES = {
    1: Style(BLACK, "circle"),
    2: Style(BLUE, "diamond", "7 3"),
    4: Style(ORANGE, "triangle", "2 3"),
}


def gpus_axis(low=1):
    ticks = [g for g in (1, 4, 16, 64, 256, 1024) if g >= low]
    return Axis("GPUs", low / 1.15, 1024 * 1.15, ticks, count_text)


def y_axis(label, series, text, step=1):
    values = [y for s in series for _, y in s.points]
    low, high = min(values) / 1.6, max(values) * 1.6
    return Axis(label, low, high, decades(low, high, step), text)


def time_panel(root, tokens):
    gpus = [g for g in GPUS if fits(tokens, g)]
    alone = [(g, sum(arithmetic_seconds(root, "lln", tokens, g).values())) for g in gpus]
    series = [Series("alone", alone, symbols=False)]
    for name in ("ring", "ulysses", "lln_causal", "lln"):
        points = [
            (g, layer_seconds(root, name, tokens, g)) for g in gpus if METHODS[name].takes(LAYER, g)
        ]
        series.append(Series(name, points))
    label = f"Time per layer, {tokens // MILLION}M tokens"
    return Panel(gpus_axis(gpus[0]), y_axis(label, series, time_text), series)


def time_figure(root):
    legend = {
        "ring": ("softmax, ring", STYLES["ring"]),
        "ulysses": ("softmax, Ulysses", STYLES["ulysses"]),
        "lln_causal": ("LLN, causal", STYLES["lln_causal"]),
        "lln": ("LLN", STYLES["lln"]),
        "alone": ("LLN without exchange", STYLES["alone"]),
    }
    return Figure(
        "Forward and backward of attention on many GPUs",
        legend,
        [time_panel(root, tokens) for tokens in (MILLION, 100 * MILLION)],
        "Model: H200, 16 heads of 64 in bf16, NVLink to 8 GPUs, InfiniBand NDR beyond. Lines begin "
        "where the tensors fit.",
    )


def bytes_figure():
    shown = ("ring", "ulysses", "delta_rule", "lln_causal", "lln")
    tokens = [count * 10**power for power in range(4, 8) for count in (1, 3)] + [100 * MILLION]
    ranks, length = LAYER.key_heads, MILLION

    def sent(name, n, p):
        return METHODS[name].leanest(LAYER, n, p).sent

    by_tokens = [Series(m, [(n, sent(m, n, ranks)) for n in tokens]) for m in shown]
    by_gpus = [
        Series(m, [(p, sent(m, length, p)) for p in GPUS[1:] if METHODS[m].takes(LAYER, p)])
        for m in shown
    ]
    tokens_axis = Axis("tokens", 8.5e3, 1.2e8, decades(1e4, 1e8), count_text)
    legend = {name: (METHODS[name].name, STYLES[name]) for name in shown}
    return Figure(
        "Bytes that a GPU sends for one layer, forward and backward",
        legend,
        [
            Panel(tokens_axis, y_axis(f"{ranks} GPUs", by_tokens, bytes_text), by_tokens),
            Panel(gpus_axis(2), y_axis("1M tokens", by_gpus, bytes_text), by_gpus),
        ],
        "Counted, not measured: 16 heads of 64, tensors in bf16, states in f32.",
    )


def operation_panel(machine, operation, label):
    series = []
    for ranks in machine.ranks():
        points = machine.points(operation, ranks)
        line = [(n, machine.operation_seconds(operation, ranks, n)) for n, _ in points]
        series += [Series(ranks, line, symbols=False), Series(ranks, points, line=False)]
    x = Axis("bytes", 45, 2.4e7, [64, 1024, 16384, 262144, 4194304], binary_text)
    return Panel(x, y_axis(label, series, time_text), series)


def attention_panel(machine, form):
    series = []
    for ranks in (1, *machine.ranks()):
        line = machine.model(form, ranks) if ranks > 1 else []
        points = machine.attention(form, ranks)
        series += [Series(ranks, line, symbols=False), Series(ranks, points, line=ranks == 1)]
    tokens = [n for n, _ in machine.attention(form, 1)]
    x = Axis("tokens", min(tokens) / 1.3, max(tokens) * 1.3, tokens, str)
    return Panel(x, y_axis(f"Attention, {form}: training", series, time_text), series)


def machine_figure(root):
    machine = Machine(root)
    panels = [
        operation_panel(machine, "all_reduce", "All-reduce"),
        operation_panel(machine, "shift", "One message to the next process"),
    ]
    panels += [attention_panel(machine, form) for form in FORMS]
    return Figure(
        "Processes of one machine, connected by Gloo",
        {n: (f"{n} process" + "es" * (n > 1), PROCESS_STYLES[n]) for n in (1, *machine.ranks())},
        panels,
        f"Symbols are measured, lines the model: {machine.report['machine']['cpu']}, "
        f"{machine.cores} cores, one thread a process.",
    )
