"""The joiner: impressions and actions in, samples out, exactly once across kills (rules 18 to 20)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from .log import Fenced
from .rules import Rules
from .simulation import Process, Steps, Unavailable

if TYPE_CHECKING:
    from .world import World

WINDOW = 60  # ticks of event time in which an action makes an impression positive
DISORDER = 15  # an event is appended at most this long after it happened
HORIZON = WINDOW + 140  # ids are kept for so long; a client repeats an event within it
COMMIT = 18
RAMP = 4  # windows over which positives come ever earlier: at first when the window closes, then at once
UNKNOWN = -1_000_000


class Kind(Enum):
    """Topics of the joiner. A TICK stands for an idle topic whose time moves on (rule 19)."""

    SERVED = auto()
    ACTION = auto()
    TICK = auto()


@dataclass(frozen=True, slots=True)
class Event:
    """An input record."""

    kind: Kind
    impression: int
    time: int
    logged: int | None = None  # the log's time of its record


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Rule 18: what one commit holds beside the samples."""

    following: tuple[int, ...]  # next offset of each input partition
    low: tuple[int, ...]  # a restart rebuilds [low, next)
    watermark: int
    began: int | None = None  # time of the first impression ever taken, from which the warm-up counts


@dataclass(slots=True)
class Known:
    """An event that may still matter: to join, or to recognise its repeat."""

    time: int
    partition: int
    offset: int
    decided: bool = False


class Join:
    """The decisions, without I/O: events in, samples out."""

    def __init__(
        self, partitions: int, watermark: int, began: int | None = None, rules: Rules | None = None
    ) -> None:
        self.rules = rules or Rules()
        self.watermark = watermark
        self.began = began
        self._newest = [UNKNOWN] * partitions
        self._served: dict[int, Known] = {}
        self._actions: dict[int, Known] = {}

    def on_event(self, event: Event, partition: int, offset: int) -> list[int]:
        """Take one event; returns the samples that it decides."""
        reading = event.time
        if self.rules.no_one_clock_moves_time and event.logged is not None:
            reading = min(reading, event.logged)
        self._newest[partition] = max(self._newest[partition], reading)
        if event.kind is Kind.TICK or event.time < self.watermark - HORIZON:
            return []  # older than the horizon: a late event, never taken for a new one (rule 20)
        known = self._served if event.kind is Kind.SERVED else self._actions
        if event.impression in known:
            return []  # a repeat
        known[event.impression] = Known(event.time, partition, offset)
        if event.kind is Kind.SERVED and self.began is None:
            self.began = event.time
        return self._positive(event.impression)

    def _positive(self, impression: int) -> list[int]:
        """The sample of an impression that was acted on, unless the warm-up holds it."""
        served, action = self._served.get(impression), self._actions.get(impression)
        if served is None or action is None or served.decided or action.time > served.time + WINDOW:
            return []
        assert self.began is not None
        until = served.time + max(0, WINDOW - max(0, served.time - self.began) // RAMP)
        if max(action.time, self.watermark) < until:
            return []
        served.decided = True
        return [sample_id(impression, clicked=True)]

    def advance(self) -> list[int]:
        """Move the watermark (monotone, the minimum over partitions); returns the samples that it decides."""
        self.watermark = max(self.watermark, min(self._newest) - DISORDER)
        closed: list[int] = []
        for impression, served in self._served.items():
            closed += self._positive(impression)
            if not served.decided and served.time + WINDOW < self.watermark:
                served.decided = True
                closed.append(sample_id(impression, clicked=False))
        for known in (self._served, self._actions):
            for impression in [i for i, event in known.items() if event.time < self.watermark - HORIZON]:
                del known[impression]
        return closed

    def low(self, following: list[int], rules: Rules) -> list[int]:
        """The first offsets that a restart must read (rules 18 and 20)."""
        low = list(following)
        for impression, event in [*self._served.items(), *self._actions.items()]:
            served = self._served.get(impression)
            if rules.joiner_low_covers_horizon or served is None or not served.decided:
                low[event.partition] = min(low[event.partition], event.offset)
        return low


def sample_id(impression: int, *, clicked: bool) -> int:
    """A sample, and its id, is (impression, label)."""
    return 2 * impression + clicked


class Joiner(Process):
    """One instance; a newer one fences it through the transactional id."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.sim, name)
        self.world = world
        self.rules = world.rules
        self.spawn(self._run())

    def _run(self) -> Steps[None]:
        try:
            yield from self._join()
        except Fenced:
            self.kill()

    def _join(self) -> Steps[None]:
        inputs, transactions = self.world.inputs.partitions, self.world.transactions
        yield self.sim.hop()
        epoch = transactions.start()
        saved = transactions.saved
        assert isinstance(saved, Checkpoint)
        yield self.sim.hop()
        join = Join(
            len(inputs),
            saved.watermark if self.rules.joiner_restores_watermark else UNKNOWN,
            saved.began if self.rules.joiner_restores_beginning else None,
            self.rules,
        )
        following = list(saved.following)
        out = (yield from self._rebuild(join, saved)) if self.rules.joiner_rebuilds else []
        if self.rules.joiner_rebuilds_silently:
            out = []
        committed_at = self.sim.now
        while True:
            for partition in self.sim.rng.sample(range(len(inputs)), len(inputs)):
                events, following[partition] = inputs[partition].read(following[partition], 1 << 30, 4)
                for offset, event in events:
                    out += join.on_event(event, partition, offset)
            out += join.advance()
            if self.sim.now - committed_at >= COMMIT:
                committed_at = self.sim.now
                checkpoint = Checkpoint(
                    tuple(following), tuple(join.low(following, self.rules)), join.watermark, join.began
                )
                yield from self._commit(epoch, out, checkpoint)
                out = []
            yield 4

    def _rebuild(self, join: Join, saved: Checkpoint) -> Steps[list[int]]:
        """Read [low, next) again; what it decides was emitted before (rule 18)."""
        out: list[int] = []
        for partition, (low, following) in enumerate(zip(saved.low, saved.following, strict=True)):
            events, _ = self.world.inputs.partitions[partition].read(low, following, 1 << 30)
            yield self.sim.hop()
            for offset, event in events:
                out += join.on_event(event, partition, offset)
        return out + join.advance()

    def _commit(self, epoch: int, out: list[int], checkpoint: Checkpoint) -> Steps[None]:
        transactions = self.world.transactions
        for sample in out:
            try:
                transactions.produce(epoch, [(sample // 2 % self.world.partitions, sample)])
            except Unavailable:
                raise Fenced from None  # start anew from the last commit
            yield int(self.sim.rng.random() * 2)
        yield self.sim.hop()
        if self.rules.joiner_commit_atomic:
            transactions.commit(epoch, checkpoint)
        else:
            transactions.commit_records(epoch)
            yield self.sim.hop()
            transactions.saved = checkpoint
        yield self.sim.hop()
