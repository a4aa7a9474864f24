"""Ranks that step the same dense weights together: what a trainer needs of the others, whatever carries it.

A rank is a process with its lanes. `Alone` is the group of one; `freshet.trainer.torch_ranks` has the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from freshet.errors import Corrupt, Unavailable
from freshet.types import F32, F64, I64, Fence, OffsetRange

__all__ = [
    "Alone",
    "Offer",
    "Offered",
    "RankGroup",
    "RankLost",
    "read_offer",
    "size_of",
    "vector_check",
    "write_offer",
]

# --- What a rank brings to a step, as it is told to the other ranks: a few integers, of the same length
# for all.
#
# No I/O. Letters: L lanes of a rank, P partitions.


LEAVING, CHANGE, MEASURES = 1, 2, 4
HEAD = 5  # step, vector, flags, lanes, ranges
RANGE = 4  # lane, partition, start, stop


@dataclass(frozen=True, slots=True)
class Offered:
    """A lane's batch, as far as the other ranks must know it."""

    ranges: tuple[OffsetRange, ...]
    rows: int  # samples


@dataclass(frozen=True, slots=True)
class Offer:
    """One rank's part in the agreement before a step (PROTOCOL 14)."""

    step: int  # steps taken
    vector: int  # `vector_check` of what is applied
    lanes: tuple[Offered | None, ...]  # (L,) None: joins with weight 0
    leaving: bool = False  # this rank has been told to stop, and has no batch
    change: bool = False  # the world is to be formed anew at this border: somebody waits to join
    measures: bool = False  # measures are to be exchanged at this border


def vector_check(applied: Mapping[int, int]) -> int:
    """A number that tells two vectors apart."""
    return zlib.crc32(np.array(sorted(applied.items()), np.int64).tobytes())


def size_of(lanes: int, partitions: int) -> int:
    """Integers of an offer: a partition feeds one lane of one rank, so there are at most P ranges."""
    return HEAD + lanes + RANGE * partitions


def write_offer(offer: Offer, size: int) -> I64:
    """(size,) the offer in integers. Raises ValueError if it has more ranges than there is room for."""
    rows = [-1 if lane is None else lane.rows for lane in offer.lanes]
    ranges = [
        number
        for place, lane in enumerate(offer.lanes)
        for r in (lane.ranges if lane is not None else ())
        for number in (place, r.partition, r.start, r.stop)
    ]
    flags = LEAVING * offer.leaving + CHANGE * offer.change + MEASURES * offer.measures
    head = [offer.step, offer.vector, flags, len(rows), len(ranges) // RANGE]
    used = HEAD + len(rows) + len(ranges)
    if used > size:
        raise ValueError(f"an offer of {len(rows)} lanes and {len(ranges) // RANGE} ranges in {size} numbers")
    return np.array(head + rows + ranges + [0] * (size - used), np.int64)


def read_offer(numbers: I64) -> Offer:
    """The offer that `write_offer` wrote. Raises Corrupt if it is none."""
    plain: Sequence[int] = numbers.tolist()
    step, vector, flags, lanes, ranges = plain[:HEAD] if len(plain) >= HEAD else (0, 0, 0, -1, -1)
    first = HEAD + lanes
    if lanes < 0 or ranges < 0 or first + RANGE * ranges > len(plain) or not 0 <= flags < 2 * MEASURES:
        raise Corrupt(f"expected a rank's offer, found {len(plain)} numbers beginning with {plain[:HEAD]}")
    found: list[list[OffsetRange]] = [[] for _ in range(lanes)]
    for at in range(first, first + RANGE * ranges, RANGE):
        lane, partition, start, stop = plain[at : at + RANGE]
        if not (0 <= lane < lanes and 0 <= start < stop):
            raise Corrupt(f"expected a range of an offer of {lanes} lanes, found {plain[at : at + RANGE]}")
        found[lane].append(OffsetRange(partition, start, stop))
    return Offer(
        step=step,
        vector=vector,
        lanes=tuple(
            None if rows < 0 else Offered(tuple(of), rows)
            for rows, of in zip(plain[HEAD:first], found, strict=True)
        ),
        leaving=bool(flags & LEAVING),
        change=bool(flags & CHANGE),
        measures=bool(flags & MEASURES),
    )


class RankLost(Unavailable):
    """A rank of the group has gone or did not answer in time. The group is of no use any more; those who are
    left form another, and take the state of the highest step among them (PROTOCOL 15)."""


class RankGroup(Protocol):
    """Some ranks for as long as none is lost and none joins. Used by one thread at a time.

    Every rank calls the same methods in the same order. Each of them blocks until all have, at most the
    group's time-out, and raises RankLost if one of them has not; then nobody knows who got how far.
    """

    rank: int  # 0 <= rank < size; 0 leads: it writes versions and measures
    size: int
    fence: Fence  # of the record that made this group: batches, pushes and versions carry it

    def gather(self, offer: Offer) -> Sequence[Offer]:
        """All ranks' offers, in rank order; the own one among them. Offers are of equally many lanes."""

    def reduce(self, buffers: Sequence[F32 | F64]) -> None:
        """Sum each array over the ranks, in place: afterwards it is the same on all of them, to the bit."""

    def exchange(self, data: bytes) -> Sequence[bytes]:
        """All ranks' bytes, in rank order. For what is small."""

    def broadcast(self, data: bytes | None, source: int) -> bytes:
        """The bytes of rank `source`, which alone gives some."""

    def close(self) -> None:
        """Let the group go; a rank that still waits in it is told that it is lost. Idempotent."""


class Alone:
    """A group of one: nothing to wait for, nothing to add."""

    rank, size = 0, 1

    def __init__(self, fence: Fence) -> None:
        self.fence = fence

    def gather(self, offer: Offer) -> Sequence[Offer]:
        """The own offer."""
        return [offer]

    def reduce(self, buffers: Sequence[F32 | F64]) -> None:
        """The sums are those of all ranks already."""

    def exchange(self, data: bytes) -> Sequence[bytes]:
        """The own bytes."""
        return [data]

    def broadcast(self, data: bytes | None, source: int) -> bytes:
        """The own bytes."""
        if data is None or source != 0:
            raise ValueError(f"rank 0 of one was asked for what rank {source} gives")
        return data

    def close(self) -> None:
        """Nothing is held."""
