"""Step coordinators: the agreement of lanes and ranks before and after each step (PROTOCOL 14).

A coordinator decides which batches count, and sums gradients. The decisions need no I/O and no tensors.

Letters: L lanes of a rank.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from freshet.batches.stream import TrainBatch, TrainRun
from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.model import Lane
from freshet.trainer.ranks import ProcessGroup, Proposal, ProposedBatch, RankLost, vector_checksum
from freshet.types import OffsetRange

__all__ = [
    "EXCHANGE_S",
    "Agreed",
    "AgreedRuns",
    "AsyncStepCoordinator",
    "BatchVerdict",
    "DenseLedger",
    "LocalStepCoordinator",
    "Ranges",
    "StepCoordinator",
    "SyncStepCoordinator",
]

Ranges = tuple[OffsetRange, ...]
"""The ranges of one batch, at most one a partition."""


class BatchVerdict(enum.Enum):
    """The effect of a batch on the dense weights."""

    LEARN = "learn"  # weight 1, and the vector advances
    APPLIED = "applied"  # weight 0: the weights contain it already; its row gradients still count
    RETURN = "return"  # unused: the lane returns it to its embedder


@dataclass(slots=True)
class DenseLedger:
    """The dense `applied` vector: {partition of samples: next offset}; identical on all ranks."""

    applied: dict[int, int]

    def decide(self, proposed: Sequence[Ranges | None]) -> list[BatchVerdict | None]:
        """Decide on the batches of one step in rank order (lane order within a rank); advance the vector.

        LEARN if every range starts at the vector; APPLIED if every range stops at or below it; otherwise
        RETURN, also for a mixture of both.

        Args:
            proposed: per lane the ranges of its batch; None: the lane has no batch.
        """
        verdicts: list[BatchVerdict | None] = []
        for ranges in proposed:
            if ranges is None:
                verdicts.append(None)
                continue
            verdict = self._verdict(ranges)
            if verdict is BatchVerdict.LEARN:
                self.applied.update({r.partition: r.stop for r in ranges})
            verdicts.append(verdict)
        return verdicts

    def decide_runs(self, runs: Sequence[Sequence[Ranges] | None]) -> list[list[BatchVerdict]]:
        """Decide on all batches of the lanes' runs, as `decide` does step by step.

        Args:
            runs: per lane the ranges of its batches, one a step; None: the lane has no run.

        Returns:
            Per lane a verdict for each batch up to the first RETURN, which rewinds the lane.
        """
        verdicts: list[list[BatchVerdict]] = [[] for _ in runs]
        for step in range(max((len(run) for run in runs if run is not None), default=0)):
            for run, lane in zip(runs, verdicts, strict=True):
                if run is None or step >= len(run) or (lane and lane[-1] is BatchVerdict.RETURN):
                    continue
                (verdict,) = self.decide([run[step]])
                assert verdict is not None
                lane.append(verdict)
        return verdicts

    def undo(self, batches: Sequence[Ranges], verdicts: Sequence[BatchVerdict]) -> None:
        """Remove the last batches of a lane's run from the vector, which the lane did not learn.

        No other lane has their partitions, so verdicts of other lanes stay valid.
        """
        for ranges, verdict in zip(reversed(batches), reversed(verdicts), strict=True):
            if verdict is BatchVerdict.LEARN:
                self.applied.update({r.partition: r.start for r in ranges})

    def _verdict(self, ranges: Ranges) -> BatchVerdict:
        if all(self.applied.get(r.partition) == r.start for r in ranges):
            return BatchVerdict.LEARN
        if all(r.stop <= self.applied.get(r.partition, 0) for r in ranges):
            return BatchVerdict.APPLIED
        return BatchVerdict.RETURN

    def raise_to(self, vector: Iterable[Sequence[int]]) -> None:
        """Raise offsets to those of another rank's (partition, offset) pairs where these are larger."""
        for partition, offset in vector:
            self.applied[partition] = max(offset, self.applied.get(partition, 0))

    def applied_offsets(self) -> Mapping[int, Sequence[int]]:
        """Return the vector as {partition: (offset,)}, the form of `RowService.applied`."""
        return {p: (offset,) for p, offset in self.applied.items()}


