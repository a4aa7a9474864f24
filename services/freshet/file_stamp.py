"""Whether a file is still the one that was read."""

from __future__ import annotations

import os

__all__ = ["file_stamp"]


def file_stamp(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return values that change with a file's content, its replacement or a link's target; () without a file.

    Two writes of equal length within one tick of the file system's clock look alike.
    """
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
