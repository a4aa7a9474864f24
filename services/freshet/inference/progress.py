"""Whether the rows served have learned from an event, by durable state of each hop.

The rows served have learned from an event at (topic, partition, offset) when
1. the joiner's newest commit for the partition has consumed the offset: the event's samples are in
   `<model>.samples` below the end of the partition right after that commit;
2. every bucket of the row store has applied that partition of samples up to that end;
3. this server has read `rows` beyond the offset that those buckets name.
Rows may serve earlier, as they are published before they are flushed. Dense weights follow with the next
version. Samples that an action gives later, within its window, and a new model's held positives do not count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from freshet.config.spec.model import Spec
from freshet.config.spec.topics import ROWS_PARTITIONS, topics_of
from freshet.errors import BadInput, Unavailable
from freshet.log import EventLog
from freshet.log.records import newest
from freshet.rows.store import RowStore
from freshet.types import Bucket, TopicPartition

__all__ = ["Progress", "Stage"]

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
