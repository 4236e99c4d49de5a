"""Files that are complete or not there: written beside their place and then renamed."""

# SPDX-License-Identifier: Apache-2.0
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The name to write to; takes the place of `path` where the block ends without an error."""
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
