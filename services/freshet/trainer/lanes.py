"""Lanes: threads that each take a batch through forward, backward and push, and step the dense weights
together.

A round: every lane takes a batch or joins with none; one of them decides which batches count; each computes;
one of them begins the dense step, of which each takes its share. Like DDP ranks, inside one process. A round
of a native model is a run of batches (`freshet.trainer.native_lanes`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from freshet import _native
from freshet.batches.stream import BatchStream, TrainBatch
from freshet.clock import Stages, summed
from freshet.errors import Refused
from freshet.model import DenseModel, Lane, SplitStep, StepResult, StepsRows
from freshet.observability.spans import Training, end_training, start_training
from freshet.observability.tracing import running
from freshet.trainer.ranks import RankLost
from freshet.trainer.step_coordinator import Agreed, Counts, Rounds
from freshet.types import F32

__all__ = ["STAGES", "Lanes", "Observer", "OtherFailed", "Seat"]

POLL_S = 0.005
"""How long a lane without data waits before it looks whether another lane has some. Idle cost: 200 looks a
second."""


class Observer(Protocol):
    """Who is told what the lanes did. Called between rounds, by one thread at a time."""

    def trained(self, batch: TrainBatch, predictions: F32) -> None:
        """A batch that counted, or several of a run, were scored and trained on; (B, L) of before that."""

    def stepped(self, step: int, rows: int) -> None:
        """The dense weights and the vector moved; both are at rest until this returns."""


IMPATIENT_S = 0.001
"""The same for a rank that had nothing in the last round while other ranks had something: a rank whose
partitions are empty must not hold up the others at every step."""


STAGES = ("wait", "forward_backward", "step", "tell")
"""Of a lane's work here: waiting for the others, the model, the dense step, and (one lane for all) telling of
it."""


class OtherFailed(Exception):
    """Another lane has failed: this one ends too."""


@dataclass(slots=True)
class Seat:
    """What one lane brings to the round."""

    lane: Lane | None = None  # of the model; None: native code has its own
    batch: TrainBatch | None = None
    verdict: Counts | None = None
    result: StepResult | None = None
    stages: Stages = field(default_factory=lambda: Stages(STAGES))
    training: Training | None = None  # of the batch, if it is traced


@dataclass
class Lanes:
    """Runs the rounds of one rank until told to stop, or until its ranks agree to end; the first error of a
    lane stops all and is raised by `run`.

    After RankLost the model, the vector and `step` are those of the last step that was completed, and no
    batch is out: what was not part of it has been given back unused.
    """

    stream: BatchStream
    model: DenseModel
    rounds: Rounds
    observer: Observer
    lanes: int
    wait_s: float  # a rank without data waits at most this long (PROTOCOL 14)
    stop: threading.Event
    step: int = 0
    _seats: list[Seat] = field(default_factory=list)
    _error: BaseException | None = None
    _agreed: Agreed = field(default_factory=lambda: Agreed((), steps=False))
    _work: threading.Event = field(default_factory=threading.Event)
    _stepping: Stages = field(default_factory=lambda: Stages(STAGES))
    _ready: _native.Gate = field(default_factory=lambda: _native.Gate(1))
    _done: _native.Gate = field(default_factory=lambda: _native.Gate(1))
    _shared: _native.Gate = field(default_factory=lambda: _native.Gate(1))
    _dense_steps: int = 1  # of the round
    _split: SplitStep | None = None  # the model, if lanes can share its step
    _sharing: SplitStep | None = None  # the model, while they do
    _summed: Sequence[Lane] = ()  # lanes that hold the sums of the step
    _counted: list[tuple[TrainBatch, StepResult]] = field(default_factory=list)  # of the round that is over
    _stepped: bool = False  # a round is over, and not reported yet
    _over: bool = False  # no round follows
    _patience_s: float = 0.0  # how long a lane without data waits in this round

    def run(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Train until `stop` is set. `prepare` runs in each lane's thread first (torch's thread count,
        say)."""
        self._seats = self._new_seats()
        self._patience_s = self.wait_s
        self._split = self.model if isinstance(self.model, SplitStep) else None  # 5 us: not at every step
        self._ready, self._done, self._shared = (_native.Gate(self.lanes) for _ in range(3))
        threads = [
            threading.Thread(target=self._lane, args=(i, prepare), name=f"lane-{i}")
            for i in range(1, self.lanes)
        ]
        for thread in threads:
            thread.start()
        self._lane(0, prepare)
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _new_seats(self) -> list[Seat]:
        return [Seat(self.model.lane()) for _ in range(self.lanes)]

    def seconds(self) -> dict[str, float]:
        """How long the lanes have been in each of STAGES, summed over them; while one steps, the others'
        wait goes on."""
        return summed([*(seat.stages for seat in self._seats), self._stepping])

    def _lane(self, index: int, prepare: Callable[[], None]) -> None:
        seat = self._seats[index]
        try:
            prepare()
            while True:
                self._take(index, seat)
                seat.stages.begin()
                self._meet(seat, self._ready, self._between)
                if self._over:
                    break
                self._train(index, seat)
                self._give_back(index, seat)
        except OtherFailed:
            pass  # it has said why
        except BaseException as error:
            self._error = self._error or error
            self._abort()
        finally:
            if self._error is None or isinstance(self._error, RankLost):
                self._give_back_unused(index, seat)

    def _abort(self) -> None:
        """Have the other lanes end."""
        self._ready.abort()
        self._done.abort()
        self._shared.abort()

    @staticmethod
    def _meet(seat: Seat, gate: _native.Gate, alone: Callable[[], None]) -> None:
        """Wait for all lanes; the last to come does `alone`, whose time is none of its wait, before any goes
        on."""
        turn = gate.arrive()
        seat.stages.mark("wait")
        if turn < 0:
            raise OtherFailed
        if turn:
            alone()
            gate.open()
            seat.stages.begin()

    def _take(self, index: int, seat: Seat) -> None:
        """Take the lane's work; gives up when its patience ends, or as soon as another lane has some and this
        has not."""
        waited, poll_s = 0.0, min(POLL_S, self._patience_s)
        while not self.stop.is_set():
            if self._poll(index, seat, poll_s):
                self._work.set()
                return
            waited += POLL_S
            if waited >= self._patience_s or self._work.is_set():
                return

    def _between(self) -> None:
        """Between two rounds, with the dense weights at rest: tell of the last one, judge the next."""
        if self._stepped:
            self._stepping.begin()
            self._tell()
            self._stepped = False
            self._stepping.mark("tell")
        self._work.clear()
        self._judge(stopping=self.stop.is_set())

    # --- one batch of each lane a round: of models and streams that work in Python

    def _poll(self, index: int, seat: Seat, wait_s: float) -> bool:
        seat.batch = self.stream.take(index, wait_s)
        if seat.batch is not None:
            seat.training = start_training(seat.batch.ranges, seat.batch.request_ids)
        return seat.batch is not None

    def _judge(self, *, stopping: bool) -> None:
        batches = [seat.batch for seat in self._seats]
        self._agreed = self.rounds.agree(self.step, batches, stopping=stopping)
        self._over = self._agreed.over
        self._dense_steps = 1
        if self._agreed.largest and self._split is not None:
            self._dense_steps = self._split.dense_steps(self._agreed.largest)
        held_up = self._agreed.others and not any(seat.batch is not None for seat in self._seats)
        self._patience_s = min(IMPATIENT_S, self.wait_s) if held_up else self.wait_s
        for seat, verdict in zip(self._seats, self._agreed.verdicts, strict=True):
            seat.verdict, seat.result = verdict, None

    def _train(self, index: int, seat: Seat) -> None:
        """Compute the batch, and make the round's dense steps with the other lanes."""
        goes_on = self._begin(seat)
        for step in range(self._dense_steps):
            if step:  # every lane has taken its share of the step before
                self._meet(seat, self._shared, _nothing)
            while goes_on is not None:
                more = goes_on.advance()
                if not more:
                    seat.result, goes_on = goes_on.result(), None
                elif seat.verdict is Counts.WHOLE:
                    break  # the rest comes after the step; a batch that counts for its rows alone needs none
            seat.stages.mark("forward_backward")
            self._meet(seat, self._done, self._begin_step)
            if self._sharing is not None:
                self._sharing.step_part(self._summed, index, self.lanes)
                seat.stages.mark("step")

    def _begin(self, seat: Seat) -> StepsRows | None:
        """Begin the lane's batch; what goes on with it, None if it is done or there is none."""
        batch, lane = seat.batch, seat.lane
        if batch is None or seat.verdict is Counts.BACK:
            return None
        assert lane is not None
        weight = 1.0 if seat.verdict is Counts.WHOLE else 0.0
        if batch.states is None or not isinstance(lane, StepsRows):
            seat.result = lane.forward_backward(batch.inputs, dense_weight=weight)
            return None
        lane.begin_batch(batch.inputs, batch.states, weight, dense_steps=self._agreed.largest > 0)
        return lane

    def _begin_step(self) -> None:
        """Begin the dense step, or take it whole where the model cannot share it."""
        self._stepping.begin()
        self._counted = [
            (seat.batch, seat.result)
            for seat in self._seats
            if seat.batch is not None and seat.verdict is Counts.WHOLE and seat.result is not None
        ]
        self._sharing = None
        if self._agreed.steps:
            self._summed = self.rounds.reduce([seat.lane for seat in self._seats if seat.lane is not None])
            self.step += 1
            if self._split is not None:
                self._split.begin_step(self._summed)
                self._sharing = self._split
            else:
                self.model.step(self._summed)
        self._stepped = True
        self._stepping.mark("step")

    def _tell(self) -> None:
        for batch, result in self._counted:
            self.observer.trained(batch, result.predictions)
        self.observer.stepped(self.step, sum(len(batch) for batch, _ in self._counted))
        self._counted = []

    def _give_back(self, index: int, seat: Seat) -> None:
        batch, result, training = seat.batch, seat.result, seat.training
        seat.batch = seat.result = seat.training = None
        if batch is None:
            return
        gradients, counts = (None, None) if result is None else (result.gradients, result.counts)
        step, learned = self.step, result is not None

        def end(_: object, error: str) -> None:
            if training is not None:
                end_training(training, error, lane=index, step=step, learned=learned)

        traced = running(None if training is None else training.span, end)
        # Refused: the stream has rewound this lane; what it issues next continues what is applied (PROTOCOL
        # 6).
        with contextlib.suppress(Refused), traced:
            self.stream.give_back(index, batch, gradients, counts)

    def _give_back_unused(self, index: int, seat: Seat) -> None:
        if seat.batch is not None:
            self.stream.give_back(index, seat.batch, None)


def _nothing() -> None:
    """The last to come has nothing to do before the others go on."""
