"""Event log: append-only topics of partitions, durable once acknowledged (Kafka; SQLite when embedded)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from freshet.errors import DataLost
from freshet.types import Append, LogId, Records, TopicPartition

__all__ = [
    "Answered",
    "Bounds",
    "EventLog",
    "GroupOutcome",
    "GroupWriter",
    "LogTraits",
    "Reader",
    "TopicInfo",
    "Writer",
]

GroupOutcome = Sequence[int] | Exception
"""The first offset of each append of a group, or the error of the group: one that `Writer.append` raises."""

Answered = Callable[[int, GroupOutcome], None]
"""Called with the index of a group in its call of `GroupWriter.append`, and its outcome; must not raise."""


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as it was created."""

    name: str
    partitions: int
    log_id: LogId
    retention_ms: int | None  # None: records are kept forever
    max_record_bytes: int  # largest record, with its key, of an append
    append_time: bool = True  # whether records carry the log's own time, not their writers'


@dataclass(frozen=True, slots=True)
class Bounds:
    """Offsets [start, end) that a partition holds; `end` is the next offset of a committed record."""

    start: int
    end: int

    def lost(self, at: TopicPartition, offset: int) -> DataLost:
        """Return the error for a reader of this partition: its next record, at `offset`, is not there."""
        if offset > self.end:
            return DataLost(
                f"{at}: offset {offset} lies beyond the log's end, {self.end}: "
                "the log was created anew, or has lost writes"
            )
        return DataLost(
            f"{at}: offset {offset} is no longer in the log, which starts at {self.start}: "
            "retention has removed it\n"
            "  set the reader to a later offset, or start anew; a longer retention prevents this"
        )


@dataclass(frozen=True, slots=True)
class LogTraits:
    """Properties of a kind of log, for services that append in a loop."""

    many_hosts: bool  # whether processes on several machines reach it, so that a service may have replicas
    append_every_ms: int  # suitable interval between atomic appends of a named writer, by their cost


class Reader(Protocol):
    """Reads chosen partitions from chosen offsets; the caller keeps positions, not a consumer group.

    Used by one thread at a time.
    """

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read these partitions, and no others, from these offsets.

        Raises:
            DataLost: an offset lies before the retained records or beyond the partition's end (PROTOCOL 1).
        """

    def poll(self, max_records: int, wait_s: float) -> Sequence[tuple[TopicPartition, Records]]:
        """Return records in offset order, at most one entry per partition and `max_records` in all.

        Blocks up to `wait_s` for the first record. An empty result means that every partition has been read
        to its end. Returns committed records only (`read_committed`), and none without a value (Kafka's
        tombstones, which are counted). An entry may have no records: then only its `next_offset` moved, past
        a marker, an aborted transaction or tombstones, up to the end of `bounds` at most. No partition
        starves the others.

        Raises:
            DataLost: retention has removed the next offset, or the topic was created anew.
            Unavailable: the log cannot be reached; polling again is safe, as a failed call takes no record.
        """

    def close(self) -> None:
        """Release the reader's resources. Idempotent."""


class Writer(Protocol):
    """Appends to the log. Thread-safe."""

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        """Append all or none of these; returns the first offset of each, once they are durable on disk.

        Atomic over all partitions and topics of the call if the writer has a name or the call has one
        partition; a nameless writer is not atomic over several. Records of one Append get increasing offsets
        in order. Where another writer's records lie between them, a later offset than the first is returned,
        so that this and a record's position are never less than its offset.

        Raises:
            KeyError: a topic or partition does not exist. Nothing was written.
            ValueError: columns of an append have different lengths, or a named writer's topics lie in several
                groups. Nothing was written.
            TooLarge: a record exceeds its topic's `max_record_bytes`. This is checked before anything is
                sent, so nothing was written. Kafka may raise it later, if the topic's limit was lowered
                meanwhile; the message says whether other records of the call may be written.
            Fenced: a later writer of the same name was opened. Nothing was written.
            Unavailable: not written, or not known to be written (time-out, full disk), as the message says.
                In the second case a named writer may refuse further appends: open another, and read the log.
        """

    def close(self) -> None:
        """Release the writer's resources. Idempotent."""


