"""What a calibration is: alpha and beta of every attention layer and head, and their file.

Causal attention and decoding need such scales, since theirs must not depend on the tokens to come;
for other models they make the concentration of LLN independent of the single sequence. The file is
the JSON that `lln calibrate` writes and that the program and the C++ library read. How the numbers
are found is in calibration.py.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .nn import LLNAttention
from .observation import holds_transformers
from .whole_file import whole_file

MODES = ("paper", "per_head", "exact", "entropy")
_FORMAT, _VERSION = "lln-calibration", 1


@dataclass(frozen=True)
class CalibratedLayer:
    """Scales of one attention layer.

    Attributes:
        name: Of the attention module in the model.
        dim: Channels of a head.
        tokens: Keys of a sequence that counted, on average.
        alpha: One per query head, float32 numbers.
        beta: One per key head, float32 numbers.
    """

    name: str
    dim: int
    tokens: float
    alpha: tuple[float, ...]
    beta: tuple[float, ...]

    def __post_init__(self) -> None:
        if not (_is_number(self.dim, int) and self.dim > 0 and self.tokens > 0):
            raise ValueError(
                f"layer {self.name!r}: dim is {self.dim!r} and tokens is {self.tokens!r}: "
                "expected positive numbers"
            )
        for side, scales in (("alpha", self.alpha), ("beta", self.beta)):
            if not scales or not all(math.isfinite(x) and x > 0 for x in scales):
                raise ValueError(
                    f"layer {self.name!r}: {side} is {list(scales)}: expected positive numbers, "
                    "one per head"
                )


class FrozenScales(nn.Module):
    """alpha and beta of a layer as tensors that go with a model from device to device.

    They are not of the state dict, since a model of transformers keeps them in its config, and stay
    float32 where the model's parameters become something else.
    """

    alpha: Tensor
    beta: Tensor

    def __init__(self, layer: CalibratedLayer, device: torch.device) -> None:
        super().__init__()
        for side in ("alpha", "beta"):
            numbers = torch.tensor(getattr(layer, side), dtype=torch.float32, device=device)
            self.register_buffer(side, numbers, persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FrozenScales:
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for side, numbers in before.items():
            now = getattr(self, side)
            if now.dtype != numbers.dtype:
                setattr(self, side, numbers.to(now.device))
        return self


@dataclass(frozen=True)
class Calibration:
    """alpha and beta of all attention layers of a model; what `calibrate` finds.

    Attributes:
        mode: The matching that found them: paper, per_head, exact or entropy.
        layers: In the order in which the model runs them.

    Example:
        >>> calibration = Calibration("entropy", (CalibratedLayer("0", 64, 512, (2.1,), (2.0,)),))
        >>> calibration.layer("0").alpha
        (2.1,)
    """

    mode: str
    layers: tuple[CalibratedLayer, ...]

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}: expected one of {', '.join(MODES)}")
        names = [layer.name for layer in self.layers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"layers occur twice: {', '.join(twice)}")

    def layer(self, name: str) -> CalibratedLayer:
        """The layer of a name; ValueError where there is none."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        found = ", ".join(repr(layer.name) for layer in self.layers) or "none"
        raise ValueError(f"the calibration has no layer {name!r}: found {found}")

    def apply(self, model: nn.Module) -> None:
        """Freezes alpha and beta of the model's attention layers at these numbers.

        Modules of `lln_attention.nn` go to matching "frozen". In models of transformers the
        numbers are used by attn_implementation="lln" and "lln_diag", and travel in config.json.

        Raises:
            ValueError: A layer of the calibration is not in the model, or has another number of
                heads there, or is neither of the package nor of transformers. The model is then
                as it was.
        """
        if holds_transformers(model):
            from .hf import configure

            configure(model, calibration=self)
        else:
            self.place(model)

    def place(self, model: nn.Module) -> None:
        """Gives every attention module its alpha and beta, for `apply`."""
        modules = dict(model.named_modules())
        places = [(layer, _find(layer.name, modules)) for layer in self.layers]
        for layer, module in places:
            _check_heads(layer, module)
        for layer, module in places:
            device = next((x.device for x in module.parameters()), torch.device("cpu"))
            scales = FrozenScales(layer, device)
            if isinstance(module, LLNAttention):
                module.freeze(scales.alpha, scales.beta)
            else:
                module.lln_scales = scales

    def to_dict(self) -> dict[str, Any]:
        """As in the file."""
        layers = [
            asdict(layer) | {"alpha": _shortest(layer.alpha), "beta": _shortest(layer.beta)}
            for layer in self.layers
        ]
        return {"format": _FORMAT, "version": _VERSION, "mode": self.mode, "layers": layers}

    @staticmethod
    def from_dict(data: Any, source: str) -> Calibration:
        """From what `to_dict` gives; ValueError that begins with `source` where it is not that."""
        try:
            _expect_fields(data, ("format", "version", "mode", "layers"), "a calibration")
            if (data["format"], data["version"]) != (_FORMAT, _VERSION):
                raise ValueError(
                    f"format is {data['format']!r}, version {data['version']!r}: expected "
                    f"{_FORMAT!r}, version {_VERSION}"
                )
            if not isinstance(data["layers"], list):
                raise ValueError(f"layers is {data['layers']!r}: expected an array")
            return Calibration(data["mode"], tuple(_layer_from(each) for each in data["layers"]))
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON file, complete or not at all."""
        with whole_file(path) as part:
            part.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """Reads the JSON file that `save` or `lln calibrate` wrote.

        Raises:
            ValueError: The file is something else; the text says what is wrong with it.
            OSError: It cannot be read.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: not valid JSON: {error}") from None
        return Calibration.from_dict(data, os.fspath(path))


