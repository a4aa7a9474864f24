"""Claims on any event log: a thread reads `control`, sends heartbeats and notifies owners of lost claims."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.coordination.claim_rules import (
    Claim,
    ClaimBook,
    LaterFormat,
    Load,
    Plan,
    claim_record,
    claims_record,
    heartbeat_record,
    load_record,
    plan_record,
    read_record,
    release_record,
    releases_record,
    state_record,
)
from freshet.errors import DataLost, Fenced, FreshetError, Unavailable
from freshet.log import Bounds, EventLog, Reader
from freshet.types import Append, BytesColumn, Fence, TopicPartition

_log = structlog.get_logger(__name__)

LEASE_S = 3.0
"""Silence after which an owner is replaced: six heartbeats, so one slow write does not matter."""

HEARTBEAT_S = 0.5

_POLL_S = 0.1
"""Time between two looks for the log's end, which cost a request to the brokers each; the longest wait of one
poll, and so the largest delay of a heartbeat. Records that come meanwhile are applied at once."""

_POLLS = 16
"""Most polls of one step that is due to reach the end. With tens of owners a record comes within every wait,
so waiting polls alone would hardly ever reach it."""

_GAP_S = 0.2
"""Largest part of the time between two reads that counts as silence: a process that slept longer cannot know
whether the log was available. On a busy machine that polls later, leases only become longer."""

STATE_EVERY = 100_000
"""Records after which a summary is written, and the records before the former summary are trimmed, so that
readers may be so far behind: about 14 hours of one owner. A start reads up to twice as many, 0.4 s."""


class Lease:
    """A claim of this process, of one or several things; valid until `lost` is set or `release` is called."""

    def __init__(
        self, claims: Claims, owner: str, fence: Fence, replaced: Mapping[str, Fence | None]
    ) -> None:
        self._claims = claims
        self.owner, self.fence = owner, fence
        self.replaced = replaced  # {thing: fence of the claim before; None: there was none}
        self.things = frozenset(replaced)  # those still owned; each may be lost or released separately
        self.thing = _named(sorted(self.things))  # for messages
        self.lost = threading.Event()  # set when another owner has claimed one of them
        self._on_lost: list[Callable[[], None]] = []

    def check(self) -> None:
        """Raise Fenced if another owner has claimed a thing. Cheap, as it reads nothing.

        Raises the error that stopped the claims' thread, if there is one.
        """
        self._claims.check()
        if self.lost.is_set():
            raise Fenced(f"{self.thing} was claimed from {self.owner} (fence {self.fence}) by another owner")

    def on_lost(self, call: Callable[[], None]) -> None:
        """Add a callback for the loss of a thing; the claims' thread calls it, or this one if it is lost."""
        self._on_lost.append(call)
        if self.lost.is_set():
            call()

    def release(self, things: Iterable[str] | None = None) -> None:
        """Release the claim, or some of its things, so that the next owner need not wait. Idempotent; lost
        things are only forgotten. While the log is unavailable, the release is kept and written later."""
        self._claims._release(self, self.things if things is None else frozenset(things))

    def forget(self) -> None:
        """Stop its heartbeats: for a claim that is valid without a lease."""
        self._claims._forget(self)

    def _lose(self, things: frozenset[str]) -> None:
        self.things -= things
        self.lost.set()
        for call in self._on_lost:
            call()


