"""What the log on Kafka asks brokers about topics: names, ids, bounds, offsets of times; and changes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)
from confluent_kafka.cimpl import NewPartitions, NewTopic

from freshet.errors import Mismatch, Unavailable
from freshet.log import Bounds, TopicInfo
from freshet.log.kafka.connection import UNKNOWN, Heard, KafkaSettings, family, refusal, translated
from freshet.types import LogId, TopicPartition

__all__ = ["KafkaAdmin"]

_REQUEST_S = 10.0
"""For an answer: longer than a leader's election, shorter than a person's patience."""

_ELECTION_S = 5.0
"""For a partition to get a leader."""

_LOOK_S = 0.05

_NEVER_LET_IN = (
    "\n  none has answered yet: do they run, and is security.protocol that of their listener (without it, "
    "PLAINTEXT)?"
)

_HEAR_S = 0.1
"""How often a client that was never let in looks whether it is refused: librdkafka would try for ever."""

T = TypeVar("T")

_NONE = -1
"""The offset of a time that no record has reached; smaller ones are no offsets."""

_BATCH_OVERHEAD = 1024
"""Of a batch that holds a single record: a topic's limit is one of batches."""


_START: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_END: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]

_SHORTEST_SEGMENT_MS, _LONGEST_SEGMENT_MS = 60_000, 7 * 86_400_000


