"""Types shared by all packages: offsets, ranges, columns of bytes, records, buckets, packed rows.

This module imports no other module of freshet. Shapes: N records or rows, B samples of a batch, U unique
rows, S float slots of a row, F features, P partitions, K buckets, R runs or removed keys, W bytes a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Append",
    "BucketMeta",
    "BucketRange",
    "BytesColumn",
    "Flush",
    "OffsetRange",
    "PackedRows",
    "Records",
    "RowRuns",
    "Run",
    "TopicPartition",
    "bucket_of",
]

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

LogId = NewType("LogId", str)
"""Identity of a topic between its creation and deletion: the Kafka topic id, or a UUID in the SQLite log.
Offsets are valid for one id only."""

Fence = NewType("Fence", int)
"""Offset of a claim in the `control` topic: unique and rising. Receivers refuse lower ones."""

Bucket = NewType("Bucket", int)
"""Unit of ownership of the parameter server: 0 <= bucket < buckets of the model; the top bits of a key."""

TimeMs = NewType("TimeMs", int)
"""Milliseconds since the Unix epoch, UTC; for event times and record times."""

Applied = Mapping[int, int]
"""{partition of `samples`: next offset}; all samples below are applied."""


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """A contiguous range [start, stop) of one partition of the log.

    The unit of training, of a gradient push and of replay. `start` is the previous range's `stop`, so gaps
    and transaction markers in the log belong to a range (PROTOCOL 2).
    """

    partition: int
    start: int  # inclusive
    stop: int  # exclusive; > start

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"an offset range must be 0 <= start < stop, found [{self.start}, {self.stop})")

    def __str__(self) -> str:
        return f"{self.partition}:{self.start}-{self.stop}"


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One partition of one topic of the event log."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


@dataclass(frozen=True, slots=True, eq=False)
class BytesColumn:
    """N byte strings in one buffer; value i is `data[ends[i-1]:ends[i]]`, the first starts at 0."""

    data: U8  # (sum of lengths,) contiguous
    ends: I64  # (N,) non-decreasing; ends[-1] == len(data)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> bytes:
        """Return value i as bytes; copies, so not for hot paths."""
        n = len(self.ends)
        if not -n <= i < n:
            raise IndexError(i)
        i %= n
        return self.data[int(self.ends[i - 1]) if i else 0 : int(self.ends[i])].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return (self[i] for i in range(len(self)))

    @property
    def starts(self) -> I64:
        """(N,) where each value starts."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]]) if len(self.ends) else self.ends

    @classmethod
    def of(cls, values: Iterable[bytes]) -> BytesColumn:
        """Create a column from Python byte strings; copies."""
        parts = list(values)
        ends = np.cumsum([len(p) for p in parts], dtype=np.int64) if parts else np.empty(0, np.int64)
        return cls(np.frombuffer(b"".join(parts), np.uint8), ends)

    def slice(self, start: int, stop: int) -> BytesColumn:
        """Return values [start, stop); shares memory."""
        first = int(self.ends[start - 1]) if start else 0
        last = int(self.ends[stop - 1]) if stop else 0
        return BytesColumn(self.data[first:last], self.ends[start:stop] - first)

    @classmethod
    def concat(cls, columns: Sequence[BytesColumn]) -> BytesColumn:
        """Join columns end to end; copies, unless only one of them has values."""
        columns = [c for c in columns if len(c.ends)]
        if len(columns) == 1:
            return columns[0]
        if not columns:
            return cls.of([])
        shift = np.cumsum([0, *(len(c.data) for c in columns[:-1])])
        return cls(
            np.concatenate([c.data for c in columns]),
            np.concatenate([c.ends + s for c, s in zip(columns, shift, strict=True)]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Consecutive records read from one partition.

    Offsets rise but may have gaps (transaction markers, tombstones). The next read starts at `next_offset`,
    which is at least `offsets[-1] + 1`, or past trailing gaps that the log knows of. N may be 0.
    """

    offsets: I64  # (N,)
    times_ms: I64  # (N,) record times
    keys: BytesColumn  # (N,) partitioning keys; empty bytes for none
    values: BytesColumn  # (N,)
    next_offset: int

    def __len__(self) -> int:
        return len(self.offsets)

    def slice(self, start: int, stop: int, next_offset: int) -> Records:
        """Return the rows [start, stop), followed by `next_offset`; shares memory."""
        return Records(
            self.offsets[start:stop],
            self.times_ms[start:stop],
            self.keys.slice(start, stop),
            self.values.slice(start, stop),
            next_offset,
        )

    def where(self, rows: Sequence[int]) -> Records:
        """Return these rows (rising indexes) with the same `next_offset`; copies, so not for hot paths."""
        return Records(
            self.offsets[rows],
            self.times_ms[rows],
            BytesColumn.of(self.keys[i] for i in rows),
            BytesColumn.of(self.values[i] for i in rows),
            self.next_offset,
        )


@dataclass(frozen=True, slots=True)
class Append:
    """Records to append to one partition, in this order."""

    topic: str
    partition: int
    values: BytesColumn
    keys: BytesColumn | None = None  # None: all empty
    times_ms: I64 | None = None  # (N,) None: the log's clock, which Kafka may use in any case


def bucket_of(keys: U64, buckets: int) -> NDArray[np.int64]:
    """Return the bucket of each key as (N,) int64: the top log2(buckets) bits of (N,) uint64 keys.

    `buckets` is a power of two >= 2.
    """
    return (keys >> np.uint64(64 - (buckets.bit_length() - 1))).astype(np.int64)


@dataclass(frozen=True, slots=True)
class BucketRange:
    """Buckets [start, stop), the unit of a claim on the parameter server."""

    start: int
    stop: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __len__(self) -> int:
        return self.stop - self.start


ROW_FORMAT = 1
"""Format of packed rows as written now."""


@dataclass(frozen=True, slots=True)
class BucketMeta:
    """State of a bucket that a store changes together with its rows in one atomic write (PROTOCOL 11)."""

    fence: Fence
    seq: int  # one more for each flush of this bucket under this fence
    rows: int  # rows stored
    applied: Applied
    rows_offset: int  # next offset of the bucket's partition of `rows`, from which readers follow
    clock_ms: TimeMs  # largest event time applied: the eviction clock (PROTOCOL 8)
    format: int = ROW_FORMAT  # of the packed rows
    writer: Fence | None = field(default=None, compare=False)
    """Fence of the last flush: a claim raises `fence` alone. None: the store loses no claim, or an earlier
    release wrote the bucket."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Rows of one table of one bucket, packed by the native table.

    A record holds no key: meta word, optimiser state and values, `record_bytes` long, little-endian. The spec
    fixes its layout for the table's lifetime (`freshet.config.spec.layout`).
    """

    table: int  # table id
    keys: U64  # (N,)
    records: U8  # (N, record_bytes)


RUN = np.dtype(
    [
        ("bucket", "<u4"),
        ("table", "<u4"),
        ("rows", "<u4"),
        ("removed", "<u4"),
        ("at", "<u8"),  # start of the run in the body
        ("keys_crc", "<u4"),  # CRC-32 of keys and removed keys
        ("records_crc", "<u4"),
    ]
)
"""Entry of a directory of runs: place and checksums of a run, see `RowRuns`."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One run, decoded; for rare paths, tests and tools."""

    bucket: int
    table: int
    keys: U64  # (N,) rising
    removed: U64  # (R,) rising, disjoint from keys
    records: U8  # (N, W)


@dataclass(frozen=True, slots=True, eq=False)
class RowRuns:
    """Packed rows and removed keys of many buckets in one buffer, as written by a flush and read by a scan.

    A run holds rows of one table of one bucket: u64 keys (rising), u64 removed keys (rising, none among the
    keys), then the packed records, little-endian. Runs lie end to end in order of the directory, which is
    sorted by (bucket, table), so neighbouring buckets are a slice of both arrays. A large table of a bucket
    may have several runs; no key is in two.
    """

    directory: NDArray[np.void]  # (R,) of RUN
    body: U8  # starts with the first run of the directory
    widths: U32  # (256,) bytes of a record by table id; 0: no such table

    @property
    def rows(self) -> int:
        """Number of rows of all runs, without removed keys."""
        return int(self.directory["rows"].sum(dtype=np.int64))

    @property
    def start(self) -> int:
        """Offset in the directory's terms at which `body` begins; slices keep their offsets."""
        return int(self.directory["at"][0]) if len(self.directory) else 0

    def sizes(self) -> I64:
        """Return (R,) int64 bytes of each run."""
        rows, removed = self.directory["rows"].astype(np.int64), self.directory["removed"].astype(np.int64)
        widths: I64 = self.widths[self.directory["table"]].astype(np.int64)
        sizes: I64 = 8 * (rows + removed) + rows * widths
        return sizes

    def of_buckets(self, first: int, stop: int) -> RowRuns:
        """Return the runs of buckets [first, stop); shares memory."""
        low, high = np.searchsorted(self.directory["bucket"], [first, stop]).tolist()
        return self.slice(low, high)

    def slice(self, low: int, high: int) -> RowRuns:
        """Return the runs [low, high) of the directory; shares memory."""
        chosen, places = self.directory[low:high], self.directory["at"]
        if not len(chosen):
            return RowRuns(chosen, self.body[:0], self.widths)
        first, base = int(places[low]), self.start
        last = int(places[high]) if high < len(places) else base + len(self.body)
        return RowRuns(chosen, self.body[first - base : last - base], self.widths)

    def __iter__(self) -> Iterator[Run]:
        """Yield the runs, decoded; for rare paths, tests and tools."""
        for bucket, table, rows, removed, at, _, _ in self.directory.tolist():
            width, begin = int(self.widths[table]), at - self.start
            keys = self.body[begin : begin + 8 * (rows + removed)].copy().view(np.uint64)
            records = self.body[begin + 8 * (rows + removed) :][: rows * width].reshape(rows, width)
            yield Run(bucket, table, keys[:rows], keys[rows:], records)


@dataclass(frozen=True, slots=True, eq=False)
class Flush:
    """Changed rows of K buckets, and the meta that each bucket gets (PROTOCOL 11).

    The owner expects each stored bucket at (fence, seq - 1). Buckets of different claims have different
    fences.
    """

    buckets: I64  # (K,) rising
    fences: I64  # (K,) fence of the owner's claim on each bucket
    seqs: I64  # (K,)
    rows: I64  # (K,) rows in the row store after the flush
    applied: I64  # (K, P) next offset of each partition of `samples`
    rows_offsets: I64  # (K,) next offset of the bucket's partition of `rows`
    clocks_ms: I64  # (K,) largest event time applied
    runs: RowRuns  # changed rows and removed keys of these buckets; all rows if `whole`
    whole: bool = False  # replace the stored rows and meta atomically

    def __len__(self) -> int:
        return len(self.buckets)

    def meta(self, i: int) -> BucketMeta:
        """Return the i-th bucket's new meta; for tests and single buckets."""
        return BucketMeta(
            fence=Fence(int(self.fences[i])),
            seq=int(self.seqs[i]),
            rows=int(self.rows[i]),
            applied=dict(enumerate(self.applied[i].tolist())),
            rows_offset=int(self.rows_offsets[i]),
            clock_ms=TimeMs(int(self.clocks_ms[i])),
        )