class GroupWriter(Protocol):
    """Appends groups of records, each with an outcome of its own: a partition that cannot be written delays
    and fails only the groups that have records for it. Has no name.

    Used by one thread at a time; `close` may be called by any thread. `answered` is called once for each
    group, by the thread that is in `append`, `wait` or `close`.
    """

    def append(self, groups: Sequence[Sequence[Append]], answered: Answered) -> None:
        """Send groups; each is answered once all its records are durable, or once one of them has failed.

        Does not wait for a partition that cannot be written. A log that commits all partitions together
        waits for that commit, so it answers all groups before this returns.

        Records of a partition are written in the order of the groups, over all calls. If a group fails, later
        groups may be written nevertheless; a caller that repeats groups and needs their order must hand over
        a partition's next group after the answer to the one before. As for `Writer`, records of a failed
        group are not known to be written unless its error excludes it; KeyError, ValueError and TooLarge that
        is found before sending mean that none is, and are never outcomes of other groups.
        """

    def wait(self, within_s: float) -> None:
        """Process acknowledgements until all groups are answered, for at most `within_s` > 0 seconds."""

    def close(self) -> None:
        """Answer all outstanding groups, with Unavailable if they are not known to be written, and release
        the writer's resources. Later groups are answered with Unavailable. Idempotent."""


class EventLog(Protocol):
    """Topics of one log. Thread-safe; several processes may open the same log at once."""

    @property
    def traits(self) -> LogTraits:
        """Properties of the log, the same for every log of its kind."""

    def create_topic(
        self, name: str, *, partitions: int, retention_ms: int | None = None, group: str | None = None
    ) -> TopicInfo:
        """Create a topic, or return the one that exists; sets its retention to `retention_ms`.

        Topics of one `group` can be written in one atomic append (SQLite keeps them in one file; Kafka
        ignores it). A name is `[a-z0-9][a-z0-9._-]{0,200}`.

        Raises:
            ConfigError: the name, the number of partitions or a setting of the log is not allowed.
            Mismatch: it exists with another number of partitions (fixed for a model's life).
        """

    def topics(self) -> Mapping[str, TopicInfo]:
        """Return all topics by name. Raises Unavailable if the log cannot be reached."""

    def partition_counts(self, topics: Iterable[str]) -> Mapping[str, int]:
        """Return the present partition counts of these topics, without topics that do not exist.

        External topics may grow while they are read (Kafka). New partitions can be used after this call.
        Raises Unavailable if the log cannot be reached.
        """

    def grow_topic(self, name: str, partitions: int) -> None:
        """Grow a topic to this many partitions if it has fewer; idempotent.

        Raises:
            Unavailable: the log cannot be reached.
            ConfigError: the log does not allow it: brokers that do not permit this client to alter topics,
                and the embedded log, where only freshet writes topics.
        """

    def bounds(self, partition: TopicPartition) -> Bounds:
        """Return the partition's offsets. Raises Unavailable, or KeyError for an unknown partition."""

    def all_bounds(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, Bounds]:
        """Return `bounds` of many partitions, in one network round trip. Raises as it does."""

    def offset_at(self, partition: TopicPartition, time_ms: int) -> int:
        """Return the smallest offset with a record time >= `time_ms`; the end if there is none."""

    def reader(self) -> Reader:
        """Open a reader without partitions."""

    def writer(self, name: str | None = None) -> Writer:
        """Open a writer. A named one fences earlier writers of that name (Kafka: its `transactional.id`).

        Args:
            name: of the writer; without one its appends are atomic over one partition only.

        Raises:
            Unavailable: it cannot be opened now.
            Mismatch: appends of a named writer would not be atomic in this log (Kafka 4.3.0 to 4.4.0:
                KAFKA-20734).
        """

    def group_writer(self) -> GroupWriter:
        """Open a writer of groups. Raises Unavailable if it cannot be opened now."""

    def trim(self, partition: TopicPartition, before: int) -> None:
        """Remove records below `before`, at a time of the log's choice, as retention by time does."""

    def hold(self, name: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Set the retention pin of `name`: retention by time keeps records from these offsets on. Replaces
        the pin's former offsets; an empty mapping removes it.

        Pins keep records that must be replayed after a loss (PROTOCOL 12, 17). A log without pins (Kafka)
        ignores them; there the distance to the log's start is a metric with an alert.
        """

    def close(self) -> None:
        """Release the log's resources. Idempotent."""
