"""Whether the rows served have learned the samples of an event, by durable state of each hop.

They have learned those of the event at (topic, partition, offset) when
1. the joiner's newest commit for the partition has consumed the offset: the event's samples are in
   `<model>.samples` below the end of the partition when it was first queried, and so may be later ones;
2. every bucket of the row store has applied that partition of samples up to that end;
3. this server has read `rows` beyond the offset that those buckets name.
Rows may serve earlier, as they are published before they are flushed. Dense weights follow with the next
version. An event without samples passes them too: a dead letter, an orphan, a late, repeated or outside
event, one with an open window, and a new model's held positive.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import orjson
import structlog

from freshet.clock import Clock
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import ROWS_PARTITIONS, topics_of
from freshet.errors import BadInput, Unavailable, first_line
from freshet.inference.rows import RowFollower
from freshet.log import EventLog
from freshet.log.records import newest
from freshet.rows.store import RowStore
from freshet.types import Bucket, TopicPartition

log = structlog.get_logger(__name__)

REMEMBERED = 10_000
"""Number of queried events with a cached end of samples; others use the present end."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The hop at which an event is."""

    served: bool
    waits_for: str  # "joiner", "trainer", "rows"; "" once served


class Progress:
    """Finds the stage of events. Not thread-safe; may block on log and store."""

    def __init__(self, spec: Spec, log: EventLog, store: RowStore) -> None:
        topics = topics_of(spec)
        self._spec, self._log, self._store = spec, log, store
        self._samples, self._joiner = topics.samples, topics.joiner
        self._roles = {topics.served: "served", topics.action: "action"}
        if topics.shown is not None:
            self._roles[topics.shown] = "shown"
        self._targets: OrderedDict[tuple[str, int, int], int] = OrderedDict()

    def stage_of(self, topic: str, partition: int, offset: int, rows_next: Mapping[int, int]) -> Stage:
        """Return the stage of the event at an offset; `rows_next`: {partition of `rows`: next offset}.

        Raises BadInput if the spec does not have the topic or partition.
        """
        known = self._spec.partitions
        if topic in self._roles and partition >= known:  # the topic may have got more partitions
            known = self._log.partition_counts([self._joiner]).get(self._joiner, 0)
        if topic not in self._roles or not 0 <= partition < known or offset < 0:
            raise BadInput(
                f"expected a topic of {', '.join(self._roles)}, a partition below {known} "
                f"and an offset, found {topic!r}, {partition}, {offset}"
            )
        target = self._target(topic, partition, offset)
        if target is None:
            return Stage(False, "joiner")
        buckets, samples = self._spec.buckets, self._samples_of(partition)
        metas = self._store.metas([Bucket(b) for b in range(buckets)])
        if len(metas) < buckets or any(m.applied.get(samples, 0) < target for m in metas.values()):
            return Stage(False, "trainer")
        behind = any(
            rows_next.get(bucket * ROWS_PARTITIONS // buckets, 0) < meta.rows_offset
            for bucket, meta in metas.items()
        )
        return Stage(False, "rows") if behind else Stage(True, "")

    def _target(self, topic: str, partition: int, offset: int) -> int | None:
        """Return the end of the event's samples; None before the joiner has consumed it."""
        event = (topic, partition, offset)
        known = self._targets.get(event)
        if known is not None:
            return known
        if self._joined_to(self._roles[topic], partition) <= offset:
            return None
        # The end of the last block, not of the log: no batch contains a transaction marker after it.
        last = newest(self._log, TopicPartition(self._samples, self._samples_of(partition)), 1)
        target = last[0][0] + 1 if last else 0
        self._targets[event] = target
        if len(self._targets) > REMEMBERED:
            self._targets.popitem(last=False)
        return target

    def _samples_of(self, partition: int) -> int:
        """Return the partition of `samples` for a partition of events (PROTOCOL 1)."""
        return partition % self._spec.partitions

    def _joined_to(self, role: str, partition: int) -> int:
        """Return a stream's next offset in the joiner's newest commit."""
        where = TopicPartition(self._joiner, partition)
        try:
            for _, value in newest(self._log, where, 1):
                return int(orjson.loads(value).get("next", {}).get(role, 0))
        except (orjson.JSONDecodeError, AttributeError, TypeError, ValueError) as error:
            raise Unavailable(f"the joiner's commit cannot be read: {error}") from None
        return 0


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
            self._failed = first_line(error)
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
