"""Decisions of the embedder: which blocks make a batch, and when another batch may be looked up. No I/O.

Offsets of `samples` count blocks; a batch is whole blocks, a set of ranges with at most one per partition
(PROTOCOL 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from freshet.clock import Clock
from freshet.coordination.claim_rules import Claim
from freshet.coordination.claims import Claims
from freshet.coordination.partition_assignment import Shares
from freshet.types import I64, BytesColumn, OffsetRange, Records

__all__ = [
    "Assembler",
    "BatchPlan",
    "Credits",
    "address_of",
    "cut_points",
    "embedders_of",
    "lanes_for",
    "partitions_of_lane",
    "shares_of",
]

# --- Which embedder owns which partitions of samples, and where it is reached.


SEAT, PARTITION = "embedder", "partition"


def address_of(owner: str) -> str:
    """host:port of an owner `name@host:port/life`; empty if it names none."""
    _, at, rest = owner.partition("@")
    return rest.rpartition("/")[0] if at else ""


def embedders_of(living: Mapping[str, Claim]) -> dict[int, str]:
    """{partition: host:port of the embedder that owns it}."""
    return {
        int(what.removeprefix(f"{PARTITION}:")): address_of(claim.owner)
        for what, claim in living.items()
        if what.startswith(f"{PARTITION}:") and address_of(claim.owner)
    }


def shares_of(claims: Claims, name: str, owner: str, partitions: int, clock: Clock) -> Shares:
    """The partitions of one embedder; `owner` is `name@host:port/life`, unique to this process."""
    return Shares(claims, SEAT, PARTITION, name, owner, partitions, clock)


SAMPLE_BYTES = 37
"""Bytes of a sample in a block beside its payload (schemas/README.md, "Samples: blocks")."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """Blocks chosen for a batch, and the ranges that they stand for."""

    ranges: tuple[OffsetRange, ...]
    blocks: BytesColumn  # records of `samples`, partition after partition
    places: tuple[tuple[int, I64], ...]  # per range: (partition, offsets of its blocks)
    rows: int


@dataclass(slots=True)
class _Partition:
    """Blocks read and not yet in a batch, and where the next range starts."""

    position: int
    cuts: list[int]  # rising, all > position
    read_to: int  # what the log holds before this was offered; markers and gaps may follow the last block
    offsets: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    row_ends: I64 = field(default_factory=lambda: np.empty(0, np.int64))  # rows up to and with each block
    blocks: BytesColumn = field(default_factory=lambda: BytesColumn.of([]))
    cursor: int = 0
    taken: int = 0  # rows before the cursor
    waiting: int = 0  # rows from the cursor on


class Assembler:
    """Puts blocks of a lane's partitions together into batches, in offset order within each partition.

    After a rewind, `cuts` are the offsets that some store had applied up to (PROTOCOL 7): a range ends at
    each of them, and while cuts lie ahead of a partition a batch holds that partition's single range. Where
    no block lies before a cut the range to it holds none.

    Markers and gaps belong to the range that follows them, or precede a cut. So `positions` say how far
    batches go, and `covered` that nothing but markers lies behind them.
    """

    def __init__(self, positions: Mapping[int, int], cuts: Mapping[int, Sequence[int]] | None = None) -> None:
        self._partitions = {
            p: _Partition(position, sorted(c for c in (cuts or {}).get(p, ()) if c > position), position)
            for p, position in sorted(positions.items())
        }
        self._turn = 0  # index of the partition that is served first: no partition starves

    def offer(self, partition: int, records: Records) -> None:
        """Add blocks as they were read. Raises ValueError if they do not follow what was offered before."""
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
        """Rows read and not yet in a batch."""
        return sum(part.waiting for part in self._partitions.values())

    def positions(self) -> dict[int, int]:
        """{partition: where its next range starts}."""
        return {p: part.position for p, part in self._partitions.items()}

    def covered(self) -> dict[int, int]:
        """{partition: up to where no block waits}: past markers behind the last block as well."""
        return {
            p: part.read_to if part.cursor == len(part.offsets) else part.position
            for p, part in self._partitions.items()
        }

    def next(self, rows: int) -> BatchPlan | None:
        """The next batch of at least one block and at most `rows` rows (more if one block alone has more).

        It has no block only where a cut point follows a gap. Returns None if no block is waiting.
        """
        order = list(self._partitions)
        order = order[self._turn :] + order[: self._turn]
        taken: list[tuple[OffsetRange, BytesColumn, I64]] = []
        total = 0
        for p in order:
            part = self._partitions[p]
            if part.cursor == len(part.offsets) or (part.cuts and taken):
                continue
            count = self._blocks_that_fit(part, rows - total, first=not taken)
            stop = part.cursor + count
            span = OffsetRange(p, part.position, _stop_of_range(part, stop)) if count or part.cuts else None
            if span is None:
                continue
            offsets = part.offsets[part.cursor : stop]
            taken.append((span, part.blocks.slice(part.cursor, stop), offsets))
            ends_at = int(part.row_ends[stop - 1]) if count else part.taken
            total += ends_at - part.taken
            alone = bool(part.cuts)
            part.position, part.cursor = span.stop, stop
            part.waiting -= ends_at - part.taken
            part.taken = ends_at
            part.cuts = [c for c in part.cuts if c > part.position]
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
    def _blocks_that_fit(part: _Partition, room: int, *, first: bool) -> int:
        limit = len(part.offsets)
        if part.cuts:
            limit = int(np.searchsorted(part.offsets, part.cuts[0]))
        ends = part.row_ends[part.cursor : limit]
        count = int(ends.searchsorted(part.taken + room, side="right"))
        return max(count, 1) if first and len(ends) else count


def _stop_of_range(part: _Partition, stop: int) -> int:
    """Where a range ends that takes the blocks up to the index `stop`."""
    known = int(part.offsets[stop]) if stop < len(part.offsets) else part.read_to  # all before it are taken
    if part.cuts and known >= part.cuts[0]:
        return part.cuts[0]
    return int(part.offsets[stop - 1]) + 1


def rows_of_blocks(blocks: BytesColumn) -> I64:
    """(N,) samples of each block, from its header, which is not checked yet: at least 1, and at most as many
    as its bytes could hold."""
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


def cut_points(applied: Sequence[Mapping[int, Sequence[int]]]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Where to start again, and what no range may cross, from what every store says it has applied (PROTOCOL
    7).

    Args:
        applied: one mapping a store (each shard, the trainer): {partition: distinct offsets applied up to}.

    Returns:
        ({partition: smallest offset}, {partition: the larger ones, rising}).
    """
    partitions = sorted({p for store in applied for p in store})
    told = {p: sorted({offset for store in applied for offset in store.get(p, ())}) for p in partitions}
    return {p: offsets[0] for p, offsets in told.items()}, {p: offsets[1:] for p, offsets in told.items()}