EXCHANGE_S = 0.25
"""Seconds between two exchanges of measures, and in mode `async` between two agreements."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """The agreement on one round."""

    verdicts: Sequence[BatchVerdict | None]  # (L,) for this rank's lanes
    steps: bool  # whether the dense weights are stepped
    largest: int = 0
    """Samples of the largest batch that counts, from which the model derives the dense steps within the
    round; 0: one dense step."""
    over: bool = False  # neither this round nor another is run: the lanes return their batches
    others: bool = False  # other ranks have batches, so this one must not delay them


class StepCoordinator(Protocol):
    """Agreement before a round, and sums after it. One lane at a time calls it, between two dense steps."""

    def agree(self, step: int, batches: Sequence[TrainBatch | None], *, stopping: bool) -> Agreed:
        """Decide on the batches of a round and advance the vector (PROTOCOL 14).

        Args:
            step: completed steps.
            batches: (L,) of this rank's lanes; None: the lane has no batch.
            stopping: this rank must stop.

        Raises:
            RankLost: a rank did not answer; the vector is unchanged.
        """

    def reduce(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Sum the gradients of the lanes; returns the lanes that hold the sums for the step.

        Raises RankLost: the vector is as before this round; the gradients are void.
        """


def _has_rows(batches: Sequence[TrainBatch | None], verdicts: Sequence[BatchVerdict | None]) -> bool:
    pairs = zip(batches, verdicts, strict=True)
    return any(b is not None and len(b) > 0 and v is BatchVerdict.LEARN for b, v in pairs)


def _largest(batches: Sequence[TrainBatch | None], verdicts: Sequence[BatchVerdict | None]) -> int:
    """Return the samples of the largest batch that counts and can be learned in several steps."""
    counted = [b for b, v in zip(batches, verdicts, strict=True) if b is not None and v is BatchVerdict.LEARN]
    return max((len(b) for b in counted if b.states is not None), default=0)


@dataclass(frozen=True, slots=True)
class AgreedRuns:
    """The agreement on the runs of one round."""

    verdicts: Sequence[Sequence[BatchVerdict]]  # per lane, up to its first RETURN
    trains: bool  # whether a lane has a batch to train on
    over: bool = False  # as `Agreed.over`


