"""Error families under one root, distinguished by the action that a caller should take.

A message states the expected value, the value found, its place and the next action, in this order if
possible.
"""

from __future__ import annotations


class FreshetError(Exception):
    """Root of the errors that callers of freshet see.

    `HttpError` and errors that do not leave their module are not below it.
    """


class ConfigError(FreshetError):
    """A spec, a setting or a command line is invalid. Correct it and start again."""

    def __init__(self, where: str, key: str, found: object, expected: str, hint: str = "") -> None:
        self.where, self.key, self.found, self.expected, self.hint = where, key, found, expected, hint
        lines = [f"{where}: {key} = {found!r}" if key else f"{where}: {found}", f"  expected {expected}"]
        if hint:
            lines.append(f"  {hint}")
        super().__init__("\n".join(lines))


class BadInput(FreshetError):
    """Bytes or values from outside are invalid. Refuse the one event, record or request, and continue."""


class TooLarge(BadInput):
    """A message exceeds a size limit. Send it in smaller pieces."""


class Unavailable(FreshetError):
    """A component cannot be reached or is not ready. The outcome may be unknown; a retry is safe."""


class Overloaded(Unavailable):
    """A bounded queue is full. Try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Fenced(FreshetError):
    """Another owner has a higher fence. Stop using the resource; do not retry."""


class Refused(FreshetError):
    """A push or batch does not continue the applied offsets. Rewind to `applied` and continue (PROTOCOL 4 and
    6)."""

    def __init__(self, message: str, applied: dict[int, int]) -> None:
        super().__init__(message)
        self.applied = applied


class DataLost(FreshetError):
    """The log lacks records that must be replayed, or is another log. Stop; an operator must decide."""


class Corrupt(FreshetError):
    """Stored bytes fail their checks (magic, version, length, checksum). The message names their place; they
    are never skipped silently."""


class Mismatch(FreshetError):
    """A store, a version or a log belongs to another spec, or to an earlier log of the same name."""


def first_line(error: Exception) -> str:
    """Return the first line of an error, for health pages; with its type unless it is a FreshetError."""
    text = str(error).split("\n")[0]
    return text if isinstance(error, FreshetError) else f"{type(error).__name__}: {text}"
