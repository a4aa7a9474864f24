"""The row service: rows of a batch looked up, gradients pushed with the ranges they stand for (a shard in
this process; gRPC)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from freshet.errors import Refused
from freshet.observability.tracing import Context
from freshet.tables import Store
from freshet.tables.changes import KnownPushes
from freshet.types import F32, U8, U32, U64, Bool, Fence, OffsetRange, TimeMs

__all__ = ["KeyGroup", "NativeRows", "OwnersChange", "Push", "PushesAhead", "RowService", "RowStates"]


@dataclass(frozen=True, slots=True, eq=False)
class KeyGroup:
    """Unique keys of a batch in one store group, in order of their buckets."""

    group: int  # store group: tables of equal layout share one
    keys: U64  # (U,) unique by (table, key), sorted by bucket
    tables: U8  # (U,) table id of each key
    bucket_starts: U32  # (buckets + 1,) keys of bucket b are [bucket_starts[b], bucket_starts[b + 1])

    def repeated(self, counts: U32) -> KeyGroup:
        """Each key as often as `counts` (U,) says, one behind the other: what a push of several gradients a
        row names. Copies."""
        ends = np.zeros(len(counts) + 1, np.uint32)
        np.cumsum(counts, out=ends[1:])
        return KeyGroup(
            self.group,
            np.repeat(self.keys, counts),
            np.repeat(self.tables, counts),
            ends[self.bucket_starts],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """Gradients of one batch. Applied whole, skipped whole or refused whole (PROTOCOL 2 and 4)."""

    ranges: tuple[OffsetRange, ...]  # at most one per partition
    fence: Fence  # of the embedder's claim on these partitions
    clock_ms: TimeMs  # largest event time in the batch
    groups: Sequence[KeyGroup]
    """A key may stand in one several times, one behind the other (`KeyGroup.repeated`): its row then makes a
    step by each of its gradients, in their order."""
    gradients: Sequence[F32]  # per group (U, S): summed over occurrences of a step; slots as in the row
    owned: Bool | None = None
    """(buckets,) those that the sender believes to be the receiver's: it touches no others, and refuses the
    push if one of them is not (PROTOCOL 4). None: all that the receiver has, which is in the same process."""
    span: Context | None = None  # that it is part of, if its batch is traced and its thread's is another


@dataclass(slots=True, eq=False)
class RowStates:
    """What a lookup fills in beside the rows, for who steps copies of them."""

    floats: Sequence[F32]
    """Per group (U, T): optimiser state of all slots in their order (`freshet.config.spec.optimizers`),
    of the same moment as the values."""
    known: KnownPushes | None = None  # which pushes the rows know; None before the lookup


class RowService(Protocol):
    """All shards of one model, as an embedder sees them. Thread-safe."""

    def lookup(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        create: bool = True,
        states: RowStates | None = None,
    ) -> None:
        """Write each key's slots into `out[g]` (U, S), and fill in `states`, if given.

        An absent row yields the initial values of (model seed, table, key); with `create` it also comes into
        being (subject to the table's admission). Without `create` an absent row yields zeros: serving's view.

        Raises Unavailable while a bucket has no owner.
        """

    def push(self, push: Push) -> bool:
        """Apply a batch's gradients; True if applied, False if every bucket had it already.

        Checked against all buckets before any is touched. An absent row is created. Non-finite gradients
        advance the offsets without changing rows, and are counted (PROTOCOL 3).

        Raises:
            Refused: the ranges do not continue what is applied, or a bucket is not owned here; carries
            `applied`.
            Fenced: a higher fence has claimed one of the partitions.
            Unavailable: not known to be applied; pushing the same again is safe.
        """

    def applied(self) -> Mapping[int, Sequence[int]]:
        """{partition: the distinct offsets that buckets have applied up to, rising}.

        The first is where to rewind to; all of them are cut points that no range may cross (PROTOCOL 7).
        Raises Unavailable until all buckets are owned.
        """


@runtime_checkable
class NativeRows(Protocol):
    """A row service of this process whose store native code looks up and pushes itself, many batches at a
    time. Optional. Each push is checked against all buckets before it touches any (PROTOCOL 4)."""

    @property
    def store(self) -> Store:
        """The native store."""

    def admit(self, ranges: Sequence[OffsetRange], fence: Fence) -> None:
        """Let a run push these ranges. Raises Fenced and Unavailable as `push` does."""

    def pushed(self, pushes: int, skipped: int) -> None:
        """Count pushes of a run, and how many of them every bucket had applied before."""

    def refused(self, ranges: Sequence[OffsetRange]) -> Refused:
        """Count a push that was refused; the error that says so."""

    def answered(self, method: str, asked: Context, began_ns: int, end_ns: int) -> None:
        """Tell a trace of a lookup or a push that a run has made for the span `asked`."""


@runtime_checkable
class PushesAhead(Protocol):
    """A row service over a link, which takes further pushes before it has answered the last one. Optional."""

    def push_soon(self, push: Push) -> Future[bool]:
        """As `push`, but returns at once; the future holds what `push` would have returned or raised.

        Pushes that one thread begins reach each shard in the order in which they were begun, and none of them
        waits for the answer to another. So if one is refused or lost, those after it of the same partitions
        are refused, too: none is applied out of turn. The arrays must not change until the future is done.
        Never blocks for longer than it takes to hand the bytes over; raises nothing.
        """


@runtime_checkable
class OwnersChange(Protocol):
    """A row service whose buckets may move to another shard while it is used. Optional."""

    def ownership(self) -> int:
        """A number that rises with every change of who owns a bucket; cheap, asked many times a second.

        What was acknowledged before a change may be lost with the former owner's memory: who has pushed asks
        for `applied` and starts again there (PROTOCOL 7).
        """
