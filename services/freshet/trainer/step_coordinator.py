"""What the lanes of a rank agree upon before and after they compute: among themselves, or with other ranks.

Letters: L lanes of a rank, R ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from freshet.batches.stream import TrainBatch, TrainRun
from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.model import Lane
from freshet.trainer.ranks import Offer, Offered, RankGroup, RankLost, vector_check
from freshet.types import OffsetRange

__all__ = [
    "EXCHANGE_S",
    "Agreed",
    "AgreedRuns",
    "AloneRounds",
    "ApartRounds",
    "Counts",
    "DenseLedger",
    "Ranges",
    "RankRounds",
    "Rounds",
]

# --- Decisions of the dense step: which ranges count (PROTOCOL 14). No I/O, no tensors.


Ranges = tuple[OffsetRange, ...]
"""Of one batch, at most one a partition."""


class Counts(enum.Enum):
    """What a batch does to the dense weights."""

    WHOLE = "whole"  # applied; the vector moves on
    ALREADY = "already"  # dense weight 0: applied before; its row gradients are kept
    BACK = "back"  # neither: it goes back to its embedder


@dataclass(slots=True)
class DenseLedger:
    """The dense `applied` vector: {partition of samples: next offset}; identical on all ranks."""

    applied: dict[int, int]

    def decide(self, offered: Sequence[tuple[OffsetRange, ...] | None]) -> list[Counts | None]:
        """Judge the batches of one step in rank order (lane order within a rank) and move the vector.

        Args:
            offered: per rank or lane its batch's ranges, or None where it has no batch and joins with weight
            0.

        A batch counts if every range's `start` equals the vector, has weight 0 if every `stop` is at or below
        it, and otherwise goes back. A mixture goes back too: it straddles what is applied.
        """
        verdicts: list[Counts | None] = []
        for ranges in offered:
            if ranges is None:
                verdicts.append(None)
                continue
            verdict = self._judge(ranges)
            if verdict is Counts.WHOLE:
                self.applied.update({r.partition: r.stop for r in ranges})
            verdicts.append(verdict)
        return verdicts

    def decide_runs(self, runs: Sequence[Sequence[Ranges] | None]) -> list[list[Counts]]:
        """Judge all batches of a run's steps, as `decide` would one step after the other.

        Args:
            runs: per lane the ranges of its batches, one a step, or None.

        Returns per lane a verdict for each batch up to the first that goes back: it rewinds the lane, so
        those after it are not judged.
        """
        verdicts: list[list[Counts]] = [[] for _ in runs]
        for step in range(max((len(run) for run in runs if run is not None), default=0)):
            for run, of in zip(runs, verdicts, strict=True):
                if run is None or step >= len(run) or (of and of[-1] is Counts.BACK):
                    continue
                (verdict,) = self.decide([run[step]])
                assert verdict is not None
                of.append(verdict)
        return verdicts

    def set_back(self, batches: Sequence[Ranges], verdicts: Sequence[Counts]) -> None:
        """The last batches of a lane's run were judged, and then not learned from: the vector names them no
        longer. Their partitions are the lane's own, so other lanes' verdicts stand."""
        for ranges, verdict in zip(reversed(batches), reversed(verdicts), strict=True):
            if verdict is Counts.WHOLE:
                self.applied.update({r.partition: r.start for r in ranges})

    def _judge(self, ranges: tuple[OffsetRange, ...]) -> Counts:
        if all(self.applied.get(r.partition) == r.start for r in ranges):
            return Counts.WHOLE
        if all(r.stop <= self.applied.get(r.partition, 0) for r in ranges):
            return Counts.ALREADY
        return Counts.BACK

    def raise_to(self, vector: Iterable[Sequence[int]]) -> None:
        """Take over each (partition, offset) that is larger: of ranks that step on their own, in mode
        `async`."""
        for partition, offset in vector:
            self.applied[partition] = max(offset, self.applied.get(partition, 0))

    def told(self) -> Mapping[int, Sequence[int]]:
        """The vector in the shape in which stores tell what they have applied."""
        return {p: (offset,) for p, offset in self.applied.items()}


EXCHANGE_S = 0.25
"""Between two exchanges of measures, and in mode `async` between two meetings at all."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What a round is to be."""

    verdicts: Sequence[Counts | None]  # (L,) for this rank's lanes
    steps: bool  # the dense weights make a step
    largest: int = 0
    """Samples of the largest batch that counts, if the lanes are to make several dense steps within it as
    the model says; 0: the round is one dense step."""
    over: bool = False  # no round follows, nor is this one made: batches in hand go back
    others: bool = False  # other ranks have batches: this one must not make them wait


