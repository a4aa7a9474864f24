"""The audit trail: lines of JSON with the actor, action, place, time and outcome of changes by operators.

An action has two lines with one id: its beginning, which is on disk before anything is done, and its outcome.
If the first cannot be written, nothing is done; if the second is missing, the reader reports that the outcome
is not known. The file is only appended to. Several processes may write to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal, TypeVar

import orjson
import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import FreshetError, Unavailable

log = structlog.get_logger(__name__)

LONGEST = 1_000
"""Characters of a reason that are kept."""

READ_BYTES = 1 << 20
"""Size of one read, from the file's end backwards."""

LONGEST_LINE = 1 << 20
"""Bytes; a longer line was not written here."""

Outcome = Literal["begun", "done", "refused", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("begun", "done", "refused", "failed")

NOT_KNOWN = "whether it was done is not known, or it is being done"


@dataclass(frozen=True, slots=True)
class Actor:
    """The person or program that acts."""

    who: str  # token:NAME, or user:NAME of the operating system; "" if it is not known
    at: str  # address of the client, or the host on which a command ran


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One action."""

    time: str  # ISO 8601, UTC
    action: str  # promote, rollback, token new, token drop; operate: a refused action that is not known
    who: str
    at: str
    what: Mapping[str, Any]
    outcome: str  # done, refused, failed; begun: the outcome is missing
    why: str  # "" if it was done


def os_user() -> Actor:
    """Return the user of this process and this host; by the user id, as any user can set the environment."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    return Actor(f"user:{name}", socket.gethostname())


@dataclass(frozen=True, slots=True)
class _Action:
    id: str  # of its two lines
    action: str
    actor: Actor
    what: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Refusal:
    action: str
    actor: Actor
    why: str


PAUSE_S = 1.0
"""Pause between the first two lines of a kind. Refusals during it are counted into the line after it; while
refusals continue, each pause is twice as long as the one before."""

LONGEST_PAUSES = 60
"""The longest pause, in first pauses: a flood of a day is 1,445 lines of a kind."""

MOST_KINDS = 1_000
"""Kinds that are counted separately. If as many wait for a disk that fails, further kinds are counted
together, and the newest refusal stands for all."""

_OTHERS = object()

CLOSE_S = 10.0
"""Longest wait for the last lines at the close, as the disk may hang."""

T = TypeVar("T")


class _Kind(Generic[T]):
    """Refusals of one kind."""

    def __init__(self, pause_s: float) -> None:
        self.newest: T | None = None
        self.count = 0  # refusals that are not written
        self.added = False  # a refusal came since the last attempt to write
        self.is_tried = False  # a write is under way; if it fails, its count is added again
        self.next_s = float("-inf")  # earliest time of the next line
        self.pause_s = pause_s


class Refusals(Generic[T]):
    """Refusals on their way from an event loop to the disk: written by a thread, in ever fewer lines.

    Clients that are refused must neither fill the disk nor delay the others. Each line is the newest refusal
    of its kind with the number of further ones; the first is written without delay.
    """

    def __init__(
        self,
        write: Callable[[T, int], bool],
        pause_s: float = PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the thread with the first refusal.

        Args:
            write: called on the thread with a refusal and the number of further ones that it stands for;
                returns False if they are not written and must be counted into the next line.
        """
        self._write, self._pause_s, self._clock = write, pause_s, clock
        self.changed = threading.Condition()  # notified of each refusal
        self._kinds: dict[Hashable, _Kind[T]] = {}
        self._all_wait = False  # MOST_KINDS kinds wait to be written
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(self, refusal: T, kind: Hashable = None) -> None:
        """Count a refusal. Never blocks on the disk."""
        with self.changed:
            if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
                kind = self._kind_to_count(kind)
            one = self._kinds.setdefault(kind, _Kind(self._pause_s))
            one.newest, one.count, one.added = refusal, one.count + 1, True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="refusals", daemon=True)
                self._thread.start()
            self.changed.notify_all()

    def _kind_to_count(self, kind: Hashable) -> Hashable:
        """Forget kinds that are written; return the kind as which a new one is counted."""
        if not self._all_wait:  # otherwise each new refusal would go through all kinds
            self._kinds = {name: one for name, one in self._kinds.items() if one.count or one.is_tried}
            self._all_wait = len(self._kinds) >= MOST_KINDS
        return _OTHERS if self._all_wait else kind

    def close(self) -> None:
        """Write the remaining refusals, and end the thread."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            with self.changed:
                taken = self._next_lines()
                last = self._closing
            for kind, newest, count in taken:
                written = self._write(newest, count - 1)
                with self.changed:
                    kind.is_tried = False
                    kind.count += 0 if written else count
                    self._all_wait = self._all_wait and not written
            if last:
                return

    def _next_lines(self) -> list[tuple[_Kind[T], T, int]]:
        """Wait for refusals that may be written now, and return them; all remaining ones at the close."""
        while True:
            now = self._clock()
            taken = []
            for kind in self._kinds.values():
                if kind.newest is None or not kind.count:
                    continue
                if self._closing or (kind.added and kind.next_s <= now):
                    taken.append((kind, kind.newest, kind.count))
                    quiet = now - kind.next_s >= kind.pause_s
                    longest = LONGEST_PAUSES * self._pause_s
                    kind.pause_s = self._pause_s if quiet else min(2 * kind.pause_s, longest)
                    kind.next_s = now + kind.pause_s
                    kind.count, kind.added, kind.is_tried = 0, False, True
            if taken or self._closing:
                return taken
            waits = [kind.next_s - now for kind in self._kinds.values() if kind.added]
            self.changed.wait(min(waits) if waits else None)


class Audit:
    """Writes to one file. Thread-safe."""

    def __init__(self, path: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path, self._clock = path, clock
        self._refusals = Refusals(self._write_refusal)

    @contextlib.contextmanager
    def of(self, action: str, actor: Actor, what: dict[str, Any]) -> Iterator[None]:
        """Record the block's action as done, or as failed with the error that it raises.

        The block may add to `what`. Raises Unavailable, before the block, if its beginning cannot be written.
        If only the outcome cannot be written, that is logged, and the action stays without an outcome.
        """
        begun = _Action(secrets.token_hex(8), action, actor, what)
        with contextlib.ExitStack() as opened:
            try:
                handle = self._open()
                opened.callback(os.close, handle)
                self._write(handle, begun, "begun", "")
            except OSError as error:
                raise Unavailable(
                    f"{self._path}: an action must be written there first, and cannot be "
                    f"({error.strerror}); nothing was done. See that it can be written to, or name another "
                    "with FRESHET_COMMON_AUDIT_FILE"
                ) from error
            try:
                yield
            except BaseException as error:  # an interrupted action is recorded, too
                self._end(handle, begun, "failed", str(error) or type(error).__name__)
                raise
            self._end(handle, begun, "done", "")

    def refused(self, action: str, actor: Actor, why: str) -> None:
        """Record an action that was refused, by a thread; repeated ones in ever fewer lines. Never blocks."""
        self._refusals.add(_Refusal(action, actor, why), (action, actor.who, why))

    def on_refused(self, scope: str, name: str, peer: str, why: str) -> None:
        """Record a refusal of the `Authenticator`."""
        self.refused(scope, Actor(f"token:{name}" if name else "", peer), why)

    def close(self) -> None:
        """Write the remaining refusals; none may come afterwards. May block on the disk. Idempotent."""
        self._refusals.close()

    def _write_refusal(self, refusal: _Refusal, more: int) -> bool:
        what = {"also_refused": more} if more else {}
        try:
            handle = self._open()
            try:
                refused = _Action(secrets.token_hex(8), refusal.action, refusal.actor, what)
                self._write(handle, refused, "refused", refusal.why)
            finally:
                os.close(handle)
        except OSError as error:
            self._not_written(error)
            return False
        return True

    def _end(self, handle: int, action: _Action, outcome: Outcome, why: str) -> None:
        try:
            self._write(handle, action, outcome, why)
        except OSError as error:  # the action itself is over
            self._not_written(error)

    def _not_written(self, error: OSError) -> None:
        log.error("a line of the audit log could not be written", path=str(self._path), reason=str(error))

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _write(self, handle: int, action: _Action, outcome: Outcome, why: str) -> None:
        """Append a line and flush it to disk. Raises OSError; the line may then be there in part."""
        line = {
            "v": 1,
            "id": action.id,
            "time": _text(self._clock.now_ms()),
            "action": action.action,
            "who": action.actor.who,
            "at": action.actor.at,
            "what": action.what,
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
    """Append a line; begin a new one if a crash or a full disk left the last one incomplete."""
    size = os.fstat(handle).st_size
    if size and os.pread(handle, 1, size - 1) != b"\n":
        line = b"\n" + line
    while line:
        line = line[os.write(handle, line) :]


def _text(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class AuditTail:
    """The newest lines of an audit log."""

    lines: list[AuditLine]  # oldest first
    damaged: int  # lines among those read that cannot be parsed
    unread_bytes: int  # of older lines, which were not read


def read_audit(path: Path, most: int, outcomes: Collection[str] = OUTCOMES) -> AuditTail:
    """Return the newest actions with one of these outcomes, from a file of any length.

    The file is read from its end backwards until there are enough. The beginning of an action is left out if
    its outcome follows.

    Raises FreshetError if the file cannot be read.
    """
    found: list[AuditLine] = []
    ended: set[str] = set()  # ids of which the beginning was not read yet
    damaged, unread = 0, 0
    try:
        with path.open("rb") as file:
            for before, line in lines_backwards(file):
                unread = before
                one = _line(line)
                if one is None:
                    damaged += 1
                    continue
                id_, action = one
                if action.outcome in ("done", "failed"):
                    ended.add(id_)
                if action.outcome == "begun" and id_ in ended:
                    ended.remove(id_)
                elif action.outcome in outcomes:
                    found.append(action)
                    if len(found) == most:
                        break
    except OSError as error:
        raise FreshetError(f"{path}: {error.strerror}") from error
    return AuditTail(found[::-1], damaged, unread)


def lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (bytes before the line, line) from the last line to the first; the beginning of too long ones."""
    at, rest = file.seek(0, os.SEEK_END), b""  # `rest`: the line that ends the next piece
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
    """Parse a line; return its id and the action, or None."""
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
