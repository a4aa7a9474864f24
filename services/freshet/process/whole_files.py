"""Files that are read by others while they are written: whole, or as they were before."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: Path, content: bytes) -> None:
    """Write a file, or leave what stood there if that fails. Raises OSError, and leaves nothing beside it."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        made.write_bytes(content)
        made.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)
        raise
