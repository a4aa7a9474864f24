"""The event log on Apache Kafka (4.x, or another broker of its protocol with transactions and topic ids).

Brokers keep topics and remove old records; records are durable once all in-sync replicas have them. A topic's
log id is Kafka's topic id.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakSet

import structlog

from freshet.errors import Mismatch, Unavailable
from freshet.log import Bounds, LogTraits, TopicInfo
from freshet.log.kafka.admin import KafkaAdmin
from freshet.log.kafka.connection import KafkaSettings, parse_url
from freshet.log.kafka.group_writer import KafkaGroupWriter
from freshet.log.kafka.reader import KafkaReader
from freshet.log.kafka.writer import IdempotentClient, IdempotentSender, KafkaWriter, TransactionalSender
from freshet.log.topics import check_new_topic, check_partitions
from freshet.types import TopicPartition

_log = structlog.get_logger(__name__)

AnyWriter = TypeVar("AnyWriter", KafkaWriter, KafkaGroupWriter)

_SINCE_4_3 = "cordoned.log.dirs"
"""A setting that brokers have since Kafka 4.3.0 (KIP-1066)."""

_BATCH_BYTES = 1_000_000
"""Most bytes of a batch of several records; librdkafka's default."""

_AGREE_S = 10.0
"""Longest wait until all brokers know a new topic."""

_RETRY_S = 0.05


def open_url(url: str) -> KafkaEventLog:
    """Open the log of `kafka://HOST:PORT,HOST:PORT[/PREFIX][?KEY=VALUE&...]`; no request is sent yet.

    The keys are in `freshet.log.kafka.connection`. Raises ConfigError.
    """
    return KafkaEventLog(parse_url(url))


