"""Records on any event log: checks of appends, combined appends, the newest records, and dead letters."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import orjson

from freshet.errors import FreshetError, TooLarge, Unavailable
from freshet.log import Bounds, EventLog
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


def append_gathered(
    append: Callable[[Sequence[Append]], Sequence[int]], groups: Sequence[Sequence[Append]]
) -> list[Sequence[int] | TooLarge]:
    """Append the groups of several clients in one call; returns the outcome of each group.

    If a record is too large for the log, only its group fails: the call is repeated with halves of the groups
    until that group is alone. A log that checks sizes before it sends writes no record twice. Kafka checks
    later if a topic's limit was lowered after the start; then events of other groups may be written twice,
    and the joiner counts the second as duplicates.

    Args:
        append: `Writer.append` of a writer without a name.
        groups: the appends of each client.

    Returns the first offset of each append of a group, or its error: one of its records is too large, and
    others may be written if the error's message does not exclude it.
    Raises other errors of `append`, for all groups.
    """
    try:
        offsets = append([one for group in groups for one in group])
    except TooLarge as error:
        if len(groups) == 1:
            return [error]
        middle = len(groups) // 2
        return [*append_gathered(append, groups[:middle]), *append_gathered(append, groups[middle:])]
    found: list[Sequence[int] | TooLarge] = []
    at = 0
    for group in groups:
        found.append(offsets[at : at + len(group)])
        at += len(group)
    return found


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
