"""The step coordinator: the agreement of lanes and ranks before and after each step (PROTOCOL 14).

It decides which batches count, and sums gradients. The decisions need no I/O and no tensors.

Letters: L lanes of a rank.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from freshet.batches.stream import TrainBatch, TrainRun
from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.model import Lane, StepResult
from freshet.trainer.gradient_sums import GradientSums
from freshet.trainer.process_group import ProcessGroup, Proposal, ProposedBatch, RankLost, vector_checksum
from freshet.types import I64, OffsetRange

Ranges = tuple[OffsetRange, ...]
"""The ranges of one batch, at most one a partition."""


class BatchVerdict(enum.Enum):
    """The effect of a batch on the dense weights."""

    LEARN = "learn"  # weight 1, and the vector advances
    APPLIED = "applied"  # weight 0: the weights contain it already; its row gradients still count
    RETURN = "return"  # unused: the lane returns it to its embedder


@dataclass(slots=True)
class DenseLedger:
    """The dense `applied` vector: {partition of samples: next offset}.

    Identical on all ranks, except between two averagings of ranks that step alone: then each has advanced the
    offsets of its own partitions only.
    """

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

    def to_array(self) -> I64:
        """Return the vector as (P, 2) pairs of partition and offset, in order."""
        return np.array(sorted(self.applied.items()), np.int64).reshape(-1, 2)

    def raise_to(self, vector: Iterable[Sequence[int]]) -> None:
        """Raise offsets to those of another rank's (partition, offset) pairs where these are larger."""
        for partition, offset in vector:
            self.applied[partition] = max(offset, self.applied.get(partition, 0))

    def applied_offsets(self) -> Mapping[int, Sequence[int]]:
        """Return the vector as {partition: (offset,)}, the form of `RowService.applied`."""
        return {p: (offset,) for p, offset in self.applied.items()}


EXCHANGE_S = 0.25
"""Seconds between two exchanges of measures."""

AVERAGE_S = 1.0
"""Seconds after which ranks that step alone average although one has not made its rounds: a slow rank delays
the others for no longer than this."""


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
    step: int = 0  # completed steps; after an averaging those of the rank that made the most


def _weighted_rows(batch: TrainBatch) -> int:
    """Return the samples with a weight: a model drops the sums of a step that has none."""
    labels = batch.inputs.labels
    return len(batch) if labels is None else int(np.count_nonzero(labels.weight))


def _learned_rows(batches: Sequence[TrainBatch | None], verdicts: Sequence[BatchVerdict | None]) -> int:
    """Return the weighted samples of the batches that count."""
    pairs = zip(batches, verdicts, strict=True)
    return sum(_weighted_rows(b) for b, v in pairs if b is not None and v is BatchVerdict.LEARN)


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


@dataclass(frozen=True, slots=True)
class RankHooks:
    """Calls of a coordinator to its rank, between two rounds."""

    must_regroup: Callable[[], bool] = lambda: False  # whether another rank waits to join
    exchange: Callable[[ProcessGroup, bool], None] = lambda group, last: None
    """Exchanges measures; the flag marks the quorum's last exchange."""
    flush_due: Callable[[], bool] = lambda: False  # of the leader: whether a version waits for a flush point
    average: Callable[[ProcessGroup, int, int], None] = lambda group, rows, step: None
    """Averages the dense states, with the samples that this rank learned from and the new number of steps."""
    flush_point: Callable[[], None] = lambda: None
    """Called at each flush point: all ranks have one dense state, and nothing of a gradient is missing in it.
    Versions are written at flush points only (PROTOCOL 15)."""


