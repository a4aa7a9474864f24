"""Reader of Kafka: messages by the thousand as columns, read ahead, and returned fairly by partition.

Positions, ends and topic ids are checked here; N messages.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import pairwise
from operator import itemgetter, ne
from typing import Any

import numpy as np
import structlog
from confluent_kafka import Consumer
from confluent_kafka.cimpl import Message

from freshet.errors import Corrupt, DataLost, Unavailable
from freshet.log.kafka.admin import KafkaAdmin
from freshet.log.kafka.connection import DAMAGED, LOST, UNKNOWN, LastError, family, translated
from freshet.log.records import take_fairly
from freshet.observability.skipped_state import count_tombstones
from freshet.types import I64, BytesColumn, LogId, Records, TopicPartition


def flatten(
    messages: Sequence[Message], topics: Mapping[str, str]
) -> Iterable[tuple[TopicPartition, Records]]:
    """Yield messages without errors as columns, one entry for each run of a partition.

    Messages without a value are left out and counted; an entry of such messages alone has no records.
    Every column is a map over one of the client's C functions: 0.5 µs a message, as long as the client needs
    to create it.

    Args:
        messages: (N,) as returned by `consume`.
        topics: {name in Kafka: freshet's name}.
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
    """Leave out the records with a null, not an empty, value."""
    kept = [i for i, value in enumerate(values) if value is not None]
    if len(kept) == len(values):
        return records
    count_tombstones(at.topic, len(values) - len(kept))
    return records.where(kept)


def _integers(values: Iterable[int | None], n: int) -> I64:
    return np.fromiter(values, np.int64, n)


def _column(values: list[bytes | None]) -> BytesColumn:
    if not any(values):  # usual for keys
        return BytesColumn(np.empty(0, np.uint8), np.zeros(len(values), np.int64))
    given = [value or b"" for value in values]
    return BytesColumn(
        np.frombuffer(b"".join(given), np.uint8),
        np.cumsum(np.fromiter(map(len, given), np.int64, len(given))),
    )


class Ahead:
    """Records read ahead, by partition, and returned fairly. Not thread-safe."""

    def __init__(self, positions: Mapping[TopicPartition, int]) -> None:
        self.next = dict(positions)
        """{partition: next offset to read ahead}, past markers and gaps"""
        self.bytes = 0
        self._pieces: dict[TopicPartition, deque[Records]] = {at: deque() for at in positions}
        self._turn = 0

    def add(self, at: TopicPartition, records: Records) -> int:
        """Add records, at least one, that follow the present ones; returns the number of skipped ones.

        Records at former offsets are skipped, since librdkafka is known to return an offset twice.
        """
        found, records = len(records), _rising(records, self.next[at])
        if not len(records):
            return found
        self._pieces[at].append(records)
        self.next[at] = records.next_offset
        self.bytes += _size(records)
        return found - len(records)

    def moved(self, at: TopicPartition, next_offset: int) -> None:
        """Move past markers, or records of an aborted transaction.

        If no records wait, an entry without records carries the next offset.
        """
        if next_offset <= self.next[at]:
            return
        self.next[at] = next_offset
        pieces = self._pieces[at]
        last = pieces.pop() if pieces else _nothing(next_offset)
        pieces.append(last.slice(0, len(last), next_offset))

    def pop_records(self, most: int) -> list[tuple[TopicPartition, Records]]:
        """Return at most this many records, from the partitions that have some."""
        ready = [at for at, pieces in self._pieces.items() if pieces]
        if not ready:
            return []
        self._turn += 1
        found = take_fairly(ready, self._turn, most, lambda at, share: _pop(self._pieces[at], share))
        self.bytes -= sum(_size(records) for _, records in found)
        return found


def _pop(pieces: deque[Records], most: int) -> Records:
    parts: list[Records] = []
    while pieces and len(pieces[0]) <= most:
        parts.append(pieces.popleft())
        most -= len(parts[-1])
    if pieces and most:
        whole = pieces.popleft()
        parts.append(whole.slice(0, most, int(whole.offsets[most - 1]) + 1))
        pieces.appendleft(whole.slice(most, len(whole), whole.next_offset))
    return parts[0] if len(parts) == 1 else _joined(parts)


def _rising(records: Records, least: int) -> Records:
    """Return the records from `least` on, each at a higher offset than the one before."""
    offsets = records.offsets
    if offsets[0] >= least and (len(offsets) == 1 or (offsets[1:] > offsets[:-1]).all()):
        return records
    before = np.maximum.accumulate(np.concatenate(([least - 1], offsets[:-1])))
    good = np.flatnonzero(offsets > before).tolist()
    return _joined([records.slice(i, i + 1, int(offsets[i]) + 1) for i in good]) if good else _nothing(least)


def _size(records: Records) -> int:
    return len(records.values.data) + len(records.keys.data)


def _nothing(next_offset: int) -> Records:
    empty = np.empty(0, np.int64)
    return Records(empty, empty, BytesColumn.of([]), BytesColumn.of([]), next_offset)


def _joined(parts: Sequence[Records]) -> Records:
    return Records(
        np.concatenate([part.offsets for part in parts]),
        np.concatenate([part.times_ms for part in parts]),
        BytesColumn.concat([part.keys for part in parts]),
        BytesColumn.concat([part.values for part in parts]),
        parts[-1].next_offset,
    )


_log = structlog.get_logger(__name__)

_AT_ONCE = 4096
"""Messages of one `consume`: more are no faster, and hold the GIL for longer (1 ms)."""

_AHEAD_BYTES = 8 << 20
"""Most bytes read ahead; the client's own queue (16 MiB, see CLIENT) fills up behind them."""

_SLICE_S = 0.05
"""Longest wait in one `consume`: markers, which do not end the wait, are seen by then."""

_BRIEFLY_S = 0.001
"""Time between two checks for markers, once the partitions' ends are known and lie behind them."""

_LOOK_S = 0.01
"""Longest wait for an answer about the ends before records that have come meanwhile are looked for."""

_TOGETHER_S = 0.25
"""Longest wait for the first records of all partitions, so that none is read far ahead of others."""

_ALIVE_S = 0.1
"""Age up to which an answer about a partition's end counts as new, for a caller that waits anyway."""

_ANSWER_S = 1.0
"""Time without an answer, or without records that are known to exist, after which the log is unavailable."""

_IDS_EVERY_S = 1.0
"""Interval of checks that topics still have the same ids."""

CLIENT: Mapping[str, Any] = {
    "isolation.level": "read_committed",
    "enable.auto.commit": False,  # positions belong to the stores, never to a group
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",  # an absent offset is a loss, never a new beginning
    "check.crcs": True,  # neither brokers that serve nor clients that read check batches by default
    "fetch.queue.backoff.ms": 10,  # the default of 1 s stalls a fast reader
    "queued.max.messages.kbytes": 16 << 10,
    "fetch.message.max.bytes": 4 << 20,
    "fetch.wait.max.ms": 250,
}
"""Settings of librdkafka for a reader; users cannot change the first five."""


class KafkaReader:
    """See `freshet.log.Reader`. Fetching begins with the first poll after `assign`."""

    def __init__(
        self, admin: KafkaAdmin, locate: Callable[[TopicPartition], str], client: Mapping[str, Any]
    ) -> None:
        self._admin, self._locate, self._last_error = admin, locate, LastError()
        self._client = {**CLIENT, **client, "error_cb": self._last_error}
        self._consumer = self._new_consumer()
        self._using = threading.Lock()  # the log may be closed while a thread polls
        self._closed = False
        self._ids: dict[str, LogId] = {}
        self._awaited: set[TopicPartition] = set()  # have records, none of which was read yet
        self._forget(Ahead({}))

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read only these partitions, from these offsets.

        Raises:
            DataLost: an offset is out of bounds.
            KeyError: a partition does not exist.
            Unavailable: brokers do not answer, or the reader was closed.
        """
        places = list(positions)
        for at in places:
            self._locate(at)
        ids = self._admin.ids({at.topic for at in places})
        bounds = self._admin.bounds(places, committed=False)
        for at, offset in positions.items():
            if not bounds[at].start <= offset <= bounds[at].end:
                raise bounds[at].lost(at, offset)
        with self._using:
            self._check_open()
            self._begin_anew()
            self._ids = {topic: log_id for topic, (log_id, _) in ids.items()}
            self._forget(Ahead(positions))
            self._awaited = {at for at, offset in positions.items() if offset < bounds[at].end}

    def poll(self, max_records: int, wait_s: float) -> Sequence[tuple[TopicPartition, Records]]:
        """Return the records of partitions that have some; waits up to `wait_s` for the first.

        An empty result means that every partition has been read to its end, as of a moment after the call
        began, or at most 0.1 s before its wait was over.

        Raises:
            ValueError: `max_records` is less than 1.
            DataLost: retention has removed the next offset, or the topic was created anew.
            Corrupt: a batch of records fails its checksum; a further call reads it once more.
            Unavailable: brokers do not answer, or the reader was closed.
        """
        if max_records < 1:
            raise ValueError(f"max_records must be at least 1, found {max_records}")
        began = time.monotonic()
        until = began + wait_s
        with self._using:
            self._check_open()
            if not self._ids:
                return []
            if not self._fetching:
                self._begin(began)
            self._check_ids(began)
            if self._ahead.bytes < _AHEAD_BYTES:
                self._fetch(0.0)
            while True:
                now = time.monotonic()
                if not self._awaited or now >= self._together_until:
                    found = self._ahead.pop_records(max_records)
                    if found:
                        return found
                    if now >= until and self._is_at_end(until - min(wait_s, _ALIVE_S)):
                        return []
                if now >= until and self._end_requests:
                    wait(self._end_requests.values(), _LOOK_S)
                    self._fetch(0.0)
                else:
                    self._fetch(min(_SLICE_S, max(_BRIEFLY_S, until - now)))

    def close(self) -> None:
        """Close the connections. Idempotent."""
        with self._using:
            if not self._closed:
                self._closed = True
                self._consumer.close()

    def _new_consumer(self) -> Consumer:
        with translated("a reader could not be created"):
            return Consumer(self._client)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the reader was closed")

    def _forget(self, ahead: Ahead) -> None:
        self._ahead, self._fetching = ahead, False
        self._places = [self._admin.place(at) for at in ahead.next]
        self._topics = {self._admin.name(topic): topic for topic in self._ids}
        self._awaited = set()
        self._together_until = 0.0
        self._end_requests: dict[TopicPartition, Future[Any]] = {}
        self._ends_requested_s = self._at_end_s = float("-inf")
        self._silent_since_s: float | None = None
        self._id_requests: dict[str, Future[Any]] = {}
        self._ids_requested_s = time.monotonic()

    def _begin_anew(self) -> None:
        """Have the next poll begin where the records read ahead end: a new consumer has no position."""
        if self._fetching:
            self._consumer.close()
            self._consumer, self._fetching = self._new_consumer(), False

    def _begin(self, now: float) -> None:
        with translated("the partitions could not be assigned", self._last_error):
            self._consumer.assign([self._admin.place(at, offset) for at, offset in self._ahead.next.items()])
        self._fetching, self._together_until = True, now + _TOGETHER_S

    def _fetch(self, wait_s: float) -> None:
        """Add the client's messages to the records read ahead; waits up to `wait_s` for the first."""
        with translated("records could not be read", self._last_error):
            try:
                # `consume` of many waits until it has them all, so wait for one.
                messages = self._consumer.consume(1, wait_s) if wait_s else []
                if messages or not wait_s:
                    messages += self._consumer.consume(_AT_ONCE, 0)
                if any(map(Message.error, messages)):
                    messages = [message for message in messages if self._is_good(message)]
                for at, records in flatten(messages, self._topics):
                    if not len(records):
                        self._ahead.moved(at, records.next_offset)
                    elif repeated := self._ahead.add(at, records):
                        _log.warning("repeated records were skipped", partition=str(at), records=repeated)
                    self._awaited.discard(at)
                if len(messages) < _AT_ONCE:  # the client has no more, so it is past trailing markers
                    self._pass_markers()
            except Exception:  # the next call reads once more what the client has returned, or dropped
                self._begin_anew()
                raise
        if messages:
            self._silent_since_s = None

    def _pass_markers(self) -> None:
        for place in self._consumer.position(self._places):
            if place.offset >= 0:
                self._ahead.moved(TopicPartition(self._topics[place.topic], place.partition), place.offset)

    def _is_good(self, message: Message) -> bool:
        error = message.error()
        if error is None:
            return True
        at = f"{self._topics.get(str(message.topic()), message.topic())}[{message.partition()}]"
        if error.code() in LOST:
            raise family(error, f"{at}: retention has removed the next record, or the log has lost writes")
        if error.code() in DAMAGED:
            raise Corrupt(
                f"{at}: expected whole records, found a damaged batch at offset {message.offset()}:"
                f" {error.str()}\n  make a replica that is whole the partition's leader, and start again"
            )
        if error.code() in UNKNOWN:
            self._ids_requested_s = float("-inf")  # perhaps it was deleted
        else:
            self._last_error(error)
        return False

    def _check_ids(self, now: float) -> None:
        """Raise DataLost if a topic was created anew under its name; requests its id in the background."""
        if self._id_requests and all(future.done() for future in self._id_requests.values()):
            requests, self._id_requests = self._id_requests, {}
            with suppress(Unavailable):  # the next request follows; `_is_at_end` reports absent brokers
                self._compare({name: log_id for name, (log_id, _) in self._admin.described(requests).items()})
        if not self._id_requests and now - self._ids_requested_s >= _IDS_EVERY_S:
            self._id_requests, self._ids_requested_s = self._admin.request_ids(self._ids), now

    def _compare(self, found: Mapping[str, LogId]) -> None:
        for topic, log_id in self._ids.items():
            if found.get(topic) != log_id:
                raise DataLost(
                    f"topic {topic}: expected log id {log_id}, found {found.get(topic, 'no such topic')}\n"
                    "  it was deleted or created anew: offsets read before have no meaning in it"
                )

    def _is_at_end(self, since: float) -> bool:
        """Whether there is nothing more to read, by an answer requested after `since`.

        Raises Unavailable if no answer comes.
        """
        now = time.monotonic()
        if self._at_end_s >= since:
            return True
        if not self._end_requests:
            self._end_requests = self._admin.request_ends(self._ahead.next)
            self._ends_requested_s = now
            self._silent_since_s = self._silent_since_s or now
        if all(future.done() for future in self._end_requests.values()):
            requests, self._end_requests = self._end_requests, {}
            with suppress(Unavailable):  # the next request follows
                ends = self._admin.offsets(requests)
                if all(self._ahead.next[at] >= end for at, end in ends.items()):
                    self._at_end_s, self._silent_since_s = self._ends_requested_s, None
                    return self._at_end_s >= since
        if self._silent_since_s is not None and now - self._silent_since_s > _ANSWER_S:
            self._silent_since_s = None
            raise Unavailable(
                f"the brokers gave no answer, or no records, for {_ANSWER_S:g} s{self._last_error}"
            )
        return False
