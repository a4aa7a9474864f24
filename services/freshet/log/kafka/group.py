"""Which partitions a process of a group has, decided by Kafka's group protocol; positions never come from it.

For who takes which partitions first: claims decide who may write (PROTOCOL 9), stores where reading goes
on. Topics with equally many partitions are assigned alike (range).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import OFFSET_END, Consumer
from confluent_kafka import TopicPartition as KafkaPartition

from freshet.errors import Fenced
from freshet.log.kafka.admin import KafkaAdmin
from freshet.log.kafka.errors import Heard, family, translated
from freshet.types import TopicPartition

__all__ = ["KafkaGroup", "Partitions"]

Partitions = frozenset[TopicPartition]


class KafkaGroup:
    """One member of a group. Used by one thread, which polls every few seconds; callbacks are on it.

    Settings of the log's URL choose how: `group.protocol` is `classic` (then also `session.timeout.ms`) or
    `consumer` (KIP-848); with a `group.instance.id` of its own a member that comes back soon gets the
    partitions it had, and nobody else is disturbed.
    """

    def __init__(
        self,
        admin: KafkaAdmin,
        client: Mapping[str, Any],
        group: str,
        topics: Sequence[str],
        on_granted: Callable[[Partitions], None],
        on_revoked: Callable[[Partitions], None],
    ) -> None:
        """Join it; partitions come with later polls.

        Args:
            admin: for names.
            client: settings of librdkafka.
            group: its name.
            topics: must exist.
            on_granted: these partitions are this member's from now on, besides those that it has.
            on_revoked: these go to somebody else once this returns; or have gone, if this member was silent
                too long.
        """
        self._heard = Heard()
        self._topics = {admin.name(topic): topic for topic in topics}
        self._granted, self._revoked = on_granted, on_revoked
        self._by_consumer = client.get("group.protocol") == "consumer"
        assignor = "group.remote.assignor" if self._by_consumer else "partition.assignment.strategy"
        settings = {
            assignor: "range",
            **client,
            "group.id": admin.name(group),
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "error_cb": self._heard,
        }
        self._held: set[TopicPartition] = set()
        self._closed = False
        with translated(f"group {group} could not be joined"):
            self._consumer = Consumer(settings)
            self._consumer.subscribe(
                list(self._topics), on_assign=self._assign, on_revoke=self._revoke, on_lost=self._revoke
            )

    @property
    def held(self) -> Partitions:
        """The partitions that this member has."""
        return frozenset(self._held)

    def poll(self, wait_s: float) -> None:
        """Take part for so long. Raises Fenced if another process has this member's `group.instance.id`."""
        message = self._consumer.poll(wait_s)
        error = None if message is None else message.error()
        if error is not None:
            if error.fatal():
                raise Fenced(str(family(error, "this member of the group was replaced", self._heard)))
            self._heard(error)

    def close(self) -> None:
        """Leave, or stay away for a while if the membership is static. Idempotent."""
        if not self._closed:
            self._closed = True
            self._consumer.close()

    def _assign(self, consumer: Consumer, partitions: list[KafkaPartition]) -> None:
        for partition in partitions:
            partition.offset = OFFSET_END  # nothing is read by this consumer
        (consumer.incremental_assign if self._by_consumer else consumer.assign)(partitions)
        consumer.pause(partitions)
        granted = self._ours(partitions)
        self._held |= granted
        self._granted(granted)

    def _revoke(self, consumer: Consumer, partitions: list[KafkaPartition]) -> None:
        revoked = self._ours(partitions)
        self._held -= revoked
        self._revoked(revoked)

    def _ours(self, partitions: list[KafkaPartition]) -> Partitions:
        return frozenset(TopicPartition(self._topics[p.topic], p.partition) for p in partitions)
