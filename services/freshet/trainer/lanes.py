"""Lanes: threads that each take a batch through forward, backward and push, and step the dense weights
together.

A round: every lane takes a batch or joins with none; one of them decides which batches count; each computes;
one of them steps the dense weights for all. Like DDP ranks, inside one process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from freshet.errors import Refused
from freshet.model import DenseModel, Lane, StepResult
from freshet.seams.batches import BatchStream, TrainBatch
from freshet.trainer.core import Counts, DenseLedger

__all__ = ["Lanes", "Observer"]

POLL_S = 0.005
"""How long a lane without data waits before it looks whether another lane has some. Idle cost: 200 looks a
second."""


class Observer(Protocol):
    """Who is told what the lanes did. Called between rounds, by one thread at a time."""

    def trained(self, batch: TrainBatch, result: StepResult) -> None:
        """A batch that counted was scored and trained on."""

    def stepped(self, step: int, rows: int) -> None:
        """The dense weights and the vector moved; both are at rest until this returns."""


@dataclass(slots=True)
class _Seat:
    """What one lane brings to the round."""

    lane: Lane
    batch: TrainBatch | None = None
    verdict: Counts | None = None
    result: StepResult | None = None
    rounds: int = 0


@dataclass
class Lanes:
    """Runs the rounds of one rank until told to stop; the first error of a lane stops all and is raised by
    `run`."""

    stream: BatchStream
    model: DenseModel
    ledger: DenseLedger
    observer: Observer
    lanes: int
    wait_s: float  # a rank without data waits at most this long (PROTOCOL 14)
    stop: threading.Event
    step: int = 0
    _seats: list[_Seat] = field(default_factory=list)
    _error: BaseException | None = None
    _quit: bool = False
    _work: threading.Event = field(default_factory=threading.Event)

    def run(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Train until `stop` is set. `prepare` runs in each lane's thread first (torch's thread count,
        say)."""
        self._seats = [_Seat(self.model.lane()) for _ in range(self.lanes)]
        ready = threading.Barrier(self.lanes, action=self._decide)
        done = threading.Barrier(self.lanes, action=self._step)
        threads = [
            threading.Thread(target=self._lane, args=(i, ready, done, prepare), name=f"lane-{i}")
            for i in range(1, self.lanes)
        ]
        for thread in threads:
            thread.start()
        self._lane(0, ready, done, prepare)
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _lane(
        self, index: int, ready: threading.Barrier, done: threading.Barrier, prepare: Callable[[], None]
    ) -> None:
        seat = self._seats[index]
        try:
            prepare()
            while True:
                seat.batch = self._take(index)
                ready.wait()
                if self._quit:
                    break
                if seat.batch is not None and seat.verdict is not Counts.BACK:
                    weight = 1.0 if seat.verdict is Counts.WHOLE else 0.0
                    seat.result = seat.lane.forward_backward(seat.batch.inputs, dense_weight=weight)
                done.wait()
                self._give_back(index, seat)
        except threading.BrokenBarrierError:
            pass  # another lane failed and has said why
        except BaseException as error:
            self._error = self._error or error
            ready.abort()
            done.abort()
        finally:
            if seat.batch is not None and seat.result is None and self._error is None:
                self.stream.give_back(index, seat.batch, None)

    def _take(self, index: int) -> TrainBatch | None:
        """The lane's batch; gives up after `wait_s`, or as soon as another lane has one and this has not."""
        waited = 0.0
        while not self.stop.is_set():
            batch = self.stream.take(index, POLL_S)
            if batch is not None:
                self._work.set()
                return batch
            waited += POLL_S
            if waited >= self.wait_s or self._work.is_set():
                return None
        return None

    def _decide(self) -> None:
        self._work.clear()
        batches = [seat.batch for seat in self._seats]
        self._quit = self.stop.is_set() and not any(batches)
        offered = [None if b is None else b.ranges for b in batches]
        for seat, verdict in zip(self._seats, self.ledger.decide(offered), strict=True):
            seat.verdict, seat.result = verdict, None

    def _step(self) -> None:
        rows = 0
        for seat in self._seats:
            if seat.batch is not None and seat.verdict is Counts.WHOLE and seat.result is not None:
                rows += len(seat.batch)
        if rows:
            self.model.step([seat.lane for seat in self._seats])
            self.step += 1
            for seat in self._seats:
                if seat.batch is not None and seat.verdict is Counts.WHOLE and seat.result is not None:
                    self.observer.trained(seat.batch, seat.result)
        self.observer.stepped(self.step, rows)

    def _give_back(self, index: int, seat: _Seat) -> None:
        batch, result = seat.batch, seat.result
        seat.batch = seat.result = None
        if batch is None:
            return
        # Refused: the stream has rewound this lane; what it issues next continues what is applied (PROTOCOL
        # 6).
        with contextlib.suppress(Refused):
            self.stream.give_back(index, batch, result.gradients if result is not None else None)