def _kept_for(retention_ms: int | None) -> dict[str, str]:
    """Settings of a topic that forgets what is older, or what it is told to.

    Kafka forgets whole segments, and none that is written to; one is a week's or 1 GiB by default, here an
    eighth of what is kept.
    """
    if retention_ms is None:
        segment_bytes, segment_ms = 1 << 26, _LONGEST_SEGMENT_MS  # readers cut some of them, as the joiner's
    else:
        segment_bytes = 1 << 30
        segment_ms = min(max(retention_ms // 8, _SHORTEST_SEGMENT_MS), _LONGEST_SEGMENT_MS)
    return {
        "retention.ms": str(-1 if retention_ms is None else retention_ms),
        "segment.bytes": str(segment_bytes),
        "segment.ms": str(segment_ms),
    }


class KafkaAdmin:
    """Thread-safe. Names are ours: the prefix is put before them here, and taken off."""

    def __init__(self, settings: KafkaSettings, client: Mapping[str, Any]) -> None:
        """Prepare, with these settings of librdkafka; nothing is sent yet. Raises ConfigError."""
        self._settings = settings
        self.heard = Heard()
        given: dict[str, Any] = {**client, "error_cb": self.heard}
        with translated("the client could not be made"):
            self._client = AdminClient(given)
        self.heard.serve = lambda: self._client.poll(0)
        self._let_in = False  # brokers have answered, so what they refuse later may pass

    def name(self, topic: str) -> str:
        """The name in Kafka."""
        return f"{self._settings.prefix}.{topic}" if self._settings.prefix else topic

    def place(self, at: TopicPartition, offset: int = -1001) -> KafkaPartition:
        """The partition as the client names it."""
        return KafkaPartition(self.name(at.topic), at.partition, offset)

    def create(self, topic: str, partitions: int, retention_ms: int | None) -> bool:
        """Create a topic; False if there is one of that name."""
        settings = self._settings
        config = {
            "cleanup.policy": "delete",
            **_kept_for(retention_ms),
            "retention.bytes": "-1",
            "max.message.bytes": str(settings.max_record_bytes + _BATCH_OVERHEAD),
            # A writer whose clock is wrong would else have its records forgotten too soon, or the joiner
            # believe events that lie in the future (PROTOCOL 19).
            "message.timestamp.type": "LogAppendTime",
            "message.timestamp.after.max.ms": str((1 << 63) - 1),  # where the URL says CreateTime
            **({} if settings.min_insync is None else {"min.insync.replicas": str(settings.min_insync)}),
            **settings.topic,
        }
        wanted = NewTopic(self.name(topic), partitions, settings.replication, config=config)
        try:
            self._answers(self._client.create_topics([wanted], request_timeout=_REQUEST_S))
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
                return False
            raise family(error.args[0], f"topic {topic} could not be created", self.heard) from error
        return True

    def grow(self, topic: str, partitions: int) -> None:
        """Give a topic more partitions. Raises Unavailable, ConfigError."""
        wanted = NewPartitions(self.name(topic), partitions)
        try:
            self._answers(self._client.create_partitions([wanted], request_timeout=_REQUEST_S))
        except KafkaException as error:
            if error.args[0].code() == KafkaError.INVALID_PARTITIONS:
                return  # another process was quicker
            raise family(error.args[0], f"topic {topic} could not grow", self.heard) from error

    def set_retention(self, topic: str, retention_ms: int | None) -> None:
        """What is older may be forgotten from now on."""
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in _kept_for(retention_ms).items()
            if name == "retention.ms" or name not in self._settings.topic
        ]
        resource = ConfigResource(ResourceType.TOPIC, self.name(topic), incremental_configs=entries)
        with translated(f"the retention of topic {topic} could not be set", self.heard):
            self._answers(self._client.incremental_alter_configs([resource], request_timeout=_REQUEST_S))

    def names(self) -> list[str]:
        """Of all topics with our prefix."""
        with translated("the topics could not be listed", self.heard):
            if not self._let_in:  # it waits for its answer without hearing of anything else
                self._answers({"": self._client.describe_cluster(request_timeout=_REQUEST_S)})
            found = self._client.list_topics(timeout=_REQUEST_S).topics
        prefix = self.name("")
        return sorted(
            name.removeprefix(prefix) for name in found if name.startswith(prefix) and name[:2] != "__"
        )

    def broker_settings(self) -> dict[int, frozenset[str]]:
        """{broker: names of the settings that it has}; none of one that does not answer, or not this client.

        Raises Unavailable if the brokers cannot be listed.
        """
        with translated("the brokers could not be listed", self.heard):
            cluster = self._answers({"": self._client.describe_cluster(request_timeout=_REQUEST_S)})[""]
        resources = [ConfigResource(ResourceType.BROKER, str(node.id)) for node in cluster.nodes]
        found = {}
        asked = self._client.describe_configs(resources, request_timeout=_REQUEST_S)
        for resource, future in asked.items():
            try:
                names = frozenset(self._answers({"": future})[""])
            except (KafkaException, Unavailable):
                names = frozenset()
            found[int(resource.name)] = names
        return found

    def ids(self, topics: Iterable[str]) -> dict[str, tuple[LogId, int]]:
        """{topic: (its id, its partitions)}; those that do not exist are left out."""
        return self.described(self.ask_ids(topics))

    def ask_ids(self, topics: Iterable[str]) -> dict[str, Future[Any]]:
        """As `ids`, to be looked at later with `described`."""
        names = [self.name(topic) for topic in topics]
        if not names:
            return {}
        asked = self._client.describe_topics(TopicCollection(names), request_timeout=_REQUEST_S)
        return {name.removeprefix(self.name("")): future for name, future in asked.items()}

    def described(self, asked: Mapping[str, Future[Any]]) -> dict[str, tuple[LogId, int]]:
        """The answers, when they are there. Raises Unavailable."""
        found = {}
        for topic, future in asked.items():
            try:
                description = self._answers({topic: future})[topic]
            except KafkaException as error:
                if error.args[0].code() in UNKNOWN:
                    continue
                raise family(error.args[0], f"topic {topic} could not be read", self.heard) from error
            found[topic] = (LogId(str(description.topic_id)), len(description.partitions))
        return found

    def infos(self, topics: Iterable[str]) -> dict[str, TopicInfo]:
        """All there is to know of these topics; those that do not exist are left out.

        Raises Mismatch for one that is compacted: records would vanish from its middle.
        """
        ids = self.ids(topics)
        if not ids:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, self.name(topic)) for topic in ids]
        with translated("the topics' settings could not be read", self.heard):
            answers = self._answers(self._client.describe_configs(resources, request_timeout=_REQUEST_S))
        infos = {}
        for resource, config in answers.items():
            topic = resource.name.removeprefix(self.name(""))
            policy = config["cleanup.policy"].value
            if "compact" in policy:
                raise Mismatch(
                    f"topic {resource.name}: expected cleanup.policy=delete, found {policy}\n"
                    "  compaction removes records from a partition's middle: give the topic the policy delete"
                )
            retention = int(config["retention.ms"].value)
            log_id, partitions = ids[topic]
            limit = int(config["max.message.bytes"].value) - _BATCH_OVERHEAD
            infos[topic] = TopicInfo(
                topic,
                partitions,
                log_id,
                None if retention < 0 else retention,
                min(limit, self._settings.max_record_bytes),
                append_time=config["message.timestamp.type"].value == "LogAppendTime",
            )
        return infos

    def bounds(
        self, partitions: Iterable[TopicPartition], *, committed: bool = True
    ) -> dict[TopicPartition, Bounds]:
        """Starts and ends; without `committed` ends as if open transactions were not.

        Raises Unavailable; KeyError for partitions that do not exist.
        """
        places = list(partitions)

        def ask() -> dict[TopicPartition, Bounds]:
            starts, ends = self._ask(places, _START), self.ask_ends(places, committed=committed)
            first, last = self.offsets(starts), self.offsets(ends)
            if min([*first.values(), *last.values()], default=0) < 0:
                raise Unavailable(f"no broker told where {', '.join(map(str, places))} begin and end")
            return {at: Bounds(first[at], last[at]) for at in places}

        return _settled(ask)

    def ask_ends(
        self, partitions: Iterable[TopicPartition], *, committed: bool = True
    ) -> dict[TopicPartition, Future[Any]]:
        """Ask where partitions end, to be looked at later with `offsets`."""
        return self._ask(partitions, _END, committed=committed)

    def of_time(self, at: TopicPartition, time_ms: int) -> int:
        """Smallest offset whose record time is >= `time_ms`; -1 if there is none."""
        return _settled(lambda: self.offsets(self._ask([at], OffsetSpec.for_timestamp(time_ms)))[at])

    def _ask(
        self, partitions: Iterable[TopicPartition], what: OffsetSpec, *, committed: bool = True
    ) -> dict[TopicPartition, Future[Any]]:
        places = {at: self.place(at) for at in partitions}
        futures = self._client.list_offsets(
            dict.fromkeys(places.values(), what),
            isolation_level=IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED,
            request_timeout=_REQUEST_S,
        )
        return {at: futures[place] for at, place in places.items()}

    def offsets(
        self, asked: Mapping[TopicPartition, Future[Any]], within_s: float = _REQUEST_S
    ) -> dict[TopicPartition, int]:
        """The answers, when they are there. Raises Unavailable."""
        names = ", ".join(sorted({at.topic for at in asked}))
        with translated(f"the offsets of {names} could not be read", self.heard):
            try:
                found = {at: result.offset for at, result in self._answers(asked, within_s).items()}
            except KafkaException:
                # Leaders and their epochs are of the last metadata, which this request never renews: after a
                # broker's restart it would be refused for ever. Describing topics renews them.
                self.ask_ids({at.topic for at in asked})
                raise
        unknown = [str(at) for at, offset in found.items() if offset < _NONE]
        if unknown:  # a partition that was not answered for, as while its broker starts, is no error there
            self.ask_ids({at.topic for at in asked})
            raise Unavailable(f"no broker told the offsets of {', '.join(sorted(unknown))}{self.heard}")
        return found

    def trim(self, at: TopicPartition, before: int) -> None:
        """Forget records below an offset."""
        with translated(f"{at} could not be trimmed", self.heard):
            self._answers(self._client.delete_records([self.place(at, before)], request_timeout=_REQUEST_S))

    def _answers(self, asked: Mapping[Any, Future[Any]], within_s: float = _REQUEST_S) -> dict[Any, Any]:
        deadline = time.monotonic() + within_s
        try:
            return {key: self._answer(future, deadline) for key, future in asked.items()}
        except FutureTimeoutError:
            never = "" if self._let_in else _NEVER_LET_IN
            raise Unavailable(
                f"the brokers did not answer within {within_s:g} s{self.heard}{never}"
            ) from None

    def _answer(self, future: Future[Any], deadline: float) -> Any:
        """Raises ConfigError as soon as brokers refuse a client that they have never let in."""
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                found = future.result(left if self._let_in else min(left, _HEAR_S))
            except FutureTimeoutError:
                if left == 0:
                    raise
            except KafkaException:
                self._check_let_in()
                raise
            else:
                self._let_in = True
                return found
            self._check_let_in()

    def _check_let_in(self) -> None:
        refused = None if self._let_in else self.heard.refused()
        if refused is not None:
            raise refusal(self._settings.brokers, *refused)


def _settled(ask: Callable[[], T]) -> T:
    """Ask again for a while if a partition has no leader, as when it was just made."""
    deadline = time.monotonic() + _ELECTION_S
    while True:
        try:
            return ask()
        except Unavailable:
            if time.monotonic() >= deadline:
                raise
        threading.Event().wait(_LOOK_S)
