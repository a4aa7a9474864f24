"""Who has changed what, from where, when, and how it went: lines of JSON, on disk before it is told.

An action is two lines of one id: that it has begun, on disk before anything is done, and how it went. Where
the first cannot be written, nothing is done; where the second is missing, the reader says that it is not
known whether it was. The file is appended to and never shortened by us. Several processes may write to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import secrets
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

import orjson
import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import FreshetError, Unavailable
from freshet.observability.audit_queue import Refusals

__all__ = ["OUTCOMES", "Actor", "Audit", "AuditLine", "Told", "os_user", "read_audit"]

log = structlog.get_logger(__name__)

LONGEST = 1_000
"""Characters of a reason."""

READ_BYTES = 1 << 20
"""At once, from the file's end backwards."""

LONGEST_LINE = 1 << 20
"""Bytes; what is longer is none of ours."""

Outcome = Literal["begun", "done", "refused", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("begun", "done", "refused", "failed")

NOT_KNOWN = "whether it was done is not known, or it is being done"


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
    outcome: str  # done, refused, failed; begun: how it went is not there
    why: str  # "" if it was done


def os_user() -> Actor:
    """Whoever runs this process, on this host. By the user id: variables of the environment are anybody's."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    return Actor(f"user:{name}", socket.gethostname())


@dataclass(frozen=True, slots=True)
class _Asked:
    id: str  # of its two lines
    action: str
    actor: Actor
    what: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Refusal:
    action: str
    actor: Actor
    why: str


class Audit:
    """Writes to one file. For any thread."""

    def __init__(self, path: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path, self._clock = path, clock
        self._refusals = Refusals(self._write_refusal)

    @contextlib.contextmanager
    def of(self, action: str, actor: Actor, what: dict[str, Any]) -> Iterator[None]:
        """Record what the block does: as done, or as failed with the error that it raises.

        `what` may be filled by the block. Raises Unavailable, before the block, if it is not on disk that it
        has begun. A disk that is full only then is logged, and the line stays without an outcome.
        """
        asked = _Asked(secrets.token_hex(8), action, actor, what)
        with contextlib.ExitStack() as opened:
            try:
                handle = self._open()
                opened.callback(os.close, handle)
                self._write(handle, asked, "begun", "")
            except OSError as error:
                raise Unavailable(
                    f"{self._path}: what is done must be written there first, and cannot be "
                    f"({error.strerror}); nothing was done. See that it can be written to, or name another "
                    "with FRESHET_COMMON_AUDIT_FILE"
                ) from error
            try:
                yield
            except BaseException as error:
                self._end(handle, asked, "failed", str(error) or type(error).__name__)
                raise
            self._end(handle, asked, "done", "")

    def refused(self, action: str, actor: Actor, why: str) -> None:
        """Record what somebody was not let do: soon, by a thread, in fewer lines the longer the same goes on.

        Never blocks."""
        self._refusals.add(_Refusal(action, actor, why), (action, actor.who, why))

    def on_refused(self, scope: str, name: str, peer: str, why: str) -> None:
        """Called by an `Authenticator`."""
        self.refused(scope, Actor(f"token:{name}" if name else "", peer), why)

    def close(self) -> None:
        """Write the refusals that are left; none may come after it. May block on the disk. Idempotent."""
        self._refusals.close()

    def _write_refusal(self, refusal: _Refusal, more: int) -> bool:
        what = {"also_refused": more} if more else {}
        try:
            handle = self._open()
            try:
                asked = _Asked(secrets.token_hex(8), refusal.action, refusal.actor, what)
                self._write(handle, asked, "refused", refusal.why)
            finally:
                os.close(handle)
        except OSError as error:
            self._not_written(error)
            return False
        return True

    def _end(self, handle: int, asked: _Asked, outcome: Outcome, why: str) -> None:
        try:
            self._write(handle, asked, outcome, why)
        except OSError as error:  # it is done, or has failed, all the same
            self._not_written(error)

    def _not_written(self, error: OSError) -> None:
        log.error("a line of the audit log could not be written", path=str(self._path), reason=str(error))

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _write(self, handle: int, asked: _Asked, outcome: Outcome, why: str) -> None:
        """Append a line, and have it on disk. Raises OSError: it may be there in part, or not be kept."""
        line = {
            "v": 1,
            "id": asked.id,
            "time": _text(self._clock.now_ms()),
            "action": asked.action,
            "who": asked.actor.who,
            "at": asked.actor.at,
            "what": asked.what,
            "outcome": outcome,
            "why": why.splitlines()[0][:LONGEST] if why else "",
        }
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            _append(handle, orjson.dumps(line, default=str) + b"\n")
            os.fsync(handle)
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def _append(handle: int, line: bytes) -> None:
    """After a line that was cut off by a crash or a full disk, a new one is begun."""
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":
        line = b"\n" + line
    while line:
        line = line[os.write(handle, line) :]


def _text(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Told:
    """What was read of an audit log."""

    lines: list[AuditLine]  # oldest first
    damaged: int  # lines among those read that cannot be understood
    unread_bytes: int  # of older lines, which were not looked at


def read_audit(path: Path, most: int, outcomes: Collection[str] = OUTCOMES) -> Told:
    """The newest actions that ended in one of these ways, from a file of any length.

    It is read from its end backwards until there are enough. What has begun is left out where its outcome
    follows.

    Raises FreshetError: the file cannot be read.
    """
    found: list[AuditLine] = []
    ended: set[str] = set()  # ids whose beginning is not met yet
    damaged, unread = 0, 0
    try:
        with path.open("rb") as file:
            for before, line in _backwards(file):
                unread = before
                one = _line(line)
                if one is None:
                    damaged += 1
                    continue
                id_, said = one
                if said.outcome in ("done", "failed"):
                    ended.add(id_)
                if said.outcome == "begun" and id_ in ended:
                    ended.remove(id_)
                elif said.outcome in outcomes:
                    found.append(said)
                    if len(found) == most:
                        break
    except OSError as error:
        raise FreshetError(f"{path}: {error.strerror}") from error
    return Told(found[::-1], damaged, unread)


def _backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(bytes before it, line) from the last line to the first; of one that is too long, its beginning."""
    at, rest = file.seek(0, os.SEEK_END), b""  # `rest`: of the line that ends the next piece
    first = True
    while at:
        size = min(READ_BYTES, at)
        at = file.seek(at - size)
        lines = (file.read(size) + rest).split(b"\n")
        if first and not lines[-1]:
            lines.pop()  # behind the last line's end
        first = False
        before = at + sum(len(line) + 1 for line in lines)
        for line in reversed(lines[1:]):
            before -= len(line) + 1
            yield before, line
        rest = lines[0][:LONGEST_LINE]
        if not at:
            yield 0, rest


def _line(line: bytes) -> tuple[str, AuditLine] | None:
    """Its id, and what it says."""
    try:
        said = orjson.loads(line)
        keys = ("time", "action", "who", "at", "outcome", "why")
        texts = [said.get("id", ""), *(said[key] for key in keys)]  # the first lines had no id
        if not all(isinstance(text, str) for text in texts) or not isinstance(said["what"], dict):
            return None
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return None
    id_, time, action, who, at, outcome, why = texts
    if outcome == "begun":
        why = NOT_KNOWN
    return id_, AuditLine(time, action, who, at, said["what"], outcome, why)
