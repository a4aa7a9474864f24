"""The batch stream: batches to a trainer rank and gradients back, with credits (in this process; gRPC from
an embedder)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from freshet.batches.read_my_writes import Looked
from freshet.model.inputs import Labels, ModelInputs
from freshet.model.native_loop import LoopBatches, Ran
from freshet.types import F32, I64, U8, U32, U64, Bool, Fence, OffsetRange

__all__ = ["BatchStream", "RunStream", "TrainBatch", "TrainRun"]


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
    states: Sequence[F32] | None = None
    """Per group (U, T): optimiser state of its rows, if the stream takes several gradients a row; who steps
    rows within the batch writes to it. None: the stream takes one gradient a row."""
    ends: I64 | None = (
        None  # (K,) where batches end that it is put together of, for measures; None: it is one
    )

    def __len__(self) -> int:
        return len(self.sample_ids)

    def part(self, first: int, last: int) -> TrainBatch:
        """Samples [first, last), as measures take them: without rows and ranges."""
        at, labels = slice(first, last), self.inputs.labels
        own = None if labels is None else Labels(labels.index[at], labels.value[at], labels.weight[at])
        return TrainBatch(
            ranges=(),
            fence=self.fence,
            inputs=ModelInputs(last - first, (), self.inputs.dense[at], own),
            sample_ids=self.sample_ids[at],
            request_ids=self.request_ids[at],
            event_times_ms=self.event_times_ms[at],
            segments={name: keys[at] for name, keys in self.segments.items()},
            served={name: scores[at] for name, scores in self.served.items()},
            replayed=self.replayed,
            explored=None if self.explored is None else self.explored[at],
            items=None if self.items is None else self.items[at],
            ends=None if self.ends is None else self.ends[(self.ends > first) & (self.ends <= last)] - first,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TrainRun:
    """Consecutive batches of one lane, read and decoded together.

    Each is judged, stepped and pushed by itself, in order; the lane holds one credit for all of them, as it
    has one of them in flight at a time.

    K batches; a batch may have no sample.
    """

    batches: LoopBatches
    replayed: Sequence[bool]  # (K,) as `TrainBatch.replayed`
    keep: U8  # (K,) 1: the gate wants copies of its rows (`Ran.kept`)
    samples: TrainBatch  # of all batches together, without rows and ranges
    traced: bool = False  # whether `Ran.moments_ns` is wanted

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def starts(self) -> list[int]:
        """(K + 1,) where each batch's samples start; the last is where they end."""
        return [0, *self.batches.ends.tolist()]


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

    def give_back(
        self,
        lane: int,
        batch: TrainBatch,
        gradients: Sequence[F32] | None,
        counts: Sequence[U32] | None = None,
    ) -> None:
        """Push a batch's row gradients; None returns the batch unused, to be issued again.

        Args:
            gradients: per group (G, S), G the sum of its counts.
            counts: per group (U,), of a batch with `states`: how many gradients each row has, one behind the
                other in the order of its steps. None: one each.

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


class RunStream(BatchStream, Protocol):
    """A stream whose rows the native loop (`freshet.model.native_loop`) looks up and pushes itself."""

    def take_run(self, lane: int, wait_s: float) -> TrainRun | None:
        """The lane's next batches, or None as `take`. Waits for the first batch as `take` does, and takes
        more only as far as they are there already.

        Raises Fenced, too: the claim on rows or partitions is lost.
        """

    def give_back_run(self, lane: int, run: TrainRun, ran: Ran | None) -> None:
        """Tell what became of a run; None returns it unused. Batches that were not pushed are issued again.

        Raises Refused if a push was refused, as `give_back`; Unavailable if rows could not be read.
        """
