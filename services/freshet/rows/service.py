"""The row service: lookups of a batch's rows, and pushes of its gradients with their offset ranges.

Implemented by a shard in the process and by the gRPC client of remote shards.
U unique keys of a batch in one store group, G keys with repeats, S floats of a row, T floats of its optimiser
state, B buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from freshet.errors import Refused
from freshet.observability.tracing import Context
from freshet.tables import Store
from freshet.tables.changes import KnownPushes
from freshet.tables.plan import KeyGroup
from freshet.types import F32, Bool, Fence, OffsetRange, TimeMs

__all__ = [
    "KeyGroup",
    "LookupsAfter",
    "NativeRows",
    "OwnersChange",
    "PoolsLists",
    "Push",
    "PushesAhead",
    "RowService",
    "RowStates",
]


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """Gradients of one batch, applied, skipped or refused as a whole (PROTOCOL 2 and 4)."""

    ranges: tuple[OffsetRange, ...]  # at most one per partition
    fence: Fence  # of the embedder's claim on these partitions, or of the rank's quorum (PROTOCOL 9)
    clock_ms: TimeMs  # largest event time in the batch
    groups: Sequence[KeyGroup]
    """Repeated keys are adjacent (`KeyGroup.repeated`); their row makes a step by each gradient in order."""
    gradients: Sequence[F32]  # per group (G, S): summed over occurrences of a step; slots as in the row
    owned: Bool | None = None
    """(B,) buckets that the sender assumes the receiver to own. The push changes only these, and is refused
    if one of them is not owned (PROTOCOL 4). None: all buckets of a receiver in the same process."""
    span: Context | None = None  # parent span, if the batch is traced in another thread


@dataclass(slots=True, eq=False)
class RowStates:
    """Output of a lookup beside the rows, for callers that step copies of them."""

    floats: Sequence[F32]
    """Per group (U, T): optimiser state of all slots in their order (`freshet.config.spec.layout`), read
    together with the values."""
    known: KnownPushes | None = None  # pushes contained in the rows; None before the lookup


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
        """Write each key's slots into `out[g]` (U, S) float32, and fill in `states` if given.

        An absent row yields the initial values of (model seed, table, key). With `create` the row is also
        created, if the table's admission allows. Without `create` it yields zeros, as serving needs them.

        Raises:
            Unavailable: a bucket has no owner.
        """

    def push(self, push: Push) -> bool:
        """Apply a batch's gradients; True if applied, False if every bucket had applied them before.

        All buckets are checked before any is changed. An absent row is created if its table admits the key.
        Non-finite gradients advance the offsets without changing rows, and are counted (PROTOCOL 3).

        Raises:
            Refused: the ranges do not continue the applied offsets, or a bucket is not owned here; carries
                `applied`.
            Fenced: a higher fence has claimed one of the partitions.
            Unavailable: the outcome is unknown; pushing the same again is safe.
        """

    def applied(self) -> Mapping[int, Sequence[int]]:
        """Return {partition: the distinct offsets that buckets have applied up to, rising}.

        Batches rewind to the first; no range may cross any of them (PROTOCOL 7). Raises Unavailable until all
        buckets are owned.
        """


@runtime_checkable
class NativeRows(Protocol):
    """A row service of this process with a store that the native core reads and writes itself.

    Optional. Each push is checked against all buckets before it changes any (PROTOCOL 4).
    """

    @property
    def store(self) -> Store:
        """The native store."""

    def admit(self, ranges: Sequence[OffsetRange], fence: Fence) -> None:
        """Allow a native run to push these ranges. Raises Fenced and Unavailable as `push` does."""

    def pushed(self, pushes: int, skipped: int) -> None:
        """Count the pushes of a run, and those of them that every bucket had applied before."""

    def refused(self, ranges: Sequence[OffsetRange]) -> Refused:
        """Count a refused push and return its error."""

    def answered(self, method: str, asked: Context, began_ns: int, end_ns: int) -> None:
        """Record a span for a lookup or push that a run made for the span `asked`."""


@runtime_checkable
class PushesAhead(Protocol):
    """A row service over a connection that accepts pushes before the last one is answered. Optional."""

    def push_soon(self, push: Push) -> Future[bool]:
        """Start a push and return at once; the future holds the result or error of `push`.

        Pushes of one thread reach each shard in order, without waiting for answers. If one is refused or
        lost, later ones of the same partitions are refused too, so none is applied out of order. The arrays
        must not change until the future is done. Blocks only while bytes are handed over; raises nothing.
        """


@runtime_checkable
class LookupsAfter(Protocol):
    """A row service over a connection that answers a lookup once pushes in flight are applied. Optional."""

    def lookup_after(
        self,
        ranges: Sequence[OffsetRange],
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        states: RowStates | None = None,
    ) -> None:
        """Look up as `lookup` does, but rows that contain the pushes of these ranges; creates absent rows.

        Each shard waits for them, so a lookup may be sent beside its push: that saves a round trip. Raises
        Unavailable if they are not applied soon; there is no second attempt.
        """


@runtime_checkable
class OwnersChange(Protocol):
    """A row service of buckets that may move to another shard during use. Optional."""

    def ownership(self) -> int:
        """Return a number that rises with every change of a bucket's owner; cheap.

        Pushes acknowledged before a change may be lost with the former owner's memory. After a change the
        caller must rewind to `applied` (PROTOCOL 7).
        """


@runtime_checkable
class PoolsLists(Protocol):
    """A row service of shards that send sums of lists in place of their rows. Optional.

    For a group with `lists`, `out` of a lookup and the gradients of a push are (R + K, S), as `PooledLists`
    says; optimiser states cannot be looked up with it. A push steps each row by the sum of its own gradient
    and those of its occurrences in lists.
    """

    def pooling_shards(self) -> int:
        """Return the number of shards, each of which may send a sum for each list; cheap."""
