"""Decisions of the embedder, without I/O: partition owners, lanes, and the blocks of a batch.

Offsets of `samples` count blocks. A batch consists of whole blocks and has at most one range a partition
(PROTOCOL 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from freshet.coordination.claim_rules import Claim
from freshet.types import I64, BytesColumn, OffsetRange, Records

PARTITION = "partition"
"""Kind of the claims of partitions of `samples`."""


def address_of(owner: str) -> str:
    """Return host:port of an owner `name@host:port/life`; empty if it has none."""
    _, at, rest = owner.partition("@")
    return rest.rpartition("/")[0] if at else ""


def embedders_of(living: Mapping[str, Claim]) -> dict[int, str]:
    """Return {partition: host:port of the embedder that owns it}."""
    return {
        int(what.removeprefix(f"{PARTITION}:")): address_of(claim.owner)
        for what, claim in living.items()
        if what.startswith(f"{PARTITION}:") and address_of(claim.owner)
    }


SAMPLE_BYTES = 37
"""Bytes of a sample in a block beside its payload (schemas/README.md, "Samples: blocks")."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """The blocks of a batch and their ranges."""

    ranges: tuple[OffsetRange, ...]
    blocks: BytesColumn  # records of `samples`, grouped by partition
    places: tuple[tuple[int, I64], ...]  # per range: (partition, offsets of its blocks)
    rows: int


@dataclass(slots=True)
class _Partition:
    """The blocks of a partition that are in no batch yet, and the start of its next range."""

    position: int
    splits: list[int]  # rising, all > position
    read_to: int  # next offset to read; markers and gaps may follow the last block
    offsets: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    row_ends: I64 = field(default_factory=lambda: np.empty(0, np.int64))  # rows up to and with each block
    blocks: BytesColumn = field(default_factory=lambda: BytesColumn.of([]))
    cursor: int = 0  # first block that is in no batch
    taken: int = 0  # rows before the cursor
    waiting: int = 0  # rows from the cursor on


class Assembler:
    """Assembles the blocks of a lane's partitions into batches, in offset order within each partition.

    After a rewind, `splits` are the larger offsets that stores have applied (PROTOCOL 7). A range ends at
    each split, and a batch before a split has a single range, without blocks if none precedes the split.

    Markers and gaps belong to the range that follows them, or to the one that ends at a split. `positions`
    are the ends of the batches; `covered` also includes markers behind the last block.
    """

    def __init__(
        self, positions: Mapping[int, int], splits: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self._partitions = {
            p: _Partition(position, sorted(c for c in (splits or {}).get(p, ()) if c > position), position)
            for p, position in sorted(positions.items())
        }
        self._turn = 0  # index of the first partition of the next batch: no partition starves

    def add(self, partition: int, records: Records) -> None:
        """Add the blocks that were read. Raises ValueError if they do not follow the earlier ones."""
        part = self._partitions[partition]
        last = part.offsets[-1] if part.cursor < len(part.offsets) else part.position - 1
        if len(records) and records.offsets[0] <= last:
            raise ValueError(
                f"blocks of partition {partition} must follow offset {last}, found {records.offsets[0]}"
            )
        keep = part.cursor
        ends = np.cumsum(rows_of_blocks(records.values)) + part.waiting
        part.offsets = np.concatenate([part.offsets[keep:], records.offsets])
        part.row_ends = np.concatenate([part.row_ends[keep:] - part.taken, ends])
        part.blocks = BytesColumn.concat([part.blocks.slice(keep, len(part.blocks)), records.values])
        part.read_to = max(part.read_to, records.next_offset)
        part.cursor = part.taken = 0
        part.waiting = int(part.row_ends[-1]) if len(part.row_ends) else 0

    def waiting(self) -> int:
        """Return the rows that are in no batch yet."""
        return sum(part.waiting for part in self._partitions.values())

    def next_blocks(self, rows: int) -> BytesColumn:
        """Return the blocks that a next batch of at most `rows` rows would have, without taking them."""
        found, left = list[BytesColumn](), rows
        for part in map(self._partitions.__getitem__, self._order()):
            if count := self._blocks_that_fit(part, left, first=not found):
                stop = part.cursor + count
                found.append(part.blocks.slice(part.cursor, stop))
                left -= int(part.row_ends[stop - 1]) - part.taken
        return BytesColumn.concat(found)

    def _order(self) -> list[int]:
        """Return the partitions in the order in which the next batch takes their blocks."""
        order = list(self._partitions)
        return order[self._turn :] + order[: self._turn]

    def positions(self) -> dict[int, int]:
        """Return {partition: start of its next range}."""
        return {p: part.position for p, part in self._partitions.items()}

    def covered(self) -> dict[int, int]:
        """Return {partition: offset before which every block is in a batch}, past trailing markers."""
        return {
            p: part.read_to if part.cursor == len(part.offsets) else part.position
            for p, part in self._partitions.items()
        }

    def next(self, rows: int) -> BatchPlan | None:
        """Return the next batch of at most `rows` rows, or of one larger block; None if no block waits.

        A batch has no block only if nothing but a gap precedes a split.
        """
        order = self._order()
        taken: list[tuple[OffsetRange, BytesColumn, I64]] = []
        total = 0
        for p in order:
            part = self._partitions[p]
            if part.cursor == len(part.offsets) or (part.splits and taken):
                continue
            count = self._blocks_that_fit(part, rows - total, first=not taken)
            stop = part.cursor + count
            span = OffsetRange(p, part.position, _stop_of_range(part, stop)) if count or part.splits else None
            if span is None:
                continue
            offsets = part.offsets[part.cursor : stop]
            taken.append((span, part.blocks.slice(part.cursor, stop), offsets))
            ends_at = int(part.row_ends[stop - 1]) if count else part.taken
            total += ends_at - part.taken
            alone = bool(part.splits)
            part.position, part.cursor = span.stop, stop
            part.waiting -= ends_at - part.taken
            part.taken = ends_at
            part.splits = [c for c in part.splits if c > part.position]
            if alone or total >= rows:
                break
        if not taken:
            return None
        self._turn = (order.index(taken[0][0].partition) + self._turn + 1) % len(order)
        taken.sort(key=lambda t: t[0].partition)
        return BatchPlan(
            tuple(t[0] for t in taken),
            BytesColumn.concat([t[1] for t in taken]),
            tuple((t[0].partition, t[2]) for t in taken),
            total,
        )

    @staticmethod
    def _blocks_that_fit(part: _Partition, rows: int, *, first: bool) -> int:
        limit = len(part.offsets)
        if part.splits:
            limit = int(np.searchsorted(part.offsets, part.splits[0]))
        ends = part.row_ends[part.cursor : limit]
        count = int(ends.searchsorted(part.taken + rows, side="right"))
        return max(count, 1) if first and len(ends) else count


def _stop_of_range(part: _Partition, stop: int) -> int:
    """Return the end of a range with the blocks before the index `stop`."""
    known = int(part.offsets[stop]) if stop < len(part.offsets) else part.read_to  # no block is between
    if part.splits and known >= part.splits[0]:
        return part.splits[0]
    return int(part.offsets[stop - 1]) + 1


def rows_of_blocks(blocks: BytesColumn) -> I64:
    """Return the (N,) int64 samples of each block by its unchecked header, limited by its bytes."""
    starts = blocks.starts
    long_enough = blocks.ends - starts >= 16
    at = np.where(long_enough, starts + 8, 0)
    if not len(blocks.data):
        return np.ones(len(blocks), np.int64)
    counts = sum(
        blocks.data[np.minimum(at + i, len(blocks.data) - 1)].astype(np.int64) << (8 * i) for i in range(4)
    )
    most = np.maximum((blocks.ends - starts) // SAMPLE_BYTES, 1)
    return np.where(long_enough, np.clip(counts, 1, most), 1)


def rewind_offsets(
    applied: Sequence[Mapping[int, Sequence[int]]],
) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Return the offsets to restart from, and the splits that no range may cross (PROTOCOL 7).

    Args:
        applied: per store (each shard, the trainer) {partition: its distinct applied offsets}.

    Returns:
        ({partition: smallest offset}, {partition: the larger ones, rising}).
    """
    partitions = sorted({p for store in applied for p in store})
    merged = {p: sorted({offset for store in applied for offset in store.get(p, ())}) for p in partitions}
    return {p: offsets[0] for p, offsets in merged.items()}, {p: offsets[1:] for p, offsets in merged.items()}


def lanes_for(cores: int, staleness_rows: int, batch_rows: int, partitions: int) -> int:
    """Return the lanes of one process: at most 8, and no more than cores, partitions or staleness allow."""
    return max(1, min(cores, 8, 1 + staleness_rows // batch_rows, partitions))


def partitions_of_lane(lane: int, lanes: int, partitions: Sequence[int]) -> tuple[int, ...]:
    """Return the partitions of a lane: disjoint from those of others, and as many up to one."""
    return tuple(partitions[lane::lanes])