@dataclass
class StepCoordinator:
    """Agreement before each round, and sums of gradients after it; a rank alone is a group of one.

    Ranks that step together decide on the same proposals in the same order, so they get the same vector. A
    batch is one dense step for them, because the vector cannot express a position within a batch at which a
    rank was lost. In mode `async` each rank steps alone, or together with those of its site, and meets the
    others to average: after `average_every` rounds with a step, after AVERAGE_S, or as soon as its site has
    no batch.

    One lane at a time calls the coordinator, between two dense steps.
    """

    group: ProcessGroup
    ledger: DenseLedger
    hooks: RankHooks = field(default_factory=RankHooks)
    sums: GradientSums = field(default_factory=GradientSums)
    average_every: int = 0  # rounds between two averagings; 0: all ranks step together
    clock: Clock = SYSTEM_CLOCK
    site: ProcessGroup | None = None  # with `average_every`: the ranks that step together; None: each alone
    _before: Mapping[int, int] = field(default_factory=dict, init=False)  # the vector before this round
    _exchanged_s: float = field(default=float("-inf"), init=False)
    _averaged_s: float = field(default=0.0, init=False)
    _averaged: Mapping[int, int] = field(default_factory=dict, init=False)  # the vector of that averaging
    _rounds_alone: int = field(default=0, init=False)  # since the last averaging
    _rows_alone: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._averaged_s, self._averaged = self.clock.monotonic(), dict(self.ledger.applied)

    @property
    def every_step_flushes(self) -> bool:
        """Whether every step ends at a flush point."""
        return self.group.size == 1 or not (self.average_every or self.sums.lossy)

    def agree(self, step: int, batches: Sequence[TrainBatch | None], *, stopping: bool) -> Agreed:
        """Decide on the batches of a round and advance the vector (PROTOCOL 14).

        Args:
            step: completed steps.
            batches: (L,) of this rank's lanes; None: the lane has no batch.
            stopping: this rank must stop.

        Raises:
            RankLost: a rank did not answer; the vector is unchanged, or the rank must go back to its last
                flush point.
        """
        leaving = stopping and all(b is None for b in batches)
        others = False
        if self.group.size == 1:
            if leaving or self.hooks.must_regroup():
                return _over(batches)
        elif not self.average_every:
            return self._agree_together(step, batches, leaving=leaving)
        elif self.site is not None and self.site.size > 1:
            return self._agree_in_site(self.site, step, batches, leaving=leaving)
        elif self._is_average_due() or all(b is None for b in batches):  # idle: it must not delay the others
            proposals = self._average(step, len(batches), leaving=leaving)
            step = max(proposal.step for proposal in proposals)
            if _ends(proposals):
                return _over(batches)
            others = any(p.flush for rank, p in enumerate(proposals) if rank != self.group.rank)
        verdicts = self.ledger.decide([None if b is None else b.ranges for b in batches])
        rows = _learned_rows(batches, verdicts)
        self._rows_alone += rows
        self._rounds_alone += rows > 0
        return Agreed(verdicts, rows > 0, largest=_largest(batches, verdicts), others=others, step=step)

    def agree_runs(self, runs: Sequence[TrainRun | None], *, stopping: bool) -> AgreedRuns:
        """Decide on all steps of the runs of a rank alone: no other can change a verdict between two steps.

        Raises ValueError if there are other ranks, which agree at every step.
        """
        if self.group.size > 1:
            raise ValueError(f"{self.group.size} ranks agree at every step, not on runs of batches")
        if (stopping and all(run is None for run in runs)) or self.hooks.must_regroup():
            return AgreedRuns([[] for _ in runs], trains=False, over=True)
        verdicts = self.ledger.decide_runs([None if run is None else run.batches.ranges for run in runs])
        return AgreedRuns(verdicts, any(lane[:1] not in ([], [BatchVerdict.RETURN]) for lane in verdicts))

    def reduce(self, lanes: Sequence[Lane], results: Sequence[StepResult] = ()) -> Sequence[Lane]:
        """Sum the gradients; returns the lanes that hold the sums for the step.

        See `GradientSums.reduce`. The ranks that step together make the same step.

        Raises RankLost: the vector is as before this round; the gradients are void.
        """
        group = self.site if self.average_every else self.group
        try:
            return self.sums.reduce(None if group is None or group.size == 1 else group, lanes, results)
        except RankLost:
            self.ledger.applied = dict(self._before)
            raise

    def end_round(self) -> None:
        """Report the flush point of a round that ended at one."""
        if self.every_step_flushes:
            self.hooks.flush_point()

    def _agree_together(self, step: int, batches: Sequence[TrainBatch | None], *, leaving: bool) -> Agreed:
        """Gather the proposals of all ranks and decide on all of them."""
        mine = Proposal(
            step=step,
            vector=vector_checksum(self.ledger.applied),
            lanes=_proposed(batches),
            leaving=leaving,
            change=self.hooks.must_regroup(),
            # Only the leader proposes these, so all ranks do them together.
            measures=self.group.rank == 0 and self._is_exchange_due(),
            flush=self.group.rank == 0
            and self.sums.lossy
            and (self.hooks.flush_due() or self.sums.flush_due),
        )
        proposals = self.group.gather(mine)
        _check(mine, proposals)
        self._exchange(proposals)
        over = _ends(proposals)
        if self.sums.lossy and (over or any(p.flush for p in proposals)):
            self.sums.flush(self.group)
            self.hooks.flush_point()
        if over:
            return _over(batches)
        return self._decide(self.group, step, proposals)[0]

    def _agree_in_site(
        self, site: ProcessGroup, step: int, batches: Sequence[TrainBatch | None], *, leaving: bool
    ) -> Agreed:
        """Gather the proposals of the site's ranks, average with other sites if that is due, and decide."""
        mine = Proposal(
            step=step,
            vector=vector_checksum(self.ledger.applied),
            lanes=_proposed(batches),
            flush=site.rank == 0 and self._is_average_due(),
        )
        proposals = site.gather(mine)
        _check(mine, proposals)
        idle = all(lane is None for proposal in proposals for lane in proposal.lanes)
        others = False
        if idle or any(proposal.flush for proposal in proposals):
            # The ranks of a site have one state, of which the first sends that of all.
            self._rows_alone *= site.rank == 0
            of_all = self._average(step, len(batches), leaving=leaving)
            step = max(proposal.step for proposal in of_all)
            if _ends(of_all):
                return _over(batches)
            others = any(p.flush for rank, p in enumerate(of_all) if rank != self.group.rank)
        agreed, rows = self._decide(site, step, proposals)
        self._rows_alone += rows
        self._rounds_alone += rows > 0
        return replace(agreed, others=agreed.others or others)

    def _decide(self, group: ProcessGroup, step: int, proposals: Sequence[Proposal]) -> tuple[Agreed, int]:
        """Decide on the batches that the ranks of a group proposed, and advance the vector.

        Returns this rank's part, and the weighted samples of all batches that count.
        """
        self._before = dict(self.ledger.applied)
        proposed = [lane for proposal in proposals for lane in proposal.lanes]
        verdicts = self.ledger.decide([None if lane is None else lane.ranges for lane in proposed])
        rows = sum(
            lane.rows
            for lane, verdict in zip(proposed, verdicts, strict=True)
            if lane is not None and verdict is BatchVerdict.LEARN
        )
        lanes = len(proposals[group.rank].lanes)
        first = group.rank * lanes
        stop = first + lanes
        others = any(lane is not None for lane in [*proposed[:first], *proposed[stop:]])
        return Agreed(verdicts[first:stop], rows > 0, others=others, step=step), rows

    def _is_average_due(self) -> bool:
        waited = self.clock.monotonic() >= self._averaged_s + AVERAGE_S
        return waited or self._rounds_alone >= self.average_every

    def _average(self, step: int, lanes: int, *, leaving: bool) -> Sequence[Proposal]:
        """Meet the other ranks and make all dense states one; returns the proposals of all ranks."""
        mine = Proposal(
            step,
            0,
            (None,) * lanes,
            leaving=leaving,
            change=self.hooks.must_regroup(),
            measures=self.group.rank == 0 and self._is_exchange_due(),
            flush=self.ledger.applied != self._averaged,
        )
        proposals = self.group.gather(mine)
        self._exchange(proposals)
        if any(proposal.flush for proposal in proposals):
            self.hooks.average(self.group, self._rows_alone, max(proposal.step for proposal in proposals))
            self._averaged = dict(self.ledger.applied)
        self._rounds_alone = self._rows_alone = 0
        self._averaged_s = self.clock.monotonic()  # after the slowest rank
        self.hooks.flush_point()
        return proposals

    def _exchange(self, proposals: Sequence[Proposal]) -> None:
        """Exchange measures if a rank proposed that, or the quorum ends."""
        if (over := _ends(proposals)) or any(p.measures for p in proposals):
            self.hooks.exchange(self.group, over)

    def _is_exchange_due(self) -> bool:
        now = self.clock.monotonic()
        if now < self._exchanged_s + EXCHANGE_S:
            return False
        self._exchanged_s = now
        return True


def _proposed(batches: Sequence[TrainBatch | None]) -> tuple[ProposedBatch | None, ...]:
    return tuple(None if b is None else ProposedBatch(b.ranges, _weighted_rows(b)) for b in batches)


def _ends(proposals: Sequence[Proposal]) -> bool:
    """Return whether the quorum ends: a rank leaves, or another waits to join."""
    return any(p.leaving or p.change for p in proposals)


def _over(batches: Sequence[TrainBatch | None]) -> Agreed:
    return Agreed([None] * len(batches), steps=False, over=True)


def _check(mine: Proposal, proposals: Sequence[Proposal]) -> None:
    """Raise RankLost if the ranks differ in step, vector or lanes."""
    states = {(p.step, p.vector) for p in proposals}
    if len(states) > 1 or any(len(p.lanes) != len(mine.lanes) for p in proposals):
        found = [(p.step, p.vector, len(p.lanes)) for p in proposals]
        raise RankLost(f"ranks differ in step, vector or lanes: {found}; they sync their state")
