"""Has the model served learned from an event? Answered from what is durable, hop by hop.

An event acknowledged at (topic, partition, offset) has arrived when
1. the joiner's newest commit for the partition names a next offset of the stream beyond it: the samples that
it led to
   are in `<model>.samples` below the partition's end as it was right after that;
2. every bucket in the row store has applied that partition of samples up to there;
3. this server has followed `rows` beyond the offset that those buckets name.
Rows may serve earlier (they are published before they are flushed); they are never later. Dense weights
follow with the next version. An action whose window is still open may lead to more samples later, and a
model's first positives are held: those are not waited for.
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
from freshet.log.tail import newest
from freshet.rows.store import RowStore
from freshet.types import Bucket, TopicPartition

__all__ = ["Progress", "Stage"]

REMEMBERED = 10_000
"""Events asked about whose samples' end is remembered; older questions are answered from the present end."""


@dataclass(frozen=True, slots=True)
class Stage:
    """How far an event has come."""

    served: bool
    waits_for: str  # "joiner", "trainer", "rows"; "" once served


class Progress:
    """Answers `GET /v1/progress`. Not thread-safe; may block on log and store."""

    def __init__(self, spec: Spec, log: EventLog, store: RowStore) -> None:
        topics = topics_of(spec)
        self._spec, self._log, self._store = spec, log, store
        self._samples, self._joiner = topics.samples, topics.joiner
        self._roles = {topics.served: "served", topics.action: "action"}
        if topics.shown is not None:
            self._roles[topics.shown] = "shown"
        self._targets: OrderedDict[tuple[str, int, int], int] = OrderedDict()

    def ask(self, topic: str, partition: int, offset: int, rows_next: Mapping[int, int]) -> Stage:
        """How far the event at this offset has come; `rows_next`: where this server follows `rows`.

        Raises BadInput for a topic or partition that the spec does not have, Unavailable as log and store do.
        """
        known = self._spec.partitions
        if topic in self._roles and partition >= known:  # which the topic got later, perhaps
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
        """End of the samples that the event led to; None before the joiner has taken it."""
        asked = (topic, partition, offset)
        known = self._targets.get(asked)
        if known is not None:
            return known
        if self._joined_to(self._roles[topic], partition) <= offset:
            return None
        # The end of the last block, not of the log: no batch is made for a marker behind it.
        last = newest(self._log, TopicPartition(self._samples, self._samples_of(partition)), 1)
        target = last[0][0] + 1 if last else 0
        self._targets[asked] = target
        if len(self._targets) > REMEMBERED:
            self._targets.popitem(last=False)
        return target

    def _samples_of(self, partition: int) -> int:
        """Partition of `samples` that a partition of the events leads to (PROTOCOL 1)."""
        return partition % self._spec.partitions

    def _joined_to(self, role: str, partition: int) -> int:
        """Next offset of a stream in the joiner's newest commit."""
        where = TopicPartition(self._joiner, partition)
        try:
            for _, value in newest(self._log, where, 1):
                return int(orjson.loads(value).get("next", {}).get(role, 0))
        except (orjson.JSONDecodeError, AttributeError, TypeError, ValueError) as error:
            raise Unavailable(f"the joiner's commit cannot be read: {error}") from None
        return 0
