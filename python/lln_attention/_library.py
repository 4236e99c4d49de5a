"""The compiled ops: finding the library, loading it, and the types of its errors.

Importing never compiles anything. The library registers its ops as ``torch.ops.lln``; it is loaded
once, when the package is imported.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import torch

_NAME = "lln_torch.so"
_ERRORS: dict[str, type[Exception]] = {
    "invalid_argument": ValueError,
    "unsupported": NotImplementedError,
    "out_of_memory": MemoryError,
}


def load() -> None:
    """Loads the ops beside this file.

    Raises:
        ImportError: there is no library, or torch cannot load it; says how to build it.
    """
    path = Path(__file__).with_name(_NAME)
    if not path.exists():
        raise ImportError(
            f"lln_attention has no compiled library: {path} does not exist. Build it with "
            "`pip install .` in the root of the source tree, or, with the torch that is installed, "
            "with `pip install --no-build-isolation .`"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"torch {torch.__version__} cannot load {path}: {error.__cause__ or error}. It needs "
            "torch >= 2.10; build it anew with `pip install --force-reinstall .` in the root of "
            "the source tree"
        ) from error


def python_error(error: RuntimeError) -> Exception:
    """The exception that belongs to an error of an op, which always arrives as a RuntimeError."""
    text = str(error)
    if "setup_context" in text:  # how torch says it of ops whose gradients Python registers
        return NotImplementedError(
            "LLN attention is not available inside torch.func.grad, vjp and other transforms of "
            "torch.func: use torch.autograd.grad or backward()"
        )
    head, found, rest = text.partition(": ")
    if not found or not head.startswith("lln "):
        return error
    kind = _ERRORS.get(head.removeprefix("lln "), RuntimeError)
    # torch adds where in C++ it was thrown; the first line is the core's.
    return kind(rest.split("\nException raised from", 1)[0])
