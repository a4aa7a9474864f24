"""Reading topics as they grow, and again after whatever happened to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from freshet.console.history import parsed
from freshet.errors import DataLost
from freshet.log import Bounds, EventLog
from freshet.log.records import newest as last_records
from freshet.types import Records, TopicPartition

__all__ = ["Commits", "Follower", "newest", "records_from"]

READ_COMMITS = 5_000


@contextmanager
def _reading(log: EventLog, at: TopicPartition, offset: int) -> Iterator[Iterator[Records]]:
    reader = log.reader()
    try:
        reader.assign({at: offset})

        def records() -> Iterator[Records]:
            while found := reader.poll(1_000, 0.0):
                for _, each in found:
                    yield each

        yield records()
    finally:
        reader.close()


def records_from(log: EventLog, at: TopicPartition, offset: int, most: int) -> list[tuple[int, bytes]]:
    """(offset, value) of up to `most` records from an offset that the partition holds, or its end."""
    found: list[tuple[int, bytes]] = []
    with _reading(log, at, offset) as pieces:
        for records in pieces:
            found += zip(records.offsets.tolist(), records.values, strict=True)
            if len(found) >= most:
                break
    return found[:most]


def newest(log: EventLog, at: TopicPartition, most: int) -> list[tuple[int, bytes]]:
    """(offset, value) of the newest records, oldest first."""
    bounds = log.bounds(at)
    return (
        records_from(log, at, max(bounds.start, bounds.end - most), most) if bounds.end > bounds.start else []
    )


class Follower:
    """One partition, read on from where one was. Used by one thread."""

    def __init__(
        self, log: EventLog, at: TopicPartition, *, span_ms: int | None = None, now_ms: int = 0
    ) -> None:
        """Begin at the partition's start, or with what was appended in the `span_ms` before `now_ms`."""
        self._log, self.at = log, at
        start = log.bounds(at).start
        self.next = start if span_ms is None else max(start, log.offset_at(at, now_ms - span_ms))
        self._reader = log.reader()
        self._reader.assign({at: self.next})

    def read(self, most: int) -> tuple[list[tuple[int, bytes]], bool]:
        """(offset, value) of up to `most` new records, and whether the log began anew with other offsets.

        What retention took away before it was read is passed over.
        """
        try:
            found = self._reader.poll(most, 0.0)
        except DataLost:
            return [], self._again()
        records: list[tuple[int, bytes]] = []
        for _, each in found:
            records += zip(each.offsets.tolist(), each.values, strict=True)
            self.next = each.next_offset
        return records, False

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _again(self) -> bool:
        bounds: Bounds = self._log.bounds(self.at)
        anew = self.next > bounds.end
        self.next = bounds.start
        self._reader.close()
        self._reader = self._log.reader()
        self._reader.assign({self.at: self.next})
        return anew


class Commits:
    """How many events of each stream the joiner has taken, by its newest commit of every partition."""

    def __init__(self, log: EventLog, topic: str) -> None:
        self._log, self._topic = log, topic
        self._count = log.partition_counts([topic]).get(topic, 0)
        self._reader = log.reader()
        self._next: dict[int, dict[str, int]] = {}  # partition -> role -> next offset
        self._assign()

    def read(self) -> dict[str, int]:
        """{role: events taken}, summed over partitions; empty before the first commit."""
        try:
            while found := self._reader.poll(READ_COMMITS, 0.0):
                for at, records in found:
                    if len(records):
                        self._take(at.partition, records.values[-1])
        except DataLost:  # the joiner drops commits that no restart needs, also those not read yet
            self._assign()
        totals: dict[str, int] = {}
        for following in self._next.values():
            for role, offset in following.items():
                totals[role] = totals.get(role, 0) + offset
        return totals

    def cover(self, partitions: int) -> None:
        """Read this many partitions from now on: the joiner's commits get more where its inputs do."""
        if partitions > self._count:
            self._count = partitions
            self._assign()

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _assign(self) -> None:
        places = [TopicPartition(self._topic, p) for p in range(self._count)]
        self._reader.assign({at: self._last(at) for at in places})

    def _last(self, at: TopicPartition) -> int:
        for offset, _ in last_records(self._log, at, 1):
            return offset
        return self._log.bounds(at).end

    def _take(self, partition: int, value: bytes) -> None:
        commit = parsed(value)
        following = commit.get("next") if commit is not None else None
        if isinstance(following, dict):
            self._next[partition] = {str(role): n for role, n in following.items() if type(n) is int}
