"""What a conversion did to a model, as numbers: the report of `lln_attention.convert`.

A stage is the model at one moment, held against the model with softmax attention on texts that were
not trained on. The report is a JSON file for programs and a table in Markdown for people.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .whole_file import whole_file


@dataclass(frozen=True)
class Stage:
    """How far a model is from the one with softmax attention.

    Attributes:
        name: softmax, swapped or recovered.
        hidden_errors: |student - teacher| / |teacher| of the hidden states of each layer, over all
            tokens of the held-out texts; the first is that of the embeddings.
        mean_cosine: Of a text's embedding (mean over tokens) with the teacher's, mean over texts.
        min_cosine: The smallest of them.
        scores: What the callers' evaluations said.
    """

    name: str
    hidden_errors: list[float]
    mean_cosine: float
    min_cosine: float
    scores: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did: its options, the stages of the model, and the way between them.

    Attributes:
        options: The arguments of `convert` that have an effect on the result.
        calibration: alpha and beta, as `Calibration.to_dict`; None with mode "none".
        texts: How many texts were trained on and held out, and their mean number of tokens.
        stages: softmax, swapped and, after at least one step, recovered.
        losses: (hidden, embedding) of every step.
        seconds: Spent on the steps, without evaluations, over all runs that it took.
    """

    options: dict[str, Any]
    calibration: dict[str, Any] | None
    texts: dict[str, float]
    stages: list[Stage]
    losses: list[tuple[float, float]]
    seconds: float

    def stage(self, name: str) -> Stage:
        """The stage of a name; ValueError where there is none."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        found = ", ".join(stage.name for stage in self.stages)
        raise ValueError(f"the report has no stage {name!r}: found {found}")

    def to_dict(self) -> dict[str, Any]:
        """As in the JSON file."""
        return asdict(self)

    def to_markdown(self) -> str:
        """The page for people.

        Example:
            >>> stage = Stage("swapped", [0.0, 0.25], 0.9, 0.8, {"sts-b": 0.79})
            >>> report = ConversionReport({"steps": 0}, None, {"trained": 9}, [stage], [], 0.0)
            >>> print(report.to_markdown().splitlines()[4])
            | swapped | 0.250 | 0.9000 | 0.8000 | 0.7900 |
        """
        scores = sorted({name for stage in self.stages for name in stage.scores})
        titles = ["stage", "error of the last layer", "mean cosine", "least cosine", *scores]
        lines = ["# Conversion", "", _row(titles), _row(["---"] * len(titles))]
        for stage in self.stages:
            cells = [stage.name, f"{stage.hidden_errors[-1]:.3f}"]
            cells += [f"{x:.4f}" for x in (stage.mean_cosine, stage.min_cosine)]
            cells += [f"{stage.scores[x]:.4f}" if x in stage.scores else "" for x in scores]
            lines.append(_row(cells))
        lines += ["", "Relative error of the hidden states, by layer (0: embeddings):", ""]
        count = max(len(stage.hidden_errors) for stage in self.stages)
        lines += [_row(["stage", *map(str, range(count))]), _row(["---"] * (count + 1))]
        for stage in self.stages:
            lines.append(_row([stage.name, *(f"{x:.3f}" for x in stage.hidden_errors)]))
        if self.losses:
            ends = (
                f"({hidden:.4f}, {embedding:.4f})"
                for hidden, embedding in (self.losses[0], self.losses[-1])
            )
            loss = f"Loss (hidden states, embedding) from {' to '.join(ends)}."
            lines += ["", f"{len(self.losses)} steps in {self.seconds:.0f} s. {loss}"]
        lines += ["", "| option | value |", "| --- | --- |"]
        lines += [_row([name, str(value)]) for name, value in (self.options | self.texts).items()]
        return "\n".join(lines) + "\n"

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes report.json and report.md into a folder that is there, each complete or not."""
        data = json.dumps(self.to_dict(), indent=1) + "\n"
        for name, text in (("report.json", data), ("report.md", self.to_markdown())):
            with whole_file(Path(folder) / name) as part:
                part.write_text(text, encoding="utf-8")


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
