"""Who has changed what, from where, when, and how it went: a line of JSON each, on disk before it is told.

The file is appended to and never shortened by us. An action is refused where its line could not be written,
so that none goes unrecorded. Several processes may write to one file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import orjson
import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import FreshetError, Unavailable

__all__ = ["Actor", "Audit", "AuditLine", "os_user", "read_audit"]

log = structlog.get_logger(__name__)

REFUSALS_S = 1.0
"""Refused requests are written no more often than that, and else counted into the next line: whoever is shut
out must not fill the disk."""

LONGEST = 1_000
"""Characters of a reason."""

MOST_BYTES = 256 << 20
"""Of what `freshet audit` reads, from the end."""

Outcome = Literal["done", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Actor:
    """Who does something."""

    who: str  # token:NAME, or user:NAME of the operating system; "" if it is not known
    at: str  # the address that asked, or the host on which a command ran


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One action."""

    time: str  # ISO 8601, UTC
    action: str  # promote, rollback, token new, token drop; operate: what was refused is not known
    who: str
    at: str
    what: Mapping[str, Any]
    outcome: str  # done, refused, failed
    why: str  # "" if it was done


def os_user() -> Actor:
    """Whoever runs this process, on this host. By the user id: variables of the environment are anybody's."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    return Actor(f"user:{name}", socket.gethostname())


class Audit:
    """Writes to one file. `refused` is for one thread; all else for any."""

    def __init__(self, path: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path, self._clock = path, clock
        self._next_refusal, self._uncounted = clock.monotonic(), 0

    @contextlib.contextmanager
    def of(self, action: str, actor: Actor, what: dict[str, Any]) -> Iterator[None]:
        """Record what the block does: as done, or as failed with the error that it raises.

        `what` may be filled by the block. Raises Unavailable, before the block, if nothing can be written.
        """
        try:
            handle = self._open()
        except OSError as error:
            raise Unavailable(
                f"{self._path}: what is done must be written there first, and cannot be ({error.strerror}); "
                "see that it can be written to, or name another with FRESHET_COMMON_AUDIT_FILE"
            ) from error
        try:
            try:
                yield
            except BaseException as error:
                self._write(handle, action, actor, what, "failed", str(error) or type(error).__name__)
                raise
            self._write(handle, action, actor, what, "done", "")
        finally:
            os.close(handle)

    def refused(self, action: str, actor: Actor, why: str) -> None:
        """Record what somebody was not let do."""
        now = self._clock.monotonic()
        if now < self._next_refusal:
            self._uncounted += 1
            return
        self._next_refusal = now + REFUSALS_S
        what = {"also_refused": self._uncounted} if self._uncounted else {}
        self._uncounted = 0
        try:
            handle = self._open()
        except OSError as error:
            log.error("a line of the audit log could not be written", path=str(self._path), reason=str(error))
            return
        try:
            self._write(handle, action, actor, what, "refused", why)
        finally:
            os.close(handle)

    def on_refused(self, scope: str, name: str, peer: str, why: str) -> None:
        """As a `Guard` tells it."""
        self.refused(scope, Actor(f"token:{name}" if name else "", peer), why)

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _write(
        self, handle: int, action: str, actor: Actor, what: Mapping[str, Any], outcome: Outcome, why: str
    ) -> None:
        line = {
            "v": 1,
            "time": _text(self._clock.now_ms()),
            "action": action,
            "who": actor.who,
            "at": actor.at,
            "what": what,
            "outcome": outcome,
            "why": why.splitlines()[0][:LONGEST] if why else "",
        }
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            _append(handle, orjson.dumps(line, default=str) + b"\n")
            os.fsync(handle)
        except OSError as error:  # it is done, or was refused, all the same
            log.error("a line of the audit log could not be written", path=str(self._path), reason=str(error))


def _append(handle: int, line: bytes) -> None:
    """After a line that was cut off by a crash or a full disk, a new one is begun."""
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":
        line = b"\n" + line
    while line:
        line = line[os.write(handle, line) :]


def _text(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_audit(path: Path, most: int) -> tuple[list[AuditLine], int]:
    """The newest lines, oldest first, and how many of what was read cannot be understood.

    Raises FreshetError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MOST_BYTES))
            content = file.read()
    except OSError as error:
        raise FreshetError(f"{path}: {error.strerror}") from error
    lines = content.splitlines()[1 if size > MOST_BYTES else 0 :]
    found = [_line(line) for line in lines]
    return [line for line in found if line is not None][-most:], found.count(None)


def _line(line: bytes) -> AuditLine | None:
    try:
        said = orjson.loads(line)
        texts = [said[key] for key in ("time", "action", "who", "at", "outcome", "why")]
        if not all(isinstance(text, str) for text in texts) or not isinstance(said["what"], dict):
            return None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    time, action, who, at, outcome, why = texts
    return AuditLine(time, action, who, at, said["what"], outcome, why)
