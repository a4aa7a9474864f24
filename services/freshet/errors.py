"""The error families: one root, branches by what the caller should do about it.

A message says what was expected, what was found, where, and what to do next, in that order where it can.
"""

from __future__ import annotations


class FreshetError(Exception):
    """Root of what a caller of freshet is told. Not below it: answers of HTTP on their way (`HttpError`), and
    what a module tells itself."""


class ConfigError(FreshetError):
    """A spec, a setting or a command line cannot be accepted. Mend it and start again."""

    def __init__(self, where: str, key: str, found: object, expected: str, hint: str = "") -> None:
        self.where, self.key, self.found, self.expected, self.hint = where, key, found, expected, hint
        lines = [f"{where}: {key} = {found!r}" if key else f"{where}: {found}", f"  expected {expected}"]
        if hint:
            lines.append(f"  {hint}")
        super().__init__("\n".join(lines))


class BadInput(FreshetError):
    """Bytes or values from outside cannot be understood. The one event, record or request is refused; go
    on."""


class TooLarge(BadInput):
    """More than is taken at once. Send it in smaller pieces."""


class Unavailable(FreshetError):
    """A part cannot be reached or is not ready; nothing is known to have been done. Trying again is safe."""


class Overloaded(Unavailable):
    """A bounded queue is full. Try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Fenced(FreshetError):
    """Somebody with a higher fence owns this now. Stop using it; do not retry."""


class Refused(FreshetError):
    """A push or batch does not continue what was applied. Ask for `applied`, rewind and go on (PROTOCOL 4,
    6)."""

    def __init__(self, message: str, applied: dict[int, int]) -> None:
        super().__init__(message)
        self.applied = applied


class DataLost(FreshetError):
    """What must be replayed is no longer in the log, or the log is another one. Stops the model; an operator
    decides."""


class Corrupt(FreshetError):
    """Stored bytes fail their checks (magic, version, length, checksum). Named by where they lie; never
    skipped silently."""


class Mismatch(FreshetError):
    """A store, a version or a log belongs to another spec or another life of the log."""
