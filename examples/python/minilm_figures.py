#!/usr/bin/env python3
"""The pictures of docs/minilm.md, from the analysis.json that analyze_minilm.py writes.

    examples/python/minilm_figures.py build/minilm/analysis.json docs/pictures

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import LogNorm, Normalize

from lln_attention.convert import MODES

COLORS = dict(zip(MODES, ("#7f7f7f", "#d55e00", "#0072b2", "#009e73", "#cc79a7"), strict=True))
KINDS = {"lln": "LLN", "lln_diag": "LLN+Diag"}


def grid(heads: list[dict[str, Any]], name: str) -> np.ndarray:
    """A number of every head as [layer, head]; NaN where there is none."""
    layers = 1 + max(head["layer"] for head in heads)
    return np.array(
        [
            [np.nan if head[name] is None else head[name] for head in heads if head["layer"] == i]
            for i in range(layers)
        ],
        dtype=float,
    )


def draw_heads(analysis: dict[str, Any], path: Path) -> None:
    """Entropy, gap and temperature of softmax, layer by layer and head by head."""
    heads = analysis["heads"]["softmax"]
    panels = (
        ("entropy_nats", "entropy of rows, nats", Normalize(0, np.log(analysis["tokens"]))),
        ("spectral_gap", "spectral gap", Normalize(0, 1)),
        ("temperature", "temperature", LogNorm()),
    )
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for axis, (name, title, norm) in zip(axes, panels, strict=True):
        numbers = grid(heads, name)
        image = axis.imshow(numbers, norm=norm, cmap="viridis", aspect="auto")
        axis.set(title=title, xlabel="head", ylabel="layer")
        axis.set_xticks(range(0, numbers.shape[1], 2))
        axis.set_yticks(range(numbers.shape[0]))
        bar = figure.colorbar(image, ax=axis)
        if isinstance(norm, LogNorm):
            ticks = (0.2, 0.3, 0.5, 0.7, 1, 1.5)
            bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
            bar.minorticks_off()
    save(figure, path)


def draw_lognormality(analysis: dict[str, Any], path: Path) -> None:
    """How log-normal softmax's weights are: distances of all heads, quantiles of one a layer."""
    heads = analysis["heads"]["softmax"]
    distances = grid(heads, "ks")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for layer, row in enumerate(distances):
        left.plot(np.full(len(row), layer), row, "o", color="#0072b2", alpha=0.5)
    left.plot(np.median(distances, axis=1), "k_", markersize=22, label="median of the heads")
    left.set(xlabel="layer", ylabel="distance to the normal", title="ln P of softmax, every head")
    left.set_ylim(bottom=0)
    left.legend()
    shades = pyplot.get_cmap("viridis")(np.linspace(0, 0.9, len(distances)))
    for layer, row in enumerate(distances):
        middle = int(np.argsort(row)[len(row) // 2])
        chosen = [head for head in heads if head["layer"] == layer][middle]
        points = np.array(chosen["qq"])
        label = f"layer {layer}, head {middle}"
        right.plot(points[:, 0], points[:, 1], color=shades[layer], label=label)
    right.plot([-2.5, 2.5], [-2.5, 2.5], "k--", linewidth=1, label="log-normal")
    right.set(aspect="equal", xlabel="quantile of the normal")
    right.set(ylabel="quantile of ln P, standardised", title="the median head of each layer")
    right.legend(fontsize=8)
    save(figure, path)


def draw_matching(analysis: dict[str, Any], path: Path) -> None:
    """LLN against softmax in every mode: difference of entropy and of the gap, by layer."""
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    panels = (("entropy_nats", "entropy of rows, nats"), ("spectral_gap", "spectral gap"))
    for axis, (name, title) in zip(axes, panels, strict=True):
        softmax = grid(analysis["heads"]["softmax"], name)
        for number, mode in enumerate(MODES):
            difference = grid(analysis["heads"][mode], name) - softmax
            x = np.arange(len(difference)) + 0.12 * (number - 2)
            axis.errorbar(
                x,
                np.nanmean(difference, axis=1),
                np.nanstd(difference, axis=1),
                fmt="o",
                color=COLORS[mode],
                label=mode,
                markersize=4,
                linewidth=1,
            )
        axis.axhline(0, color="k", linestyle="--", linewidth=1)
        axis.set(xlabel="layer", ylabel="LLN minus softmax", title=title)
    figure.legend(*axes[0].get_legend_handles_labels(), title="mode", loc="outside right upper")
    save(figure, path)


def draw_swaps(analysis: dict[str, Any], path: Path) -> None:
    """What a swap moves: error of the hidden states by layer, and STS-B."""
    rows = {
        (row["implementation"], row.get("mode"), row.get("mix")): row for row in analysis["swaps"]
    }
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    styles = {"lln": ":", "lln_diag": "-"}
    for kind, title in KINDS.items():
        for mode in MODES:
            errors = rows[kind, mode, 0.5]["hidden_errors"]
            label = f"{title}, {mode}"
            left.plot(errors, styles[kind], color=COLORS[mode], marker=".", label=label)
    left.plot(
        rows["lln_diag", "none", 0.0]["hidden_errors"], "k--", linewidth=1, label="Diag alone"
    )
    left.set(xlabel="hidden states after layer (0: embeddings)", ylabel="relative error")
    left.set(title="hidden states, untrained")
    left.legend(fontsize=7, ncols=2)
    for number, kind in enumerate(KINDS):
        scores = [rows[kind, mode, 0.5]["sts"] for mode in MODES]
        places = np.arange(len(MODES)) + 0.4 * (number - 0.5)
        bars = right.bar(
            places, scores, 0.36, color=[COLORS[mode] for mode in MODES], alpha=(0.45, 1)[number]
        )
        right.bar_label(bars, [f"{x:.3f}"[1:] for x in scores], fontsize=8)
    softmax = next(row["sts"] for row in analysis["swaps"] if row["implementation"] == "softmax")
    right.axhline(softmax, color="k", linestyle="--", linewidth=1)
    right.text(len(MODES) - 0.55, softmax + 0.005, f"softmax {softmax:.3f}", ha="right")
    right.set_xticks(range(len(MODES)), MODES)
    right.set(ylim=(0.5, 0.88), ylabel="Spearman's correlation")
    right.set_title(f"STS-B {analysis['part']}, untrained: LLN (pale), LLN+Diag (full)")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """As a file, and done with."""
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw(analysis: dict[str, Any], folder: Path) -> None:
    """All pictures."""
    draw_heads(analysis, folder / "minilm_heads.png")
    draw_lognormality(analysis, folder / "minilm_lognormality.png")
    draw_matching(analysis, folder / "minilm_matching.png")
    draw_swaps(analysis, folder / "minilm_swaps.png")


def main() -> None:
    """Parses the command line and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("analysis", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    draw(json.loads(options.analysis.read_text(encoding="utf-8")), options.folder)


if __name__ == "__main__":
    main()
