"""Ranks that step the same dense weights together: what a trainer needs of the others, whatever carries it.

A rank is a process with its lanes. `Alone` is the group of one; `freshet.trainer.torch_ranks` has the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from freshet.errors import Unavailable
from freshet.trainer.proposals import Offer
from freshet.types import F32, F64, Fence

__all__ = ["Alone", "RankGroup", "RankLost"]


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
