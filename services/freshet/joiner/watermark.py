"""Event time: its watermark in a partition, the validation of events' times, and the clocks that judge them.

Letters: N events.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from freshet.clock import CONFIRMED_S, Clock, SteadyClock
from freshet.config.spec.inputs import YEAR_2000_S, unit_hint, written_in_larger_unit
from freshet.config.spec.model import TimeField
from freshet.joiner.core import JoinColumns
from freshet.joiner.decoder import Disputed, Refused
from freshet.types import I64, Records, TopicPartition

_log = structlog.get_logger("freshet.joiner")


@dataclass(frozen=True, slots=True)
class Now:
    """Present time, by the clocks of a joiner (PROTOCOL 19)."""

    ms: int  # known to be right: `SteadyClock.now_ms`
    latest_ms: int  # `SteadyClock.latest_ms`: by the wall clock as it was set a moment ago, or before
    log_counts: bool = True  # whether the log's time comes from another clock, not from writers


@dataclass(frozen=True, slots=True)
class TimeRules:
    """Rules for the times of a stream's events."""

    role: str
    max_ahead_ms: int
    time: TimeField | None  # field and unit; None: unknown

    def hint(self, time_ms: int, now_ms: int) -> str:
        """Return a hint on how to correct a wrong time; "" if there is none."""
        return "" if self.time is None else unit_hint(self.time, self.role, time_ms, now_ms)


@dataclass(frozen=True, slots=True)
class Timed:
    """Events to join, and the event time that they show."""

    columns: JoinColumns
    first_ms: int = 0  # smallest reading
    last_ms: int = 0  # largest reading
    disputed: Disputed | None = None  # the first such record; events from it on are dropped


def judge_times(
    columns: JoinColumns, records: Records, rules: TimeRules, now: Now | None, refused: Refused
) -> Timed:
    """Refuse events with wrong times, and read event time from the others (PROTOCOL 19).

    An event is refused if it is dated before 1970, or more than `max_ahead_ms` ahead of now, or in January
    1970 because its unit is a thousand times longer than the spec's. It is disputed, not refused, if the
    log's time, or the wall clock before or after it was set, is as far ahead.

    A reading of event time is the minimum of the event's time, the log's time of its record, and now: an
    event that is dated ahead does not show that others have come as far.

    Args:
        columns: N events of `records`.
        records: their records.
        rules: of their stream.
        now: None for a log that is joined as history, where only the log's time is known.
        refused: receives the refusals.
    """
    if not len(columns):
        return Timed(columns)
    offsets, _ = columns.places
    rows = np.searchsorted(records.offsets, offsets)
    times, logged = columns.times_ms, records.times_ms[rows]
    limit = (logged if now is None else now.ms) + rules.max_ahead_ms
    max_ahead_ms = rules.max_ahead_ms
    larger = _in_larger_unit(times, rules, limit)
    bad = (times > limit) | (times < 0) | larger
    disputed = None
    if bad.any():
        at = None if now is None else _first_disputed(times, logged, records, max_ahead_ms, now)
        if now is not None and at is not None:
            record = int(rows[at])
            before = rows < record
            disputed = Disputed(
                int(offsets[at]), int(times[at] - now.ms), int(logged[at]), int(records.times_ms[-1])
            )
            columns, rows, times, logged = columns.where(before), rows[before], times[before], logged[before]
            bad, larger = bad[before], larger[before]
        by = "the log's time" if now is None else "now"
        for row in np.unique(rows[bad]):
            of, now_ms = times[rows == row], int(logged[rows == row].min()) if now is None else now.ms
            worst = int(of.max()) - now_ms
            refused.bad_time += 1
            refused.rows.append(int(row))
            if worst > max_ahead_ms:
                reason = f"its time is {worst} ms ahead of {by}, more than join.max_ahead_ms = {max_ahead_ms}"
                refused.reasons.append(reason + rules.hint(int(of.max()), now_ms))
            elif of.min() < 0:
                refused.reasons.append("its time is before 1970")
            else:
                first_ms = int(of[larger[rows == row]][0])
                reason = f"its time is {first_ms} ms since 1970, in January 1970"
                refused.reasons.append(reason + rules.hint(first_ms, now_ms))
        if bad.any():
            first = int(rows[bad].min())
            reason = refused.reasons[refused.rows.index(first)]
            refused.first_bad_time = f"{int(records.offsets[first])}: {reason}"
        good = ~np.isin(rows, rows[bad])
        columns, times, logged = columns.where(good), times[good], logged[good]
        if not len(columns):
            return Timed(columns, disputed=disputed)
    readings = np.minimum(times, logged)
    last_ms = int(readings.max())
    return Timed(columns, int(readings.min()), last_ms if now is None else min(last_ms, now.ms), disputed)


