"""The rows and the version served, with their freshness."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import structlog

from freshet.clock import Clock
from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.errors import Unavailable
from freshet.inference.core import explain, freshness_ms
from freshet.inference.pipeline import Lookup
from freshet.inference.rows import RowFollower
from freshet.inference.versions import ServingVersion, VersionFollower
from freshet.log import EventLog
from freshet.types import TopicPartition

__all__ = ["Mark", "RowsWatch", "ServingState", "unread_s", "update_marks"]

log = structlog.get_logger(__name__)

POLL_S = 1.0
"""Interval of queries for the partitions' ends; on Kafka each takes two requests per broker."""

UNKNOWN_END = 1 << 62
"""Assumed end of a partition before the first query succeeds: no reader reaches it."""

REPORT_S = 10.0
"""Unread time from which it is reported: a change of a partition's leader takes seconds. As FreshetStale."""


@dataclass(frozen=True, slots=True)
class Mark:
    """End of a partition of `rows` at a query of the log, kept until the follower has read to it."""

    read_s: float  # the partition is read up to its end at this time, monotonic
    queried_s: float  # time of the query, monotonic
    end: int


def update_marks(
    marks: Mapping[int, Mark], following: Mapping[int, int], queried_s: float, ends: Mapping[int, int]
) -> dict[int, Mark]:
    """Return the marks after a query: a new one for each partition that has reached its old one.

    Args:
        marks: after the previous query.
        following: {partition: next offset} of the follower.
        queried_s: time of the query, monotonic.
        ends: {partition: end}, the query's result.
    """
    made = {}
    for partition, end in ends.items():
        old = marks.get(partition)
        if old is None:
            made[partition] = Mark(queried_s, queried_s, end)
        elif end < old.end:  # the topic was recreated, or the old end was not known
            made[partition] = Mark(old.read_s, queried_s, end)
        elif following.get(partition, 0) >= old.end:
            made[partition] = Mark(old.queried_s, queried_s, end)
        else:
            made[partition] = old
    return made


def unread_s(marks: Mapping[int, Mark], following: Mapping[int, int], now_s: float) -> dict[int, float]:
    """Return {partition: seconds for which it is not known to be read to its end}.

    The value grows between two queries, even without new records, and while queries fail.
    """
    return {
        p: now_s - (mark.queried_s if following.get(p, 0) >= mark.end else mark.read_s)
        for p, mark in marks.items()
    }


class RowsWatch:
    """Measures whether each partition of `rows` is read to its end: freshness hides a stalled one.

    Queries run on a thread of their own, so that they do not block the follower. Readable from any thread.
    """

    def __init__(self, log_: EventLog, follower: RowFollower, topic: str, clock: Clock) -> None:
        self._log, self._follower, self._clock = log_, follower, clock
        self._places = [TopicPartition(topic, p) for p in range(ROWS_PARTITIONS)]
        self._topic = topic
        self._marks: Mapping[int, Mark] = {}
        self._failed = ""  # error of the last query; "": none

    def run(self, stop: threading.Event) -> None:
        """Query at intervals until `stop` is set."""
        while not stop.wait(POLL_S):
            self.poll()
            if reason := self.reason:
                log.warning("rows are not read to their end", reason=reason)

    def poll(self) -> None:
        """Query the log once rows are served; may block."""
        if self._follower.state.sink is None:
            return
        queried_s = self._clock.monotonic()
        try:
            ends = {at.partition: bounds.end for at, bounds in self._log.all_bounds(self._places).items()}
        except Exception as error:  # the figure grows until a query succeeds
            self._failed = explain(error)
            if not self._marks:
                self._marks = {at.partition: Mark(queried_s, queried_s, UNKNOWN_END) for at in self._places}
            return
        self._failed = ""
        self._marks = update_marks(self._marks, self._follower.state.next, queried_s, ends)

    @property
    def worst_s(self) -> float:
        """Longest unread time of a partition, in seconds; 0 until rows are served."""
        return max(self._unread().values(), default=0.0)

    @property
    def reason(self) -> str:
        """Description of the partition with the longest unread time; "" below `REPORT_S`."""
        unread = self._unread()
        worst = max(unread, key=lambda p: unread[p], default=0)
        for_s = unread.get(worst, 0.0)
        if for_s <= REPORT_S:
            return ""
        place, following = TopicPartition(self._topic, worst), self._follower.state.next.get(worst, 0)
        text = f"{place} is not known to have been read to its end for {for_s:.0f} s, "
        text += f"and is followed from offset {following}"
        return f"{text}; the log does not say where it ends: {self._failed}" if self._failed else text

    def _unread(self) -> dict[int, float]:
        return unread_s(self._marks, self._follower.state.next, self._clock.monotonic())


class ServingState:
    """The two followers' rows and version. Thread-safe."""

    def __init__(self, rows: RowFollower, versions: VersionFollower, clock: Clock) -> None:
        self._rows, self._versions, self._clock = rows, versions, clock

    def version(self) -> ServingVersion | None:
        """Return the version served; None before rows and a version are loaded."""
        return self._versions.state.serving if self._rows.state.sink is not None else None

    def now(self) -> tuple[Lookup, ServingVersion]:
        """Return rows and version to score with. Raises Unavailable before both are loaded."""
        table, serving = self._rows.state.sink, self._versions.state.serving
        if table is None:
            raise Unavailable(f"rows are not served yet: {self._rows.state.reason}")
        if serving is None:
            raise Unavailable(f"no version is served yet: {self._versions.state.reason}")
        return cast(Lookup, table), serving

    def rows_freshness_ms(self) -> int | None:
        """Return the freshness of rows without versions; `freshness_ms` until rows have learned."""
        rows_ms = self._rows.state.event_time_ms
        return freshness_ms(self._clock.now_ms(), rows_ms, 0) if rows_ms > 0 else self.freshness_ms()

    def freshness_ms(self) -> int | None:
        """Return now minus the newest event learned from; None before any."""
        serving = self._versions.state.serving
        dense_ms = serving.manifest.event_time_ms if serving is not None else 0
        return freshness_ms(self._clock.now_ms(), self._rows.state.event_time_ms, dense_ms)
