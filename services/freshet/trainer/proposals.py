"""What a rank brings to a step, as it is told to the other ranks: a few integers, of the same length for
all.

No I/O. Letters: L lanes of a rank, P partitions.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from freshet.errors import Corrupt
from freshet.types import I64, OffsetRange

__all__ = ["Offer", "Offered", "read_offer", "size_of", "vector_check", "write_offer"]

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
