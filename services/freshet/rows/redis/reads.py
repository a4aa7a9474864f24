"""Reading the Redis row store: the pages of buckets, and the rows they add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from freshet.errors import Corrupt
from freshet.rows.redis.nodes import Replies, Request
from freshet.rows.redis.scripts import EXEC, MULTI, command
from freshet.rows.redis.writes import PIECE_BYTES, Keys
from freshet.rows.sqlite.segments import find, parts_of
from freshet.rows.store import Sound
from freshet.tables.runs import PAGE_BYTES, pages_of, pick_runs, runs_of_pages, which_may_hold
from freshet.types import I64, U8, U32, U64, Bool, RowRuns

__all__ = ["Reads", "ahead"]

# --- Doing the next step while this one is used.


T = TypeVar("T")
_END: Final = object()


def ahead(steps: Iterable[T]) -> Iterator[T]:
    """The same things in the same order, each made in a thread while the one before is used.

    What making one raises is raised in its place. Closed early, it waits for the one that is being made.
    """
    making = iter(steps)
    with ThreadPoolExecutor(1, "ahead") as thread:
        waiting: Future[T | object] = thread.submit(next, making, _END)
        while (one := waiting.result()) is not _END:
            waiting = thread.submit(next, making, _END)
            yield one  # type: ignore[misc]


BYTES_AT_ONCE = 32 << 20
"""A bucket with more is not read by one HGETALL, which would hold its server for more than some 20 ms, but
some pages at a time, again if they changed meanwhile; after TRIES by one HGETALL after all."""

TRIES = 3

COMPARED_AT_ONCE = 64
"""Keys, with each page of a bucket."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Keys of many buckets, sorted by (bucket, table, key)."""

    buckets: I64  # (N,)
    tables: U8  # (N,)
    keys: U64  # (N,)

    def numbers(self) -> list[int]:
        """The buckets, rising."""
        return list(map(int, np.unique(self.buckets)))

    def chosen(self, pages: NDArray[np.void], bucket: int) -> I64:
        """Which of a bucket's pages (P,) may know one of its keys."""
        low, high = np.searchsorted(self.buckets, [bucket, bucket + 1]).tolist()
        table, first, last = (pages[name][:, None] for name in ("table", "first", "last"))
        chosen = np.zeros(len(pages), np.bool_)
        for at in range(low, high, COMPARED_AT_ONCE):  # mostly once: a batch has a few keys of each bucket
            here = slice(at, min(at + COMPARED_AT_ONCE, high))
            tables, keys = self.tables[here], self.keys[here]
            chosen |= ((table == tables) & (first <= keys) & (keys <= last)).any(1)
        return np.flatnonzero(chosen)


Ask = Callable[[Sequence[Request], str], list[Replies]]


@dataclass(frozen=True, slots=True)
class Labelled:
    """Pages of a bucket, and the (fence, seq) that they were written under: as of one moment."""

    fence: bytes | None  # None: the bucket has no meta
    seq: bytes | None
    items: list[bytes]  # field, value, field, value ...


@dataclass(frozen=True, slots=True)
class Reads:
    """Reads of one store. Thread-safe if `ask` is."""

    ask: Ask
    keys_of: Callable[[int], Keys]
    where: Callable[[int], str]
    widths: U32  # (256,) bytes of a record by table id

    def scan(self, buckets: Sequence[int]) -> Iterator[RowRuns]:
        """All rows of rising buckets, in pieces; the next is asked for while one is used."""
        for runs in ahead(self._scanned(buckets)):
            yield from parts_of(runs, PIECE_BYTES)

    def labelled(self, buckets: Sequence[int]) -> list[Labelled]:
        """Pages of each bucket with what they were written under."""
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
        """The same of one bucket of more than BYTES_AT_ONCE, without holding its server."""
        keys = self.keys_of(bucket)
        look = [command(b"HMGET", keys.meta, b"fence", b"seq"), command(b"HKEYS", keys.rows)]
        (before,) = self.ask([self._request(bucket, *look)], "reading a bucket")
        for _ in range(TRIES):
            fields: list[bytes] = before[1]
            values = self._values(bucket, fields)
            (after,) = self.ask([self._request(bucket, *look)], "reading a bucket")
            # Pages are never changed; those put together meanwhile are missing, or have other names.
            if after == before and None not in values:
                fence, seq = before[0]
                return Labelled(fence, seq, _items(fields, values))
            before = after
        (at_once,) = self.labelled([bucket])
        return at_once

    def runs(self, pages: Sequence[tuple[int, list[bytes]]]) -> RowRuns:
        """The rows that pages of buckets add up to."""
        where = [self.where(bucket) for bucket, _ in pages]
        return runs_of_pages(pages, where, self.widths, most_bytes=PIECE_BYTES)

    def sound(self, bucket: int) -> Sound:
        """Rows of a bucket without those of damaged pages, which are found one by one."""
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
        """Rows by key: (found (N,), records (N, W); zeros where not found).

        Two round trips: which pages there are, then those that may hold one of the keys.
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
        """Rows by key, of many buckets and tables, in pieces of about PIECE_BYTES of pages.

        Two round trips as for one bucket, but each for many of them.
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
        """(bucket, pages that may know one of its keys), rising."""
        numbers = wanted.numbers()
        names = [self._request(bucket, command(b"HKEYS", self.keys_of(bucket).rows)) for bucket in numbers]
        for bucket, (fields,) in zip(numbers, self.ask(names, "reading rows"), strict=True):
            chosen = wanted.chosen(pages_of(fields, self.where(bucket)), bucket)
            if len(chosen):
                yield bucket, [fields[i] for i in chosen.tolist()]

    def _picked(self, some: Sequence[tuple[int, list[bytes]]], wanted: Wanted) -> RowRuns:
        """The wanted rows of these pages."""
        requests = [
            self._request(bucket, command(b"HMGET", self.keys_of(bucket).rows, *fields))
            for bucket, fields in some
        ]
        pages = []
        for (bucket, fields), (values,) in zip(some, self.ask(requests, "reading rows"), strict=True):
            if None in values:  # put together meanwhile
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
        """About how many bytes each bucket's pages take."""
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
        """The pages of these names, a bounded number at a time; None for those that are gone."""
        some = 128  # some 7 MB
        values: list[bytes | None] = []
        for low in range(0, len(fields), some):
            step = command(b"HMGET", self.keys_of(bucket).rows, *fields[low : low + some])
            ((found,),) = self.ask([self._request(bucket, step)], "reading a bucket")
            values += found
        return values

    def _pages_with(self, bucket: int, table: int, keys: U64) -> list[bytes]:
        """Pages that may know one of the keys: field, value, field, value ..."""
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
    """Field, value, field, value ... of fields that all have one."""
    return [part for pair in zip(fields, values, strict=True) for part in pair if part is not None]
