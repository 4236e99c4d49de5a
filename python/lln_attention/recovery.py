"""The recovery of a converted model: training on the hidden states that it had with softmax.

Here are the losses, the loop with its checkpoints, and the comparison of two models; what is
converted and how is in convert.py.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .conversion_report import Stage
from .text_batches import Batch, TextBatches
from .whole_file import whole_file

_WARMUP = 20  # steps until the learning rate is reached


@dataclass(frozen=True)
class Progress:
    """Where a recovery is, after a step.

    Attributes:
        step: Steps that are done, from 1.
        steps: All of them.
        hidden_loss: Squared error of the hidden states over their variance, mean over layers.
        embedding_loss: 1 - cosine of the texts' embeddings with the teacher's, mean over texts.
        seconds: Spent on the steps so far, earlier runs included.
    """

    step: int
    steps: int
    hidden_loss: float
    embedding_loss: float
    seconds: float


@dataclass
class State:
    """All that a recovery needs to go on."""

    step: int
    losses: list[tuple[float, float]]
    seconds: float
    stages: list[dict[str, Any]]
    model: dict[str, Any]
    optimizer: dict[str, Any]


class Checkpoint:
    """The file with a recovery's state; nothing where there is no folder."""

    def __init__(self, folder: str | os.PathLike[str] | None, fingerprint: dict[str, Any]) -> None:
        self.path = None if folder is None else Path(folder) / "checkpoint.pt"
        self.fingerprint = fingerprint
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def load(self) -> State | None:
        """What was saved, where it is of this conversion; None where nothing was."""
        if self.path is None or not self.path.exists():
            return None
        saved = torch.load(self.path, map_location="cpu", weights_only=True)
        theirs = saved.pop("fingerprint")
        changed = [name for name, x in self.fingerprint.items() if theirs.get(name) != x]
        if changed:
            raise ValueError(
                f"{self.path} is of another conversion, which differs in {', '.join(changed)}: "
                "use another folder, or remove the file"
            )
        return State(**saved)

    def save(self, state: State) -> None:
        """Complete or not at all."""
        if self.path is None:
            return
        with whole_file(self.path) as part:
            torch.save({"fingerprint": self.fingerprint, **vars(state)}, part)


def recover(
    model: nn.Module,
    teacher: nn.Module,
    batches: TextBatches,
    state: State,
    checkpoint: Checkpoint,
    checkpoint_every: int,
    options: dict[str, Any],
    progress: Callable[[Progress], None] | None,
) -> None:
    """Trains the model to have the teacher's hidden states, from where `state` is to the end.

    options["learning_rates"], where it is there, has rates by parts of the parameters' names:
    "block.gate" is of "layer.0.block.gate.weight" and of its like in the other layers.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    frozen = {id(x) for x in embedding.parameters()}
    weights = [x for x in model.parameters() if id(x) not in frozen and x.requires_grad]
    optimizer = torch.optim.AdamW(_groups(model, weights, options), weight_decay=0.0)
    rates = [group["lr"] for group in optimizer.param_groups]
    if state.step > 0:
        model.load_state_dict(state.model)
        optimizer.load_state_dict(state.optimizer)
    for step in range(state.step, options["steps"]):
        start = time.monotonic()
        rate = min(1.0, (step + 1) / _WARMUP) * (1 - step / options["steps"])
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = own * rate
        hidden, cosine = _losses(model, teacher, batches.of_step(step))
        gradients = torch.autograd.grad(hidden + cosine, weights, allow_unused=True)
        for x, gradient in zip(weights, gradients, strict=True):
            x.grad = gradient
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state.step = step + 1
        state.losses.append((hidden.item(), cosine.item()))
        state.seconds += time.monotonic() - start
        if state.step % checkpoint_every == 0 or state.step == options["steps"]:
            state.model, state.optimizer = model.state_dict(), optimizer.state_dict()
            checkpoint.save(state)
        if progress is not None:
            progress(Progress(state.step, options["steps"], *state.losses[-1], state.seconds))


def _groups(
    model: nn.Module, weights: list[nn.Parameter], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Parameters by their learning rate, in the order of the model."""
    own = options.get("learning_rates", {})
    names = {id(x): f".{name}." for name, x in model.named_parameters()}
    groups: dict[float, list[nn.Parameter]] = {}
    for x in weights:
        found = [rate for part, rate in own.items() if f".{part}." in names[id(x)]]
        groups.setdefault(found[0] if found else options["learning_rate"], []).append(x)
    return [{"params": some, "lr": rate} for rate, some in groups.items()]


def _losses(student: nn.Module, teacher: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of the hidden states and of the texts' embeddings."""
    with torch.no_grad():
        targets = _hidden_states(teacher, batch)
    found = _hidden_states(student, batch)
    counts = batch["attention_mask"].bool()
    errors = [
        functional.mse_loss(x[counts], y[counts]) / y[counts].var()
        for x, y in zip(found[1:], targets[1:], strict=True)
    ]
    cosine = functional.cosine_similarity(_embedding(found, counts), _embedding(targets, counts))
    return torch.stack(errors).mean(), 1 - cosine.mean()


@torch.no_grad()
def compare(
    name: str,
    student: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Batch],
    scores: dict[str, float],
) -> Stage:
    """The stage of a student, from texts that it was not trained on."""
    squares: Tensor | float = 0.0
    norms: Tensor | float = 0.0
    cosines = []
    for batch in batches:
        found, targets = _hidden_states(student, batch), _hidden_states(teacher, batch)
        counts = batch["attention_mask"].bool()
        pairs = [
            (x[counts].double(), y[counts].double()) for x, y in zip(found, targets, strict=True)
        ]
        squares = squares + torch.stack([(x - y).square().sum() for x, y in pairs])
        norms = norms + torch.stack([y.square().sum() for _, y in pairs])
        cosines.append(
            functional.cosine_similarity(_embedding(found, counts), _embedding(targets, counts))
        )
    errors = torch.as_tensor(squares / norms).sqrt().tolist()
    cosine = torch.cat(cosines)
    return Stage(name, errors, cosine.mean().item(), cosine.min().item(), scores)


def _hidden_states(model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
    """Embeddings and the output of each layer, [batch, tokens, channels] each."""
    states: tuple[Tensor, ...] = model(**batch, output_hidden_states=True).hidden_states
    return states


def _embedding(states: tuple[Tensor, ...], counts: Tensor) -> Tensor:
    """Of each text: the mean of the last layer over its tokens."""
    weights = counts[..., None].to(states[-1].dtype)
    return (states[-1] * weights).sum(1) / weights.sum(1)
