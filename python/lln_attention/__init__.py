"""Linear Log-Normal attention for PyTorch.

>>> import torch, lln_attention
>>> q = k = v = torch.randn(1, 8, 256, 64)
>>> lln_attention.attention(q, k, v, diag_block=64).shape
torch.Size([1, 8, 256, 64])
"""

# SPDX-License-Identifier: Apache-2.0
from .calibration import CalibratedLayer, Calibration, calibrate
from .decode import DecodeState
from .functional import Moments, attention, head_moments, match, update_moments
from .instruments import analyze, collect, report
from .nn import LLNAttention, LLNPlusDiagAttention
from .observation import Observation, observe

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
