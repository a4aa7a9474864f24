"""Pages of the Redis row store: commands that write a flush's pages, and reads that merge a bucket's pages.

N keys, P pages of a bucket.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from redis.crc import key_slot

from freshet.errors import Corrupt
from freshet.rows.redis.nodes import Replies, Request
from freshet.rows.redis.scripts import (
    APPLY,
    COMMIT,
    EXEC,
    GATE,
    MULTI,
    OPEN,
    SWAP,
    WRITTEN,
    command,
    command_of,
    evaluate,
)
from freshet.rows.sqlite.file import find, parts_of
from freshet.rows.store import Sound, offsets_text, offsets_texts
from freshet.tables.runs import (
    PAGE_BYTES,
    PageWrites,
    page_writes,
    pages_of,
    pick_runs,
    runs_of_pages,
    which_may_hold,
)
from freshet.types import I64, ROW_FORMAT, U8, U32, U64, Bool, BucketMeta, Flush, RowRuns

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


# --- Prefetch.


T = TypeVar("T")
_END: Final = object()


def ahead(steps: Iterable[T]) -> Iterator[T]:
    """Yield the same items in order, each computed in a thread while the previous one is used.

    An error is raised in place of its item. Closing the iterator waits for the item in progress.
    """
    source = iter(steps)
    with ThreadPoolExecutor(1, "ahead") as thread:
        waiting: Future[T | object] = thread.submit(next, source, _END)
        while (one := waiting.result()) is not _END:
            waiting = thread.submit(next, source, _END)
            yield one  # type: ignore[misc]


BYTES_AT_ONCE = 32 << 20
"""Largest bucket that is read by one HGETALL, which blocks its server for some 20 ms. Larger ones are read
some pages at a time, and again if they changed; after TRIES by one HGETALL in any case."""

TRIES = 3

COMPARED_AT_ONCE = 64
"""Keys compared with all pages of a bucket in one numpy call."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Keys of many buckets, sorted by (bucket, table, key)."""

    buckets: I64  # (N,)
    tables: U8  # (N,)
    keys: U64  # (N,)

    def numbers(self) -> list[int]:
        """Return the buckets, rising."""
        return list(map(int, np.unique(self.buckets)))

    def chosen(self, pages: NDArray[np.void], bucket: int) -> I64:
        """Return the indices, int64, of a bucket's (P,) pages that may contain one of its keys."""
        low, high = np.searchsorted(self.buckets, [bucket, bucket + 1]).tolist()
        table, first, last = (pages[name][:, None] for name in ("table", "first", "last"))
        chosen = np.zeros(len(pages), np.bool_)
        for at in range(low, high, COMPARED_AT_ONCE):  # usually once: a batch has few keys of each bucket
            here = slice(at, min(at + COMPARED_AT_ONCE, high))
            tables, keys = self.tables[here], self.keys[here]
            chosen |= ((table == tables) & (first <= keys) & (keys <= last)).any(1)
        return np.flatnonzero(chosen)


Ask = Callable[[Sequence[Request], str], list[Replies]]


@dataclass(frozen=True, slots=True)
class Labelled:
    """Pages of a bucket with the (fence, seq) under which they were written, read as one snapshot."""

    fence: bytes | None  # None: the bucket has no meta
    seq: bytes | None
    items: list[bytes]  # field, value, field, value ...


