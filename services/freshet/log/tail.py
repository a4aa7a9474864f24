"""Newest records of a partition, on any event log."""

from __future__ import annotations

import time

from freshet.errors import Unavailable
from freshet.log import EventLog
from freshet.types import TopicPartition

__all__ = ["newest"]

_READ_RECORDS = 8192

_STALLED_S = 10.0
"""Time without a record, though the log reports a later end, after which the log counts as unavailable."""

_MAX_SILENT_POLLS = 10
"""Silent polls of a reader after which Unavailable is raised; brokers may be busy for seconds."""


def newest(log: EventLog, at: TopicPartition, most: int) -> list[tuple[int, bytes]]:
    """Return (offset, value) of the newest records, at most `most`, oldest first.

    Offsets without a record (markers, aborted transactions) are skipped, so the read reaches further back.

    Raises:
        DataLost: retention removed records during the read.
        Unavailable: the log cannot be read, or reports an end and does not return the records before it, as a
            broker may do after a restart. An older record must not pass for the newest.
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
                if silences == _MAX_SILENT_POLLS:
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
