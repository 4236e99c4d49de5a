"""`calibrate`: runs a model on data, pools the moments of q and k of every attention layer, and
finds the alpha and beta with which LLN attention concentrates as softmax does on these data."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import _moment_ops as _moments
from ._library import python_error
from .calibration_file import MODES, CalibratedLayer, Calibration
from .functional import head_moments
from .observation import Observation, holds_transformers, observe

__all__ = ["CalibratedLayer", "Calibration", "calibrate"]


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    mode: str = "entropy",
    progress: Callable[[int, int | None], None] | None = None,
) -> Calibration:
    """alpha and beta of every attention layer and head, from data that the model is run on.

    The model runs in evaluation mode, without gradients and, where it is one of transformers, with
    softmax attention; nothing of it changes. Padding does not count. Moments of a key head are
    taken over all sequences together, as `lln calibrate` does.

    Args:
        model: Any module whose attention `observe` can see.
        batches: What the model is called with: mappings become keyword arguments, tuples and lists
            positional ones. Tensors are moved to the device of the model.
        mode: paper, per_head, exact or entropy.
        progress: Called after each batch with the number of batches so far and of all of them,
            None where `batches` has no length.

    Returns:
        The scales; `apply` puts them into a model, `save` into a file.

    Raises:
        ValueError: The mode is none of these, or no attention layer saw a token.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}: expected one of {', '.join(MODES)}")
    pools: dict[str, _Pool] = {}

    def take(seen: Observation) -> None:
        pools.setdefault(seen.name, _Pool.like(seen)).take(seen)

    total = len(batches) if isinstance(batches, Sized) else None
    device = next((x.device for x in model.parameters()), torch.device("cpu"))
    with _evaluating(model), observe(model, take):
        for done, batch in enumerate(batches, start=1):
            _run(model, batch, device)
            if progress is not None:
                progress(done, total)
    if not pools:
        raise ValueError(
            f"no attention layer of {type(model).__name__} was seen: expected batches, and a model "
            "whose attention lln_attention.observe can see"
        )
    found = {name: pool.layer(name, mode) for name, pool in pools.items()}
    if clamped := [name for name, (_, heads) in found.items() if heads > 0]:
        warnings.warn(
            f"mode {mode}: a limit was applied in {len(clamped)} of {len(found)} layers, the first "
            f"of them {clamped[0]!r}: their q and k, or the number of tokens of a sequence, are "
            "outside of what the mode was made for (docs/matching.md)",
            stacklevel=2,
        )
    return Calibration(mode, tuple(layer for layer, _ in found.values()))


class _Pool:
    """Moments of one layer over all sequences so far: count, mean and squared deviations."""

    def __init__(self, heads: int, heads_k: int, dim: int) -> None:
        self.heads, self.dim, self.sequences = heads, dim, 0
        self.q = torch.zeros(heads_k, 3, dtype=torch.float64)
        self.k = torch.zeros(heads_k, 3, dtype=torch.float64)

    @staticmethod
    def like(seen: Observation) -> _Pool:
        return _Pool(seen.q.shape[1], seen.k.shape[1], seen.q.shape[3])

    def take(self, seen: Observation) -> None:
        """Adds the sequences of one call."""
        of_k = _head_moments(seen.k, seen.key_mask)  # [batch, key heads, 3]
        self_attention = seen.q.shape[2] == seen.k.shape[2]
        of_q = _head_moments(seen.q, seen.key_mask if self_attention else None)
        # Query heads that share a key head are one set of numbers.
        of_q = of_q.reshape(len(of_q), of_k.shape[1], -1, 3).transpose(1, 2).flatten(0, 1)
        self.q = _moments.merged(torch.cat([self.q[None], of_q]))
        self.k = _moments.merged(torch.cat([self.k[None], of_k]))
        self.sequences += int((of_k[:, 0, 0] > 0).sum())

    def layer(self, name: str, mode: str) -> tuple[CalibratedLayer, int]:
        """alpha and beta from all that was taken, and to how many key heads a limit applied."""
        if self.sequences == 0:
            raise ValueError(f"layer {name!r}: no token of any batch counts")
        try:
            alpha, beta, clamped = _moments.calibrate(
                self.q, self.k, self.heads, self.dim, self.sequences, mode
            )
        except RuntimeError as error:
            raise ValueError(f"layer {name!r}: {python_error(error)}") from None
        tokens = float(self.k[0, 0]) / (self.dim * self.sequences)
        scales = (tuple(x.tolist()) for x in (alpha, beta))
        return CalibratedLayer(name, self.dim, tokens, *scales), int(clamped)


def _head_moments(x: Tensor, mask: Tensor | None) -> Tensor:
    """[batch, heads, 3] of float64: what `merged` takes."""
    found = head_moments(x, mask=mask)
    squares = found.variance * (found.count - 1).clamp(min=0)
    return torch.stack([found.count, found.mean, squares], dim=-1)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """model.eval() while it is open; then every module is in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, transformers with softmax; then as before."""
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        stack.enter_context(torch.no_grad())
        if holds_transformers(model):
            from .hf.observe import softmax_instead

            stack.enter_context(softmax_instead(model))
        yield


def _run(model: nn.Module, batch: Any, device: torch.device) -> None:
    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    if isinstance(batch, Mapping):
        model(**{name: moved(x) for name, x in batch.items()})
    elif isinstance(batch, (tuple, list)):
        model(*(moved(x) for x in batch))
    else:
        model(moved(batch))