class Rounds(Protocol):
    """Called by one lane of the rank at a time, with the dense weights at rest."""

    def agree(self, step: int, batches: Sequence[TrainBatch | None], *, stopping: bool) -> Agreed:
        """Judge the batches of a round, and move the vector (PROTOCOL 14).

        Args:
            step: steps taken so far. batches: (L,) of this rank's lanes, None where one has none.
            stopping: this rank was told to stop.

        Raises RankLost: another rank did not come; the vector has not moved.
        """

    def reduce(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Sum up what the lanes have gathered; returns the lanes that hold the sums for the step.

        Raises RankLost: the vector is back where it was before this round; the lanes' sums are void.
        """


def _has_rows(batches: Sequence[TrainBatch | None], verdicts: Sequence[Counts | None]) -> bool:
    pairs = zip(batches, verdicts, strict=True)
    return any(b is not None and len(b) > 0 and v is Counts.WHOLE for b, v in pairs)


def _largest(batches: Sequence[TrainBatch | None], verdicts: Sequence[Counts | None]) -> int:
    """Samples of the largest batch that counts and can be trained on in steps."""
    counted = [b for b, v in zip(batches, verdicts, strict=True) if b is not None and v is Counts.WHOLE]
    return max((len(b) for b in counted if b.states is not None), default=0)


@dataclass(frozen=True, slots=True)
class AgreedRuns:
    """What the runs of a round are to be."""

    verdicts: Sequence[Sequence[Counts]]  # per lane, of its batches up to the first that goes back
    trains: bool  # a lane has a batch to train on
    over: bool = False  # as of `Agreed`


@dataclass
class AloneRounds:
    """Of a rank that has no others: its lanes' sums are added up in the step itself."""

    ledger: DenseLedger
    change: Callable[[], bool] = lambda: False  # whether another rank waits to join

    def agree(self, step: int, batches: Sequence[TrainBatch | None], *, stopping: bool) -> Agreed:
        """Judge the own batches."""
        if self.change() or (stopping and all(b is None for b in batches)):
            return Agreed([None] * len(batches), steps=False, over=True)
        verdicts = self.ledger.decide([None if b is None else b.ranges for b in batches])
        return Agreed(verdicts, _has_rows(batches, verdicts), largest=_largest(batches, verdicts))

    def agree_runs(self, runs: Sequence[TrainRun | None], *, stopping: bool) -> AgreedRuns:
        """As `agree`, of all steps of a run at once: lanes of one process give each other the same answers
        whenever they ask."""
        if self.change() or (stopping and all(run is None for run in runs)):
            return AgreedRuns([[] for _ in runs], trains=False, over=True)
        verdicts = self.ledger.decide_runs([None if run is None else run.batches.ranges for run in runs])
        return AgreedRuns(verdicts, any(of[:1] not in ([], [Counts.BACK]) for of in verdicts))

    def reduce(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """All lanes as they are."""
        return lanes


@dataclass
class RankRounds:
    """Of a rank among others: all of them judge the same offers in the same order, so all get the same
    vector. A batch is one dense step: the vector has no place within a batch at which a rank that is lost
    could leave the others."""

    group: RankGroup
    ledger: DenseLedger
    exchange: Callable[[RankGroup, bool], None]  # of measures, told whether this is the last time
    change: Callable[[], bool]  # whether the world is to be formed anew: somebody waits to join
    clock: Clock = SYSTEM_CLOCK
    _before: Mapping[int, int] = field(default_factory=dict)  # the vector before this round
    _exchanged: float = float("-inf")

    def agree(self, step: int, batches: Sequence[TrainBatch | None], *, stopping: bool) -> Agreed:
        """Gather the offers and judge all of them."""
        mine = self._offer(step, batches, stopping=stopping)
        offers = self.group.gather(mine)
        self._check(mine, offers)
        over = any(o.leaving or o.change for o in offers)
        if over or any(o.measures for o in offers):
            self.exchange(self.group, over)
        if over:
            return Agreed([None] * len(batches), steps=False, over=True)
        self._before = dict(self.ledger.applied)
        offered = [lane for offer in offers for lane in offer.lanes]
        verdicts = self.ledger.decide([None if lane is None else lane.ranges for lane in offered])
        steps = any(
            lane is not None and lane.rows > 0 and verdict is Counts.WHOLE
            for lane, verdict in zip(offered, verdicts, strict=True)
        )
        first = self.group.rank * len(batches)
        stop = first + len(batches)
        others = any(lane is not None for lane in [*offered[:first], *offered[stop:]])
        return Agreed(verdicts[first:stop], steps, others=others)

    def reduce(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Merge the lanes, then add up over the ranks: every rank makes the same step."""
        first, *others = lanes
        for lane in others:
            first.merge(lane)
        try:
            self.group.reduce(first.reduce_buffers())
        except RankLost:
            self.ledger.applied = dict(self._before)
            raise
        return [first]

    def _offer(self, step: int, batches: Sequence[TrainBatch | None], *, stopping: bool) -> Offer:
        return Offer(
            step=step,
            vector=vector_check(self.ledger.applied),
            lanes=tuple(None if b is None else Offered(b.ranges, len(b)) for b in batches),
            leaving=stopping and all(b is None for b in batches),
            change=self.change(),
            measures=self._measures_due(),
        )

    def _measures_due(self) -> bool:
        """Asked for by the leader only, so that the ranks do it together."""
        now = self.clock.monotonic()
        if self.group.rank or now < self._exchanged + EXCHANGE_S:
            return False
        self._exchanged = now
        return True

    @staticmethod
    def _check(mine: Offer, offers: Sequence[Offer]) -> None:
        told = {(offer.step, offer.vector) for offer in offers}
        if len(told) > 1 or any(len(offer.lanes) != len(mine.lanes) for offer in offers):
            found = [(offer.step, offer.vector, len(offer.lanes)) for offer in offers]
            raise RankLost(f"ranks differ in step, vector or lanes: {found}; they take one's state")


@dataclass
class ApartRounds:
    """Of a rank in mode `async`: it steps on its own, and meets the others now and then."""

    group: RankGroup
    ledger: DenseLedger
    exchange: Callable[[RankGroup, bool], None]  # of measures and vectors, told whether this is the last time
    change: Callable[[], bool]
    clock: Clock = SYSTEM_CLOCK
    _met: float = float("-inf")

    def agree(self, step: int, batches: Sequence[TrainBatch | None], *, stopping: bool) -> Agreed:
        """Judge the own batches; when it is time, meet the others first."""
        if self.clock.monotonic() >= self._met + EXCHANGE_S:
            leaving = stopping and all(b is None for b in batches)
            lanes = (None,) * len(batches)
            offers = self.group.gather(Offer(step, 0, lanes, leaving=leaving, change=self.change()))
            over = any(o.leaving or o.change for o in offers)
            self.exchange(self.group, over)
            self._met = self.clock.monotonic()
            if over:
                return Agreed([None] * len(batches), steps=False, over=True)
        verdicts = self.ledger.decide([None if b is None else b.ranges for b in batches])
        return Agreed(verdicts, _has_rows(batches, verdicts), largest=_largest(batches, verdicts))

    def reduce(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Nobody else's sums are added."""
        return lanes