class Claims:
    """Claims of one process on a one-partition topic, which must exist. Thread-safe."""

    def __init__(
        self,
        log: EventLog,
        topic: str,
        clock: Clock = SYSTEM_CLOCK,
        *,
        lease_s: float = LEASE_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._eventlog, self._partition, self._clock = log, TopicPartition(topic, 0), clock
        self._heartbeat_s = heartbeat_s
        self._book = ClaimBook(lease_s, longest_gap_s=min(heartbeat_s, _GAP_S))
        self._writer, self._reader = log.writer(), log.reader()
        self._leases: dict[Fence, Lease] = {}
        self._unwritten: list[bytes] = []  # releases that are not known to be written
        self._changed = threading.Condition()  # guards the book, `_leases` and the fields below
        self._next = 0  # offset up to which the book has applied the log
        self._covered = 0  # offset below which the newest summary has all claims
        self._beat_due = clock.monotonic()
        self._end_due = 0.0  # next look for the log's end; only the thread uses it
        self._error: FreshetError | None = None
        self._closing = False
        self._read_from_start()
        self._thread = threading.Thread(target=self._run, name=f"claims {topic}", daemon=True)
        self._thread.start()

    def acquire(self, thing: str, owner: str, deadline: float, stop: threading.Event | None = None) -> Lease:
        """Claim `thing` as soon as it is free, at the latest at `deadline`, an instant of the clock's
        `monotonic`.

        Raises:
            Unavailable: another owner, which the message names, holds it until the deadline or until `stop`
                is set.
        """
        return self.acquire_all([thing], owner, deadline, stop)

    def acquire_all(
        self, things: Sequence[str], owner: str, deadline: float, stop: threading.Event | None = None
    ) -> Lease:
        """Claim several things with one record and one fence, as soon as all of them are free.

        Raises:
            Unavailable: as `acquire`.
            ValueError: `things` is empty.
        """
        if not things:
            raise ValueError("a claim names at least one thing")
        while True:
            with self._changed:
                self._refuse_unknown_claims()
                for thing in things:
                    self._wait_until_claimable(thing, deadline, stop)
                if not all(self._book.claimable(thing) for thing in things):
                    continue  # one was claimed during the wait for another
                claims = {thing: self._book.claim(thing) for thing in things}
            replaces = {thing: claim.fence if claim else None for thing, claim in claims.items()}
            one = len(things) == 1
            record = (
                claim_record(things[0], owner, replaces[things[0]]) if one else claims_record(owner, replaces)
            )
            fence = Fence(self._append(record))
            with self._changed:
                while self._next <= fence:
                    self._wait(deadline, f"the claim of {_named(things)} could not be read back")
                if self._is_mine(fence, things):
                    self._leases[fence] = lease = Lease(self, owner, fence, replaces)
                    self._beat_due = self._clock.monotonic()
                    return lease

    def replace(self, thing: str, owner: str, former: Fence | None, deadline: float) -> Lease | None:
        """Claim `thing` in place of the claim with the fence `former` (None: there was none), even if its
        lease runs: for callers that decide by other rules. Returns None if another claim came first. A former
        claim of this process is forgotten, not lost.

        Raises:
            Unavailable: the record could not be read back before the deadline.
        """
        with self._changed:
            self._refuse_unknown_claims()
            renewed = self._leases.pop(former, None) if former is not None else None
        try:
            fence = Fence(self._append(claim_record(thing, owner, former)))
            with self._changed:
                while self._next <= fence:
                    self._wait(deadline, f"the claim of {thing} could not be read back")
                if not self._is_mine(fence, [thing]):
                    return None
                renewed = None
                self._leases[fence] = lease = Lease(self, owner, fence, {thing: former})
                self._beat_due = self._clock.monotonic()
                return lease
        finally:
            if renewed is not None:  # the thread finds out whether it is still valid
                with self._changed:
                    self._leases[renewed.fence] = renewed

    def available(self, things: Iterable[str]) -> list[str]:
        """Return the things that may be claimed now."""
        with self._changed:
            return [thing for thing in things if self._book.claimable(thing)]

    def alive(self, prefix: str) -> list[Claim]:
        """Return living claims of things with this prefix, by fence: the first is the leader's."""
        with self._changed:
            claims = [
                c for w, c in self._book.claims().items() if w.startswith(prefix) and self._book.alive(w)
            ]
        return sorted(claims, key=lambda claim: claim.fence)

    def plan(self) -> Plan | None:
        """Return the newest plan."""
        with self._changed:
            return self._book.plan

    def advise(self, plan: Plan) -> None:
        """Write a plan. Raises Unavailable if the log is."""
        self._append(plan_record(plan))

    def loads(self) -> Mapping[str, Load]:
        """Return {membership lease: the shard's newest load}."""
        with self._changed:
            return dict(self._book.loads)

    def report_load(self, load: Load) -> None:
        """Write this shard's load. Raises Unavailable if the log is."""
        self._append(load_record(load))

    @property
    def read_upto(self) -> int:
        """Offset up to which the log has been read."""
        return self._next

    @property
    def changes(self) -> int:
        """Number that increases with every valid claim and release; cheap."""
        return self._book.changes

    def owners(self) -> Mapping[str, Claim]:
        """Return the newest claim of each thing, released ones included."""
        with self._changed:
            return self._book.claims()

    def living(self) -> Mapping[str, Claim]:
        """Return the claims with a running lease, as far as this process has read the log."""
        with self._changed:
            return self._book.living()

    def snapshot(self) -> tuple[Mapping[str, Claim], Mapping[str, Claim]]:
        """Return the newest claim of each thing, and the living claims, of one moment."""
        with self._changed:
            return self._book.claims(), self._book.living()

    def check(self) -> None:
        """Raise the error that has stopped the thread, if there is one: DataLost or Corrupt."""
        if self._error is not None:
            raise self._error

    def close(self, *, release: bool = True) -> None:
        """Release all claims, unless `release` is False, and stop. Idempotent."""
        for lease in list(self._leases.values()) if release else ():
            lease.release()  # if that cannot be written, the lease runs out
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._reader.close()
        self._writer.close()

    # Called by the owner

    def _wait_until_claimable(self, thing: str, deadline: float, stop: threading.Event | None) -> None:
        while not self._book.claimable(thing):
            claim = self._book.claim(thing)
            owner = f"{claim.owner} (fence {claim.fence})" if claim else "no owner"
            why = f"{thing} is held by {owner}, silent for {self._book.silent_s(thing):.1f} s"
            if stop is not None and stop.is_set():
                raise Unavailable(f"stopped while {why}")
            self._wait(deadline, f"{why}; it is free a lease after its last heartbeat")

    def _wait(self, deadline: float, message: str) -> None:
        self.check()
        if self._closing:
            raise Unavailable("the claims were closed")
        if self._clock.monotonic() >= deadline:
            raise Unavailable(message)
        self._changed.wait(_POLL_S)

    def _is_mine(self, fence: Fence, things: Iterable[str]) -> bool:
        claims = [self._book.claim(thing) for thing in things]
        return all(claim is not None and claim.fence == fence for claim in claims)

    def _release(self, lease: Lease, things: frozenset[str]) -> None:
        with self._changed:
            given = sorted(things & lease.things) if lease.fence in self._leases else []
            lease.things -= things
            if not lease.things:
                self._leases.pop(lease.fence, None)
        if not given:
            return
        one = len(given) == 1
        record = release_record(given[0], lease.fence) if one else releases_record(given, lease.fence)
        try:
            self._append(record)
        except Unavailable as error:
            # Heartbeats for the rest of the claim would keep these things claimed forever.
            _log.warning("a release is written once the log is back", what=_named(given), reason=str(error))
            with self._changed:
                self._unwritten.append(record)

    def _forget(self, lease: Lease) -> None:
        with self._changed:
            self._leases.pop(lease.fence, None)

    def _append(self, record: bytes) -> int:
        return self._writer.append([Append(self._partition.topic, 0, BytesColumn.of([record]))])[0]

    def _refuse_unknown_claims(self) -> None:
        """Raise Unavailable if a record may be a claim that this release cannot read."""
        if self._book.later is not None:
            raise Unavailable(f"nothing is claimed: {self._book.later}")

    def _parsed(self, offset: int, value: bytes) -> dict[str, Any] | None:
        try:
            return read_record(value, f"{self._partition} at offset {offset}")
        except LaterFormat as error:
            if self._book.later is None:
                _log.error(
                    "a record of control is of a later release, so this process claims nothing from now on",
                    reason=str(error),
                )
            self._book.later = error
            return None

    # Called by the thread

    def _run(self) -> None:
        while not self._closing:
            try:
                self._step(self._reader)
            except Unavailable as error:
                with self._changed:
                    self._book.suspend()
                    self._changed.wait(_POLL_S)
                _log.warning("the control topic cannot be reached", reason=str(error))
            except Exception as error:
                _log.error("claims stopped", reason=str(error))
                with self._changed:
                    self._error = error if isinstance(error, FreshetError) else FreshetError(repr(error))
                    lost = list(self._leases.values())
                    self._leases.clear()
                    self._changed.notify_all()
                for lease in lost:  # they get no more heartbeats, and their loss would not be noticed
                    lease._lose(lease.things)
                return

    def _read(self, reader: Reader) -> bool:
        """Apply new records. Returns whether the log was read to its end."""
        wait_s = max(0.0, self._end_due - self._clock.monotonic())
        for _ in range(_POLLS):
            found = reader.poll(10_000, wait_s)
            if not found:
                self._end_due = self._clock.monotonic() + _POLL_S
                return True
            with self._changed:
                for _, records in found:
                    for offset, value in zip(records.offsets.tolist(), records.values, strict=True):
                        record = self._parsed(offset, value)
                        if record is not None:
                            self._apply(offset, record)
                    self._next = records.next_offset
            if wait_s > 0:
                break
        return False

    def _step(self, reader: Reader) -> None:
        is_at_end = self._read(reader)
        lost: list[tuple[Lease, frozenset[str]]] = []
        with self._changed:
            if is_at_end:
                self._book.observe(self._clock.monotonic())
            for fence, lease in list(self._leases.items()):
                gone = frozenset(thing for thing in lease.things if not self._is_mine(fence, [thing]))
                if gone:
                    lost.append((lease, gone))
                if gone == lease.things:
                    del self._leases[fence]
            fences = list(self._leases)
            due = bool(fences) and self._clock.monotonic() >= self._beat_due
            if due:
                self._beat_due = self._clock.monotonic() + self._heartbeat_s
            self._changed.notify_all()
        for lease, gone in lost:
            lease._lose(gone)
        self._write_releases()
        if due:
            self._append(heartbeat_record(fences))
            self._summarise()

    def _write_releases(self) -> None:
        """Write releases that failed before; a second record of the same release has no effect."""
        while self._unwritten:
            self._append(self._unwritten[0])
            with self._changed:
                self._unwritten.pop(0)

    def _apply(self, offset: int, record: Mapping[str, Any]) -> None:
        if record["kind"] == "state" and record["upto"] <= offset:
            self._covered = max(self._covered, record["upto"])
        self._book.apply(offset, record)

    def _summarise(self) -> None:
        if self._next - self._covered < STATE_EVERY:
            return
        with self._changed:
            upto, claims, plan = self._next, list(self._book.claims().values()), self._book.plan
        self._append(state_record(upto, claims, plan))
        former, self._covered = self._covered, upto
        self._eventlog.trim(self._partition, former)

    def _read_from_start(self) -> None:
        """Read the whole log. A trimmed log has a `state` record, of its start or later, after its start."""
        while True:
            bounds = self._eventlog.bounds(self._partition)
            try:
                records = self._records(bounds)
                break
            except DataLost:  # another process may have trimmed the log since
                if self._eventlog.bounds(self._partition).start == bounds.start:
                    raise
        first = bounds.start
        if bounds.start > 0:
            states = (r for at, r in records if r["kind"] == "state" and bounds.start <= r["upto"] <= at)
            state = next(states, None)
            if state is None:
                raise DataLost(f"{self._partition}: the log starts at {bounds.start}, without a state")
            self._book.restore(state)
            first = state["upto"]
        for offset, record in records:
            if offset >= first:
                self._apply(offset, record)

    def _records(self, bounds: Bounds) -> list[tuple[int, dict[str, Any]]]:
        self._reader.assign({self._partition: bounds.start})
        self._next = self._covered = bounds.start
        records = []
        while self._next < bounds.end:
            for _, found in self._reader.poll(100_000, LEASE_S):
                for offset, value in zip(found.offsets.tolist(), found.values, strict=True):
                    record = self._parsed(offset, value)
                    if record is not None:
                        records.append((offset, record))
                self._next = found.next_offset
        return records


def _named(things: Sequence[str]) -> str:
    return things[0] if len(things) == 1 else f"{things[0]} and {len(things) - 1} more"