def _in_larger_unit(times: I64, rules: TimeRules, limit: I64 | int) -> NDArray[np.bool_]:
    """Return (N,) bool: `written_in_larger_unit` of (N,) int64 times; the limit is one, or (N,) int64."""
    found = (times >= YEAR_2000_S) & (times <= np.floor_divide(limit, 1000))
    if found.any() and not (
        rules.time is not None and written_in_larger_unit(YEAR_2000_S, rules.time.unit, int(np.max(limit)))
    ):
        found[:] = False
    return found


def _first_disputed(times: I64, logged: I64, records: Records, max_ahead_ms: int, now: Now) -> int | None:
    """Return the index of the first event that is ahead of `now.ms`, but not of every other clock."""
    latest = np.full(len(times), now.latest_ms + max_ahead_ms)
    # Later records with earlier times prove that the log's time was wrong for a while.
    if now.log_counts and records.times_ms[-1] > now.ms + max_ahead_ms:
        latest = np.maximum(latest, logged + max_ahead_ms)
    found = np.flatnonzero((times > now.ms + max_ahead_ms) & (times <= latest))
    return int(found[0]) if len(found) else None


@dataclass(slots=True)
class _DisputedPartition:
    """A partition of a topic that is not read, as clocks disagree on its next record."""

    disputed: Disputed
    since_s: float  # monotonic
    unconfirmed: bool = False  # no later record confirmed the log's time, which therefore no longer counts


_UNCONFIRMED_S = 5 * CONFIRMED_S
"""Time after which the log's time of a record does not count if no later record confirms it."""


class JoinerClocks:
    """Clocks of one joiner, and the partitions that wait as clocks disagree (PROTOCOL 19). Used by one
    thread."""

    def __init__(self, clock: Clock, *, log_counts: bool) -> None:
        """Trust the clock at first; `log_counts`: whether the log's time is its own, not its writers'."""
        self.steady = SteadyClock(clock)  # the time that is known to be right
        self.is_history = False  # whether to join up to the log's end, with the log's time as the only one
        self.paused: set[TopicPartition] = set()  # disputed ones, until the next retry
        self.log_counts = log_counts  # whether the log's time is its own
        self._disputed: dict[TopicPartition, _DisputedPartition] = {}

    def now(self, at: TopicPartition) -> Now | None:
        """Return the present time for records of a partition; None while the log is joined as history."""
        if self.is_history:
            return None
        held = self._disputed.get(at)
        log_counts = self.log_counts and not (held is not None and held.unconfirmed)
        return Now(self.steady.now_ms(), self.steady.latest_ms(), log_counts)

    def pause_if_disputed(self, at: TopicPartition, disputed: Disputed | None) -> bool:
        """Pause a partition where clocks disagree, until one has proved wrong."""
        if disputed is None:
            self._disputed.pop(at, None)
            return False
        held, now_s = self._disputed.get(at), self.steady.monotonic()
        if held is None or held.disputed.offset != disputed.offset:
            held = self._disputed[at] = _DisputedPartition(disputed, now_s)
            _log.warning(
                "an event is dated ahead and clocks disagree on that: it waits",
                topic=at.topic,
                partition=at.partition,
                offset=disputed.offset,
                ahead_ms=disputed.ahead_ms,
                clock_step_ms=self.steady.step_ms,
            )
        waited_s = now_s - held.since_s
        moved_ms = disputed.newest_ms - held.disputed.logged_ms
        if waited_s >= CONFIRMED_S and moved_ms >= CONFIRMED_S * 500:
            _log.warning(
                "this machine's clock is behind the log's, which is followed",
                topic=at.topic,
                partition=at.partition,
            )
            self.steady.lead(disputed.newest_ms)
        held.unconfirmed = waited_s >= _UNCONFIRMED_S
        self.paused.add(at)
        return True

    def keep(self, partitions: Container[int]) -> None:
        """Forget the disputes of all other partitions."""
        self._disputed = {at: held for at, held in self._disputed.items() if at.partition in partitions}
        self.paused = {at for at in self.paused if at.partition in partitions}

    @property
    def disputed_ms(self) -> dict[int, int]:
        """{partition: how far its disputed event is ahead of the known time}."""
        return {at.partition: held.disputed.ahead_ms for at, held in self._disputed.items()}


