"""A pretrained model with LLN attention in place of softmax: swap, calibrate, recover.

`convert` gives the attention layers of a model of transformers LLN or LLN+Diag attention, freezes
alpha and beta at what a calibration on the texts finds, and then trains the model for a few minutes
to have the hidden states that it had with softmax attention. The texts need no labels. A folder
keeps checkpoints, so that a conversion that was interrupted goes on where it was, and the report.

The public name is `lln_attention.convert(model, texts, ...)`, the function.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from . import calibration_file, hf
from .calibration import calibrate, evaluation_mode
from .conversion_report import ConversionReport, Stage
from .hf.configuration import restore
from .hf.settings import IMPLEMENTATIONS
from .recovery import Checkpoint, Progress, State, compare, recover
from .text_batches import Batch, TextBatches

__all__ = ["MODES", "Progress", "convert"]

MODES = ("none", *calibration_file.MODES)
_CALIBRATION_TEXTS = 512  # some thousand tokens: moments of a head are then known to a percent
_MIX_TEXTS = 128
_MIXES = tuple(i / 10 for i in range(1, 10))


def convert(
    model: nn.Module,
    texts: Sequence[str],
    *,
    tokenizer: Any,
    implementation: str = "lln_diag",
    diag_block: int = 16,
    mix: float | None = 0.5,
    mode: str = "entropy",
    calibration_texts: Sequence[str] | None = None,
    steps: int = 300,
    batch_size: int = 64,
    learning_rate: float = 1e-4,
    max_tokens: int = 128,
    held_out: int = 256,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 50,
    evaluations: Mapping[str, Callable[[nn.Module], float]] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> ConversionReport:
    """Replaces softmax attention in a pretrained model by LLN attention, in place.

    The recovery trains all weights but the input embedding, by AdamW, on the squared error of every
    layer's hidden states and the cosine of the texts' embeddings (mean over tokens), both against
    the model as it came. There is no dropout. The same arguments on the same machine give the same
    weights, bit for bit, also when the conversion was interrupted. An error, or an interruption,
    leaves the model as it came.

    Args:
        model: A model of transformers with softmax attention, as for `hf.register`.
        texts: Without labels, of the kind and length that the model is for.
        tokenizer: Of the model.
        implementation: "lln_diag" or "lln".
        diag_block: Tokens of a block of LLN+Diag.
        mix: Share of LLN in LLN+Diag. None takes the tenth from 0.1 to 0.9 that leaves the hidden
            states of some of the texts closest to the teacher's; on texts that are not much longer
            than a block that is a small one, since Diag is then nearly softmax.
        mode: How alpha and beta are calibrated: paper, per_head, exact, entropy, or none.
        calibration_texts: To calibrate on, where it is not to be the first 512 of the texts. Modes
            exact and entropy are for 16 tokens and more: shorter texts need others here.
        steps: Of the recovery; 0 to swap and calibrate alone.
        batch_size: Texts of a step.
        learning_rate: Highest one; rises over the first 20 steps and then falls to 0 by a line.
        max_tokens: Longer texts are cut.
        held_out: Texts, drawn by `seed`, that are only used to compare with the teacher.
        seed: Of the order of the texts.
        folder: For checkpoints and report; made where it is missing. Without one there are none.
        checkpoint_every: Steps between checkpoints.
        evaluations: More to put into the report: functions of the model, by name, called with
            softmax attention, after the swap and after the recovery.
        progress: Called after every step.

    Returns:
        The report, also in the folder as report.json and report.md.

    Raises:
        ValueError: An argument is out of range; there are too few texts; the model is converted
            already; or the checkpoint of the folder is of another conversion.

    Example:
        A model as small as its language, and far too little of both to be of use:

        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
        >>> words = ["[PAD]", "the", "dog", "cat", "saw", "a", "bird"]
        >>> by_words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
        >>> by_words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_words, pad_token="[PAD]")
        >>> model = BertModel(BertConfig(vocab_size=7, hidden_size=32, num_attention_heads=2,
        ...                              num_hidden_layers=2, intermediate_size=64))
        >>> texts = ["the dog saw a cat", "a bird saw the dog"] * 8
        >>> report = convert(model, texts, tokenizer=tokenizer, mode="per_head", diag_block=2,
        ...                  steps=2, batch_size=4, held_out=4)
        >>> [stage.name for stage in report.stages]
        ['softmax', 'swapped', 'recovered']
        >>> model.config._attn_implementation
        'lln_diag'
    """
    options = {
        "implementation": implementation,
        "diag_block": diag_block,
        "mix": mix,
        "mode": mode,
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "max_tokens": max_tokens,
        "held_out": held_out,
        "seed": seed,
    }
    _validate(model, options, texts, calibration_texts, checkpoint_every)
    device = next(model.parameters()).device
    batches = TextBatches(tokenizer, texts, max_tokens, batch_size, held_out, seed, device)
    with evaluation_mode(model), _teacher_of(model) as teacher:
        checkpoint = Checkpoint(folder, _fingerprint(options, batches, calibration_texts, teacher))
        if calibration_texts is None:
            calibration = _swap(model, batches.first(_CALIBRATION_TEXTS), options)
        else:
            calibration = _swap(model, batches.of_texts(calibration_texts), options)
        if mix is None and implementation == "lln_diag":
            mix = _fitted_mix(model, teacher, batches)
        hf.configure(model, mix=mix)
        scores = evaluations or {}

        def stage(name: str, student: nn.Module) -> Stage:
            found = {label: float(score(student)) for label, score in scores.items()}
            return compare(name, student, teacher, batches.held_out(), found)

        state = checkpoint.load()
        if state is None:
            stages = [stage("softmax", teacher), stage("swapped", model)]
            state = State(0, [], 0.0, [asdict(each) for each in stages], {}, {})
        if steps > 0:
            recover(model, teacher, batches, state, checkpoint, checkpoint_every, options, progress)
        stages = [Stage(**each) for each in state.stages]
        if steps > 0:
            stages.append(stage("recovered", model))
        report = ConversionReport(
            options | {"mix": mix},
            calibration,
            batches.summary(),
            stages,
            state.losses,
            state.seconds,
        )
        if folder is not None:
            report.save(folder)
    return report


def _validate(
    model: nn.Module,
    options: dict[str, Any],
    texts: Sequence[str],
    calibration_texts: Sequence[str] | None,
    checkpoint_every: int,
) -> None:
    faults = []
    now = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if now is None:
        faults.append(f"model is a {type(model).__name__}: expected a model of transformers")
    elif now in IMPLEMENTATIONS:
        faults.append(
            f"the model has attention {now!r} already: give it as it was loaded, also to go on "
            "after an interruption"
        )
    for name, known in (("mode", MODES), ("implementation", IMPLEMENTATIONS)):
        if options[name] not in known:
            faults.append(f"{name} is {options[name]!r}: expected one of {', '.join(known)}")
    try:
        mix = 0.5 if options["mix"] is None else options["mix"]
        hf.Settings(diag_block=options["diag_block"], mix=mix)
    except ValueError as error:
        faults.append(str(error))
    for name, least in (("steps", 0), ("batch_size", 1), ("max_tokens", 1), ("held_out", 1)):
        if options[name] < least:
            faults.append(f"{name} is {options[name]}: expected {least} or more")
    if checkpoint_every < 1:
        faults.append(f"checkpoint_every is {checkpoint_every}: expected 1 or more")
    if not options["learning_rate"] > 0:
        faults.append(f"learning_rate is {options['learning_rate']}: expected a positive number")
    for name, given in (("texts", texts), ("calibration_texts", calibration_texts)):
        if isinstance(given, str):
            faults.append(f"{name} is one text: expected a list of them")
    needed = options["held_out"] + options["batch_size"]
    if len(texts) < needed:
        faults.append(
            f"{len(texts)} texts: expected at least held_out + batch_size = {needed}; give more "
            "texts, or smaller numbers"
        )
    if faults:
        raise ValueError("; ".join(faults))


@contextmanager
def _teacher_of(model: nn.Module) -> Iterator[nn.Module]:
    """A copy of the model as it is, which it becomes again where the block ends with an error."""
    teacher = copy.deepcopy(model).requires_grad_(False)
    try:
        yield teacher
    except BaseException:
        model.load_state_dict(teacher.state_dict())
        restore(model, teacher)
        raise


def _swap(model: nn.Module, batches: list[Batch], options: dict[str, Any]) -> dict[str, Any] | None:
    """Gives the model LLN attention with calibrated scales; the calibration as a dictionary."""
    calibrated = options["mode"] != "none"
    found = calibrate(model, batches, mode=options["mode"]) if calibrated else None
    hf.configure(
        model,
        implementation=options["implementation"],
        diag_block=options["diag_block"],
        matching="auto" if calibrated else "none",
        calibration=found,
    )
    return None if found is None else found.to_dict()


def _fitted_mix(model: nn.Module, teacher: nn.Module, batches: TextBatches) -> float:
    """The mix with the least error of the hidden states, mean over layers."""
    texts = batches.first(_MIX_TEXTS)

    def error(mix: float) -> float:
        hf.configure(model, mix=mix)
        return sum(compare("", model, teacher, texts, {}).hidden_errors)

    return min(_MIXES, key=error)


def _fingerprint(
    options: dict[str, Any],
    batches: TextBatches,
    calibration_texts: Sequence[str] | None,
    teacher: nn.Module,
) -> dict[str, Any]:
    """What tells a conversion from others."""
    weights = hashlib.sha256()
    for name, x in teacher.state_dict().items():
        weights.update(name.encode())
        weights.update(x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    calibrated_on = json.dumps(calibration_texts and list(calibration_texts)).encode()
    return options | {
        "texts": batches.digest,
        "calibration_texts": hashlib.sha256(calibrated_on).hexdigest(),
        "weights": weights.hexdigest(),
    }
