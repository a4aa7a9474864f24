"""What a process said last before it ended: the error at the end of its log."""

from __future__ import annotations

from pathlib import Path

__all__ = ["last_words"]

READ_BYTES = 8 << 10
"""Read from the log's end: an error takes a few hundred, a long traceback before it is not wanted."""

SAID_CHARS = 600


def last_words(path: Path, start: int = 0) -> str:
    """The last message of a log from byte `start` on that is no line of structured log: an error with what
    it says to do, of a traceback its last line. Empty if there is none, or the log cannot be read."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            if end - READ_BYTES > start:
                file.seek(end - READ_BYTES)
                file.readline()  # the rest of a line that began before
            else:
                file.seek(start)
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith("{")]
    heads = [i for i, line in enumerate(lines) if not line[0].isspace()]
    said = "\n".join(lines[heads[-1] :])[:SAID_CHARS] if heads else ""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in said)  # terminals show it: no escapes