class KafkaEventLog:
    """See `freshet.log.EventLog`. Must not be used across a fork: open it in the child.

    `hold` does nothing, as Kafka has no retention pins: the distance to the log's start is a metric with an
    alert.
    """

    traits = LogTraits(many_hosts=True, append_every_ms=200)  # a transaction takes several round trips

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._client: dict[str, Any] = {
            "bootstrap.servers": settings.brokers,
            "client.id": "freshet",
            "reconnect.backoff.max.ms": 1000,  # the default of 10 s would delay a return after an outage
            "log_level": 0,  # errors are reported by `error_cb`; users may set it, and `debug`
            **settings.client,
        }
        self._admin = KafkaAdmin(settings, self._client)
        self._lock = threading.Lock()  # guards the next three
        self._partitions: dict[str, int] = {}  # known counts, by topic
        self._opened: WeakSet[KafkaReader | KafkaWriter | KafkaGroupWriter] = WeakSet()
        self._closed = False
        self._checking, self._checked = threading.Lock(), False  # see `_check_brokers`

    def create_topic(
        self, name: str, *, partitions: int, retention_ms: int | None = None, group: str | None = None
    ) -> TopicInfo:
        """Create a topic, or return the one that exists, with this retention from now on.

        Raises:
            ConfigError: a name, the number of partitions or a setting is not allowed.
            Mismatch: the topic exists with another number of partitions, or is compacted.
            Unavailable: brokers do not answer.
        """
        check_new_topic(name, partitions)
        self._check_open()
        self._admin.create(name, partitions, retention_ms)
        info = self._agreed(name)
        check_partitions(info, partitions, f"on {self._settings.brokers}")
        if info.retention_ms != retention_ms:
            self._admin.set_retention(name, retention_ms)
            info = replace(info, retention_ms=retention_ms)
        return info

    def topics(self) -> Mapping[str, TopicInfo]:
        """Return all topics by name."""
        self._check_open()
        return self._admin.infos(self._admin.names())

    def partition_counts(self, topics: Iterable[str]) -> Mapping[str, int]:
        """Return the partition counts of these topics, without topics that do not exist, by one request."""
        self._check_open()
        counts = {topic: count for topic, (_, count) in self._admin.ids(topics).items()}
        with self._lock:
            self._partitions.update(counts)
        return counts

    def grow_topic(self, name: str, partitions: int) -> None:
        """Grow a topic to this many partitions, if it has fewer.

        Raises:
            ConfigError: brokers do not permit it.
            Unavailable: brokers do not answer, or do not agree in time.
        """
        self._check_open()
        if self.partition_counts([name]).get(name, partitions) < partitions:
            self._admin.grow(name, partitions)
            deadline = time.monotonic() + _AGREE_S
            while self.partition_counts([name]).get(name, 0) < partitions:
                if time.monotonic() > deadline:
                    raise Unavailable(f"topic {name} grew, but is not known to the brokers as grown")
                threading.Event().wait(_RETRY_S)

    def bounds(self, partition: TopicPartition) -> Bounds:
        """Return the partition's offsets; it ends at an open transaction."""
        self._locate(partition)
        return self._admin.bounds([partition])[partition]

    def all_bounds(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, Bounds]:
        """Return the offsets of many partitions, by two requests to each broker."""
        places = list(partitions)
        for at in places:
            self._locate(at)
        return self._admin.bounds(places) if places else {}

    def offset_at(self, partition: TopicPartition, time_ms: int) -> int:
        """Return the smallest offset with a record time >= `time_ms`; the end if there is none."""
        self._locate(partition)
        found = self._admin.of_time(partition, time_ms)
        return found if found >= 0 else self.bounds(partition).end

    def reader(self) -> KafkaReader:
        """Open a reader without partitions."""
        self._check_open()
        client = {**self._client, "group.id": self._admin.name("freshet")}  # required; it is never joined
        reader = KafkaReader(self._admin, self._locate, client)
        with self._lock:
            self._opened.add(reader)
        return reader

    def writer(self, name: str | None = None) -> KafkaWriter:
        """Open a writer. A named one is a `transactional.id`, prefix included, and fences every earlier one.

        Raises Mismatch if brokers may leave its transactions without an end; see `_check_brokers`.
        """
        self._check_open()
        sender: IdempotentSender | TransactionalSender
        if name is None:
            sender = IdempotentSender(IdempotentClient(self._producing))
        else:
            self._check_brokers()
            sender = TransactionalSender(self._producing, self._admin.name(name))
        return self._opened_here(KafkaWriter(sender, self._locate, self._settings.max_record_bytes))

    def group_writer(self) -> KafkaGroupWriter:
        """Open a writer of groups, with a client of its own."""
        self._check_open()
        client = IdempotentClient(self._producing)
        return self._opened_here(KafkaGroupWriter(client, self._locate, self._settings.max_record_bytes))

    @property
    def _producing(self) -> dict[str, Any]:
        """Settings of a client that writes."""
        limit = self._settings.max_record_bytes
        # Brokers refuse a batch as a whole, so one of several records must not exceed a topic's limit.
        return {"batch.size": min(_BATCH_BYTES, limit), **self._client, "message.max.bytes": limit + 1024}

    def _opened_here(self, writer: AnyWriter) -> AnyWriter:
        """Return a writer, which `close` will close. Raises Unavailable if the log was closed meanwhile."""
        with self._lock:
            if not self._closed:
                self._opened.add(writer)
                return writer
        writer.close()
        raise Unavailable(f"{self._settings.brokers}: the log was closed in this process")

    def trim(self, partition: TopicPartition, before: int) -> None:
        """Remove records below `before`."""
        self._locate(partition)
        self._admin.trim(partition, before)

    def hold(self, name: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Do nothing; see the class."""

    def close(self) -> None:
        """Close readers and writers. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for opened in list(self._opened):
            opened.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self._settings.brokers}: the log was closed in this process")

    def _check_brokers(self) -> None:
        """Refuse brokers with KAFKA-20734, before the first named writer (ADR 0024).

        A client can read a broker's settings, not its release. They distinguish 4.3 and later from earlier
        releases, but not one later release from another.

        Raises:
            Mismatch: a broker has 4.3 or later.
            Unavailable: brokers do not answer.
        """
        with self._checking:
            if self._checked or self._settings.accept_kafka_20734:
                return
            found = self._admin.broker_settings()
            if affected := [str(broker) for broker, names in sorted(found.items()) if _SINCE_4_3 in names]:
                raise Mismatch(
                    f"{self._settings.brokers}: expected Kafka 4.0 to 4.2.1, or a later release without "
                    f"KAFKA-20734; found 4.3 or later on broker {', '.join(affected)}\n"
                    "  4.3.0, 4.3.1 and 4.4.0 leave transactions without an end, which doubles or loses "
                    "samples: take 4.2.1\n"
                    "  if the brokers' release mends it, put accept_kafka_20734=true into the log's URL"
                )
            if unknown := [broker for broker, names in sorted(found.items()) if not names]:
                _log.warning(
                    "the release of brokers is not known: 4.3.0, 4.3.1 and 4.4.0 double or lose samples",
                    brokers=unknown,
                )
            self._checked = True

    def _locate(self, at: TopicPartition) -> str:
        """Return a partition's topic as Kafka names it. Raises KeyError if it does not exist."""
        self._check_open()
        with self._lock:
            partitions = self._partitions.get(at.topic)
        if partitions is None:
            found = self._admin.ids([at.topic])
            if at.topic not in found:
                raise KeyError(f"no topic {self._admin.name(at.topic)} on {self._settings.brokers}")
            partitions = found[at.topic][1]
            with self._lock:
                self._partitions[at.topic] = partitions
        if not 0 <= at.partition < partitions:
            raise KeyError(f"topic {at.topic} has partitions 0 to {partitions - 1}, not {at.partition}")
        return self._admin.name(at.topic)

    def _agreed(self, name: str) -> TopicInfo:
        """Return a topic's properties once brokers know it."""
        deadline = time.monotonic() + _AGREE_S
        while name not in (found := self._admin.infos([name])):
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"topic {name} was created, but is not known to the brokers after {_AGREE_S:g} s"
                )
            threading.Event().wait(_RETRY_S)
        return found[name]
