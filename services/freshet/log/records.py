"""Records on any event log: checks of appends, combined appends, the newest records, and dead letters."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import orjson

from freshet.errors import FreshetError, TooLarge, Unavailable
from freshet.log import Answered, Bounds, EventLog, Writer
from freshet.types import Append, Records, TopicPartition

T = TypeVar("T")


def check_append(append: Append, max_record_bytes: int, advice: str = "") -> None:
    """Check that the columns of an append have one length, and that no record with its key is too large.

    Raises:
        ValueError: the columns have different lengths.
        TooLarge: a record exceeds the limit; the message ends with `advice`.
    """
    n, keys, times = len(append.values), append.keys, append.times_ms
    if (keys is not None and len(keys) != n) or (times is not None and len(times) != n):
        found = f"{n if keys is None else len(keys)} keys and {n if times is None else len(times)} times"
        raise ValueError(f"an append of {n} values has {found}")
    ends = append.values.ends if keys is None else append.values.ends + keys.ends
    if n and int(ends[-1]) > max_record_bytes:  # otherwise no record can be that large
        largest = int(np.diff(ends, prepend=0).max())
        if largest > max_record_bytes:
            raise TooLarge(
                f"{append.topic}[{append.partition}]: a record of {largest:,} bytes; "
                f"the log accepts at most {max_record_bytes:,}{advice}"
            )


class CombinedWriter:
    """See `freshet.log.GroupWriter`. One append for all groups of a call, for logs that commit all partitions
    together.

    If a group cannot be appended, such as one with too large a record, it fails alone: the call is repeated
    with halves of the groups until that group is alone.
    """

    def __init__(self, writer: Writer) -> None:
        """Create a writer; `writer` has no name, and checks appends before it writes any record."""
        self._writer = writer

    def append(self, groups: Sequence[Sequence[Append]], answered: Answered) -> None:
        """Append groups and answer all of them."""
        self._append(groups, 0, answered)

    def wait(self, within_s: float) -> None:
        """Return at once: every group was answered."""

    def close(self) -> None:
        """Close the writer. Idempotent."""
        self._writer.close()

    def _append(self, groups: Sequence[Sequence[Append]], first: int, answered: Answered) -> None:
        """Append groups, the first of which has the index `first` in the caller's."""
        try:
            offsets = self._writer.append([append for group in groups for append in group])
        except Exception as error:
            if len(groups) > 1 and isinstance(error, TooLarge | KeyError | ValueError):
                middle = len(groups) // 2
                self._append(groups[:middle], first, answered)
                self._append(groups[middle:], first + middle, answered)
                return
            for index in range(first, first + len(groups)):
                answered(index, error)
            return
        at = 0
        for index, group in enumerate(groups, first):
            answered(index, offsets[at : at + len(group)])
            at += len(group)


def take_fairly(
    ready: Sequence[T], turn: int, most: int, read: Callable[[T, int], Records]
) -> list[tuple[T, Records]]:
    """Read at most `most` records from sources that have some, in equal shares; returns those of each source.

    `turn` selects the first source, which has a share even if there are more sources than records. `read`
    returns the records of a source, at most the given number; later sources share what an earlier one lacks.
    If it fails, what was read before is returned, so that no record is lost. Raises the first source's error.
    """
    first = turn % len(ready)
    found: list[tuple[T, Records]] = []
    for i, source in enumerate([*ready[first:], *ready[:first]]):
        share = most // (len(ready) - i)
        if i == 0:
            share = max(share, 1)
        if share:
            try:
                records = read(source, share)
            except FreshetError:
                if not found:
                    raise
                break
            most -= len(records)
            found.append((source, records))
    return found


_READ_RECORDS = 8192

STALLED_S = 10.0
"""Time without a record, though the log reports a later end, after which the log counts as unavailable."""

_MAX_SILENT_POLLS = 10
"""Silent polls of a reader after which Unavailable is raised; brokers may be busy for seconds."""


def newest(
    log: EventLog, at: TopicPartition, most: int, bounds: Bounds | None = None
) -> list[tuple[int, bytes]]:
    """Return (offset, value) of the newest records, at most `most`, oldest first.

    Offsets without a record (markers, aborted transactions) are skipped, so the read reaches further back.
    Records after `bounds` are left out, so that they agree with what the caller made of these bounds; without
    it, the bounds are read now.

    Raises:
        DataLost: retention removed records during the read.
        Unavailable: the log cannot be read, or reports an end and does not return the records before it, as a
            broker may do after a restart. An older record must not pass for the newest.
    """
    bounds = bounds or log.bounds(at)
    back = most
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
        deadline, silences = time.monotonic() + STALLED_S, 0
        while position < stop:
            try:
                polled = reader.poll(_READ_RECORDS, 1.0)
            except Unavailable:
                silences += 1
                if silences == _MAX_SILENT_POLLS:
                    raise
                continue
            for _, records in polled:
                offsets = records.offsets.tolist()
                found += ((n, v) for n, v in zip(offsets, records.values, strict=True) if n < stop)
                position, deadline = records.next_offset, time.monotonic() + STALLED_S
            if time.monotonic() >= deadline:
                raise Unavailable(f"{at}: expected records up to {stop}, found none after {position}")
    finally:
        reader.close()
    return found


TEXT_CHARS = 2_000
"""Longest text in a dead letter, such as a reason; a longer one is truncated."""

_SPARE_BYTES = 64
"""Space for the key and the number of `left_out_bytes`."""


def letter(fields: Mapping[str, object], raw: bytes, *, key: str = "bytes", max_bytes: int) -> bytes:
    """Encode a dead letter as JSON.

    Args:
        fields: its contents besides the record; texts longer than TEXT_CHARS are truncated.
        raw: the record.
        key: of the record's bytes.
        max_bytes: of the dead letter; at least the size of `fields`.
    """
    texts = {name: _truncated(value) for name, value in fields.items()}
    whole = orjson.dumps({**texts, key: ""})
    kept = max(0, max_bytes - len(whole) - _SPARE_BYTES) // 4 * 3
    if len(raw) <= kept:
        return orjson.dumps({**texts, key: base64.b64encode(raw).decode()})
    text = base64.b64encode(raw[:kept]).decode()
    return orjson.dumps({**texts, key: text, "left_out_bytes": len(raw) - kept})


def _truncated(value: object) -> object:
    if isinstance(value, str) and len(value) > TEXT_CHARS:
        return value[:TEXT_CHARS] + "…"
    return value
