"""The row store: rows, optimiser state and offsets of every bucket, durable (Redis Cluster; SQLite when
embedded)."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from freshet.types import I64, U8, U64, Bool, Bucket, BucketMeta, Fence, Flush, RowRuns

__all__ = ["FlushOutcome", "OnServers", "RowStore", "Sound", "StoreIdentity", "StoreServer", "TellsDamage"]


class FlushOutcome(enum.IntEnum):
    """What became of one bucket of a flush."""

    DONE = 0
    FENCED = 1  # another owner has claimed the bucket: drop it
    REPLACE = 2  # what is stored is not what this owner wrote last: flush the bucket whole


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What a store is tied to for life; opening it as another model is a Mismatch."""

    model: str
    spec_hash: str  # of the spec's identity keys
    buckets: int
    tables: Mapping[str, int]  # table name -> id, given once
    record_bytes: Mapping[int, int]  # table id -> bytes of a packed row
    samples_log_id: str


class RowStore(Protocol):
    """Buckets of one model. Thread-safe; several processes may open the same store at once."""

    def create(self, identity: StoreIdentity, starting: Mapping[Bucket, BucketMeta]) -> None:
        """Create the model's buckets with their starting offsets (PROTOCOL 5), or check that they are this
        model's.

        Raises Mismatch, naming what differs, if the store belongs to another model, spec or log.
        """

    def identity(self) -> StoreIdentity | None:
        """What the store is tied to; None if it was never created."""

    def metas(self, buckets: Sequence[Bucket]) -> Mapping[Bucket, BucketMeta]:
        """Meta of each bucket, from the authoritative copy."""

    def claim(self, buckets: Sequence[Bucket], fence: Fence) -> Mapping[Bucket, BucketMeta]:
        """Write a higher fence into each bucket's meta, and return the metas as they then are (PROTOCOL 10).

        From then on flushes under lower fences are FENCED. Raises Fenced if any bucket has a higher fence
        already.
        """

    def scan(self, buckets: Sequence[Bucket]) -> Iterator[RowRuns]:
        """All rows of these buckets, in pieces of bounded size (<= 64 MiB), each row once, newest state.

        Buckets come in any order, but a bucket's rows are as of one moment, and no removed keys are among
        them. Read `metas` before, and (as an owner) after: a scan is not a snapshot. Raises Corrupt if a
        bucket is damaged.
        """

    def read(self, bucket: Bucket, table: int, keys: U64) -> tuple[Bool, U8]:
        """Rows by key: (found (N,), records (N, record_bytes); zeros where not found).

        A read that failed raises Unavailable; only a row that is absent is reported absent (PROTOCOL 13).
        """

    def read_many(self, buckets: I64, tables: U8, keys: U64) -> Iterator[RowRuns]:
        """Rows by key, of many buckets and tables: those that are there, in pieces of bounded size.

        (N,) each, in any order, none twice. A key that is in no piece is absent once the last one has come; a
        read that failed raises Unavailable (PROTOCOL 13). Each row is as of a moment of its own.
        """

    def flush(self, flush: Flush) -> U8:
        """Write changed rows, removed keys and metas of many buckets; each bucket all or nothing.

        Called by the buckets' owner only, from its flush thread; may block up to the store's timeout. After
        it returns, a reader that starts anew sees every bucket that is DONE. Nothing is promised about
        readers in the middle of a scan. A bucket whose stored (fence, seq) equals the flush's is DONE already
        (a retry after a lost answer); one that is not at (fence, seq - 1) is to be REPLACEd, if the flush is
        not `whole`.

        Returns:
            (K,) a FlushOutcome for each bucket, in the flush's order.

        Raises:
            Unavailable: not written, or not known to be written; flushing the same again is safe.
            ValueError: the flush's columns do not fit each other or the store.
        """

    def close(self) -> None:
        """Free what the store holds. Idempotent."""


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """What can be read of one bucket that is damaged."""

    runs: RowRuns  # rows, each once; a row of a damaged page is absent, or is as an older page has it
    damage: Sequence[str]  # of each page or segment that was left out: where it lies and what is wrong


@runtime_checkable
class TellsDamage(Protocol):
    """A row store that can leave out a bucket's damaged pages and read the others. Without it a damaged
    bucket cannot be read."""

    def scan_sound(self, bucket: Bucket) -> Sound:
        """Rows of a bucket without those of damaged pages: for readers that serve, never for an owner.

        Raises Unavailable; Corrupt if no page of the bucket can be found.
        """


@dataclass(frozen=True, slots=True)
class StoreServer:
    """A server that rows are written to, as it says itself."""

    name: str  # host:port
    replicas: int  # that follow it at the moment
    used_bytes: int  # 0: it does not say
    limit_bytes: int  # full at so many; 0: no limit, or it does not say


@runtime_checkable
class OnServers(Protocol):
    """A row store on servers of its own, which may fill up or stand alone."""

    def servers(self) -> Sequence[StoreServer]:
        """Those that rows are written to. Raises Unavailable if one of them does not answer."""
