"""The process group of a quorum: its protocol, the group of one rank, and the encoding of proposals.

A rank is a process with its lanes. `freshet.trainer.torch_process_group` implements groups of several ranks.

Letters: L lanes of a rank, P partitions.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from freshet.errors import Corrupt, Unavailable
from freshet.types import F32, F64, I64, U8, Fence, OffsetRange

LEAVING, CHANGE, MEASURES, FLUSH = 1, 2, 4, 8
HEAD = 5  # step, vector, flags, lanes, ranges
RANGE = 4  # lane, partition, start, stop


@dataclass(frozen=True, slots=True)
class ProposedBatch:
    """The part of a lane's batch that the other ranks need for their decision."""

    ranges: tuple[OffsetRange, ...]
    rows: int  # samples


@dataclass(frozen=True, slots=True)
class Proposal:
    """One rank's contribution to the agreement before a step (PROTOCOL 14)."""

    step: int  # steps taken
    vector: int  # `vector_checksum` of the applied vector
    lanes: tuple[ProposedBatch | None, ...]  # (L,) None: the lane joins with weight 0
    leaving: bool = False  # this rank stops and has no batch
    change: bool = False  # the quorum must end before this step: another rank waits to join
    measures: bool = False  # exchange measures before this step
    flush: bool = False  # flush residuals before this step; in mode `async`: this rank has learned alone


def vector_checksum(applied: Mapping[int, int]) -> int:
    """Return the CRC-32 of an applied vector."""
    return zlib.crc32(np.array(sorted(applied.items()), np.int64).tobytes())


def proposal_size(lanes: int, partitions: int) -> int:
    """Return the integers of an encoded proposal: at most P ranges, as a partition feeds one lane."""
    return HEAD + lanes + RANGE * partitions


