"""A trainer group of two ranks: dense weights, their vector, and versions (rules 14 and 15).

Ranks reduce with a residual: a step delivers half of a gradient, and every FLUSH steps all is delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from .control import Member
from .rules import Rules
from .shard import Ranges
from .simulation import Steps, Unavailable
from .store import Row

if TYPE_CHECKING:
    from .world import World

RANKS = 2
VERSION = 60  # ticks between versions
FLUSH = 4  # steps between two flush points
NOTHING: Row = (0, 0)


class Answer(Enum):
    """What a batch gets back from its rank."""

    GRADIENTS = auto()
    NO_ROWS = auto()  # only with rule 14 broken
    REFUSED = auto()


@dataclass(frozen=True, slots=True)
class Dense:
    """Weights (here the two columns of the ledger) and the vector, changed in the same step (rule 14)."""

    step: int
    weights: Row
    applied: tuple[int, ...]
    residuals: tuple[Row, ...] = (NOTHING,) * RANKS  # of each rank; lost with it

    def after(self, gradients: Sequence[Row], applied: tuple[int, ...]) -> Dense:
        """The state after a step: half of what each rank has is delivered, at a flush point all of it."""
        step, weights, residuals = self.step + 1, self.weights, []
        for residual, gradient in zip(self.residuals, gradients, strict=True):
            whole = _sum(residual, gradient)
            part = whole if step % FLUSH == 0 else (whole[0] // 2, whole[1] // 2)
            weights = _sum(weights, part)
            residuals.append((whole[0] - part[0], whole[1] - part[1]))
        return Dense(step, weights, applied, tuple(residuals))

    def without(self, rank: int) -> Dense:
        """The state when the residual of a rank is lost."""
        return replace(
            self, residuals=tuple(NOTHING if i == rank else r for i, r in enumerate(self.residuals))
        )

    def total(self) -> Row:
        """The weights once all residuals are delivered."""
        weights = self.weights
        for residual in self.residuals:
            weights = _sum(weights, residual)
        return weights

    @property
    def flushed(self) -> bool:
        """Whether this is a flush point."""
        return self.step % FLUSH == 0


def _sum(a: Row, b: Row) -> Row:
    return a[0] + b[0], a[1] + b[1]


@dataclass(frozen=True, slots=True)
class Version:
    """A saved state, with the fence of the lease under which it was saved."""

    fence: int
    dense: Dense


@dataclass(frozen=True, slots=True)
class Offer:
    """A batch at a rank: its ranges, each one's dense gradient, and the way back."""

    ranges: Ranges
    gradients: Mapping[int, Row]
    answer: Callable[[Answer], None]


class Versions:
    """The version store; it does not lose what it acknowledged."""

    def __init__(self, partitions: int) -> None:
        self.latest = Version(-1, Dense(0, (0, 0), (0,) * partitions))  # version 0: the initial weights

    def put(self, version: Version) -> None:
        """Keep a version, unless its fence is lower than one seen (rule 9: receivers refuse lower ones)."""
        if version.fence >= self.latest.fence:
            self.latest = version


def weigh(ranges: Ranges, applied: Sequence[int], rules: Rules) -> dict[int, int] | None:
    """Rule 14: the dense weight of each range, or None if the batch goes back to its embedder."""
    weights: dict[int, int] = {}
    for partition, (start, stop) in ranges.items():
        if start == applied[partition]:
            weights[partition] = 1
        elif stop <= applied[partition]:
            weights[partition] = 0 if rules.dense_repeat_weighs_nothing else 1
        elif rules.dense_gap_goes_back:
            return None
        else:
            weights[partition] = 1
    return weights


def gather(
    offers: Sequence[Ranges | None], applied: Sequence[int], rules: Rules
) -> tuple[list[dict[int, int] | None], tuple[int, ...]]:
    """Rule 14: all ranks see all ranges and judge them in rank order, so that all reach the same vector."""
    vector = list(applied)
    verdicts: list[dict[int, int] | None] = []
    for ranges in offers:
        weights = (
            None
            if ranges is None
            else weigh(ranges, vector if rules.dense_ranges_gathered else applied, rules)
        )
        for partition in weights or ():
            assert ranges is not None
            vector[partition] = max(vector[partition], ranges[partition][1])
        verdicts.append(weights)
    return verdicts, tuple(vector)


