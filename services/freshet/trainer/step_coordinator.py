"""The step coordinator: the agreement of lanes and ranks before and after each step (PROTOCOL 14).

It decides which batches count, and sums gradients. The decisions need no I/O and no tensors.

Letters: L lanes of a rank.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from freshet.batches.stream import TrainBatch, TrainRun
from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.model import Lane
from freshet.trainer.process_group import ProcessGroup, Proposal, ProposedBatch, RankLost, vector_checksum
from freshet.types import OffsetRange

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
class StepCoordinator:
    """Agreement before each round, and sums of gradients after it; a rank alone is a group of one.

    Ranks that step together decide on the same proposals in the same order, so they get the same vector. A
    batch is one dense step for them, because the vector cannot express a position within a batch at which a
    rank was lost. Independent ranks (mode `async`) step alone and agree with the others every EXCHANGE_S.

    One lane at a time calls the coordinator, between two dense steps.
    """

    group: ProcessGroup
    ledger: DenseLedger
    must_regroup: Callable[[], bool] = lambda: False  # whether another rank waits to join
    exchange: Callable[[ProcessGroup, bool], None] = lambda group, last: None
    """Exchanges measures, in mode `async` also vectors; the flag marks the quorum's last exchange."""
    independent: bool = False  # mode `async`
    clock: Clock = SYSTEM_CLOCK
    _before: Mapping[int, int] = field(default_factory=dict)  # the vector before this round
    _exchanged_s: float = float("-inf")

    def agree(self, step: int, batches: Sequence[TrainBatch | None], *, stopping: bool) -> Agreed:
        """Decide on the batches of a round and advance the vector (PROTOCOL 14).

        Args:
            step: completed steps.
            batches: (L,) of this rank's lanes; None: the lane has no batch.
            stopping: this rank must stop.

        Raises:
            RankLost: a rank did not answer; the vector is unchanged.
        """
        leaving = stopping and all(b is None for b in batches)
        if self.group.size > 1 and not self.independent:
            return self._agree_together(step, batches, leaving=leaving)
        if self._is_over(step, len(batches), leaving=leaving):
            return _over(batches)
        verdicts = self.ledger.decide([None if b is None else b.ranges for b in batches])
        return Agreed(verdicts, _has_rows(batches, verdicts), largest=_largest(batches, verdicts))

    def agree_runs(self, runs: Sequence[TrainRun | None], *, stopping: bool) -> AgreedRuns:
        """Decide on all steps of the runs of a rank alone: no other can change a verdict between two steps.

        Raises ValueError if there are other ranks, which agree at every step.
        """
        if self.group.size > 1:
            raise ValueError(f"{self.group.size} ranks agree at every step, not on runs of batches")
        if self._is_over(0, len(runs), leaving=stopping and all(run is None for run in runs)):
            return AgreedRuns([[] for _ in runs], trains=False, over=True)
        verdicts = self.ledger.decide_runs([None if run is None else run.batches.ranges for run in runs])
        return AgreedRuns(verdicts, any(lane[:1] not in ([], [BatchVerdict.RETURN]) for lane in verdicts))

    def reduce(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Sum the gradients; returns the lanes that hold the sums for the step.

        A rank that steps alone keeps its lanes, which the dense step itself sums. Other ranks merge their
        lanes, then sum over the ranks, so that every rank makes the same step.

        Raises RankLost: the vector is as before this round; the gradients are void.
        """
        if self.group.size == 1 or self.independent:
            return lanes
        first, *others = lanes
        for lane in others:
            first.merge(lane)
        try:
            self.group.reduce(first.reduce_buffers())
        except RankLost:
            self.ledger.applied = dict(self._before)
            raise
        return [first]

    def _agree_together(self, step: int, batches: Sequence[TrainBatch | None], *, leaving: bool) -> Agreed:
        """Gather the proposals of all ranks and decide on all of them."""
        mine = Proposal(
            step=step,
            vector=vector_checksum(self.ledger.applied),
            lanes=tuple(None if b is None else ProposedBatch(b.ranges, len(b)) for b in batches),
            leaving=leaving,
            change=self.must_regroup(),
            # Only the leader proposes an exchange, so all exchange together.
            measures=self.group.rank == 0 and self._is_exchange_due(),
        )
        proposals = self.group.gather(mine)
        _check(mine, proposals)
        if self._exchange(proposals):
            return _over(batches)
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

    def _is_over(self, step: int, lanes: int, *, leaving: bool) -> bool:
        """Return whether a rank that steps alone must end its rounds; agrees with others when that is due."""
        if self.group.size == 1:
            return leaving or self.must_regroup()
        if not self._is_exchange_due():
            return False
        proposal = Proposal(
            step, 0, (None,) * lanes, leaving=leaving, change=self.must_regroup(), measures=True
        )
        over = self._exchange(self.group.gather(proposal))
        self._exchanged_s = self.clock.monotonic()  # the slowest rank delays the others once an interval
        return over

    def _exchange(self, proposals: Sequence[Proposal]) -> bool:
        """Exchange measures if a rank proposed that; returns whether the quorum ends."""
        over = any(p.leaving or p.change for p in proposals)
        if over or any(p.measures for p in proposals):
            self.exchange(self.group, over)
        return over

    def _is_exchange_due(self) -> bool:
        now = self.clock.monotonic()
        if now < self._exchanged_s + EXCHANGE_S:
            return False
        self._exchanged_s = now
        return True


def _over(batches: Sequence[TrainBatch | None]) -> Agreed:
    return Agreed([None] * len(batches), steps=False, over=True)


def _check(mine: Proposal, proposals: Sequence[Proposal]) -> None:
    """Raise RankLost if the ranks differ in step, vector or lanes."""
    states = {(p.step, p.vector) for p in proposals}
    if len(states) > 1 or any(len(p.lanes) != len(mine.lanes) for p in proposals):
        found = [(p.step, p.vector, len(p.lanes)) for p in proposals]
        raise RankLost(f"ranks differ in step, vector or lanes: {found}; they sync their state")