def encode_proposal(proposal: Proposal, size: int) -> I64:
    """Encode a proposal as (size,) integers, padded with zeros. Raises ValueError if it is longer."""
    rows = [-1 if lane is None else lane.rows for lane in proposal.lanes]
    ranges = [
        number
        for i, lane in enumerate(proposal.lanes)
        for r in (lane.ranges if lane is not None else ())
        for number in (i, r.partition, r.start, r.stop)
    ]
    flags = LEAVING * proposal.leaving + CHANGE * proposal.change
    flags += MEASURES * proposal.measures + FLUSH * proposal.flush
    head = [proposal.step, proposal.vector, flags, len(rows), len(ranges) // RANGE]
    used = HEAD + len(rows) + len(ranges)
    if used > size:
        raise ValueError(
            f"a proposal of {len(rows)} lanes and {len(ranges) // RANGE} ranges exceeds {size} integers"
        )
    return np.array(head + rows + ranges + [0] * (size - used), np.int64)


def decode_proposal(numbers: I64) -> Proposal:
    """Decode the (N,) int64 integers of `encode_proposal`. Raises Corrupt if they are no proposal."""
    plain: Sequence[int] = numbers.tolist()
    step, vector, flags, lanes, ranges = plain[:HEAD] if len(plain) >= HEAD else (0, 0, 0, -1, -1)
    first = HEAD + lanes
    if lanes < 0 or ranges < 0 or first + RANGE * ranges > len(plain) or not 0 <= flags < 2 * FLUSH:
        raise Corrupt(f"expected a rank's proposal, found {len(plain)} integers, first {plain[:HEAD]}")
    found: list[list[OffsetRange]] = [[] for _ in range(lanes)]
    for at in range(first, first + RANGE * ranges, RANGE):
        lane, partition, start, stop = plain[at : at + RANGE]
        if not (0 <= lane < lanes and 0 <= start < stop):
            raise Corrupt(f"expected a range of a proposal of {lanes} lanes, found {plain[at : at + RANGE]}")
        found[lane].append(OffsetRange(partition, start, stop))
    return Proposal(
        step=step,
        vector=vector,
        lanes=tuple(
            None if rows < 0 else ProposedBatch(tuple(ranges_of_lane), rows)
            for rows, ranges_of_lane in zip(plain[HEAD:first], found, strict=True)
        ),
        leaving=bool(flags & LEAVING),
        change=bool(flags & CHANGE),
        measures=bool(flags & MEASURES),
        flush=bool(flags & FLUSH),
    )


class RankLost(Unavailable):
    """A rank of the group ended or did not answer in time.

    The group is unusable. The remaining ranks go back to a flush point, form another and sync to the state of
    the highest step among them (PROTOCOL 15).
    """


class ProcessGroup(Protocol):
    """The ranks of a quorum and their collectives. One thread at a time uses it.

    Every rank calls the same methods in the same order. A call blocks until all ranks have made it, at most
    for the group's time-out, and raises RankLost otherwise; the progress of the other ranks is unknown then.
    """

    rank: int  # 0 <= rank < size; rank 0 leads: it writes versions and measures
    size: int
    fence: Fence  # of the quorum's record: batches, pushes and versions carry it

    def gather(self, proposal: Proposal) -> Sequence[Proposal]:
        """Return the proposals of all ranks in rank order. All must have the same number of lanes."""

    def reduce(self, buffers: Sequence[F32 | F64]) -> None:
        """Sum each (N,) array over the ranks in place; the result is bit-identical on all ranks."""

    def all_to_all(self, parts: Sequence[U8], sizes: Sequence[int] | None = None) -> list[U8]:
        """Send part j, (N_j,) bytes, to rank j; returns the part that each rank sent to this one.

        `sizes`: the (n,) lengths of the parts for this rank. Ranks that do not know them all pass None; they
        are exchanged first then, which is one more message to wait for.
        """

    def all_gather(self, part: U8, sizes: Sequence[int] | None = None) -> list[U8]:
        """Return the (N_i,) bytes of every rank in rank order; lengths may differ.

        `sizes`: the (n,) lengths of all ranks' parts, or None as for `all_to_all`.
        """

    def exchange(self, data: bytes) -> Sequence[bytes]:
        """Return the bytes of all ranks in rank order. For small messages."""

    def broadcast(self, data: bytes | None, source: int) -> bytes:
        """Return the bytes of rank `source`; the other ranks pass None."""

    def split(self, site: str) -> ProcessGroup:
        """Return a new group of the ranks that gave the same `site`, in their order here.

        Its fence is this group's. This group stays usable; the caller closes both.
        """

    def close(self) -> None:
        """Close the connections; ranks that still wait in the group get RankLost. Idempotent."""


class LocalProcessGroup:
    """A process group of one rank."""

    rank, size = 0, 1

    def __init__(self, fence: Fence) -> None:
        self.fence = fence

    def gather(self, proposal: Proposal) -> Sequence[Proposal]:
        """Return this rank's proposal."""
        return [proposal]

    def reduce(self, buffers: Sequence[F32 | F64]) -> None:
        """Keep the (N,) arrays: they are the sums of the only rank."""

    def all_to_all(self, parts: Sequence[U8], sizes: Sequence[int] | None = None) -> list[U8]:
        """Return this rank's only part, (N,) bytes."""
        return list(parts)

    def all_gather(self, part: U8, sizes: Sequence[int] | None = None) -> list[U8]:
        """Return this rank's (N,) bytes."""
        return [part]

    def exchange(self, data: bytes) -> Sequence[bytes]:
        """Return this rank's bytes."""
        return [data]

    def broadcast(self, data: bytes | None, source: int) -> bytes:
        """Return this rank's bytes. Raises ValueError if the source is another rank, or `data` is None."""
        if data is None or source != 0:
            raise ValueError(f"a group of one rank cannot receive from rank {source}")
        return data

    def split(self, site: str) -> ProcessGroup:
        """Return another group of this rank."""
        return LocalProcessGroup(self.fence)

    def close(self) -> None:
        """Do nothing: the group holds no connection."""
