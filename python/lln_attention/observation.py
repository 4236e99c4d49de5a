"""What a model's attention layers were called with: the common ground of calibrations and
instruments, which see it through different kinds of models."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Observation:
    """One call of one attention layer.

    Attributes:
        name: Of the attention module in the model.
        module: The attention module.
        q: [batch, heads, tokens, dim], such that the logits of softmax are q.k / sqrt(dim).
        k: [batch, key heads, tokens, dim].
        key_mask: bool [batch, tokens], True where a key counts; None where all do.
        causal: Whether a token sees those after it.
    """

    name: str
    module: nn.Module
    q: Tensor
    k: Tensor
    key_mask: Tensor | None
    causal: bool


def holds_transformers(model: nn.Module) -> bool:
    """Whether some module is a model of transformers, which need not be installed."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and any(
        isinstance(module, transformers.PreTrainedModel) for module in model.modules()
    )
