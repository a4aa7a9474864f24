"""What a flush sends to Redis: the commands of each bucket, made for many buckets at once."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from redis.crc import key_slot

from freshet.rows.checks import offsets_text, offsets_texts
from freshet.rows.redis.nodes import Request
from freshet.rows.redis.scripts import (
    APPLY,
    COMMIT,
    EXEC,
    GATE,
    MULTI,
    OPEN,
    SWAP,
    WRITTEN,
    command_of,
    evaluate,
)
from freshet.tables.runs import PageWrites, page_writes
from freshet.types import ROW_FORMAT, BucketMeta, Flush

__all__ = [
    "PIECE_BYTES",
    "Keys",
    "gathered",
    "keys_of",
    "meta_arguments",
    "outcome_of",
    "requests_of",
    "stage_token",
]

PIECE_BYTES = 16 << 20
"""Of rows sent, or asked for, before answers are awaited: some 20 ms of one server's time."""

COMMAND_BYTES = 1 << 20
"""Of pages that one HSET writes."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Where one bucket stands in Redis; its keys share a slot."""

    slot: int
    meta: bytes
    rows: bytes
    aside: bytes  # rows, while a flush that is not written goes by

    def stage(self, token: bytes) -> bytes:
        """Where a whole bucket is gathered: a key of one call alone."""
        return b"%b:%b" % (self.aside, token)


def keys_of(name: str, bucket: int) -> Keys:
    """Keys of a bucket of the store `name`."""
    tag = f"{{{name}:{bucket}}}".encode()
    return Keys(key_slot(tag), tag + b":meta", tag + b":rows", tag + b":aside")


def stage_token() -> bytes:
    """Of a call that gathers pages."""
    return secrets.token_hex(8).encode()


def requests_of(flush: Flush, keys_of: Callable[[int], Keys]) -> Iterator[tuple[int, list[Request]]]:
    """(first bucket's place, a request for each bucket from there on), of bounded size each time."""
    token = stage_token()
    metas = _metas_of(flush)
    for low, high in _pieces(flush):
        buckets = flush.buckets[low:high]
        runs = flush.runs.of_buckets(int(buckets[0]), int(buckets[-1]) + 1)
        writes = page_writes(runs, buckets, flush.seqs[low:high], whole=flush.whole)
        keys = [keys_of(b) for b in buckets.tolist()]
        make = _whole if flush.whole else _changed
        yield low, [make(keys[i], metas[low + i], writes, i, token) for i in range(high - low)]


def outcome_of(replies: Sequence[Any]) -> tuple[int, int]:
    """(FlushOutcome; bytes of the bucket's pages if they should be put together, else 0) that replies end
    with."""
    end = replies[-1]
    last = int(end[-1] if isinstance(end, list) else end)
    return (0, last - WRITTEN) if last >= WRITTEN else (last, 0)


def meta_arguments(meta: BucketMeta) -> list[bytes]:
    """A meta as scripts take it, in the order of META_FIELDS."""
    numbers = [meta.fence, meta.seq, meta.rows, meta.rows_offset, meta.clock_ms, meta.format]
    texts = [b"%d" % number for number in numbers]
    return [*texts[:3], offsets_text(meta.applied).encode(), *texts[3:]]


def gathered(stage: bytes, writes: PageWrites, i: int) -> list[bytes | memoryview]:
    """Commands that gather the i-th bucket's pages under a key: OPEN's, then one each two."""
    return [evaluate(OPEN, [stage], []), *_sets(stage, writes, i)]


def _sets(key: bytes, writes: PageWrites, i: int) -> Iterator[bytes | memoryview]:
    """HSETs of the i-th bucket's pages: begin and arguments of each."""
    for pages, arguments in writes.of(i, COMMAND_BYTES):
        yield command_of(2 * pages, b"HSET", key)
        yield arguments


def _changed(keys: Keys, meta: list[bytes], writes: PageWrites, i: int, _: bytes) -> Request:
    """Changed rows and removed keys of the i-th bucket."""
    if not writes.pages_of(i):
        return Request(keys.slot, [evaluate(APPLY, [keys.meta], meta)], 1)
    all_keys = [keys.meta, keys.rows, keys.aside]
    data: list[bytes | memoryview] = [MULTI, evaluate(GATE, all_keys, meta[:2])]
    data += _sets(keys.rows, writes, i)
    data += [evaluate(COMMIT, all_keys, [*meta, b"%d" % writes.bytes_of(i)]), EXEC]
    return Request(keys.slot, data, 4 + (len(data) - 4) // 2)


def _whole(keys: Keys, meta: list[bytes], writes: PageWrites, i: int, token: bytes) -> Request:
    """All rows of the i-th bucket, in the place of what it holds."""
    stage = keys.stage(token)
    data = gathered(stage, writes, i)
    known = [*meta, b"%d" % writes.pages_of(i), b"%d" % writes.bytes_of(i)]
    data.append(evaluate(SWAP, [keys.meta, keys.rows, stage], known))
    return Request(keys.slot, data, 2 + (len(data) - 2) // 2)


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
