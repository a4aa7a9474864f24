"""The batch stream: batches to a trainer rank and gradients back, with credits (in this process; gRPC from
an embedder)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from freshet.model.inputs import ModelInputs
from freshet.seams.batches.own_writes import Looked
from freshet.types import F32, I64, U64, Bool, Fence, OffsetRange

__all__ = ["BatchStream", "TrainBatch"]


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """Whole blocks of samples, ready for the model, with what must come back beside their gradients.

    Holds a credit from lookup until its push is acknowledged (PROTOCOL 16).
    """

    ranges: tuple[OffsetRange, ...]  # at most one per partition
    fence: Fence
    inputs: ModelInputs
    sample_ids: I64  # (B,) 64-bit id of (impression, label)
    request_ids: U64  # (B,) samples of equal id were served together
    event_times_ms: I64  # (B,)
    segments: Mapping[str, U64]  # spec's segment fields: (B,) value keys
    served: Mapping[str, F32]  # label -> (B,) prediction logged at serving, NaN where none was
    replayed: bool = (
        False  # some store had applied it before: trained where it must be, but not measured again
    )
    explored: Bool | None = None  # (B,) served in random order; None: it is not known of any
    items: U64 | None = None  # (B,) key of the item, 0: null; None: the spec has no feature for it
    looked: Looked | None = None  # what its rows can be brought up by; None: they are as they should be

    def __len__(self) -> int:
        return len(self.sample_ids)


class BatchStream(Protocol):
    """Batches of one rank. `take` may be called from several lanes at once; partitions of a lane are its
    own."""

    def take(self, lane: int, wait_s: float) -> TrainBatch | None:
        """The lane's next batch, or None if there is none within `wait_s` or no credit is free.

        `LocalStream` does the embedder's work on the caller's thread; others do it ahead, on threads of
        theirs, or elsewhere.

        Raises:
            DataLost, Unavailable: as the log and the row service do.
        """

    def give_back(self, lane: int, batch: TrainBatch, gradients: Sequence[F32] | None) -> None:
        """Push a batch's row gradients; None returns the batch unused, to be issued again.

        Its credit is free once all shards have acknowledged the push (PROTOCOL 16). A stream may answer
        later: then it copies the gradients, and a refusal shows in what `take` gives next.

        Raises Refused if the push was refused at once. Either way the lane's batches in flight are void then,
        and `take` starts again from `applied`; those that are still out are given back as ever.
        """

    def settled(self, wait_s: float) -> bool:
        """Wait until every push of what was given back was answered; False if some are not within `wait_s`.

        For who must know that rows have learned all there is to learn from: at the end of a run, or before
        somebody asks the shards.
        """

    def recent(self, rows: int) -> Sequence[ModelInputs]:
        """The newest samples given back, at least `rows` of them if there are, with their rows as they were
        before they were trained on.

        For the gate, which judges versions on equal samples. Rows as they are now know these by heart: a
        version that leans on the expert that memorises most would look best. So replayed batches, whose rows
        may know them, are left out. The arrays must not be changed.
        """

    def lag(self) -> Mapping[int, int]:
        """{partition: blocks in the log that no batch has covered yet}."""

    def close(self) -> None:
        """Free what the stream holds. Idempotent."""