class Trainer(Member):
    """One candidate for the lease; while it holds it, two ranks step together."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, ("seat",))
        self.fence: int | None = None  # of the lease, once a version was loaded under it
        self.ranks: list[Dense] = []
        self._kept: list[Dense] = []  # each rank's copy of its last flush point
        self._queues: list[deque[Offer]] = [deque() for _ in range(RANKS)]
        self._loading = False
        self._failing: int | None = None
        self.spawn(self._steps())
        self.spawn(self._save_versions())

    def on_control(self) -> None:
        """Load the last version when the lease is won; stop when it is lost."""
        fence = dict(self.owned()).get("seat")
        if fence is None:
            self.fence = None
        elif self.fence is None and not self._loading:
            self._loading = True
            self.spawn(self._load(fence))
        elif self.fence is not None:
            self.fence = fence  # re-formed under a new claim of its own

    def applied(self, claim: int) -> list[int] | None:
        """The vector, or None if no version was loaded (yet) under that claim of the lease."""
        if self.fence is None or (self.fence != claim and self.rules.requests_name_the_claim):
            return None
        return list(self._furthest().applied)

    def take(
        self, rank: int, ranges: Ranges, gradients: Mapping[int, Row], answer: Callable[[Answer], None]
    ) -> None:
        """Queue a batch at a rank."""
        if self.fence is not None:
            self._queues[rank].append(Offer(ranges, gradients, answer))

    def lose_rank(self, rank: int) -> None:
        """A rank dies at the next step, after it may have applied what the other has not."""
        self._failing = rank

    def _furthest(self) -> Dense:
        return max(self.ranks, key=lambda dense: dense.step)

    def _load(self, fence: int) -> Steps[None]:
        while True:
            try:
                version = yield from self.call(lambda: self.world.versions.latest)
                break
            except Unavailable:
                pass
        self.ranks, self._kept = [version.dense] * RANKS, [version.dense] * RANKS
        self._queues = [deque() for _ in range(RANKS)]
        self.fence = fence
        self._loading = False

    def _steps(self) -> Steps[None]:
        while True:
            yield 3
            if self.fence is not None and any(self._queues):
                if not all(self._queues):
                    yield 2  # a rank without data waits a little and joins with weight 0
                yield from self._step()

    def _step(self) -> Steps[None]:
        fence, before = self.fence, self._furthest()
        offers = [queue.popleft() if queue else None for queue in self._queues]
        verdicts, vector = gather(
            [None if offer is None else offer.ranges for offer in offers], before.applied, self.rules
        )
        gradients: list[Row] = []
        for offer, weights in zip(offers, verdicts, strict=True):
            count = checksum = 0
            for partition, weight in (weights or {}).items():
                assert offer is not None
                gradient = offer.gradients.get(partition, NOTHING)
                count += weight * gradient[0]
                checksum += weight * gradient[1]
            gradients.append((count, checksum))
        after = before.after(gradients, vector)
        yield 1 + self.sim.rng.randrange(2)
        for rank in self.sim.rng.sample(range(RANKS), RANKS):  # ranks finish the step one after the other
            if self._seat_changed(fence):
                return
            if self._failing == rank and self.sim.rng.random() < 0.5:
                yield from self._form_again(rank)
                return
            self.ranks[rank] = after
            if after.flushed:
                self._kept[rank] = after
            self._reply(offers[rank], verdicts[rank])
            if self._failing == rank:
                yield from self._form_again(rank)
                return
            yield 1

    def _seat_changed(self, fence: int | None) -> bool:
        """Whether the lease was lost (and won again) since a step began: its batches are of another time."""
        return self.fence is None or self.fence != fence

    def _reply(self, offer: Offer | None, weights: Mapping[int, int] | None) -> None:
        if offer is None:
            return
        if weights is None:
            offer.answer(Answer.REFUSED)
        elif not self.rules.dense_repeat_keeps_rows and 0 in weights.values():
            offer.answer(Answer.NO_ROWS)
        else:
            offer.answer(Answer.GRADIENTS)

    def _form_again(self, lost: int) -> Steps[None]:
        """Rule 15: survivors go back to their last flush point, and on from the highest step among them.

        A new claim makes embedders ask again.
        """
        self._failing = None
        states = self._kept if self.rules.loss_rolls_back else [dense.without(lost) for dense in self.ranks]
        survivors = [dense for rank, dense in enumerate(states) if rank != lost]
        furthest = max(survivors, key=lambda dense: dense.step)
        self.ranks, self._kept = [furthest] * RANKS, [furthest] * RANKS
        self._queues = [deque() for _ in range(RANKS)]
        old = self.fence
        while self.fence is not None and self.fence == old:
            yield from self.claim("seat")
            yield 20

    def _save_versions(self) -> Steps[None]:
        while True:
            yield VERSION
            if self.fence is not None:
                flushed = max(self._kept, key=lambda dense: dense.step)
                now = replace(self._furthest(), residuals=(NOTHING,) * RANKS)
                yield from self._save(self.fence, flushed if self.rules.version_at_flush_point else now)

    def _save(self, fence: int, dense: Dense) -> Steps[None]:
        if not self.rules.vector_saved_with_weights:
            yield 4
            dense = replace(dense, applied=self._furthest().applied)
        try:
            yield from self.call(lambda: self.world.versions.put(Version(fence, dense)))
        except Unavailable:
            self.sim.note(f"{self.name} does not know whether its version was saved")
