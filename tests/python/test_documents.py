"""The Python programs in the documents run as they stand there."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _programs() -> list[tuple[str, str]]:
    found = []
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("python/*.md")]):
        text = path.read_text(encoding="utf-8")
        for block in FENCE.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            found.append((f"{path.relative_to(ROOT)}:{line}", block[1]))
    return found


@pytest.mark.parametrize(("place", "program"), _programs(), ids=lambda x: x.partition("\n")[0])
def test_program(place: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program, place, "exec"), {"__name__": "__main__"})
