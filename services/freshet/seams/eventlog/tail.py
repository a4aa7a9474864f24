"""The end of a partition, on any event log."""

from __future__ import annotations

from freshet.seams.eventlog import EventLog
from freshet.types import TopicPartition

__all__ = ["newest"]

_READ_RECORDS = 8192


def newest(log: EventLog, at: TopicPartition, most: int) -> list[tuple[int, bytes]]:
    """(offset, value) of the newest records, `most` at the most, oldest first.

    Offsets without a record (markers, aborted transactions) are looked past, ever further back.

    Raises what a reader raises, DataLost included, if the log's start passes where it looks.
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
        while position < stop and (polled := reader.poll(_READ_RECORDS, 1.0)):
            for _, records in polled:
                found += zip(records.offsets.tolist(), records.values, strict=True)
                position = records.next_offset
    finally:
        reader.close()
    return found
