"""The row store: durable rows, optimiser state and offsets of every bucket (SQLite, Redis Cluster).

Includes the encodings and checks that all row stores share. N keys, K buckets of a flush, R runs,
P partitions.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Protocol, runtime_checkable

import numpy as np
import orjson

from freshet.config.spec.identity import explain_defaults
from freshet.errors import Corrupt, Mismatch, Unavailable
from freshet.tables.runs import check_runs
from freshet.types import I64, U8, U32, U64, Applied, Bool, Bucket, BucketMeta, Fence, Flush, RowRuns

__all__ = [
    "A_STORE_OF_ITS_OWN",
    "FlushOutcome",
    "LostMetas",
    "OnServers",
    "RowStore",
    "Sound",
    "StoreIdentity",
    "StoreServer",
    "TellsDamage",
    "check_flush",
    "check_identity",
    "identity_text",
    "offsets_text",
    "offsets_texts",
    "parse_identity",
    "parse_offsets",
]


class FlushOutcome(enum.IntEnum):
    """Outcome of a flush for one bucket."""

    DONE = 0
    FENCED = 1  # another owner has claimed the bucket; drop it
    REPLACE = 2  # the stored meta is not this owner's last; flush the bucket whole


class LostMetas(Unavailable):
    """The store has lost the metas of `buckets`."""

    def __init__(self, message: str, buckets: Sequence[Bucket]) -> None:
        super().__init__(message)
        self.buckets = buckets


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
        """Return the meta of each bucket from the authoritative copy.

        Raises KeyError for an unknown bucket, LostMetas if one is gone.
        """

    def claim(self, buckets: Sequence[Bucket], fence: Fence) -> Mapping[Bucket, BucketMeta]:
        """Write a higher fence into each bucket's meta and return the new metas (PROTOCOL 10).

        Later flushes under lower fences are FENCED. Raises Fenced, and claims none of the buckets, if one has
        a higher fence already.
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
        readers see every bucket that is DONE; running scans may not. A bucket with a stored (fence, seq) that
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


# --- Identity and offsets as row stores keep them: JSON.


def offsets_text(applied: Applied) -> str:
    """Encode {partition: offset} as JSON, as a bucket's meta holds it."""
    return orjson.dumps({str(p): int(o) for p, o in applied.items()}).decode()


def offsets_texts(applied: I64) -> list[str]:
    """Encode (K, P) int64 offsets as `offsets_text` of each bucket; equal neighbours share a string."""
    if not len(applied):
        return []
    new = (applied[1:] != applied[:-1]).any(1)
    texts = [offsets_text(dict(enumerate(row))) for row in [applied[0].tolist(), *applied[1:][new].tolist()]]
    return [texts[0], *(texts[i] for i in new.cumsum().tolist())]


def parse_offsets(text: str | bytes, where: object) -> dict[int, int]:
    """Decode the offsets of a meta. Raises Corrupt if the text is malformed."""
    try:
        return {int(partition): int(offset) for partition, offset in orjson.loads(text).items()}
    except (orjson.JSONDecodeError, AttributeError, ValueError, TypeError) as error:
        raise Corrupt(f"{where}: expected offsets in JSON, found {text!r}") from error


def identity_text(identity: StoreIdentity) -> str:
    """Encode a store's identity as JSON."""
    return orjson.dumps(asdict(identity), option=orjson.OPT_NON_STR_KEYS).decode()


def parse_identity(text: str | bytes, where: object) -> StoreIdentity:
    """Decode a store's identity. Raises Corrupt if the text is malformed."""
    try:
        record = orjson.loads(text)
        record["record_bytes"] = {int(table): size for table, size in record["record_bytes"].items()}
        return StoreIdentity(**record)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"{where}: expected the store's identity in JSON, found {text!r}") from error


def check_flush(flush: Flush, buckets_of_model: int, widths: U32) -> None:
    """Check that a flush's columns fit each other and the store; row contents are not checked.

    Args:
        flush: the flush.
        buckets_of_model: number of buckets of the model.
        widths: (256,) uint32, bytes of a record by table id.

    Raises:
        ValueError: lengths differ, buckets do not rise, or runs are out of place.
    """
    buckets, count, directory = flush.buckets, len(flush), flush.runs.directory
    columns = (
        buckets,
        flush.fences,
        flush.seqs,
        flush.rows,
        flush.applied,
        flush.rows_offsets,
        flush.clocks_ms,
    )
    if any(len(column) != count for column in columns):
        raise ValueError(f"columns of a flush of {count} buckets have {[len(c) for c in columns]} values")
    if count and not (buckets[0] >= 0 and buckets[-1] < buckets_of_model and (np.diff(buckets) > 0).all()):
        raise ValueError(f"buckets of a flush must rise, from 0 to {buckets_of_model - 1}, found {buckets}")
    if not np.array_equal(flush.runs.widths, widths):
        raise ValueError("records of the flush have other lengths than those of the store")
    check_runs(flush.runs)
    ends = np.cumsum(flush.runs.sizes())
    starts = directory["at"].astype(np.int64) - flush.runs.start
    if len(ends) and (starts[0] or (starts[1:] != ends[:-1]).any() or ends[-1] != len(flush.runs.body)):
        raise ValueError("runs of a flush must lie end to end")
    if not np.isin(directory["bucket"], buckets).all():
        raise ValueError("a flush holds rows of buckets that it does not name")


A_STORE_OF_ITS_OWN = (
    "  each model needs stores of its own: continue with the former spec and log, or set another run folder\n"
    "  for the new one; in your own Redis another name at the end of the URL, which its user may write to;\n"
    '  with docker compose empty volumes (docs/compose.md, "Another model")'
)
"""Advice for a store that belongs to another model."""


def check_identity(where: object, expected: StoreIdentity, found: StoreIdentity) -> None:
    """Raise Mismatch, with all differences, if a store belongs to another model.

    If only the generation of defaults differs, the message explains how to continue.
    """
    lines = []
    for field in fields(StoreIdentity):
        wanted, stored = getattr(expected, field.name), getattr(found, field.name)
        if isinstance(wanted, Mapping):
            for key in sorted({*wanted, *stored}, key=str):
                if wanted.get(key) != stored.get(key):
                    lines.append(
                        f"  {field.name}.{key}: expected {wanted.get(key)!r}, found {stored.get(key)!r}"
                    )
        elif wanted != stored:
            lines.append(f"  {field.name}: expected {wanted!r}, found {stored!r}")
    if lines:
        raise Mismatch(
            "\n".join(
                [
                    f"{where}: the row store belongs to another model, spec or log:",
                    *lines,
                    explain_defaults(expected.spec_hash, found.spec_hash) or A_STORE_OF_ITS_OWN,
                ]
            )
        )
