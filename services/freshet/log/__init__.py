"""The event log: append-only topics of partitions, durable once acknowledged (Kafka; SQLite when
embedded)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from freshet.types import Append, LogId, Records, TopicPartition

__all__ = ["Bounds", "EventLog", "LogTraits", "Reader", "TopicInfo", "Writer"]


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as it was created."""

    name: str
    partitions: int
    log_id: LogId
    retention_ms: int | None  # None: kept for ever
    max_record_bytes: int  # largest record, with its key, that an append to it may hold
    append_time: bool = True  # records carry the log's own time, and not what their writers say


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a partition holds now: offsets [start, end). `end` is the next offset a committed record can
    get."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LogTraits:
    """What a kind of log is like for services that append in a loop."""

    many_hosts: bool  # processes on several machines reach it: then a service may run in several replicas
    append_every_ms: int  # a good pause between atomic appends of a named writer, by what one costs


class Reader(Protocol):
    """Reads chosen partitions from chosen offsets; positions belong to the caller, never to a consumer group.

    Used by one thread at a time.
    """

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read these partitions from these offsets from now on, and no others.

        Raises:
            DataLost: an offset lies before what is retained or beyond the partition's end (PROTOCOL 1).
        """

    def poll(self, max_records: int, wait_s: float) -> Sequence[tuple[TopicPartition, Records]]:
        """Return records in offset order per partition, at most one entry per partition and `max_records` in
        all.

        Blocks up to `wait_s` for the first record; returns an empty sequence if none came, and then every
        partition has been read to its end. Only committed records are seen (`read_committed`), and none
        without a value (Kafka's tombstones, which are counted). An entry may hold no records: then only its
        `next_offset` moved, past a marker, an aborted transaction or tombstones, as far as `bounds` says the
        partition ends. A partition whose records run ahead is not allowed to starve the others.

        Raises:
            DataLost: the next offset has been removed by retention, or the topic was recreated.
            Unavailable: the log cannot be reached; polling again is safe.
        """

    def close(self) -> None:
        """Free what the reader holds. Idempotent."""


class Writer(Protocol):
    """Appends to the log. Thread-safe."""

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        """Append all of these or none; return each one's first offset, once they are durable on disk.

        Atomic over all partitions and topics of the call if the writer has a name or the call holds one
        partition; a nameless writer promises no atomicity over several. Records of one Append get rising
        offsets in order.

        Raises:
            TooLarge: a record exceeds its topic's `max_record_bytes`; found before anything is sent, so
                nothing was written. Kafka may say so later, if the topic's limit was lowered meanwhile.
            Fenced: a later writer of the same name was opened. Nothing was written.
            Unavailable: not written, or not known to be written (time-out, full disk); the message says
            which. A named writer of which the latter is said may refuse further appends: open another, and
            look what the log says.
        """

    def close(self) -> None:
        """Free what the writer holds. Idempotent."""


class EventLog(Protocol):
    """Topics of one log. Thread-safe; several processes may open the same log at once."""

    @property
    def traits(self) -> LogTraits:
        """What it is like; the same for every log of its kind."""

    def create_topic(
        self, name: str, *, partitions: int, retention_ms: int | None = None, group: str | None = None
    ) -> TopicInfo:
        """Create a topic, or return the one that exists; what it keeps is from now on `retention_ms`.

        Topics of one `group` can be written in one atomic append (SQLite keeps them in one file; Kafka
        ignores it). A name is `[a-z0-9][a-z0-9._-]{0,200}`.

        Raises:
            Mismatch: it exists with another number of partitions (fixed for a model's life).
        """

    def topics(self) -> Mapping[str, TopicInfo]:
        """All topics by name."""

    def partition_counts(self, topics: Iterable[str]) -> Mapping[str, int]:
        """How many partitions each of these topics has now; topics that do not exist are left out.

        Topics of others grow while they are read (Kafka). Partitions that came since an earlier call can be
        used after this one. Raises Unavailable.
        """

    def grow_topic(self, name: str, partitions: int) -> None:
        """Give a topic this many partitions if it has fewer; idempotent.

        Raises Unavailable; ConfigError where the log does not allow it: brokers that do not let this client
        alter topics, and the embedded log, whose topics freshet alone writes.
        """

    def bounds(self, partition: TopicPartition) -> Bounds:
        """What the partition holds now. Raises Unavailable, or KeyError for an unknown topic or partition."""

    def all_bounds(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, Bounds]:
        """`bounds` of many, asked for together: what one costs over a network. Raises as it does."""

    def offset_at(self, partition: TopicPartition, time_ms: int) -> int:
        """Smallest offset whose record time is >= `time_ms`; the end if there is none."""

    def reader(self) -> Reader:
        """A new reader without partitions."""

    def writer(self, name: str | None = None) -> Writer:
        """Open a writer. A named one fences earlier writers of that name (Kafka: its `transactional.id`).

        Args:
            name: of the writer; None for one whose appends are atomic over one partition only.

        Raises:
            Unavailable: it cannot be opened now.
            Mismatch: the log cannot keep what named writers promise (Kafka 4.3.0 to 4.4.0: KAFKA-20734).
        """

    def trim(self, partition: TopicPartition, before: int) -> None:
        """Forget records below `before`, at the log's leisure. Retention by time calls the same thing."""

    def hold(self, name: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Keep records from these offsets on: retention by time passes none, until `name` holds others. Those
        of an earlier call that are not among them are let go: all, if these are none.

        For what must be replayed after a loss (PROTOCOL 12, 17). A log that cannot be held (Kafka) ignores
        it; there the distance to the log's start is a metric with an alert.
        """

    def close(self) -> None:
        """Free what the log holds. Idempotent."""