class Watermark:
    """W of one partition (PROTOCOL 19): the minimum of its topics' clocks. It never decreases.

    - A topic's clock is the largest reading of event time from it (`judge_times` bounds readings). It never
      decreases.
    - A topic without any record yet starts at the smallest event time of the first batch of any topic: events
      of the same time may still come there, so no window closes before its first record or the passing of
      time.
    - A topic is idle between two checks of its end that both find it read completely, with no record in
    between. Its clock then advances by the monotonic time between the checks. A check that finds unread
    records, or a record, ends the idle time; later time without checks (a paused process, a slow read) does
    not count.
    - After a restart, the wall-clock time since the commit counts as idle time for a topic that the first
    check finds read completely, but only up to the newest clock of the other topics. So a wrong wall clock,
    or that of another machine, can delay W until the next event, and cannot close windows of future events.
    - An active topic never waits for longer: an idle clock advances in real time, so it stays behind the real
      event time by the latency of its last event.

    W includes no allowance for disorder; `grace` is that.
    """

    def __init__(self, topics: Sequence[str]) -> None:
        self._clocks: dict[str, int | None] = dict.fromkeys(topics)
        self._idle_from: dict[str, float | None] = dict.fromkeys(topics)  # start of uncounted idle time, s
        self._downtime_ms: dict[str, int] = dict.fromkeys(topics, 0)
        self._value: int | None = None

    @property
    def value(self) -> int | None:
        """W in ms since the epoch; None before the first event."""
        return self._value

    @property
    def clocks(self) -> Mapping[str, int]:
        """Clocks in ms of the topics that have one."""
        return {topic: clock for topic, clock in self._clocks.items() if clock is not None}

    def resume(self, value: int | None, clocks: Mapping[str, int], downtime_ms: int) -> None:
        """Continue from a commit. `downtime_ms` is the wall-clock time since it was written, by two clocks
        that may differ or jump."""
        self._value = value
        for topic, clock in clocks.items():
            if topic in self._clocks:
                self._clocks[topic] = clock
                self._downtime_ms[topic] = max(0, downtime_ms)

    def observe(self, topic: str, first_ms: int, last_ms: int) -> None:
        """Advance a topic's clock by the smallest and largest reading of event time of new records."""
        for other, clock in self._clocks.items():
            if clock is None:
                self._clocks[other] = first_ms
        self._clocks[topic] = max(self._clocks[topic] or 0, last_ms)
        self.behind(topic)
        self._move()

    def behind(self, topic: str) -> None:
        """End the topic's idle time: it has unread records, or had until now."""
        self._idle_from[topic] = None
        self._downtime_ms[topic] = 0

    def at_end(self, topic: str, monotonic_s: float) -> None:
        """Advance the clock of a topic that a check found read completely."""
        clock, since = self._clocks[topic], self._idle_from[topic]
        if clock is None:
            return
        idle_ms = 0 if since is None else int((monotonic_s - since) * 1000)
        behind_ms = max(0, max(self.clocks.values()) - clock - idle_ms)
        down_ms = min(self._downtime_ms[topic], behind_ms)
        self._clocks[topic] = clock + idle_ms + down_ms
        self._downtime_ms[topic] -= down_ms
        # Only whole milliseconds count now; the fraction counts at the next check.
        self._idle_from[topic] = monotonic_s if since is None else since + idle_ms / 1000
        self._move()

    def close(self, horizon_ms: int) -> None:
        """Advance W beyond every window that may be open: no more events will come."""
        latest = max(self.clocks.values(), default=None)
        if latest is not None:
            self._value = max(self._value or 0, latest + horizon_ms)

    def _move(self) -> None:
        known = [clock for clock in self._clocks.values() if clock is not None]
        if len(known) == len(self._clocks):
            self._value = min(known) if self._value is None else max(self._value, min(known))
