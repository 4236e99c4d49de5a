"""The package as a whole: what importing it gives and needs."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import lln_attention

ROOT = Path(__file__).parents[2]


def run(program: str) -> str:
    """Prints of a program in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numpy_is_not_needed() -> None:
    """torch does without it, and so does this package."""
    run(
        "import sys; sys.modules['numpy'] = None\n"
        "import torch, lln_attention as lln\n"
        "x = torch.randn(1, 1, 20, 8)\n"
        "assert len(lln.analyze(x, x)) == 2\n"
        "state = lln.DecodeState(1, 1, 8)\n"
        "state.append(None, x, x)\n"
        "other = lln.DecodeState(1, 1, 8)\n"
        "other.load_bytes(state.to_bytes())\n"
        "assert other.tokens.item() == 20\n"
    )


def test_names_that_need_transformers_are_imported_when_asked_for() -> None:
    found = run(
        "import sys, lln_attention\n"
        "assert 'transformers' not in sys.modules\n"
        "lln_attention.hf.register()\n"
        "print(lln_attention.convert.__name__, callable(lln_attention.convert))\n"
    )
    assert found.split() == ["convert", "True"]
    found = run(
        "from lln_attention.convert import convert\n"
        "import lln_attention\n"
        "print(lln_attention.convert is convert, hasattr(lln_attention, 'other'))\n"
    )
    assert found.split() == ["True", "False"]


def test_version() -> None:
    """That of the library."""
    header = (ROOT / "include/lln/version.h").read_text(encoding="utf-8")
    version = re.search(r'LLN_VERSION "(.*)"', header)
    assert version is not None and version[1] == lln_attention.__version__


def test_licences_of_what_the_wheel_carries() -> None:
    """Every library beside that of the ops has its licence in the wheel."""
    try:
        files = [str(file) for file in metadata.files("lln-attention") or ()]
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed")
    licences = " ".join(file for file in files if ".dist-info/licenses/" in file)
    carried = {Path(file).name.split(".")[0] for file in files if re.search(r"/lib\w+\.so", file)}
    names = {"libfmt": "fmt.txt", "libhwy": "highway.txt"}
    assert carried and all(names[library] in licences for library in carried), (carried, licences)
