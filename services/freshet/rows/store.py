"""The row store: durable rows, optimiser state and offsets of every bucket (SQLite, Redis Cluster).

N keys, K buckets of a flush, R runs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from freshet.types import I64, U8, U64, Bool, Bucket, BucketMeta, Fence, Flush, RowRuns

__all__ = ["FlushOutcome", "OnServers", "RowStore", "Sound", "StoreIdentity", "StoreServer", "TellsDamage"]


class FlushOutcome(enum.IntEnum):
    """Outcome of a flush for one bucket."""

    DONE = 0
    FENCED = 1  # another owner has claimed the bucket; drop it
    REPLACE = 2  # the stored meta is not this owner's last; flush the bucket whole


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Identity to which a store is bound; opening it for another model raises Mismatch."""

    model: str
    spec_hash: str  # of the spec's identity keys
    buckets: int
    tables: Mapping[str, int]  # table name -> id, never changed
    record_bytes: Mapping[int, int]  # table id -> bytes of a packed row
    samples_log_id: str


class RowStore(Protocol):
    """Buckets of one model. Thread-safe; several processes may open the same store."""

    def create(self, identity: StoreIdentity, starting: Mapping[Bucket, BucketMeta]) -> None:
        """Create the model's buckets at their start offsets (PROTOCOL 5), or check the existing ones.

        Raises:
            Mismatch: the store belongs to another model, spec or log; the message names the differences.
        """

    def identity(self) -> StoreIdentity | None:
        """Return the identity of the store; None before `create`."""

    def metas(self, buckets: Sequence[Bucket]) -> Mapping[Bucket, BucketMeta]:
        """Return the meta of each bucket from the authoritative copy."""

    def claim(self, buckets: Sequence[Bucket], fence: Fence) -> Mapping[Bucket, BucketMeta]:
        """Write a higher fence into each bucket's meta and return the new metas (PROTOCOL 10).

        Later flushes under lower fences are FENCED. Raises Fenced if a bucket has a higher fence already.
        """

    def scan(self, buckets: Sequence[Bucket]) -> Iterator[RowRuns]:
        """Yield all rows of these buckets, each once in its newest state, in pieces of at most 64 MiB.

        Buckets come in any order and without removed keys; the rows of one bucket are of one state. A scan is
        no snapshot, so read `metas` before it, and as an owner also after it. Raises Corrupt if a bucket is
        damaged.
        """

    def read(self, bucket: Bucket, table: int, keys: U64) -> tuple[Bool, U8]:
        """Return (found (N,) bool, records (N, record_bytes) uint8) of keys (N,) uint64; zeros if absent.

        A failed read raises Unavailable; only an absent row is reported as absent (PROTOCOL 13).
        """

    def read_many(self, buckets: I64, tables: U8, keys: U64) -> Iterator[RowRuns]:
        """Yield the rows that exist of many buckets and tables, in pieces of bounded size.

        Each row is read at a time of its own. A key in no piece is absent once the iterator ends.

        Args:
            buckets: (N,) int64, of each key.
            tables: (N,) uint8, table id of each key.
            keys: (N,) uint64, in any order, each once with its table.

        Raises:
            Unavailable: a read failed (PROTOCOL 13).
        """

    def flush(self, flush: Flush) -> U8:
        """Write changed rows, removed keys and metas of many buckets; each bucket atomically.

        For the flush thread of the buckets' owner; may block up to the store's time-out. Afterwards new
        readers see every bucket that is DONE; running scans may not. A bucket whose stored (fence, seq)
        equals the flush's is DONE, as after a lost answer. One that is not at (fence, seq - 1) is to be
        REPLACEd, unless the flush is `whole`.

        Returns:
            (K,) uint8, the FlushOutcome of each bucket in the flush's order.

        Raises:
            Unavailable: the outcome is unknown; flushing the same again is safe.
            ValueError: the flush's columns do not fit each other or the store.
        """

    def close(self) -> None:
        """Release the store's resources. Idempotent."""


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """The readable rows of one damaged bucket."""

    runs: RowRuns  # rows, each once; rows of a damaged page are absent, or as in an older page
    damage: Sequence[str]  # place and fault of each page or segment that was skipped


@runtime_checkable
class TellsDamage(Protocol):
    """A row store that can skip a bucket's damaged pages; otherwise a damaged bucket is unreadable."""

    def scan_sound(self, bucket: Bucket) -> Sound:
        """Return the rows of a bucket without its damaged pages; for readers that serve, not for owners.

        Raises:
            Unavailable: the store cannot be reached.
            Corrupt: no page of the bucket can be found.
        """


@dataclass(frozen=True, slots=True)
class StoreServer:
    """Figures of a server to which rows are written, as it reports them."""

    name: str  # host:port
    replicas: int  # connected
    used_bytes: int  # 0: not reported
    limit_bytes: int  # memory at which it refuses writes; 0: no limit, or not reported


@runtime_checkable
class OnServers(Protocol):
    """A row store on separate servers, which may fill up or lack a replica."""

    def servers(self) -> Sequence[StoreServer]:
        """Return the servers to which rows are written. Raises Unavailable if one does not answer."""
