"""Appends on their way to Kafka: put into the client's queue record by record, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import repeat

import numpy as np
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.cimpl import Message

from freshet.errors import FreshetError, TooLarge, Unavailable
from freshet.log.kafka.errors import ending, family
from freshet.types import Append, BytesColumn, TopicPartition

__all__ = ["Piece", "Request", "flushed"]

_ROOM_S = 10.0
"""For room in the client's queue, which is emptied as brokers acknowledge."""

_MAYBE_WRITTEN = frozenset(
    {
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TIMED_OUT,
        KafkaError._PURGE_INFLIGHT,
        KafkaError._TRANSPORT,
        KafkaError._FATAL,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    }
)
"""What a record's report may say of one that the brokers have all the same."""


class Piece:
    """One Append; the client calls it with each record's report."""

    def __init__(self, append: Append, topic: str, max_record_bytes: int) -> None:
        """Check it. `topic`: its name in Kafka. Raises ValueError, or TooLarge."""
        n = len(append.values)
        keys, times = append.keys, append.times_ms
        if (keys is not None and len(keys) != n) or (times is not None and len(times) != n):
            found = f"{n if keys is None else len(keys)} keys and {n if times is None else len(times)} times"
            raise ValueError(f"an append of {n} values has {found}")
        ends = append.values.ends if keys is None else append.values.ends + keys.ends
        if n and int(ends[-1]) > max_record_bytes:  # else no record can be that large
            largest = int(np.diff(ends, prepend=0).max())
            if largest > max_record_bytes:
                raise TooLarge(
                    f"{append.topic}[{append.partition}]: a record of {largest:,} bytes; "
                    f"the log takes at most {max_record_bytes:,}\n"
                    "  raise max_record_bytes in the log's URL, and max.message.bytes of topics that exist"
                )
        self.at = TopicPartition(append.topic, append.partition)
        self.topic, self.waiting = topic, n
        self.first = -1  # offset of the first record
        self.error: KafkaError | None = None
        self._append = append

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        """One record's report."""
        self.waiting -= 1
        if error is not None:
            self.error = error
        elif self.first < 0:
            self.first = message.offset() or 0

    def produce(self, producer: Producer) -> None:
        """Queue its records. Raises KafkaException, or Unavailable if there is no room for long."""
        send, room_until = producer.produce, time.monotonic() + _ROOM_S
        append, topic, partition = self._append, self.topic, self.at.partition
        keys = repeat(None) if append.keys is None else _items(append.keys)
        times = repeat(0) if append.times_ms is None else append.times_ms.tolist()
        for value, key, time_ms in zip(_items(append.values), keys, times, strict=False):
            while True:
                try:
                    send(topic, value, key or None, partition, self, None, time_ms)
                    break
                except BufferError:
                    if time.monotonic() > room_until:
                        raise Unavailable(f"the queue to the brokers was full for {_ROOM_S:g} s") from None
                    producer.poll(0.05)


class Request:
    """One call of `append`."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.done = False
        self.error: FreshetError | None = None

    @property
    def empty(self) -> bool:
        """Has it no records?"""
        return not any(piece.waiting for piece in self.pieces)

    def check(self, heard: object) -> None:
        """Raise why its records were not all acknowledged, if so; the message says what is known of them."""
        for piece in sorted(self.pieces, key=lambda piece: piece.error is None):  # causes first
            if piece.error is None and piece.waiting:
                raise Unavailable(f"not known to be written: {piece.at} was not acknowledged{heard}")
            if piece.error is not None:
                maybe = piece.error.code() in _MAYBE_WRITTEN or len(self.pieces) > 1
                known = "not known to be written" if maybe else "nothing was written"
                raise family(piece.error, f"{known}: {piece.at}", heard)

    def first_offsets(self) -> list[int]:
        """Of each piece, once all are acknowledged."""
        return [max(piece.first, 0) for piece in self.pieces]


def flushed(producer: Producer, within_s: float) -> KafkaError | None:
    """Wait until every record was reported; the error that ended the client for good, if one did: the
    remaining reports are there all the same."""
    try:
        producer.flush(within_s)
    except (KafkaException, SystemError) as error:
        fatal = ending(error)
        producer.flush(within_s)
        return fatal
    return None


def _items(column: BytesColumn) -> list[bytes]:
    data, ends = column.data.tobytes(), column.ends.tolist()
    return [data[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
