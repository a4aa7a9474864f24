"""The end of a partition, on any event log."""

from __future__ import annotations

import time

from freshet.errors import Unavailable
from freshet.log import EventLog
from freshet.types import TopicPartition

__all__ = ["newest"]

_READ_RECORDS = 8192

_STALLED_S = 10.0
"""Without a record below an end that the log has told, for so long it is away."""

_SILENCES = 10
"""So many times a reader may find the log silent on the way, as busy brokers are for a second or two, before
that is passed on."""


def newest(log: EventLog, at: TopicPartition, most: int) -> list[tuple[int, bytes]]:
    """(offset, value) of the newest records, `most` at the most, oldest first.

    Offsets without a record (markers, aborted transactions) are looked past, ever further back.

    Raises what a reader raises, DataLost included, if the log's start passes where it looks; Unavailable also
    if the log tells an end and does not give what is before it, as a broker that has just come back may do:
    who took an older record for the newest would begin in the past.
    """
    bounds, back = log.bounds(at), most
    while True:
        start = max(bounds.start, bounds.end - back)
        found = _records(log, at, start, bounds.end)
        if len(found) >= most or start == bounds.start:
            return found[-most:]
        back *= 16


def _records(log: EventLog, at: TopicPartition, start: int, stop: int) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    reader = log.reader()
    try:
        reader.assign({at: start})
        position = start
        deadline, silences = time.monotonic() + _STALLED_S, 0
        while position < stop:
            try:
                polled = reader.poll(_READ_RECORDS, 1.0)
            except Unavailable:
                silences += 1
                if silences == _SILENCES:
                    raise
                continue
            for _, records in polled:
                found += zip(records.offsets.tolist(), records.values, strict=True)
                position, deadline = records.next_offset, time.monotonic() + _STALLED_S
            if time.monotonic() >= deadline:
                raise Unavailable(f"{at}: expected records up to {stop}, found none after {position}")
    finally:
        reader.close()
    return found
