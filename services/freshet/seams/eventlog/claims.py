"""Claims on any event log: a thread that reads `control`, sends heartbeats and tells owners what they
lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import DataLost, Fenced, FreshetError, Unavailable
from freshet.seams.eventlog import EventLog, Reader
from freshet.seams.eventlog.claimbook import (
    Claim,
    ClaimBook,
    claim_record,
    heartbeat_record,
    parse_record,
    release_record,
    state_record,
)
from freshet.types import Append, BytesColumn, Fence, TopicPartition

__all__ = ["HEARTBEAT_S", "LEASE_S", "Claims", "Held"]

_log = structlog.get_logger(__name__)

LEASE_S = 3.0
"""Silence after which an owner is replaced: six heartbeats, so that a slow disk or a long pause of one costs
nothing."""

HEARTBEAT_S = 0.5

_POLL_S = 0.05
"""Longest wait in one poll: a heartbeat is late by no more than this."""

_GAP_S = 0.2
"""Between two readings at most this counts as silence: who slept in between cannot know whether the log was
there. A busy machine that polls later than this only makes leases longer."""

_STATE_EVERY = 100_000
"""Records after which a summary is written and the rest trimmed; about 14 hours of one owner, 0.2 s to
read."""


class Held:
    """One claim that this process made. It is held until `lost` is set or `release` is called."""

    def __init__(self, claims: Claims, claim: Claim) -> None:
        self._claims = claims
        self.what, self.owner, self.fence = claim.what, claim.owner, claim.fence
        self.lost = threading.Event()
        self._on_lost: list[Callable[[], None]] = []

    def check(self) -> None:
        """Raise Fenced if somebody else has claimed it meanwhile; cheap, as it only looks at what was read.

        Raises what stopped the claims' thread, if that is why it is lost.
        """
        self._claims.check()
        if self.lost.is_set():
            raise Fenced(f"{self.what} was claimed from {self.owner} (fence {self.fence}) by another owner")

    def on_lost(self, call: Callable[[], None]) -> None:
        """Call this once, on the claims' thread, when the claim is lost; at once if it is already."""
        self._on_lost.append(call)
        if self.lost.is_set():
            call()

    def release(self) -> None:
        """Give it up, so that the next owner need not wait. Idempotent; a lost claim is only forgotten."""
        self._claims._release(self)

    def _lose(self) -> None:
        self.lost.set()
        for call in self._on_lost:
            call()


