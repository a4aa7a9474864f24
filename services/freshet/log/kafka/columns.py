"""Messages of Kafka's client as columns, and what was read ahead, handed out fairly."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter, ne

import numpy as np
from confluent_kafka.cimpl import Message

from freshet.observability.skipped_state import count_tombstones
from freshet.types import I64, BytesColumn, Records, TopicPartition

__all__ = ["Ahead", "flatten"]


def flatten(
    messages: Sequence[Message], topics: Mapping[str, str]
) -> Iterable[tuple[TopicPartition, Records]]:
    """Messages without errors as columns, one entry for each run of a partition.

    Messages without a value are left out and counted; an entry of nothing else holds no records.

    Everything is a map over one of the client's C functions: 0.5 µs a message, as much as making the objects.

    Args:
        messages: (N,) as `consume` gave them.
        topics: {name in Kafka: our name}.
    """
    n = len(messages)
    if not n:
        return
    places = list(map(Message.topic, messages))
    parts = _integers(map(Message.partition, messages), n)
    changes = parts[1:] != parts[:-1]
    if len(topics) > 1:
        changes |= np.fromiter(map(ne, places[1:], places[:-1]), np.bool_, n - 1)
    offsets = _integers(map(Message.offset, messages), n)
    times = _integers(map(itemgetter(1), map(Message.timestamp, messages)), n)
    values, keys = list(map(Message.value, messages)), list(map(Message.key, messages))
    borders = [0, *(np.flatnonzero(changes) + 1).tolist(), n]
    some_empty = not all(values)
    for start, stop in pairwise(borders):
        at = TopicPartition(topics[str(places[start])], int(parts[start]))
        records = Records(
            offsets[start:stop],
            times[start:stop],
            _column(keys[start:stop]),
            _column(values[start:stop]),
            int(offsets[stop - 1]) + 1,
        )
        yield at, _with_values(at, records, values[start:stop]) if some_empty else records


def _with_values(at: TopicPartition, records: Records, values: Sequence[bytes | None]) -> Records:
    """Leave out records whose value is null, which is another thing than empty."""
    kept = [i for i, value in enumerate(values) if value is not None]
    if len(kept) == len(values):
        return records
    count_tombstones(at.topic, len(values) - len(kept))
    return records.where(kept)


def _integers(values: Iterable[int | None], n: int) -> I64:
    return np.fromiter(values, np.int64, n)


def _column(values: list[bytes | None]) -> BytesColumn:
    if not any(values):  # keys, mostly
        return BytesColumn(np.empty(0, np.uint8), np.zeros(len(values), np.int64))
    given = [value or b"" for value in values]
    return BytesColumn(
        np.frombuffer(b"".join(given), np.uint8),
        np.cumsum(np.fromiter(map(len, given), np.int64, len(given))),
    )


class Ahead:
    """Records read ahead of the caller, by partition; every partition has its turn. Not thread-safe."""

    def __init__(self, positions: Mapping[TopicPartition, int]) -> None:
        self.next = dict(positions)
        """Where each partition is read on, markers and gaps included: of what was read ahead, not of what was
        handed out."""
        self.bytes = 0
        self._pieces: dict[TopicPartition, deque[Records]] = {at: deque() for at in positions}
        self._turn = 0

    def add(self, at: TopicPartition, records: Records) -> int:
        """Records, at least one, that follow those there are. Those that do not are passed over: others have
        seen librdkafka hand out an offset twice. Returns how many these were."""
        found, records = len(records), _rising(records, self.next[at])
        if not len(records):
            return found
        self._pieces[at].append(records)
        self.next[at] = records.next_offset
        self.bytes += _size(records)
        return found - len(records)

    def moved(self, at: TopicPartition, next_offset: int) -> None:
        """The partition's reading has passed markers, or records of an aborted transaction.

        Where no records wait that could carry this, an entry without records tells of it.
        """
        if next_offset <= self.next[at]:
            return
        self.next[at] = next_offset
        pieces = self._pieces[at]
        last = pieces.pop() if pieces else _nothing(next_offset)
        pieces.append(_part(last, 0, len(last), next_offset))

    def take(self, most: int) -> list[tuple[TopicPartition, Records]]:
        """At most so many records, of the partitions that have some."""
        ready = [at for at, pieces in self._pieces.items() if pieces]
        if not ready:
            return []
        self._turn += 1
        turn = self._turn % len(ready)
        found = []
        for i, at in enumerate(ready[turn:] + ready[:turn]):
            share = most // (len(ready) - i)  # what earlier ones left falls to the later
            if i == 0:
                share = max(share, 1)
            if share:
                records = self._take(self._pieces[at], share)
                most -= len(records)
                found.append((at, records))
        return found

    def _take(self, pieces: deque[Records], most: int) -> Records:
        parts: list[Records] = []
        while pieces and len(pieces[0]) <= most:
            parts.append(pieces.popleft())
            most -= len(parts[-1])
        if pieces and most:
            whole = pieces.popleft()
            parts.append(_part(whole, 0, most, int(whole.offsets[most - 1]) + 1))
            pieces.appendleft(_part(whole, most, len(whole), whole.next_offset))
        taken = parts[0] if len(parts) == 1 else _joined(parts)
        self.bytes -= _size(taken)
        return taken


def _rising(records: Records, least: int) -> Records:
    """Those from `least` on, each above the one before."""
    offsets = records.offsets
    if offsets[0] >= least and (len(offsets) == 1 or (offsets[1:] > offsets[:-1]).all()):
        return records
    before = np.maximum.accumulate(np.concatenate(([least - 1], offsets[:-1])))
    good = np.flatnonzero(offsets > before).tolist()
    return _joined([_part(records, i, i + 1, int(offsets[i]) + 1) for i in good]) if good else _nothing(least)


def _size(records: Records) -> int:
    return len(records.values.data) + len(records.keys.data)


def _nothing(next_offset: int) -> Records:
    empty = np.empty(0, np.int64)
    return Records(empty, empty, BytesColumn.of([]), BytesColumn.of([]), next_offset)


def _part(records: Records, start: int, stop: int, next_offset: int) -> Records:
    return Records(
        records.offsets[start:stop],
        records.times_ms[start:stop],
        records.keys.slice(start, stop),
        records.values.slice(start, stop),
        next_offset,
    )


def _joined(parts: Sequence[Records]) -> Records:
    return Records(
        np.concatenate([part.offsets for part in parts]),
        np.concatenate([part.times_ms for part in parts]),
        BytesColumn.concat([part.keys for part in parts]),
        BytesColumn.concat([part.values for part in parts]),
        parts[-1].next_offset,
    )