@dataclass(frozen=True, slots=True)
class Reads:
    """Reads of a store. Thread-safe if `ask` is."""

    ask: Ask
    keys_of: Callable[[int], Keys]
    where: Callable[[int], str]
    widths: U32  # (256,) uint32 bytes of a record by table id

    def scan(self, buckets: Sequence[int]) -> Iterator[RowRuns]:
        """Yield all rows of rising buckets in pieces, with one piece prefetched."""
        for runs in ahead(self._scanned(buckets)):
            yield from parts_of(runs, PIECE_BYTES)

    def labelled(self, buckets: Sequence[int]) -> list[Labelled]:
        """Return the pages of each bucket with its (fence, seq)."""
        requests = []
        for keys in map(self.keys_of, buckets):
            look, pages = command(b"HMGET", keys.meta, b"fence", b"seq"), command(b"HGETALL", keys.rows)
            requests.append(Request(keys.slot, [MULTI, look, pages, EXEC], 4))
        found = []
        for replies in self.ask(requests, "reading buckets"):
            (fence, seq), items = replies[-1]
            found.append(Labelled(fence, seq, items))
        return found

    def large(self, bucket: int) -> Labelled:
        """Read one bucket of more than BYTES_AT_ONCE in several requests; see `labelled`."""
        keys = self.keys_of(bucket)
        look = [command(b"HMGET", keys.meta, b"fence", b"seq"), command(b"HKEYS", keys.rows)]
        (before,) = self.ask([self._request(bucket, *look)], "reading a bucket")
        for _ in range(TRIES):
            fields: list[bytes] = before[1]
            values = self._values(bucket, fields)
            (after,) = self.ask([self._request(bucket, *look)], "reading a bucket")
            # Pages never change; merged ones are gone or have other names.
            if after == before and None not in values:
                fence, seq = before[0]
                return Labelled(fence, seq, _items(fields, values))
            before = after
        (at_once,) = self.labelled([bucket])
        return at_once

    def runs(self, pages: Sequence[tuple[int, list[bytes]]]) -> RowRuns:
        """Merge pages of buckets into rows. Raises Corrupt if a page is damaged."""
        where = [self.where(bucket) for bucket, _ in pages]
        return runs_of_pages(pages, where, self.widths, most_bytes=PIECE_BYTES)

    def sound(self, bucket: int) -> Sound:
        """Return the rows of a bucket without its damaged pages, which are found by decoding each."""
        (labelled,) = self.labelled([bucket])
        fields, values = labelled.items[::2], labelled.items[1::2]
        good: list[bytes] = []
        damage: list[str] = []
        for field, value in zip(fields, values, strict=True):
            try:
                self.runs([(bucket, [field, value])])
                good += [field, value]
            except Corrupt as error:
                damage.append(f"page {field[:32].hex()}: {error}")
        return Sound(self.runs([(bucket, good)]), damage)

    def read(self, bucket: int, table: int, keys: U64) -> tuple[Bool, U8]:
        """Return (found (N,) bool, records (N, W) uint8; zeros where not found) of keys (N,) uint64.

        Two round trips: the names of the pages, then the pages that may contain a key.
        """
        there, records = (
            np.zeros(len(keys), np.bool_),
            np.zeros((len(keys), int(self.widths[table])), np.uint8),
        )
        for run in self.runs([(bucket, self._pages_with(bucket, table, keys))]):
            if run.table == table:
                found, at = find(run.keys, keys)
                there |= found
                records[found] = run.records[at[found]]
        return there, records

    def read_many(self, buckets: I64, tables: U8, keys: U64) -> Iterator[RowRuns]:
        """Yield rows of (N,) buckets, tables and keys, in pieces of about PIECE_BYTES of pages.

        Two round trips, as `read`, each for many buckets.

        Args:
            buckets: (N,) int64, of each key.
            tables: (N,) uint8, table id of each key.
            keys: (N,) uint64, in any order.
        """
        order = np.lexsort((keys, tables, buckets))
        wanted = Wanted(buckets[order], tables[order], keys[order])
        some: list[tuple[int, list[bytes]]] = []  # bucket, fields
        size = 0
        for bucket, fields in self._fields_with(wanted):
            if some and size + len(fields) * PAGE_BYTES > PIECE_BYTES:
                yield self._picked(some, wanted)
                some, size = [], 0
            some.append((bucket, fields))
            size += len(fields) * PAGE_BYTES
        if some:
            yield self._picked(some, wanted)

    def _fields_with(self, wanted: Wanted) -> Iterator[tuple[int, list[bytes]]]:
        """Yield (bucket, names of pages that may contain one of its keys), rising."""
        numbers = wanted.numbers()
        names = [self._request(bucket, command(b"HKEYS", self.keys_of(bucket).rows)) for bucket in numbers]
        for bucket, (fields,) in zip(numbers, self.ask(names, "reading rows"), strict=True):
            chosen = wanted.chosen(pages_of(fields, self.where(bucket)), bucket)
            if len(chosen):
                yield bucket, [fields[i] for i in chosen.tolist()]

    def _picked(self, some: Sequence[tuple[int, list[bytes]]], wanted: Wanted) -> RowRuns:
        """Return the wanted rows of these pages."""
        requests = [
            self._request(bucket, command(b"HMGET", self.keys_of(bucket).rows, *fields))
            for bucket, fields in some
        ]
        pages = []
        for (bucket, fields), (values,) in zip(some, self.ask(requests, "reading rows"), strict=True):
            if None in values:  # pages were merged since their names were read
                (whole,) = self.labelled([bucket])
                pages.append((bucket, whole.items))
            else:
                pages.append((bucket, _items(fields, values)))
        return pick_runs(self.runs(pages), wanted.buckets, wanted.tables, wanted.keys)

    def _scanned(self, buckets: Sequence[int]) -> Iterator[RowRuns]:
        together: list[int] = []
        size = 0
        for bucket, taken in zip(buckets, self._sizes(buckets), strict=True):
            if taken > BYTES_AT_ONCE:
                yield self.runs([(bucket, self.large(bucket).items)])
                continue
            if together and size + taken > PIECE_BYTES:
                yield self._whole(together)
                together, size = [], 0
            together.append(bucket)
            size += taken
        if together:
            yield self._whole(together)

    def _sizes(self, buckets: Sequence[int]) -> list[int]:
        """Return the approximate bytes of each bucket's pages."""
        sizes = [
            self._request(bucket, command(b"HMGET", self.keys_of(bucket).meta, b"base", b"added"))
            for bucket in buckets
        ]
        return [sum(int(part or 0) for part in reply) for (reply,) in self.ask(sizes, "reading sizes")]

    def _whole(self, buckets: Sequence[int]) -> RowRuns:
        requests = [self._request(b, command(b"HGETALL", self.keys_of(b).rows)) for b in buckets]
        replies = self.ask(requests, "reading buckets")
        return self.runs([(bucket, items) for bucket, (items,) in zip(buckets, replies, strict=True)])

    def _values(self, bucket: int, fields: Sequence[bytes]) -> list[bytes | None]:
        """Return the pages of these names, a bounded number per request; None for absent ones."""
        some = 128  # some 7 MB
        values: list[bytes | None] = []
        for low in range(0, len(fields), some):
            step = command(b"HMGET", self.keys_of(bucket).rows, *fields[low : low + some])
            ((found,),) = self.ask([self._request(bucket, step)], "reading a bucket")
            values += found
        return values

    def _pages_with(self, bucket: int, table: int, keys: U64) -> list[bytes]:
        """Return the pages that may contain one of the keys: field, value, field, value ..."""
        names = self._request(bucket, command(b"HKEYS", self.keys_of(bucket).rows))
        for _ in range(TRIES):
            ((fields,),) = self.ask([names], "reading rows")
            pages = pages_of(fields, self.where(bucket))
            chosen = [fields[i] for i in np.flatnonzero(which_may_hold(pages, table, keys)).tolist()]
            values = self._values(bucket, chosen)
            if None not in values:
                return _items(chosen, values)
        (only,) = self.labelled([bucket])
        return only.items

    def _request(self, bucket: int, *commands: bytes) -> Request:
        return Request(self.keys_of(bucket).slot, commands, len(commands))


def _items(fields: Sequence[bytes], values: Sequence[bytes | None]) -> list[bytes]:
    """Interleave fields and values, without absent ones."""
    return [part for pair in zip(fields, values, strict=True) for part in pair if part is not None]