def _shortest(numbers: tuple[float, ...]) -> list[float]:
    # Nine digits come back as the same float32.
    return [float(f"{x:.9g}") for x in numbers]


def _is_number(x: Any, kind: Any) -> bool:
    return isinstance(x, kind) and not isinstance(x, bool)


def _expect_fields(data: Any, names: tuple[str, ...], what: str) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{what} is {type(data).__name__}: expected an object")
    if set(data) != set(names):
        raise ValueError(f"{what} has the fields {sorted(data)}: expected {sorted(names)}")


def _layer_from(data: Any) -> CalibratedLayer:
    _expect_fields(data, ("name", "dim", "tokens", "alpha", "beta"), "a layer")
    name = data["name"]
    if not isinstance(name, str) or not _is_number(data["tokens"], (int, float)):
        raise ValueError(f"name is {name!r}, tokens {data['tokens']!r}: expected text and a number")
    scales = []
    for side in ("alpha", "beta"):
        numbers = data[side]
        if not isinstance(numbers, list) or not all(_is_number(x, (int, float)) for x in numbers):
            raise ValueError(f"layer {name!r}: {side} is {numbers!r}: expected numbers")
        scales.append(tuple(torch.tensor(numbers, dtype=torch.float32).tolist()))
    return CalibratedLayer(name, data["dim"], data["tokens"], scales[0], scales[1])


def _check_heads(layer: CalibratedLayer, module: nn.Module) -> None:
    config = getattr(module, "config", None)
    if isinstance(module, LLNAttention):
        heads, heads_k = module.num_heads, module.num_kv_heads
    elif config is not None:
        # The rule by which transformers repeats key heads.
        heads = config.num_attention_heads
        heads_k = heads // getattr(module, "num_key_value_groups", 1)
    else:
        raise ValueError(
            f"layer {layer.name!r} is a {type(module).__name__}: expected an attention module of "
            "lln_attention.nn or of a model of transformers; others can give alpha and beta of "
            "Calibration.layer to lln_attention.attention"
        )
    if (len(layer.alpha), len(layer.beta)) != (heads, heads_k):
        raise ValueError(
            f"layer {layer.name!r}: the calibration has {len(layer.alpha)} alpha and "
            f"{len(layer.beta)} beta, the module {heads} heads and {heads_k} key heads: calibrate "
            "the model that it is to be applied to"
        )


def _find(name: str, modules: dict[str, nn.Module]) -> nn.Module:
    """The module of a layer, also where one of the two models is a part of the other."""
    if name in modules:
        return modules[name]
    alike = [
        own for own in modules if own and (own.endswith(f".{name}") or name.endswith(f".{own}"))
    ]
    if not alike:
        raise ValueError(
            f"the model has no module {name!r} for this layer of the calibration: calibrate the "
            "model that it is to be applied to"
        )
    longest = max(len(own) for own in alike)
    best = [own for own in alike if len(own) == longest]
    if len(best) > 1:
        raise ValueError(f"layer {name!r} of the calibration could be {' or '.join(best)}")
    return modules[best[0]]