@dataclass(slots=True)
class Credits:
    """Rows of batches looked up and not yet applied, and whether one more lookup keeps within the bound.

    PERSIA's bounded staleness, counted in rows: what a batch misses is the samples that other batches will
    still apply. In mode `sync` nothing may be missed but the batches of the same step: each lane has one
    batch at most, and the next is looked up when all that were in flight with it are applied.
    """

    staleness_rows: int
    sync: bool = False
    in_flight: dict[int, int] = field(default_factory=dict)  # credit -> rows
    _lanes: dict[int, int] = field(default_factory=dict)  # credit -> lane
    _kept: dict[int, int] = field(default_factory=dict)  # lane -> rows of its batches that are void
    _of_the_step: set[int] = field(default_factory=set)  # in flight when the step's gradients came
    _next: int = 0

    def free(self, lane: int = 0) -> bool:
        """Whether a batch of this lane may be looked up now: rows of the others in flight are within the
        bound."""
        if self.sync:
            return not self._of_the_step and not self.batches_of(lane)
        if self._kept.get(lane):
            return True
        others = sum(self.in_flight.values()) + sum(self._kept.values())
        return not others or others <= self.staleness_rows

    def batches_of(self, lane: int) -> int:
        """Batches of a lane in flight."""
        return sum(of == lane for of in self._lanes.values())

    def take(self, rows: int, lane: int = 0) -> int:
        """Take a credit, of those that the lane has kept if there are any; only when `free`. Never 0."""
        self._next += 1
        self.in_flight[self._next], self._lanes[self._next] = rows, lane
        if lane in self._kept:
            self._kept[lane] = max(0, self._kept[lane] - rows)
        return self._next

    def step_over(self) -> None:
        """Gradients of a step come back: what is in flight now belongs to it, or was looked up beside it."""
        if self.sync:
            self._of_the_step.update(self.in_flight)

    def give_back(self, credit: int) -> None:
        """Return a credit. Idempotent: a batch may be voided and acknowledged."""
        self.in_flight.pop(credit, None)
        self._lanes.pop(credit, None)
        self._of_the_step.discard(credit)

    def keep(self, credit: int) -> None:
        """The batch is void: its rows stay the lane's until they are issued again (PROTOCOL 16)."""
        if credit in self.in_flight:
            lane = self._lanes[credit]
            self._kept[lane] = self._kept.get(lane, 0) + self.in_flight[credit]
        self.give_back(credit)

    def settle(self, lane: int) -> None:
        """Give up what the lane has kept: everything void was issued again, or turned out to be applied."""
        self._kept.pop(lane, None)


def lanes_for(cores: int, staleness_rows: int, batch_rows: int, partitions: int) -> int:
    """Lanes of one process: min(cores, 8, 1 + staleness_rows / batch rows), and no more than partitions."""
    return max(1, min(cores, 8, 1 + staleness_rows // batch_rows, partitions))


def partitions_of_lane(lane: int, lanes: int, partitions: Sequence[int]) -> tuple[int, ...]:
    """Partitions that a lane owns: disjoint, all covered, as even as can be."""
    return tuple(partitions[lane::lanes])
