"""The event log: partitions with gaps, transactions with markers and fencing, and an outage switch.

An aborted record and a marker take an offset and are read as nothing, as on Kafka with `read_committed`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from .simulation import Unavailable

R = TypeVar("R")


class Fenced(Exception):
    """Another instance with the same transactional id has started: this one must stop."""


class Partition(Generic[R]):
    """Records at offsets; None is a gap."""

    def __init__(self) -> None:
        self.records: list[R | None] = []
        self.open_at: int | None = None  # first offset of the open transaction

    @property
    def end(self) -> int:
        """The last stable offset: nothing of an open transaction can be read."""
        return len(self.records) if self.open_at is None else self.open_at

    def append(self, record: R | None) -> int:
        """Append and return the offset."""
        self.records.append(record)
        return len(self.records) - 1

    def read(self, start: int, limit: int, count: int) -> tuple[list[tuple[int, R]], int]:
        """Up to `count` records from `start`, before `limit`; and where the reader stands afterwards."""
        stop = min(limit, self.end)
        found: list[tuple[int, R]] = []
        at = start
        while at < stop and len(found) < count:
            record = self.records[at]
            if record is not None:
                found.append((at, record))
            at += 1
        return found, at


class Topic(Generic[R]):
    """Partitions that can be away together."""

    def __init__(self, partitions: int) -> None:
        self.partitions: list[Partition[R]] = [Partition() for _ in range(partitions)]
        self.away = False

    def __getitem__(self, partition: int) -> Partition[R]:
        if self.away:
            raise Unavailable
        return self.partitions[partition]


class Transactions(Generic[R]):
    """The coordinator for one transactional id; a commit carries the writer's state with the records."""

    def __init__(self, topic: Topic[R]) -> None:
        self._topic = topic
        self._epoch = 0
        self.saved: object = None

    def start(self) -> int:
        """Fence older instances and abort what they left open; returns the new epoch."""
        self._epoch += 1
        self._close(keep=False)
        return self._epoch

    def produce(self, epoch: int, records: Iterable[tuple[int, R]]) -> None:
        """Write records of an open transaction: they have offsets, but no reader sees them."""
        self._check(epoch)
        for number, record in records:
            partition = self._topic[number]
            if partition.open_at is None:
                partition.open_at = len(partition.records)
            partition.append(record)

    def commit(self, epoch: int, state: object) -> None:
        """Make the open records readable, and the state with them (rule 18)."""
        self._check(epoch)
        self._close(keep=True)
        self.saved = state

    def commit_records(self, epoch: int) -> None:
        """Make the open records readable and leave the state as it was (rule 18 broken)."""
        self.commit(epoch, self.saved)

    def _check(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise Fenced

    def _close(self, *, keep: bool) -> None:
        for partition in self._topic.partitions:
            if partition.open_at is None:
                continue
            if not keep:
                for at in range(partition.open_at, len(partition.records)):
                    partition.records[at] = None
            partition.append(None)  # the marker
            partition.open_at = None
