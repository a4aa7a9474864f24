"""Times of events: which are refused, which wait as clocks disagree, and how far event time has come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from freshet.config.spec.model import TimeField
from freshet.config.spec.time_units import YEAR_2000_S, unit_hint, written_in_larger_unit
from freshet.joiner.core import ActionColumns, ImpressionColumns, ShownColumns
from freshet.joiner.decode import Disputed, Refused
from freshet.types import I64, Records

__all__ = ["Now", "TimeRules", "Timed", "judge_times"]

C = TypeVar("C", ImpressionColumns, ShownColumns, ActionColumns)


@dataclass(frozen=True, slots=True)
class Now:
    """The present time, by the clocks that a joiner has (PROTOCOL 19)."""

    ms: int  # known to be right: `SteadyClock.now_ms`
    latest_ms: int  # `SteadyClock.latest_ms`: by the wall clock as it was set a moment ago, or before
    log_counts: bool = True  # whether the log's time is another clock, and no writer's claim


@dataclass(frozen=True, slots=True)
class TimeRules:
    """Which times of a stream's events are right."""

    role: str
    max_ahead_ms: int
    time: TimeField | None  # how it is written; None: not known

    def hint(self, time_ms: int, now_ms: int) -> str:
        """What to do about a wrong time."""
        return "" if self.time is None else unit_hint(self.time, self.role, time_ms, now_ms)


@dataclass(frozen=True, slots=True)
class Timed(Generic[C]):
    """Events that may be joined, and how far they show that event time has come."""

    columns: C
    first_ms: int = 0  # smallest reading
    last_ms: int = 0  # largest reading
    disputed: Disputed | None = None  # the first such record: events from it on are left out


def judge_times(
    columns: C, records: Records, rules: TimeRules, now: Now | None, refused: Refused
) -> Timed[C]:
    """Refuse events that are dated wrongly, and read event time from the others (PROTOCOL 19).

    An event is refused if it is dated before 1970, or more than `max_ahead_ms` ahead of now, or in January
    1970 because it is written in a unit a thousand times longer than the spec says. It is disputed if the
    log's time, or the wall clock's before or after it was set, is as far ahead.

    A reading of event time is an event's time, but at most the log's time of its record, and at most now: an
    event that is dated ahead shows nothing about how far the others have come.

    Args:
        columns: events of `records`, N of them.
        now: None for a log that is joined as history, where the log's time alone is known.
        refused: gets what is refused.
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
                said = f"its time is {worst} ms ahead of {by}, more than join.max_ahead_ms = {max_ahead_ms}"
                refused.reasons.append(said + rules.hint(int(of.max()), now_ms))
            elif of.min() < 0:
                refused.reasons.append("its time is before 1970")
            else:
                first_ms = int(of[larger[rows == row]][0])
                said = f"its time is {first_ms} ms since 1970, in January 1970"
                refused.reasons.append(said + rules.hint(first_ms, now_ms))
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
    """(N,) `written_in_larger_unit` of times, up to a limit for each or for all."""
    if rules.time is None or not written_in_larger_unit(YEAR_2000_S, rules.time.unit, int(np.max(limit))):
        return np.zeros(len(times), np.bool_)
    return (times >= YEAR_2000_S) & (times <= np.floor_divide(limit, 1000))


def _first_disputed(times: I64, logged: I64, records: Records, max_ahead_ms: int, now: Now) -> int | None:
    """Index of the first event that is ahead of `now.ms`, but of no other clock."""
    latest = np.full(len(times), now.latest_ms + max_ahead_ms)
    # Records that came later and are dated earlier prove that the log's time was wrong for a while.
    if now.log_counts and records.times_ms[-1] > now.ms + max_ahead_ms:
        latest = np.maximum(latest, logged + max_ahead_ms)
    found = np.flatnonzero((times > now.ms + max_ahead_ms) & (times <= latest))
    return int(found[0]) if len(found) else None
