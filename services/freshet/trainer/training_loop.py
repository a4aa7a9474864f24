"""How a trainer gets through its batches: by its own lanes alone, or with other ranks through the worlds
that come and go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import structlog

from freshet.batches.stream import BatchStream
from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import Fenced
from freshet.model import DenseModel
from freshet.model.native_loop import NativeLoop
from freshet.trainer.lanes import STAGES, Lanes, Observer
from freshet.trainer.membership import Membership
from freshet.trainer.native_lanes import RunLanes
from freshet.trainer.ranks import RankGroup, RankLost
from freshet.trainer.state_sync import DenseState
from freshet.trainer.step_coordinator import AloneRounds, ApartRounds, DenseLedger, RankRounds, Rounds

__all__ = ["Course", "ManyRanks", "Mode", "OneRank", "RankObserver", "StreamOf"]

log = structlog.get_logger("freshet.trainer")

Mode = Literal["hybrid", "sync", "async"]

SETTLE_S = 1.0
"""How long the end of a world waits for the shards to acknowledge what the last batches taught; what they
have not is trained on again."""

WAITING_EVERY_S = 0.1
"""How often a rank looks whether another waits to join."""


class RankObserver(Observer, Protocol):
    """Who is told what the lanes did, and whom they did it with."""

    def leveled(self, group: RankGroup) -> None:
        """The ranks of a new world have the same state; training goes on from it."""


class Course(Protocol):
    """Runs the rounds of one rank."""

    def run(self, observer: RankObserver, stop: threading.Event) -> None:
        """Train on the caller's thread and the lanes' own until `stop` is set. Raises what a lane raised."""

    def seconds(self) -> dict[str, float]:
        """How long the lanes have been in each stage of their work, summed over them."""


@dataclass
class OneRank:
    """A process that trains alone."""

    stream: BatchStream
    model: DenseModel
    ledger: DenseLedger
    lanes: int
    wait_s: float  # PROTOCOL 14
    step: int = 0
    loop: NativeLoop | None = None  # of a native model; `stream` is a `RunStream` then
    _running: Lanes | None = None

    def run(self, observer: RankObserver, stop: threading.Event) -> None:
        """Train until `stop` is set."""
        parts = (self.stream, self.model, AloneRounds(self.ledger), observer, self.lanes, self.wait_s, stop)
        if self.loop is not None:
            self._running = RunLanes(*parts, self.step, loop=self.loop)
        else:
            self._running = Lanes(*parts, self.step)
        self._running.run()

    def seconds(self) -> dict[str, float]:
        """How long the lanes have been in each stage."""
        return self._running.seconds() if self._running is not None else dict.fromkeys(STAGES, 0.0)


class StreamOf(Protocol):
    """Makes the batch stream of a rank in a new world."""

    def __call__(self, group: RankGroup, lanes: int) -> BatchStream:
        """Batches of the partitions p with p % (ranks * lanes) == rank * lanes + lane, under the group's
        fence, from what is applied now; closed when the world ends."""


@dataclass
class ManyRanks:
    """A process that trains with others, as long as there are any (PROTOCOL 14, 15).

    When a rank is lost, joins or leaves, the world ends at that border: batches in hand go back, a new world
    is formed, all take the state of the highest step, partitions are dealt anew, and training goes on. No
    process starts anew for it.
    """

    membership: Membership
    state: DenseState
    stream_of: StreamOf
    wait_s: float  # PROTOCOL 14
    mode: Mode = "hybrid"
    clock: Clock = SYSTEM_CLOCK
    prepare: Callable[[], None] = lambda: None  # in each lane's thread, before it begins
    worlds: int = 0  # that this rank was in
    lost: int = 0  # worlds that ended because a rank was lost
    _past: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    _running: Lanes | None = None
    _looked: float = float("-inf")
    _somebody_waits: bool = False

    def run(self, observer: RankObserver, stop: threading.Event) -> None:
        """Train until `stop` is set; the seat is given up then."""
        try:
            while not stop.is_set():
                group = self.membership.join()
                if group is None:
                    break
                self.worlds += 1
                try:
                    self._run_world(group, observer, stop)
                except (RankLost, Fenced) as error:
                    if isinstance(error, Fenced) and not self.membership.was_left_behind():
                        raise
                    self.lost += 1
                    log.warning("a rank was lost", world=int(group.fence), reason=str(error))
                finally:
                    group.close()
        finally:
            self.membership.leave()

    def standing(self) -> dict[str, int]:
        """This rank among the others, for people."""
        world = self.membership.world
        return {
            "seat": self.membership.seat,
            "ranks": len(world.members) if world is not None else 0,
            "worlds": self.worlds,
            "lost": self.lost,
        }

    def seconds(self) -> dict[str, float]:
        """How long the lanes have been in each stage."""
        now = self._running.seconds() if self._running is not None else {}
        return {stage: past + now.get(stage, 0.0) for stage, past in self._past.items()}

    def _run_world(self, group: RankGroup, observer: RankObserver, stop: threading.Event) -> None:
        self.state.level(group, apart=self.mode == "async")
        observer.leveled(group)
        world = self.membership.world
        assert world is not None
        stream = self.stream_of(group, world.lanes)
        try:
            self._running = running = Lanes(
                stream,
                self.state.model,
                self._rounds(group),
                observer,
                world.lanes,
                self.wait_s,
                stop,
                self.state.progress.steps,
            )
            running.run(self.prepare)
            stream.settled(SETTLE_S)
        finally:
            self._past, self._running = self.seconds(), None
            stream.close()

    def _rounds(self, group: RankGroup) -> Rounds:
        state = self.state
        if group.size == 1:
            return AloneRounds(state.ledger, self._others_wait)
        kind = ApartRounds if self.mode == "async" else RankRounds
        return kind(group, state.ledger, self._exchange, self._others_wait, self.clock)

    def _exchange(self, group: RankGroup, last: bool) -> None:
        self.state.shared.exchange(group, last)
        if self.mode == "async":
            mine = np.array(sorted(self.state.ledger.applied.items()), np.int64)
            for vector in group.exchange(mine.tobytes()):
                self.state.ledger.raise_to(np.frombuffer(vector, np.int64).reshape(-1, 2).tolist())

    def _others_wait(self) -> bool:
        now = self.clock.monotonic()
        if now >= self._looked + WAITING_EVERY_S:
            self._looked, self._somebody_waits = now, self.membership.somebody_waits()
        return self._somebody_waits
