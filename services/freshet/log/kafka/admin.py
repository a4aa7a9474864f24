"""Requests of the log on Kafka to brokers: creation and settings of topics, their ids, bounds and offsets."""

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
from freshet.log.kafka.connection import UNKNOWN, KafkaSettings, LastError, family, refusal, translated
from freshet.types import LogId, TopicPartition

_REQUEST_S = 10.0
"""Time-out of a request: longer than a leader's election."""

_ELECTION_S = 5.0
"""Longest wait for a partition's leader."""

_RETRY_S = 0.05

_NEVER_ACCEPTED = (
    "\n  none has answered yet: do they run, and is security.protocol that of their listener (without it, "
    "PLAINTEXT)?"
)

_REFUSED_EVERY_S = 0.1
"""Interval at which a client that no broker has accepted yet checks for a refusal: librdkafka would try for
ever."""

T = TypeVar("T")

_NONE = -1
"""Offset of a time that no record has reached; smaller numbers are no offsets."""

_BATCH_OVERHEAD = 1024
"""Upper bound of a batch's size beyond its one record: the limit of a topic is one of batches."""


_START: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_END: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]

_SHORTEST_SEGMENT_MS, _LONGEST_SEGMENT_MS = 60_000, 7 * 86_400_000


def _kept_for(retention_ms: int | None) -> dict[str, str]:
    """Return a topic's settings for this retention; None: records are kept until they are trimmed.

    Kafka removes whole segments, and none that is still written. The default segment is 1 GiB or a week, here
    an eighth of the retention.
    """
    if retention_ms is None:
        segment_bytes, segment_ms = 1 << 26, _LONGEST_SEGMENT_MS  # some of them are trimmed, as the joiner's
    else:
        segment_bytes = 1 << 30
        segment_ms = min(max(retention_ms // 8, _SHORTEST_SEGMENT_MS), _LONGEST_SEGMENT_MS)
    return {
        "retention.ms": str(-1 if retention_ms is None else retention_ms),
        "segment.bytes": str(segment_bytes),
        "segment.ms": str(segment_ms),
    }


class KafkaAdmin:
    """Topics on the brokers, by freshet's names: the prefix is added and removed here. Thread-safe."""

    def __init__(self, settings: KafkaSettings, client: Mapping[str, Any]) -> None:
        """Create a client with these settings of librdkafka; nothing is sent yet. Raises ConfigError."""
        self._settings = settings
        self.last_error = LastError()
        given: dict[str, Any] = {**client, "error_cb": self.last_error}
        with translated("the client could not be created"):
            self._client = AdminClient(given)
        self.last_error.serve = lambda: self._client.poll(0)
        self._accepted = False  # a broker has answered, so later refusals may pass

    def name(self, topic: str) -> str:
        """Return a topic's name in Kafka."""
        return f"{self._settings.prefix}.{topic}" if self._settings.prefix else topic

    def place(self, at: TopicPartition, offset: int = -1001) -> KafkaPartition:
        """Return a partition as the client names it, with an offset if given."""
        return KafkaPartition(self.name(at.topic), at.partition, offset)

    def create(self, topic: str, partitions: int, retention_ms: int | None) -> bool:
        """Create a topic; False if one of that name exists.

        Raises:
            ConfigError: this client may not, or a setting is wrong.
            Unavailable: brokers do not answer.
        """
        settings = self._settings
        config = {
            "cleanup.policy": "delete",
            **_kept_for(retention_ms),
            "retention.bytes": "-1",
            "max.message.bytes": str(settings.max_record_bytes + _BATCH_OVERHEAD),
            # With a writer's own times, a wrong clock would have records removed too soon, or the joiner
            # believe events in the future (PROTOCOL 19).
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
            raise family(error.args[0], f"topic {topic} could not be created", self.last_error) from error
        return True

    def grow(self, topic: str, partitions: int) -> None:
        """Grow a topic to this many partitions. Raises Unavailable, or ConfigError if this client may not."""
        wanted = NewPartitions(self.name(topic), partitions)
        try:
            self._answers(self._client.create_partitions([wanted], request_timeout=_REQUEST_S))
        except KafkaException as error:
            if error.args[0].code() == KafkaError.INVALID_PARTITIONS:
                return  # another process was first
            raise family(error.args[0], f"topic {topic} could not grow", self.last_error) from error

    def set_retention(self, topic: str, retention_ms: int | None) -> None:
        """Set a topic's retention."""
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in _kept_for(retention_ms).items()
            if name == "retention.ms" or name not in self._settings.topic
        ]
        resource = ConfigResource(ResourceType.TOPIC, self.name(topic), incremental_configs=entries)
        with translated(f"the retention of topic {topic} could not be set", self.last_error):
            self._answers(self._client.incremental_alter_configs([resource], request_timeout=_REQUEST_S))

    def names(self) -> list[str]:
        """Return the names of all topics with the prefix."""
        with translated("the topics could not be listed", self.last_error):
            if not self._accepted:  # `list_topics` would wait without a check for a refusal
                self._answers({"": self._client.describe_cluster(request_timeout=_REQUEST_S)})
            found = self._client.list_topics(timeout=_REQUEST_S).topics
        prefix = self.name("")
        return sorted(
            name.removeprefix(prefix) for name in found if name.startswith(prefix) and name[:2] != "__"
        )

    def broker_settings(self) -> dict[int, frozenset[str]]:
        """Return {broker: names of its settings}; no name of a broker that does not answer this client.

        Raises Unavailable if the brokers cannot be listed.
        """
        with translated("the brokers could not be listed", self.last_error):
            cluster = self._answers({"": self._client.describe_cluster(request_timeout=_REQUEST_S)})[""]
        resources = [ConfigResource(ResourceType.BROKER, str(node.id)) for node in cluster.nodes]
        found = {}
        futures = self._client.describe_configs(resources, request_timeout=_REQUEST_S)
        for resource, future in futures.items():
            try:
                names = frozenset(self._answers({"": future})[""])
            except (KafkaException, Unavailable):
                names = frozenset()
            found[int(resource.name)] = names
        return found

    def ids(self, topics: Iterable[str]) -> dict[str, tuple[LogId, int]]:
        """Return {topic: (id, partitions)}, without topics that do not exist. Raises Unavailable."""
        return self.described(self.request_ids(topics))

    def request_ids(self, topics: Iterable[str]) -> dict[str, Future[Any]]:
        """Request the `ids` of topics; `described` returns them."""
        names = [self.name(topic) for topic in topics]
        if not names:
            return {}
        futures = self._client.describe_topics(TopicCollection(names), request_timeout=_REQUEST_S)
        return {name.removeprefix(self.name("")): future for name, future in futures.items()}

    def described(self, requests: Mapping[str, Future[Any]]) -> dict[str, tuple[LogId, int]]:
        """Wait for the answers to `request_ids`. Raises Unavailable."""
        found = {}
        for topic, future in requests.items():
            try:
                description = self._answers({topic: future})[topic]
            except KafkaException as error:
                if error.args[0].code() in UNKNOWN:
                    continue
                raise family(error.args[0], f"topic {topic} could not be read", self.last_error) from error
            found[topic] = (LogId(str(description.topic_id)), len(description.partitions))
        return found

    def infos(self, topics: Iterable[str]) -> dict[str, TopicInfo]:
        """Return the topics' properties, without topics that do not exist.

        Raises:
            Mismatch: a topic is compacted: records would vanish from its middle.
            Unavailable: brokers do not answer.
        """
        ids = self.ids(topics)
        if not ids:
            return {}
        resources = [ConfigResource(ResourceType.TOPIC, self.name(topic)) for topic in ids]
        with translated("the topics' settings could not be read", self.last_error):
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
        """Return the offsets of partitions; without `committed` the end includes open transactions.

        Raises:
            Unavailable: brokers do not answer.
            KeyError: a partition does not exist.
        """
        places = list(partitions)

        def request() -> dict[TopicPartition, Bounds]:
            starts, ends = self._request(places, _START), self.request_ends(places, committed=committed)
            first, last = self.offsets(starts), self.offsets(ends)
            if min([*first.values(), *last.values()], default=0) < 0:
                raise Unavailable(f"no broker returned where {', '.join(map(str, places))} begin and end")
            return {at: Bounds(first[at], last[at]) for at in places}

        return _with_leader(request)

    def request_ends(
        self, partitions: Iterable[TopicPartition], *, committed: bool = True
    ) -> dict[TopicPartition, Future[Any]]:
        """Request the ends of partitions; `offsets` returns them."""
        return self._request(partitions, _END, committed=committed)

    def of_time(self, at: TopicPartition, time_ms: int) -> int:
        """Return the smallest offset with a record time >= `time_ms`; -1 if there is none."""
        return _with_leader(lambda: self.offsets(self._request([at], OffsetSpec.for_timestamp(time_ms)))[at])

    def _request(
        self, partitions: Iterable[TopicPartition], spec: OffsetSpec, *, committed: bool = True
    ) -> dict[TopicPartition, Future[Any]]:
        places = {at: self.place(at) for at in partitions}
        futures = self._client.list_offsets(
            dict.fromkeys(places.values(), spec),
            isolation_level=IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED,
            request_timeout=_REQUEST_S,
        )
        return {at: futures[place] for at, place in places.items()}

    def offsets(self, requests: Mapping[TopicPartition, Future[Any]]) -> dict[TopicPartition, int]:
        """Wait for the offsets of `request_ends`. Raises Unavailable, or KeyError for unknown partitions."""
        names = ", ".join(sorted({at.topic for at in requests}))
        with translated(f"the offsets of {names} could not be read", self.last_error):
            try:
                found = {at: result.offset for at, result in self._answers(requests).items()}
            except KafkaException:
                # Leaders and their epochs come from the last metadata, which this request never renews: after
                # a broker's restart it would be refused for ever. Describing topics renews them.
                self.request_ids({at.topic for at in requests})
                raise
        unknown = [str(at) for at, offset in found.items() if offset < _NONE]
        if unknown:  # librdkafka reports no error for a partition of a broker that starts
            self.request_ids({at.topic for at in requests})
            raise Unavailable(
                f"no broker returned the offsets of {', '.join(sorted(unknown))}{self.last_error}"
            )
        return found

    def trim(self, at: TopicPartition, before: int) -> None:
        """Remove records below an offset. Raises Unavailable."""
        with translated(f"{at} could not be trimmed", self.last_error):
            self._answers(self._client.delete_records([self.place(at, before)], request_timeout=_REQUEST_S))

    def _answers(self, requests: Mapping[Any, Future[Any]]) -> dict[Any, Any]:
        deadline = time.monotonic() + _REQUEST_S
        try:
            return {key: self._answer(future, deadline) for key, future in requests.items()}
        except FutureTimeoutError:
            never = "" if self._accepted else _NEVER_ACCEPTED
            raise Unavailable(
                f"the brokers did not answer within {_REQUEST_S:g} s{self.last_error}{never}"
            ) from None

    def _answer(self, future: Future[Any], deadline: float) -> Any:
        """Wait for an answer. Raises ConfigError once brokers refuse a client that none has accepted."""
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                found = future.result(left if self._accepted else min(left, _REFUSED_EVERY_S))
            except FutureTimeoutError:
                if left == 0:
                    raise
            except KafkaException:
                self._check_refused()
                raise
            else:
                self._accepted = True
                return found
            self._check_refused()

    def _check_refused(self) -> None:
        refused = None if self._accepted else self.last_error.refused()
        if refused is not None:
            raise refusal(self._settings.brokers, *refused)


def _with_leader(request: Callable[[], T]) -> T:
    """Repeat a request while a partition has no leader, as just after its creation."""
    deadline = time.monotonic() + _ELECTION_S
    while True:
        try:
            return request()
        except Unavailable:
            if time.monotonic() >= deadline:
                raise
        threading.Event().wait(_RETRY_S)
