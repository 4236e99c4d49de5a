"""Options of LLN attention in a model of transformers, and where they are kept.

They live in the model's config as `config.lln`, so that save_pretrained() writes them into
config.json and from_pretrained() reads them back. alpha and beta of a calibration are also with
the attention modules, as `FrozenScales`, which move with the model between devices. Neither is a
weight: the state dict and every parameter stay as they are.
"""

# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..calibration_file import MODES, FrozenScales

IMPLEMENTATIONS = ("lln", "lln_diag")
MATCHINGS = ("auto", "none", *MODES)


@dataclass(frozen=True)
class Settings:
    """Options of attn_implementation="lln" and "lln_diag"; what `configure` sets.

    Attributes:
        implementation: "lln" or "lln_diag", whichever was in use when options were last set; None
            where none was.
        diag_block: Tokens of a diagonal block; "lln" has none.
        mix: Share of LLN in LLN+Diag, from 0 to 1.
        matching: How alpha and beta are found: "auto" takes those of the calibration where there
            is one and otherwise per_head; none, paper, per_head, exact and entropy are the modes
            of `lln_attention.match`.
        calibration: What `Calibration.to_dict` gives, or None.
    """

    implementation: str | None = None
    diag_block: int = 64
    mix: float = 0.5
    matching: str = "auto"
    calibration: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        faults = []
        if self.implementation not in (None, *IMPLEMENTATIONS):
            known = ", ".join(IMPLEMENTATIONS)
            faults.append(f"implementation is {self.implementation!r}: expected one of {known}")
        if not isinstance(self.diag_block, int) or self.diag_block < 1:
            faults.append(f"diag_block is {self.diag_block!r}: expected a positive integer")
        if not isinstance(self.mix, (int, float)) or not 0 <= self.mix <= 1:
            faults.append(f"mix is {self.mix!r}: expected a number from 0 to 1")
        if self.matching not in MATCHINGS:
            faults.append(f"matching is {self.matching!r}: expected one of {', '.join(MATCHINGS)}")
        if faults:
            raise ValueError("; ".join(faults))


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
    scales: FrozenScales | None = getattr(module, "lln_scales", None)
    if scales is None:
        raise RuntimeError(
            "the model's config has a calibration that this attention module has not taken up: "
            "call lln_attention.hf.configure(model) once after from_pretrained(); where that does "
            "not help, the calibration has no layer for it: calibrate this model again"
        )
    return scales.alpha, scales.beta