class Claims:
    """Claims of one process on a one-partition topic. Thread-safe. The topic must exist."""

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
        self._held: dict[Fence, Held] = {}
        self._changed = threading.Condition()  # guards the book, what is held, and the fields below
        self._next = 0  # offset up to which the book has read
        self._start = 0
        self._beat_due = clock.monotonic()
        self._error: FreshetError | None = None
        self._closing = False
        self._read_from_start()
        self._thread = threading.Thread(target=self._run, name=f"claims {topic}", daemon=True)
        self._thread.start()

    def acquire(self, what: str, owner: str, deadline: float) -> Held:
        """Claim `what` as soon as that is allowed, at the latest at `deadline`, an instant of the clock's
        `monotonic`.

        Raises:
            Unavailable: somebody else holds it until the deadline; the message says who.
        """
        while True:
            with self._changed:
                self._wait_until_claimable(what, deadline)
                current = self._book.claim(what)
            fence = Fence(self._append(claim_record(what, owner, current.fence if current else None)))
            with self._changed:
                while self._next <= fence:
                    self._wait(deadline, f"the claim of {what} could not be read back")
                claim = self._book.claim(what)
                if claim is not None and claim.fence == fence:
                    self._held[fence] = held = Held(self, claim)
                    self._beat_due = self._clock.monotonic()
                    return held

    def owners(self) -> Mapping[str, Claim]:
        """The newest claim of everything that was ever claimed, the released ones included."""
        with self._changed:
            return self._book.claims()

    def check(self) -> None:
        """Raise what has stopped the thread, if anything has: DataLost or Corrupt."""
        if self._error is not None:
            raise self._error

    def close(self, *, release: bool = True) -> None:
        """Release what is held, unless told not to, and stop. Idempotent."""
        for held in list(self._held.values()) if release else ():
            try:
                held.release()
            except Unavailable as error:  # then the lease runs out
                _log.warning("a claim could not be released", what=held.what, error=str(error))
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._reader.close()
        self._writer.close()

    # The caller's side

    def _wait_until_claimable(self, what: str, deadline: float) -> None:
        while not self._book.claimable(what):
            claim = self._book.claim(what)
            owner = f"{claim.owner} (fence {claim.fence})" if claim else "nobody"
            self._wait(
                deadline,
                f"{what} is held by {owner}, silent for {self._book.silent_s(what):.1f} s; "
                "it is free a lease after its last heartbeat",
            )

    def _wait(self, deadline: float, message: str) -> None:
        self.check()
        if self._closing:
            raise Unavailable("the claims were closed")
        if self._clock.monotonic() >= deadline:
            raise Unavailable(message)
        self._changed.wait(_POLL_S)

    def _release(self, held: Held) -> None:
        with self._changed:
            mine = self._held.pop(held.fence, None)
        if mine is not None and not held.lost.is_set():
            self._append(release_record(held.what, held.fence))

    def _append(self, record: bytes) -> int:
        return self._writer.append([Append(self._partition.topic, 0, BytesColumn.of([record]))])[0]

    # The thread

    def _run(self) -> None:
        while not self._closing:
            try:
                self._step(self._reader)
            except Unavailable as error:
                with self._changed:
                    self._book.blind()
                    self._changed.wait(_POLL_S)
                _log.warning("the control topic cannot be reached", error=str(error))
            except Exception as error:
                _log.error("claims stopped", error=str(error))
                with self._changed:
                    self._error = error if isinstance(error, FreshetError) else FreshetError(repr(error))
                    lost = list(self._held.values())
                    self._held.clear()
                    self._changed.notify_all()
                for held in lost:  # nobody sends their heartbeats any more, nor would see who takes over
                    held._lose()
                return

    def _step(self, reader: Reader) -> None:
        found = reader.poll(10_000, _POLL_S)
        lost = []
        with self._changed:
            for _, records in found:
                for offset, value in zip(records.offsets.tolist(), records.values, strict=True):
                    self._book.apply(offset, parse_record(value, f"{self._partition} at offset {offset}"))
                self._next = records.next_offset
            if not found:
                self._book.observe(self._clock.monotonic())
            for fence, held in list(self._held.items()):
                claim = self._book.claim(held.what)
                if claim is None or claim.fence != fence:
                    lost.append(self._held.pop(fence))
            fences = list(self._held)
            due = bool(fences) and self._clock.monotonic() >= self._beat_due
            if due:
                self._beat_due = self._clock.monotonic() + self._heartbeat_s
            self._changed.notify_all()
        for held in lost:
            held._lose()
        if due:
            self._append(heartbeat_record(fences))
            self._summarise()

    def _summarise(self) -> None:
        if self._next - self._start < _STATE_EVERY:
            return
        with self._changed:
            upto, claims = self._next, list(self._book.claims().values())
        self._append(state_record(upto, claims))
        self._eventlog.trim(self._partition, upto)
        self._start = upto

    def _read_from_start(self) -> None:
        """Read all there is. A log that was trimmed starts with the state as of its start, a little further
        on."""
        bounds = self._eventlog.bounds(self._partition)
        self._reader.assign({self._partition: bounds.start})
        self._next = self._start = bounds.start
        records = []
        while self._next < bounds.end:
            for _, found in self._reader.poll(100_000, LEASE_S):
                for offset, value in zip(found.offsets.tolist(), found.values, strict=True):
                    records.append((offset, parse_record(value, f"{self._partition} at offset {offset}")))
                self._next = found.next_offset
        first = bounds.start
        if bounds.start > 0:
            state = next((r for _, r in records if r["kind"] == "state" and r["upto"] >= bounds.start), None)
            if state is None:
                raise DataLost(f"{self._partition}: the log starts at {bounds.start}, without a state")
            self._book.restore(state)
            first = state["upto"]
        for offset, record in records:
            if offset >= first:
                self._book.apply(offset, record)
