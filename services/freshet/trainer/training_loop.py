"""Training loops: of one process alone, and of an elastic rank that trains in changing quorums."""

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
from freshet.trainer.ranks import ProcessGroup, RankLost
from freshet.trainer.state_sync import DenseState
from freshet.trainer.step_coordinator import (
    AsyncStepCoordinator,
    DenseLedger,
    LocalStepCoordinator,
    StepCoordinator,
    SyncStepCoordinator,
)

__all__ = ["ElasticTrainer", "LocalTrainer", "Mode", "RankObserver", "StreamFactory", "TrainingLoop"]

log = structlog.get_logger("freshet.trainer")

Mode = Literal["hybrid", "sync", "async"]

FLUSH_S = 1.0
"""Seconds that the end of a quorum waits for the shards to acknowledge the last pushes; batches without an
acknowledgement are trained on again."""

WAITING_EVERY_S = 0.1
"""Seconds between two checks whether another rank waits to join."""


class RankObserver(Observer, Protocol):
    """An observer of the lanes that also follows the quorums of its rank."""

    def on_state_synced(self, group: ProcessGroup) -> None:
        """The ranks of a new quorum have the same state; training continues from it."""


class TrainingLoop(Protocol):
    """The rounds of one rank."""

    def run(self, observer: RankObserver, stop: threading.Event) -> None:
        """Train on the caller's thread and the lanes' threads until `stop` is set; raises a lane's error."""

    def seconds(self) -> dict[str, float]:
        """Return the seconds that the lanes have spent in each stage, summed over them."""


@dataclass
class LocalTrainer:
    """The training loop of a process without other ranks."""

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
        coordinator = LocalStepCoordinator(self.ledger)
        parts = (self.stream, self.model, coordinator, observer, self.lanes, self.wait_s, stop)
        if self.loop is not None:
            self._running = RunLanes(*parts, self.step, loop=self.loop)
        else:
            self._running = Lanes(*parts, self.step)
        self._running.run()

    def seconds(self) -> dict[str, float]:
        """Return the seconds that the lanes have spent in each stage."""
        return self._running.seconds() if self._running is not None else dict.fromkeys(STAGES, 0.0)


class StreamFactory(Protocol):
    """Opens the batch stream of a rank in a new quorum."""

    def __call__(self, group: ProcessGroup, lanes: int) -> BatchStream:
        """Open a stream under the group's fence that starts at the applied offsets.

        Lane i gets the partitions p with p % (ranks * lanes) == rank * lanes + i. The caller closes the
        stream when the quorum ends.
        """


@dataclass
class ElasticTrainer:
    """The training loop of an elastic rank (PROTOCOL 14, 15).

    When a rank is lost, joins or leaves, the quorum ends between two steps: the lanes return their batches,
    a new quorum forms, its ranks sync to the state of the highest step, partitions are assigned anew, and
    training continues. No process restarts.
    """

    membership: Membership
    state: DenseState
    open_stream: StreamFactory
    wait_s: float  # PROTOCOL 14
    mode: Mode = "hybrid"
    clock: Clock = SYSTEM_CLOCK
    prepare: Callable[[], None] = lambda: None  # runs first in each lane's thread
    quorums: int = 0  # that this rank was in
    lost: int = 0  # quorums that ended because a rank was lost
    _past: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    _running: Lanes | None = None
    _checked_s: float = float("-inf")
    _members_waiting: bool = False

    def run(self, observer: RankObserver, stop: threading.Event) -> None:
        """Train until `stop` is set, then release the membership lease."""
        try:
            while not stop.is_set():
                group = self.membership.join()
                if group is None:
                    break
                self.quorums += 1
                try:
                    self._run_quorum(group, observer, stop)
                except (RankLost, Fenced) as error:
                    if isinstance(error, Fenced) and not self.membership.await_superseded():
                        raise
                    self.lost += 1
                    log.warning("a rank was lost", world=int(group.fence), reason=str(error))
                finally:
                    group.close()
        finally:
            self.membership.leave()

    def status(self) -> dict[str, int]:
        """Return this rank's membership for the status."""
        quorum = self.membership.quorum
        return {
            "seat": self.membership.member,
            "ranks": len(quorum.members) if quorum is not None else 0,
            "worlds": self.quorums,
            "lost": self.lost,
        }

    def seconds(self) -> dict[str, float]:
        """Return the seconds that the lanes have spent in each stage."""
        now = self._running.seconds() if self._running is not None else {}
        return {stage: past + now.get(stage, 0.0) for stage, past in self._past.items()}

    def _run_quorum(self, group: ProcessGroup, observer: RankObserver, stop: threading.Event) -> None:
        self.state.sync(group, independent=self.mode == "async")
        observer.on_state_synced(group)
        quorum = self.membership.quorum
        assert quorum is not None
        stream = self.open_stream(group, quorum.lanes)
        try:
            self._running = running = Lanes(
                stream,
                self.state.model,
                self._coordinator(group),
                observer,
                quorum.lanes,
                self.wait_s,
                stop,
                self.state.progress.steps,
            )
            running.run(self.prepare)
            stream.flush(FLUSH_S)
        finally:
            self._past, self._running = self.seconds(), None
            stream.close()

    def _coordinator(self, group: ProcessGroup) -> StepCoordinator:
        state = self.state
        if group.size == 1:
            return LocalStepCoordinator(state.ledger, self._must_regroup)
        kind = AsyncStepCoordinator if self.mode == "async" else SyncStepCoordinator
        return kind(group, state.ledger, self._exchange, self._must_regroup, self.clock)

    def _exchange(self, group: ProcessGroup, last: bool) -> None:
        self.state.shared.exchange(group, last)
        if self.mode == "async":
            mine = np.array(sorted(self.state.ledger.applied.items()), np.int64)
            for vector in group.exchange(mine.tobytes()):
                self.state.ledger.raise_to(np.frombuffer(vector, np.int64).reshape(-1, 2).tolist())

    def _must_regroup(self) -> bool:
        now = self.clock.monotonic()
        if now >= self._checked_s + WAITING_EVERY_S:
            self._checked_s, self._members_waiting = now, self.membership.members_waiting()
        return self._members_waiting
