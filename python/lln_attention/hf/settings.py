"""Options of LLN attention in a model of transformers, and where they are kept.

They live in the model's config as `config.lln`, so that save_pretrained() writes them into
config.json and from_pretrained() reads them back. alpha and beta of a calibration are also buffers
of the attention modules, which move with the model between devices. Neither is a weight: the state
dict and every parameter stay as they are.
"""

# SPDX-License-Identifier: Apache-2.0
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..calibration_file import Calibration

IMPLEMENTATIONS = ("lln", "lln_diag")
MATCHINGS = ("auto", "none", "paper", "per_head", "exact", "entropy")


@dataclass(frozen=True)
class Settings:
    """Options of attn_implementation="lln" and "lln_diag"; what `configure` sets.

    Attributes:
        diag_block: Tokens of a diagonal block; "lln" has none.
        mix: Share of LLN in LLN+Diag, from 0 to 1.
        matching: How alpha and beta are found: "auto" takes those of the calibration where there
            is one and otherwise per_head; none, paper, per_head, exact and entropy are the modes
            of `lln_attention.match`.
        calibration: What `Calibration.to_dict` gives, or None.
    """

    diag_block: int = 64
    mix: float = 0.5
    matching: str = "auto"
    calibration: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        faults = []
        if not isinstance(self.diag_block, int) or self.diag_block < 1:
            faults.append(f"diag_block is {self.diag_block!r}: expected a positive integer")
        if not isinstance(self.mix, (int, float)) or not 0 <= self.mix <= 1:
            faults.append(f"mix is {self.mix!r}: expected a number from 0 to 1")
        if self.matching not in MATCHINGS:
            faults.append(f"matching is {self.matching!r}: expected one of {', '.join(MATCHINGS)}")
        if faults:
            raise ValueError("; ".join(faults))


def configure(
    model: nn.Module,
    *,
    diag_block: int | None = None,
    mix: float | None = None,
    matching: str | None = None,
    calibration: Calibration | None = None,
) -> None:
    """Sets options of LLN attention on a model; those that are not given stay as they are.

    Without any it takes up those of `model.config`: call it so after from_pretrained() where
    the saved model had a calibration.

    Args:
        model: A model of transformers, or a module that holds some; on any device.
        diag_block: Tokens of a diagonal block of "lln_diag"; 64 before it is set.
        mix: Share of LLN in "lln_diag"; 0.5 before it is set.
        matching: How alpha and beta are found; "auto" before it is set.
        calibration: alpha and beta of every layer and head; causal models need one.

    Example:
        >>> from transformers import ViTConfig, ViTModel
        >>> model = ViTModel(ViTConfig(hidden_size=32, num_attention_heads=2,
        ...                            num_hidden_layers=1, intermediate_size=64))
        >>> configure(model, diag_block=16, matching="entropy")
        >>> model.config.lln["diag_block"]
        16
    """
    given: dict[str, Any] = {
        "diag_block": diag_block,
        "mix": mix,
        "matching": matching,
        "calibration": None if calibration is None else calibration.to_dict(),
    }
    configs = configs_of(model)
    if not configs:
        raise ValueError(f"{type(model).__name__} holds no model of transformers")
    settings = replace(
        settings_of(configs[0]), **{name: x for name, x in given.items() if x is not None}
    )
    if settings.calibration is not None:
        Calibration.from_dict(settings.calibration, "config.lln").place(model)
    for config in configs:
        config.lln = asdict(settings)


def settings_of(config: PreTrainedConfig) -> Settings:
    """Those of a config, or the defaults."""
    return Settings(**getattr(config, "lln", {}))


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """The config of the model and of every part that has its own."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            found[id(config)] = config
    return list(found.values())


def scales_of(module: nn.Module, settings: Settings) -> tuple[Tensor | None, Tensor | None]:
    """alpha and beta of the calibration, where this module is to use them."""
    if settings.matching != "auto" or settings.calibration is None:
        return None, None
    alpha: Tensor | None = getattr(module, "lln_alpha", None)
    beta: Tensor | None = getattr(module, "lln_beta", None)
    if alpha is None:
        raise RuntimeError(
            "the model's config has a calibration that this attention module has not taken up: "
            "call lln_attention.hf.configure(model) once after from_pretrained(); where that does "
            "not help, the calibration has no layer for it: calibrate this model again"
        )
    return alpha, beta
