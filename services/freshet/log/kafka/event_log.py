"""The event log on Apache Kafka (4.x, or another broker of its protocol with transactions and topic ids).

What the embedded log does by itself is here the brokers' work: topics are kept and forgotten by them, records
are durable once all in-sync replicas have them. A topic's log id is Kafka's topic id.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import structlog

from freshet.errors import ConfigError, Mismatch, Unavailable
from freshet.log import Bounds, LogTraits, TopicInfo
from freshet.log.kafka.admin import KafkaAdmin
from freshet.log.kafka.connection import KafkaSettings, parse_url
from freshet.log.kafka.reader import KafkaReader
from freshet.log.kafka.writer import KafkaWriter, Plainly, Transactions
from freshet.types import TopicPartition

__all__ = ["KafkaEventLog", "open_url"]

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,200}")

_log = structlog.get_logger(__name__)

_SINCE_4_3 = "cordoned.log.dirs"
"""A setting that brokers have since Kafka 4.3.0 (KIP-1066)."""

_BATCH_BYTES = 1_000_000
"""Of several records in one batch, as librdkafka has it by default."""

_AGREE_S = 10.0
"""For brokers to agree on a topic that was just made."""

_LOOK_S = 0.05


def open_url(url: str) -> KafkaEventLog:
    """Open the log of `kafka://HOST:PORT,HOST:PORT[/PREFIX][?KEY=VALUE&...]`; see `kafka_settings`.

    Raises ConfigError. Brokers are not asked yet.
    """
    return KafkaEventLog(parse_url(url))


class KafkaEventLog:
    """See `freshet.log.EventLog`. Do not carry it across a fork: open it in the child.

    `hold` does nothing, as Kafka's retention can't be held: the distance to the log's start is a metric
    with an alert.
    """

    traits = LogTraits(many_hosts=True, append_every_ms=200)  # a transaction takes several round trips

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._client: dict[str, Any] = {
            "bootstrap.servers": settings.brokers,
            "client.id": "freshet",
            "reconnect.backoff.max.ms": 1000,  # brokers that come back are found soon; the default waits 10 s
            "log_level": 0,  # what goes wrong comes to us as events; may be set, as `debug` may
            **settings.client,
        }
        self._admin = KafkaAdmin(settings, self._client)
        self._lock = threading.Lock()  # guards what follows
        self._partitions: dict[str, int] = {}  # of topics that were seen
        self._opened: WeakSet[KafkaReader | KafkaWriter] = WeakSet()
        self._closed = False
        self._checking, self._checked = threading.Lock(), False  # see `_check_brokers`

    def create_topic(
        self, name: str, *, partitions: int, retention_ms: int | None = None, group: str | None = None
    ) -> TopicInfo:
        """Create a topic, or return the one that exists, from now on with this retention."""
        if not _NAME.fullmatch(name):
            raise ConfigError("event log", "topic", name, f"a name that matches {_NAME.pattern}")
        if not 1 <= partitions <= 1024:
            raise ConfigError("event log", f"partitions of {name}", partitions, "an integer from 1 to 1024")
        self._check_open()
        self._admin.create(name, partitions, retention_ms)
        info = self._agreed(name)
        if info.partitions != partitions:
            raise Mismatch(
                f"topic {name}: expected {partitions} partitions, found {info.partitions} on"
                f" {self._settings.brokers}\n"
                "  the number is fixed for a model's life: keep it, or take another topic name"
            )
        if info.retention_ms != retention_ms:
            self._admin.set_retention(name, retention_ms)
            info = replace(info, retention_ms=retention_ms)
        return info

    def topics(self) -> Mapping[str, TopicInfo]:
        """All topics by name."""
        self._check_open()
        return self._admin.infos(self._admin.names())

    def partition_counts(self, topics: Iterable[str]) -> Mapping[str, int]:
        """How many partitions each of these topics has now: one request."""
        self._check_open()
        counts = {topic: count for topic, (_, count) in self._admin.ids(topics).items()}
        with self._lock:
            self._partitions.update(counts)
        return counts

    def grow_topic(self, name: str, partitions: int) -> None:
        """Give a topic this many partitions, if it has fewer."""
        self._check_open()
        if self.partition_counts([name]).get(name, partitions) < partitions:
            self._admin.grow(name, partitions)
            deadline = time.monotonic() + _AGREE_S
            while self.partition_counts([name]).get(name, 0) < partitions:
                if time.monotonic() > deadline:
                    raise Unavailable(f"topic {name} grew, but is not known to the brokers as grown")
                threading.Event().wait(_LOOK_S)

    def bounds(self, partition: TopicPartition) -> Bounds:
        """What the partition holds now; it ends where a transaction is open."""
        self._locate(partition)
        return self._admin.bounds([partition])[partition]

    def all_bounds(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, Bounds]:
        """What each of many holds now: two requests to each broker."""
        places = list(partitions)
        for at in places:
            self._locate(at)
        return self._admin.bounds(places) if places else {}

    def offset_at(self, partition: TopicPartition, time_ms: int) -> int:
        """Smallest offset whose record time is >= `time_ms`; the end if there is none."""
        self._locate(partition)
        found = self._admin.of_time(partition, time_ms)
        return found if found >= 0 else self.bounds(partition).end

    def reader(self) -> KafkaReader:
        """A new reader without partitions."""
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
        limit = self._settings.max_record_bytes
        # A batch of several records stays below what topics take of one: brokers refuse a batch as a whole.
        client = {"batch.size": min(_BATCH_BYTES, limit), **self._client, "message.max.bytes": limit + 1024}
        sender: Plainly | Transactions
        if name is None:
            sender = Plainly(client)
        else:
            self._check_brokers()
            sender = Transactions(client, self._admin.name(name))
        writer = KafkaWriter(sender, self._locate, limit)
        with self._lock:
            if not self._closed:
                self._opened.add(writer)
                return writer
        writer.close()
        raise Unavailable(f"{self._settings.brokers}: the log was closed in this process")

    def trim(self, partition: TopicPartition, before: int) -> None:
        """Forget records below `before`."""
        self._locate(partition)
        self._admin.trim(partition, before)

    def hold(self, name: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Ignored: see the class."""

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

        A client can learn which settings a broker has, not its release. So 4.3 and later are told from
        earlier releases, and not one of them from another. Raises Mismatch, Unavailable.
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
        """Its topic as Kafka names it; KeyError for one that does not exist."""
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
        """The topic as brokers know it, once they do."""
        deadline = time.monotonic() + _AGREE_S
        while name not in (found := self._admin.infos([name])):
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"topic {name} was made, but is not known to the brokers after {_AGREE_S:g} s"
                )
            threading.Event().wait(_LOOK_S)
        return found[name]