@dataclass
class LocalStepCoordinator:
    """The coordinator of a single rank: the dense step itself sums its lanes."""

    ledger: DenseLedger
    must_regroup: Callable[[], bool] = lambda: False  # whether another rank waits to join

    def agree(self, step: int, batches: Sequence[TrainBatch | None], *, stopping: bool) -> Agreed:
        """Decide on this rank's batches."""
        if self.must_regroup() or (stopping and all(b is None for b in batches)):
            return Agreed([None] * len(batches), steps=False, over=True)
        verdicts = self.ledger.decide([None if b is None else b.ranges for b in batches])
        return Agreed(verdicts, _has_rows(batches, verdicts), largest=_largest(batches, verdicts))

    def agree_runs(self, runs: Sequence[TrainRun | None], *, stopping: bool) -> AgreedRuns:
        """Decide on all steps of the runs at once: no other rank can change a verdict between two steps."""
        if self.must_regroup() or (stopping and all(run is None for run in runs)):
            return AgreedRuns([[] for _ in runs], trains=False, over=True)
        verdicts = self.ledger.decide_runs([None if run is None else run.batches.ranges for run in runs])
        return AgreedRuns(verdicts, any(lane[:1] not in ([], [BatchVerdict.RETURN]) for lane in verdicts))

    def reduce(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Return all lanes unchanged."""
        return lanes


@dataclass
class SyncStepCoordinator:
    """The coordinator of ranks that step together.

    All ranks decide on the same proposals in the same order, so they get the same vector. A batch is one
    dense step, because the vector cannot express a position within a batch at which a rank was lost.
    """

    group: ProcessGroup
    ledger: DenseLedger
    exchange: Callable[[ProcessGroup, bool], None]  # of measures; the flag marks the quorum's last exchange
    must_regroup: Callable[[], bool]  # whether another rank waits to join
    clock: Clock = SYSTEM_CLOCK
    _before: Mapping[int, int] = field(default_factory=dict)  # the vector before this round
    _exchanged_s: float = float("-inf")

    def agree(self, step: int, batches: Sequence[TrainBatch | None], *, stopping: bool) -> Agreed:
        """Gather the proposals of all ranks and decide on all of them."""
        mine = self._proposal(step, batches, stopping=stopping)
        proposals = self.group.gather(mine)
        self._check(mine, proposals)
        over = any(p.leaving or p.change for p in proposals)
        if over or any(p.measures for p in proposals):
            self.exchange(self.group, over)
        if over:
            return Agreed([None] * len(batches), steps=False, over=True)
        self._before = dict(self.ledger.applied)
        proposed = [lane for proposal in proposals for lane in proposal.lanes]
        verdicts = self.ledger.decide([None if lane is None else lane.ranges for lane in proposed])
        steps = any(
            lane is not None and lane.rows > 0 and verdict is BatchVerdict.LEARN
            for lane, verdict in zip(proposed, verdicts, strict=True)
        )
        first = self.group.rank * len(batches)
        stop = first + len(batches)
        others = any(lane is not None for lane in [*proposed[:first], *proposed[stop:]])
        return Agreed(verdicts[first:stop], steps, others=others)

    def reduce(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Merge the lanes, then sum over the ranks, so that every rank makes the same step."""
        first, *others = lanes
        for lane in others:
            first.merge(lane)
        try:
            self.group.reduce(first.reduce_buffers())
        except RankLost:
            self.ledger.applied = dict(self._before)
            raise
        return [first]

    def _proposal(self, step: int, batches: Sequence[TrainBatch | None], *, stopping: bool) -> Proposal:
        return Proposal(
            step=step,
            vector=vector_checksum(self.ledger.applied),
            lanes=tuple(None if b is None else ProposedBatch(b.ranges, len(b)) for b in batches),
            leaving=stopping and all(b is None for b in batches),
            change=self.must_regroup(),
            measures=self._measures_due(),
        )

    def _measures_due(self) -> bool:
        """Return whether to propose an exchange; only the leader does, so all exchange together."""
        now = self.clock.monotonic()
        if self.group.rank or now < self._exchanged_s + EXCHANGE_S:
            return False
        self._exchanged_s = now
        return True

    @staticmethod
    def _check(mine: Proposal, proposals: Sequence[Proposal]) -> None:
        states = {(p.step, p.vector) for p in proposals}
        if len(states) > 1 or any(len(p.lanes) != len(mine.lanes) for p in proposals):
            found = [(p.step, p.vector, len(p.lanes)) for p in proposals]
            raise RankLost(f"ranks differ in step, vector or lanes: {found}; they sync their state")


@dataclass
class AsyncStepCoordinator:
    """The coordinator of mode `async`: a rank steps alone and agrees with the others every EXCHANGE_S."""

    group: ProcessGroup
    ledger: DenseLedger
    exchange: Callable[[ProcessGroup, bool], None]  # of measures and vectors; the flag marks the last one
    must_regroup: Callable[[], bool]
    clock: Clock = SYSTEM_CLOCK
    _agreed_s: float = float("-inf")

    def agree(self, step: int, batches: Sequence[TrainBatch | None], *, stopping: bool) -> Agreed:
        """Decide on this rank's batches; agree with the other ranks first when that is due."""
        if self.clock.monotonic() >= self._agreed_s + EXCHANGE_S:
            leaving = stopping and all(b is None for b in batches)
            lanes = (None,) * len(batches)
            proposals = self.group.gather(
                Proposal(step, 0, lanes, leaving=leaving, change=self.must_regroup())
            )
            over = any(p.leaving or p.change for p in proposals)
            self.exchange(self.group, over)
            self._agreed_s = self.clock.monotonic()
            if over:
                return Agreed([None] * len(batches), steps=False, over=True)
        verdicts = self.ledger.decide([None if b is None else b.ranges for b in batches])
        return Agreed(verdicts, _has_rows(batches, verdicts), largest=_largest(batches, verdicts))

    def reduce(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Return this rank's lanes unchanged."""
        return lanes
