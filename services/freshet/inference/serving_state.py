"""What is served at this moment: rows, a version, and how fresh they are."""

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

__all__ = ["Live", "Mark", "RowsWatch", "marked", "unread_s"]

# --- Whether all of `rows` is read: freshness is the newest row's, so that a partition that stands still
# would hide behind the others.


log = structlog.get_logger(__name__)

LOOK_S = 1.0
"""Between two questions where the partitions end; on Kafka two requests to each broker."""

NOWHERE = 1 << 62
"""The end of a partition of which nobody has ever told one: no reader comes to it."""

TELL_S = 10.0
"""From so long on it is told in words. A partition's change of leader takes seconds; FreshetStale begins
here, too."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a partition of `rows` ended when the log was asked, until it is read to there."""

    read_s: float  # what it held at this moment is read, monotonic
    asked_s: float  # when the log was asked, monotonic; what it held then is read once `end` is
    end: int


def marked(
    marks: Mapping[int, Mark], following: Mapping[int, int], asked_s: float, ends: Mapping[int, int]
) -> dict[int, Mark]:
    """A mark for each partition, after an answer of the log: the new one where the old one is reached.

    Args:
        marks: as of the answer before; none when rows began to be served.
        following: {partition: next offset}; one that is missing is not read.
        asked_s: when the log was asked, monotonic.
        ends: {partition: its end}, the answer.
    """
    made = {}
    for partition, end in ends.items():
        old = marks.get(partition)
        if old is None:
            made[partition] = Mark(asked_s, asked_s, end)
        elif end < old.end:  # of a topic that was made anew, or it was not known
            made[partition] = Mark(old.read_s, asked_s, end)
        elif following.get(partition, 0) >= old.end:
            made[partition] = Mark(old.asked_s, asked_s, end)
        else:
            made[partition] = old
    return made


def unread_s(marks: Mapping[int, Mark], following: Mapping[int, int], now_s: float) -> dict[int, float]:
    """{partition: for how long it is not known to be read to its end}. Between two answers it grows, with no
    record waiting, too; where the log does not say where a partition ends, on and on."""
    return {
        p: now_s - (mark.asked_s if following.get(p, 0) >= mark.end else mark.read_s)
        for p, mark in marks.items()
    }


class RowsWatch:
    """Asks the log where the partitions of `rows` end, beside the thread that follows them: that one is never
    held up. May be read from any thread."""

    def __init__(self, log_: EventLog, follower: RowFollower, topic: str, clock: Clock) -> None:
        self._log, self._follower, self._clock = log_, follower, clock
        self._places = [TopicPartition(topic, p) for p in range(ROWS_PARTITIONS)]
        self._topic = topic
        self._marks: Mapping[int, Mark] = {}
        self._failed = ""  # why the log did not answer; "": it did

    def run(self, stop: threading.Event) -> None:
        """Look again and again until told to stop."""
        while not stop.wait(LOOK_S):
            self.look()
            if reason := self.reason:
                log.warning("rows are not read to their end", reason=reason)

    def look(self) -> None:
        """Ask the log once; may block for as long as it does. Nothing is asked before rows are served."""
        if self._follower.state.sink is None:
            return
        asked_s = self._clock.monotonic()
        try:
            ends = {at.partition: bounds.end for at, bounds in self._log.all_bounds(self._places).items()}
        except Exception as error:  # whatever it is: the figure grows, and the next look may go well
            self._failed = explain(error)
            if not self._marks:
                self._marks = {at.partition: Mark(asked_s, asked_s, NOWHERE) for at in self._places}
            return
        self._failed = ""
        self._marks = marked(self._marks, self._follower.state.next, asked_s, ends)

    @property
    def worst_s(self) -> float:
        """For how long the partition that is worst off is not known to be read to its end; 0 until rows are
        served."""
        return max(self._unread().values(), default=0.0)

    @property
    def reason(self) -> str:
        """Which partition stands still, or that the log does not say where they end; "": none does."""
        unread = self._unread()
        worst = max(unread, key=lambda p: unread[p], default=0)
        for_s = unread.get(worst, 0.0)
        if for_s <= TELL_S:
            return ""
        place, following = TopicPartition(self._topic, worst), self._follower.state.next.get(worst, 0)
        said = f"{place} is not known to have been read to its end for {for_s:.0f} s, "
        said += f"and is followed from offset {following}"
        return f"{said}; the log does not say where it ends: {self._failed}" if self._failed else said

    def _unread(self) -> dict[int, float]:
        return unread_s(self._marks, self._follower.state.next, self._clock.monotonic())


class Live:
    """A view of the two followers; may be asked from any thread."""

    def __init__(self, rows: RowFollower, versions: VersionFollower, clock: Clock) -> None:
        self._rows, self._versions, self._clock = rows, versions, clock

    def version(self) -> ServingVersion | None:
        """The version that is served; None while rows or versions are not there yet."""
        return self._versions.state.serving if self._rows.state.sink is not None else None

    def now(self) -> tuple[Lookup, ServingVersion]:
        """Rows and version to score with, together. Raises Unavailable before they are there."""
        table, serving = self._rows.state.sink, self._versions.state.serving
        if table is None:
            raise Unavailable(f"rows are not served yet: {self._rows.state.reason}")
        if serving is None:
            raise Unavailable(f"no version is served yet: {self._versions.state.reason}")
        return cast(Lookup, table), serving

    def rows_freshness_ms(self) -> int | None:
        """As `freshness_ms`, of rows alone, whatever dense versions have learned; until rows have learned
        anything the same."""
        rows_ms = self._rows.state.event_time_ms
        return freshness_ms(self._clock.now_ms(), rows_ms, 0) if rows_ms > 0 else self.freshness_ms()

    def freshness_ms(self) -> int | None:
        """Now minus the newest event learned from; None before anything was learned."""
        serving = self._versions.state.serving
        dense_ms = serving.manifest.event_time_ms if serving is not None else 0
        return freshness_ms(self._clock.now_ms(), self._rows.state.event_time_ms, dense_ms)
