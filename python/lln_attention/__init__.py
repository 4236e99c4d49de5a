"""Linear Log-Normal attention for PyTorch.

>>> import torch, lln_attention
>>> q = k = v = torch.randn(1, 8, 256, 64)
>>> lln_attention.attention(q, k, v, diag_block=64).shape
torch.Size([1, 8, 256, 64])
"""

# SPDX-License-Identifier: Apache-2.0
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .calibration import CalibratedLayer, Calibration, calibrate
from .decode import DecodeState
from .functional import Moments, attention, head_moments, match, update_moments
from .instruments import analyze, collect, report
from .nn import LLNAttention, LLNPlusDiagAttention
from .observation import Observation, observe

if TYPE_CHECKING:
    from . import hf as hf
    from .convert import convert as convert

__all__ = [
    "CalibratedLayer",
    "Calibration",
    "DecodeState",
    "LLNAttention",
    "LLNPlusDiagAttention",
    "Moments",
    "Observation",
    "analyze",
    "attention",
    "calibrate",
    "collect",
    "head_moments",
    "match",
    "observe",
    "report",
    "update_moments",
]
__version__ = "0.1.0"


class _Package(ModuleType):
    """This module, whose `convert` stays the function where its own module is imported by name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "convert" and isinstance(value, ModuleType):
            value = value.convert
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    # They need transformers, which is imported when they are asked for.
    if name not in ("convert", "hf"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(f".{name}", __name__)
    return globals()[name]


sys.modules[__name__].__class__ = _Package
