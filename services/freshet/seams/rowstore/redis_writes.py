"""What a flush sends to Redis: the commands of each bucket, made for many buckets at once."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from redis.crc import key_slot

from freshet.seams.rowstore.redis_nodes import Request
from freshet.seams.rowstore.redis_scripts import APPLY, COMMIT, EXEC, GATE, MULTI, OPEN, SWAP, evaluate
from freshet.seams.rowstore.texts import offsets_text, offsets_texts
from freshet.tables.hashes import HashWrites, hash_writes
from freshet.types import ROW_FORMAT, BucketMeta, Flush

__all__ = [
    "PIECE_BYTES",
    "ROWS_PER_COMMAND",
    "Keys",
    "keys_of",
    "meta_arguments",
    "outcome_of",
    "requests_of",
]

PIECE_BYTES = 16 << 20
"""Of rows sent, or asked for, before answers are awaited: some 60 ms of one server's time."""

ROWS_PER_COMMAND = 500
"""Of an HSET: from 50 on a command costs nothing beside its rows."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Of one bucket; they share a slot."""

    slot: int
    meta: bytes
    rows: bytes
    aside: bytes  # rows, while a flush that is not written goes by

    def stage(self, token: bytes) -> bytes:
        """Where a whole bucket is gathered: a key of one flush alone."""
        return b"%b:%b" % (self.aside, token)


def keys_of(name: str, bucket: int) -> Keys:
    """Keys of a bucket of the store `name`."""
    tag = f"{{{name}:{bucket}}}".encode()
    return Keys(key_slot(tag), tag + b":meta", tag + b":rows", tag + b":aside")


def requests_of(flush: Flush, keys_of: Callable[[int], Keys]) -> Iterator[tuple[int, list[Request]]]:
    """(first bucket's place, a request for each bucket from there on), of bounded size each time."""
    token = secrets.token_hex(8).encode()
    metas = _metas_of(flush)
    for low, high in _pieces(flush):
        buckets = flush.buckets[low:high]
        keys = [keys_of(b) for b in buckets.tolist()]
        runs = flush.runs.of_buckets(int(buckets[0]), int(buckets[-1]) + 1)
        rows = np.zeros(high - low, np.int64)
        np.add.at(rows, np.searchsorted(buckets, runs.directory["bucket"]), runs.directory["rows"])
        into = [k.stage(token) if flush.whole else k.rows for k in keys]
        writes = hash_writes(runs, buckets, into, rows_per_command=ROWS_PER_COMMAND)
        make = _whole if flush.whole else _changed
        yield low, [make(keys[i], into[i], metas[low + i], writes, i, n) for i, n in enumerate(rows.tolist())]


def outcome_of(replies: Sequence[Any]) -> int:
    """The FlushOutcome that a request's replies end with."""
    last = replies[-1]
    return int(last[-1] if isinstance(last, list) else last)


def meta_arguments(meta: BucketMeta) -> list[bytes]:
    """A meta as scripts take it, in the order of META_FIELDS."""
    numbers = [meta.fence, meta.seq, meta.rows, meta.rows_offset, meta.clock_ms, meta.format]
    texts = [b"%d" % number for number in numbers]
    return [*texts[:3], offsets_text(meta.applied).encode(), *texts[3:]]


def _changed(
    keys: Keys, rows_key: bytes, meta: list[bytes], writes: HashWrites, i: int, rows: int
) -> Request:
    """Changed rows and removed keys of the i-th bucket."""
    removed, how_many = writes.removed_of(i), writes.removed_fields[i]
    if not rows:
        return Request(keys.slot, [evaluate(APPLY, [keys.meta, rows_key], meta, removed, how_many)], 1)
    all_keys = [keys.meta, rows_key, keys.aside]
    commit = evaluate(COMMIT, all_keys, meta, removed, how_many)
    gate = evaluate(GATE, all_keys, meta[:2])
    data: list[bytes | memoryview] = [MULTI, gate, writes.sets_of(i), commit, EXEC]
    return Request(keys.slot, data, 4 + writes.set_commands[i])


def _whole(keys: Keys, stage: bytes, meta: list[bytes], writes: HashWrites, i: int, rows: int) -> Request:
    """All rows of the i-th bucket, in the place of what it holds."""
    swap = evaluate(SWAP, [keys.meta, keys.rows, stage], [*meta, b"%d" % rows])
    return Request(
        keys.slot, [evaluate(OPEN, [stage], []), writes.sets_of(i), swap], 2 + writes.set_commands[i]
    )


def _metas_of(flush: Flush) -> list[list[bytes]]:
    """`meta_arguments` of each of a flush's buckets."""
    columns = (flush.fences, flush.seqs, flush.rows, flush.rows_offsets, flush.clocks_ms)
    fmt = b"%d" % ROW_FORMAT
    return [
        [b"%d" % fence, b"%d" % seq, b"%d" % rows, applied.encode(), b"%d" % offset, b"%d" % clock, fmt]
        for fence, seq, rows, offset, clock, applied in zip(
            *(column.tolist() for column in columns), offsets_texts(flush.applied), strict=True
        )
    ]


def _pieces(flush: Flush) -> Iterator[tuple[int, int]]:
    """[low, high) of the flush's buckets, of about PIECE_BYTES each, a bucket at least."""
    sizes = np.zeros(len(flush), np.int64)
    np.add.at(sizes, np.searchsorted(flush.buckets, flush.runs.directory["bucket"]), flush.runs.sizes())
    ends = np.cumsum(sizes)
    low, done = 0, 0
    while low < len(flush):
        high = max(low + 1, int(np.searchsorted(ends, done + PIECE_BYTES, side="right")))
        yield low, high
        low, done = high, int(ends[high - 1])
