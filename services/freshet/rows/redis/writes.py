"""Flushes of the Redis row store: the commands of each bucket, encoded for many buckets at once."""

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
    "keys_of",
    "meta_arguments",
    "outcome_of",
    "requests_of",
    "stage_token",
    "staged",
]

PIECE_BYTES = 16 << 20
"""Bytes of rows in requests between two waits for answers; some 20 ms of one server's time."""

COMMAND_BYTES = 1 << 20
"""Bytes of pages in one HSET."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Redis keys of one bucket, all in one slot."""

    slot: int
    meta: bytes
    rows: bytes
    aside: bytes  # rows while GATE and COMMIT reject a flush

    def stage(self, token: bytes) -> bytes:
        """Return the key under which one call stages a whole bucket."""
        return b"%b:%b" % (self.aside, token)


def keys_of(name: str, bucket: int) -> Keys:
    """Return the keys of a bucket of the store `name`."""
    tag = f"{{{name}:{bucket}}}".encode()
    return Keys(key_slot(tag), tag + b":meta", tag + b":rows", tag + b":aside")


def stage_token() -> bytes:
    """Return a token for the stages of one call."""
    return secrets.token_hex(8).encode()


def requests_of(flush: Flush, keys_of: Callable[[int], Keys]) -> Iterator[tuple[int, list[Request]]]:
    """Yield (index of the first bucket, requests of buckets from it on) in pieces of bounded size."""
    token = stage_token()
    metas = _metas_of(flush)
    for low, high in _pieces(flush):
        buckets = flush.buckets[low:high]
        runs = flush.runs.of_buckets(int(buckets[0]), int(buckets[-1]) + 1)
        writes = page_writes(runs, buckets, flush.seqs[low:high], whole=flush.whole)
        keys = [keys_of(b) for b in buckets.tolist()]
        encode = _whole if flush.whole else _changed
        yield low, [encode(keys[i], metas[low + i], writes, i, token) for i in range(high - low)]


def outcome_of(replies: Sequence[Any]) -> tuple[int, int]:
    """Return (FlushOutcome, bytes of the bucket's pages if they should be merged, else 0) of its replies."""
    end = replies[-1]
    last = int(end[-1] if isinstance(end, list) else end)
    return (0, last - WRITTEN) if last >= WRITTEN else (last, 0)


def meta_arguments(meta: BucketMeta) -> list[bytes]:
    """Encode a meta as arguments of scripts, in the order of META_FIELDS."""
    numbers = [meta.fence, meta.seq, meta.rows, meta.rows_offset, meta.clock_ms, meta.format]
    texts = [b"%d" % number for number in numbers]
    return [*texts[:3], offsets_text(meta.applied).encode(), *texts[3:]]


def staged(stage: bytes, writes: PageWrites, i: int) -> list[bytes | memoryview]:
    """Return commands that stage the i-th bucket's pages: OPEN, then HSETs of two parts each."""
    return [evaluate(OPEN, [stage], []), *_sets(stage, writes, i)]


def _sets(key: bytes, writes: PageWrites, i: int) -> Iterator[bytes | memoryview]:
    """Yield the HSETs of the i-th bucket's pages, start and arguments of each."""
    for pages, arguments in writes.of(i, COMMAND_BYTES):
        yield command_of(2 * pages, b"HSET", key)
        yield arguments


def _changed(keys: Keys, meta: list[bytes], writes: PageWrites, i: int, _: bytes) -> Request:
    """Encode the changed rows and removed keys of the i-th bucket."""
    if not writes.pages_of(i):
        return Request(keys.slot, [evaluate(APPLY, [keys.meta], meta)], 1)
    all_keys = [keys.meta, keys.rows, keys.aside]
    data: list[bytes | memoryview] = [MULTI, evaluate(GATE, all_keys, meta[:2])]
    data += _sets(keys.rows, writes, i)
    data += [evaluate(COMMIT, all_keys, [*meta, b"%d" % writes.bytes_of(i)]), EXEC]
    return Request(keys.slot, data, 4 + (len(data) - 4) // 2)


def _whole(keys: Keys, meta: list[bytes], writes: PageWrites, i: int, token: bytes) -> Request:
    """Encode all rows of the i-th bucket, replacing the stored ones."""
    stage = keys.stage(token)
    data = staged(stage, writes, i)
    known = [*meta, b"%d" % writes.pages_of(i), b"%d" % writes.bytes_of(i)]
    data.append(evaluate(SWAP, [keys.meta, keys.rows, stage], known))
    return Request(keys.slot, data, 2 + (len(data) - 2) // 2)


def _metas_of(flush: Flush) -> list[list[bytes]]:
    """Return `meta_arguments` of each bucket of a flush."""
    columns = (flush.fences, flush.seqs, flush.rows, flush.rows_offsets, flush.clocks_ms)
    fmt = b"%d" % ROW_FORMAT
    return [
        [b"%d" % fence, b"%d" % seq, b"%d" % rows, applied.encode(), b"%d" % offset, b"%d" % clock, fmt]
        for fence, seq, rows, offset, clock, applied in zip(
            *(column.tolist() for column in columns), offsets_texts(flush.applied), strict=True
        )
    ]


def _pieces(flush: Flush) -> Iterator[tuple[int, int]]:
    """Yield [low, high) of a flush's buckets, of about PIECE_BYTES each, at least one bucket."""
    sizes = np.zeros(len(flush), np.int64)
    np.add.at(sizes, np.searchsorted(flush.buckets, flush.runs.directory["bucket"]), flush.runs.sizes())
    ends = np.cumsum(sizes)
    low, done = 0, 0
    while low < len(flush):
        high = max(low + 1, int(np.searchsorted(ends, done + PIECE_BYTES, side="right")))
        yield low, high
        low, done = high, int(ends[high - 1])
