"""Small files of people's: specs and schemas."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MOST_BYTES", "read_small"]

MOST_BYTES = 4 << 20
"""The largest specs that we know of have a few hundred KiB; what is larger is something else, or endless."""


def read_small(path: Path) -> bytes:
    """The bytes of a file. Raises OSError, also if it is larger than a spec or a schema can be."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(0, f"more than {MOST_BYTES >> 20} MiB")
    return content
