"""`configure`: sets the options of LLN attention on a model of transformers, and switches to it."""

# SPDX-License-Identifier: Apache-2.0
import warnings
from dataclasses import asdict, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..calibration_file import Calibration
from .registry import register
from .settings import IMPLEMENTATIONS, configs_of, settings_of


def configure(
    model: nn.Module,
    *,
    implementation: str | None = None,
    diag_block: int | None = None,
    mix: float | None = None,
    matching: str | None = None,
    calibration: Calibration | None = None,
) -> None:
    """Sets options of LLN attention on a model; those that are not given stay as they are.

    Without any it takes up those of `model.config`, for a model that from_pretrained() made: it
    hands the calibration to the attention modules, and switches to the implementation that was in
    use when the options were last set, unless from_pretrained() was given one of the two.

    Args:
        model: A model of transformers, or a module that holds some; on any device.
        implementation: "lln" or "lln_diag", to switch the model to; register() is not needed then.
        diag_block: Tokens of a diagonal block of "lln_diag"; 64 before it is set.
        mix: Share of LLN in "lln_diag"; 0.5 before it is set.
        matching: How alpha and beta are found; "auto" before it is set.
        calibration: alpha and beta of every layer and head; causal models need one.

    Raises:
        ValueError: An option is out of range, or the calibration is of another model.
        NotImplementedError: The model cannot switch its attention.

    Example:
        >>> from transformers import ViTConfig, ViTModel
        >>> model = ViTModel(ViTConfig(hidden_size=32, num_attention_heads=2,
        ...                            num_hidden_layers=1, intermediate_size=64))
        >>> configure(model, implementation="lln_diag", diag_block=16, matching="entropy")
        >>> model.config.lln["diag_block"]
        16
    """
    given: dict[str, Any] = {
        "implementation": implementation,
        "diag_block": diag_block,
        "mix": mix,
        "matching": matching,
        "calibration": None if calibration is None else calibration.to_dict(),
    }
    given = {name: x for name, x in given.items() if x is not None}
    configs = configs_of(model)
    if not configs:
        raise ValueError(f"{type(model).__name__} holds no model of transformers")
    in_use = configs[0]._attn_implementation
    if "implementation" not in given and in_use in IMPLEMENTATIONS:
        given["implementation"] = in_use
    settings = replace(settings_of(configs[0]), **given)
    if settings.calibration is not None:
        Calibration.from_dict(settings.calibration, "config.lln").place(model)
    if given:
        target = given.get("implementation")
    else:
        target = settings.implementation
        if target is None and hasattr(configs[0], "lln"):
            warnings.warn(
                f"the model's config has options of LLN attention, and its attention is {in_use!r}:"
                " give attn_implementation='lln' or 'lln_diag' to from_pretrained(), or call "
                "set_attn_implementation()",
                stacklevel=2,
            )
    if target is not None and target != in_use:
        _switch(model, target)
    for config in configs:
        config.lln = asdict(settings)


def restore(model: nn.Module, source: nn.Module) -> None:
    """Gives a model the attention and the options that an earlier copy of it has."""
    for part, earlier in zip(_parts(model), _parts(source), strict=True):
        part.set_attn_implementation(earlier.config._attn_implementation)
    for module in list(model.modules()):
        if hasattr(module, "lln_scales"):
            del module.lln_scales
    for config, before in zip(configs_of(model), configs_of(source), strict=True):
        if hasattr(config, "lln"):
            del config.lln
        if hasattr(before, "lln"):
            config.lln = before.lln
    settings = settings_of(configs_of(model)[0])
    if settings.calibration is not None:
        Calibration.from_dict(settings.calibration, "config.lln").place(model)


def _parts(model: nn.Module) -> list[PreTrainedModel]:
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _switch(model: nn.Module, implementation: str) -> None:
    register()
    for part in _parts(model):
        part.set_attn_implementation(implementation)
        if part.config._attn_implementation != implementation:
            raise NotImplementedError(
                f"{type(part).__name__} computes its attention by itself: use a model that takes "
                "it from transformers' AttentionInterface"
            )
