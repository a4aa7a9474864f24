"""Lanes: threads that take batches through forward, backward and push, and step the dense weights together.

In a round every lane polls for a batch; one lane calls the step coordinator; each lane computes its batch;
one lane begins the dense step, and each executes a part of it. A lane without a batch joins the round with
none.

For native models with rows in the process a round is a run of batches a lane (`RunLanes`): native code
trains on them without returning to Python between two. The coordinator decides on all batches of a run
before it begins, in the order of its steps. A lane stops at a refused push; the vector then loses the
batches after it before any other component reads it.

Letters: B samples, K batches of a lane's run, L labels.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from freshet import _native
from freshet.batches.stream import BatchStream, RunStream, TrainBatch, TrainRun
from freshet.clock import Stopwatch, summed
from freshet.errors import Refused
from freshet.model import DenseModel, Lane, SplitStep, StepResult, StepsRows
from freshet.model.native_loop import MOMENTS, Ended, NativeLoop, Ran
from freshet.observability.spans import Training, end_training, start_training
from freshet.observability.tracing import running
from freshet.trainer.process_group import RankLost
from freshet.trainer.step_coordinator import Agreed, AgreedRuns, BatchVerdict, StepCoordinator
from freshet.types import F32

POLL_S = 0.005
"""Seconds that a lane without data waits before it checks whether another lane has some; an idle lane checks
200 times a second."""

OTHERS_WAIT_S = 0.001
"""The wait of a rank that had no batch in the last round while other ranks had some: a rank with empty
partitions must not delay every step of the others."""

STAGES = ("wait", "forward_backward", "step", "tell")
"""Stages of a lane: waiting for the other lanes, the model, the dense step, and the calls of the callback."""


class LaneCallback(Protocol):
    """Receives the progress of the lanes. Called between rounds, by one thread at a time."""

    def on_trained(self, batch: TrainBatch, predictions: F32) -> None:
        """A batch that counted, or several of a run, were trained on; (B, L) predictions before that."""

    def on_stepped(self, step: int, rows: int) -> None:
        """The dense weights and the vector changed; both stay unchanged until this returns."""


class OtherLaneFailed(Exception):
    """Another lane failed, so this one ends."""


@dataclass(slots=True)
class LaneRound:
    """The state of one lane in a round."""

    lane: Lane | None = None  # of the model; None: native code holds it
    batch: TrainBatch | None = None
    verdict: BatchVerdict | None = None
    result: StepResult | None = None
    stages: Stopwatch = field(default_factory=lambda: Stopwatch(STAGES))
    training: Training | None = None  # the batch's span, if it is traced


@dataclass
class Lanes:
    """The rounds of one rank, until `stop` is set or the ranks agree to end.

    The first error of a lane stops all lanes, and `run` raises it. After RankLost the model, the vector and
    `step` are those of the last completed step; all batches outside it have been returned unused. If not
    every step is a flush point, the caller goes back to the last one.
    """

    stream: BatchStream
    model: DenseModel
    coordinator: StepCoordinator
    callback: LaneCallback
    lanes: int
    wait_s: float  # the longest wait of a rank without data (PROTOCOL 14)
    stop: threading.Event
    step: int = 0
    _lanes: list[LaneRound] = field(default_factory=list)
    _error: BaseException | None = None
    _agreed: Agreed = field(default_factory=lambda: Agreed((), steps=False))
    _work: threading.Event = field(default_factory=threading.Event)
    _stepping: Stopwatch = field(default_factory=lambda: Stopwatch(STAGES))
    _ready: _native.Gate = field(default_factory=lambda: _native.Gate(1))
    _done: _native.Gate = field(default_factory=lambda: _native.Gate(1))
    _shared: _native.Gate = field(default_factory=lambda: _native.Gate(1))
    _dense_steps: int = 1  # of the round
    _split: SplitStep | None = None  # the model, if it can split its step between lanes
    _splitting: SplitStep | None = None  # the model, while it does
    _summed: Sequence[Lane] = ()  # lanes that hold the sums of the step
    _counted: list[tuple[TrainBatch, StepResult]] = field(default_factory=list)  # of the last round
    _unreported: bool = False  # the callback has not received the last round
    _over: bool = False  # no round follows
    _poll_limit_s: float = 0.0  # the longest wait of a lane without data in this round

    def run(self) -> None:
        """Train until `stop` is set; raises the first error of a lane."""
        self._lanes = self._new_lanes()
        self._poll_limit_s = self.wait_s
        self._split = self.model if isinstance(self.model, SplitStep) else None  # the check costs 5 µs
        self._ready, self._done, self._shared = (_native.Gate(self.lanes) for _ in range(3))
        threads = [
            threading.Thread(target=self._run_lane, args=(i,), name=f"lane-{i}") for i in range(1, self.lanes)
        ]
        for thread in threads:
            thread.start()
        self._run_lane(0)
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _new_lanes(self) -> list[LaneRound]:
        return [LaneRound(self.model.lane()) for _ in range(self.lanes)]

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each of STAGES, summed over the lanes.

        While one lane begins a step, the others count as waiting.
        """
        return summed([*(lane.stages for lane in self._lanes), self._stepping])

    def _run_lane(self, index: int) -> None:
        lane = self._lanes[index]
        try:
            while True:
                self._await_work(index, lane)
                lane.stages.begin()
                self._synchronize(lane, self._ready, self._next_round)
                if self._over:
                    break
                self._train(index, lane)
                self._finish_batches(index, lane)
        except OtherLaneFailed:
            pass  # `_error` holds the cause
        except BaseException as error:  # `run` raises the first one
            self._error = self._error or error
            self._abort()
        finally:
            if self._error is None or isinstance(self._error, RankLost):
                self._return_unused(index, lane)

    def _abort(self) -> None:
        """End the other lanes."""
        self._ready.abort()
        self._done.abort()
        self._shared.abort()

    @staticmethod
    def _synchronize(lane: LaneRound, gate: _native.Gate, last: Callable[[], None]) -> None:
        """Wait for all lanes; the last to arrive runs `last`, which is no wait, before any continues."""
        turn = gate.arrive()
        lane.stages.mark("wait")
        if turn < 0:
            raise OtherLaneFailed
        if turn:
            last()
            gate.open()
            lane.stages.begin()

    def _await_work(self, index: int, lane: LaneRound) -> None:
        """Poll for the lane's work, until the limit or until another lane has some."""
        waited, poll_s = 0.0, min(POLL_S, self._poll_limit_s)
        while not self.stop.is_set():
            if self._poll(index, lane, poll_s):
                self._work.set()
                return
            waited += POLL_S
            if waited >= self._poll_limit_s or self._work.is_set():
                return

    def _next_round(self) -> None:
        """Report the last round and agree on the next; the dense weights do not change meanwhile."""
        if self._unreported:
            self._stepping.begin()
            self._report_round()
            self._unreported = False
            self._stepping.mark("tell")
        self._work.clear()
        self._agree(stopping=self.stop.is_set())

    # --- rounds with one batch a lane, for models and streams that work in Python

    def _poll(self, index: int, lane: LaneRound, wait_s: float) -> bool:
        lane.batch = self.stream.next_batch(index, wait_s)
        if lane.batch is not None:
            lane.training = start_training(lane.batch.ranges, lane.batch.request_ids)
        return lane.batch is not None

    def _agree(self, *, stopping: bool) -> None:
        batches = [lane.batch for lane in self._lanes]
        self._agreed = self.coordinator.agree(self.step, batches, stopping=stopping)
        self._over = self._agreed.over
        if not self._over:
            self.step = self._agreed.step
        self._dense_steps = 1
        if self._agreed.largest and self._split is not None:
            self._dense_steps = self._split.dense_steps(self._agreed.largest)
        delays = self._agreed.others and not any(lane.batch is not None for lane in self._lanes)
        self._poll_limit_s = min(OTHERS_WAIT_S, self.wait_s) if delays else self.wait_s
        for lane, verdict in zip(self._lanes, self._agreed.verdicts, strict=True):
            lane.verdict, lane.result = verdict, None

    def _train(self, index: int, lane: LaneRound) -> None:
        """Compute the batch, and make the round's dense steps with the other lanes."""
        unfinished = self._begin_batch(lane)
        for step in range(self._dense_steps):
            if step:  # every lane has executed its part of the previous step
                self._synchronize(lane, self._shared, _do_nothing)
            while unfinished is not None:
                more = unfinished.advance()
                if not more:
                    lane.result, unfinished = unfinished.result(), None
                elif lane.verdict is BatchVerdict.LEARN:
                    break  # the rest follows the step; an APPLIED batch does not change the dense weights
            lane.stages.mark("forward_backward")
            self._synchronize(lane, self._done, self._begin_step)
            if self._splitting is not None:
                self._splitting.step_part(self._summed, index, self.lanes)
                lane.stages.mark("step")

    def _begin_batch(self, lane: LaneRound) -> StepsRows | None:
        """Begin the lane's batch; returns the model's lane if the batch takes several steps."""
        batch, model_lane = lane.batch, lane.lane
        if batch is None or lane.verdict is BatchVerdict.RETURN:
            return None
        assert model_lane is not None
        weight = 1.0 if lane.verdict is BatchVerdict.LEARN else 0.0
        if batch.states is None or not isinstance(model_lane, StepsRows):
            lane.result = model_lane.forward_backward(batch.inputs, dense_weight=weight)
            return None
        model_lane.begin_batch(batch.inputs, batch.states, weight, dense_steps=self._agreed.largest > 0)
        return model_lane

    def _begin_step(self) -> None:
        """Begin the dense step; execute all of it if the model cannot split it."""
        self._stepping.begin()
        self._counted = [
            (lane.batch, lane.result)
            for lane in self._lanes
            if lane.batch is not None and lane.verdict is BatchVerdict.LEARN and lane.result is not None
        ]
        self._splitting = None
        if self._agreed.steps:
            lanes = [lane.lane for lane in self._lanes if lane.lane is not None]
            self._summed = self.coordinator.reduce(lanes, [result for _, result in self._counted])
            self.step += 1
            if self._split is not None:
                self._split.begin_step(self._summed)
                self._splitting = self._split
            else:
                self.model.step(self._summed)
        self._unreported = True
        self._stepping.mark("step")

    def _report_round(self) -> None:
        for batch, result in self._counted:
            self.callback.on_trained(batch, result.predictions)
        self.callback.on_stepped(self.step, sum(len(batch) for batch, _ in self._counted))
        self.coordinator.end_round()
        self._counted = []

    def _finish_batches(self, index: int, lane: LaneRound) -> None:
        batch, result, training = lane.batch, lane.result, lane.training
        lane.batch = lane.result = lane.training = None
        if batch is None:
            return
        gradients, counts = (None, None) if result is None else (result.gradients, result.counts)
        step, learned = self.step, result is not None

        def end(_: object, error: str) -> None:
            if training is not None:
                end_training(training, error, lane=index, step=step, learned=learned)

        traced = running(None if training is None else training.span, end)
        # Refused: the stream has rewound this lane to the applied offsets (PROTOCOL 6).
        with contextlib.suppress(Refused), traced:
            self.stream.push_gradients(index, batch, gradients, counts)

    def _return_unused(self, index: int, lane: LaneRound) -> None:
        if lane.batch is not None:
            self.stream.push_gradients(index, lane.batch, None)


def _do_nothing() -> None:
    pass


# --- rounds with a run of batches a lane, for native models with rows in the process


@dataclass(slots=True)
class _LaneRun:
    """The run of one lane in a round."""

    run: TrainRun | None = None
    verdicts: list[BatchVerdict] = field(default_factory=list)  # of the batches to train on
    ran: Ran | None = None
    done: list[tuple[TrainBatch, F32]] = field(default_factory=list)  # counted, not yet reported


@dataclass
class RunLanes(Lanes):
    """The `Lanes` of a native model: no other ranks, and rows in the same process."""

    loop: NativeLoop | None = None
    _lane_runs: list[_LaneRun] = field(default_factory=list)
    _round: AgreedRuns = field(default_factory=lambda: AgreedRuns((), trains=False))
    _first_step: int = 0

    def __post_init__(self) -> None:
        assert self.loop is not None, "the loop that the lanes run"
        assert self.loop.lanes == self.lanes, "as many lanes as the loop has"
        self._first_step = self.step - self.loop.dense_steps
        self._lane_runs = [_LaneRun() for _ in range(self.lanes)]

    @property
    def _run_stream(self) -> RunStream:
        return self.stream  # type: ignore[return-value]  # a trainer with a loop has such a stream

    def _abort(self) -> None:
        super()._abort()
        assert self.loop is not None
        self.loop.abort()

    def _poll(self, index: int, lane: LaneRound, wait_s: float) -> bool:
        own = self._lane_runs[index]
        own.run = self._run_stream.next_run(index, wait_s)
        return own.run is not None

    def _agree(self, *, stopping: bool) -> None:
        self._round = self.coordinator.agree_runs([own.run for own in self._lane_runs], stopping=stopping)
        self._over = self._round.over
        for own, verdicts in zip(self._lane_runs, self._round.verdicts, strict=True):
            own.verdicts, own.ran = [v for v in verdicts if v is not BatchVerdict.RETURN], None

    def _train(self, index: int, lane: LaneRound) -> None:
        own, loop, trains = self._lane_runs[index], self.loop, self._round.trains
        assert loop is not None
        run, count = own.run, len(own.verdicts)
        self._unreported = True
        if run is not None and count:
            learn = np.array([v is BatchVerdict.LEARN for v in own.verdicts], np.uint8)
            ran = loop.run(index, run.batches, learn, keep=run.keep[:count], moments=run.traced)
            own.ran = ran
        elif trains:
            ran = loop.join(index)
        else:
            return
        for stage in ("wait", "forward_backward", "step"):
            lane.stages.seconds[stage] += ran.seconds[stage]
        if ran.ended is Ended.BROKEN:
            raise OtherLaneFailed

    def _finish_batches(self, index: int, lane: LaneRound) -> None:
        own = self._lane_runs[index]
        run, verdicts, ran = own.run, own.verdicts, own.ran
        own.run = own.ran = None
        if run is None:
            return
        trained = 0 if ran is None else ran.trained
        own.done = [] if ran is None else list(_counted(run, verdicts[:trained], ran))
        self.coordinator.ledger.undo(run.batches.ranges[trained : len(verdicts)], verdicts[trained:])
        if ran is not None and run.traced:
            self._trace(index, run, ran)
        # Refused: the stream rewinds this lane to the applied offsets (PROTOCOL 6).
        with contextlib.suppress(Refused):
            self._run_stream.finish_run(index, run, ran)

    def _return_unused(self, index: int, lane: LaneRound) -> None:
        run, self._lane_runs[index].run = self._lane_runs[index].run, None
        if run is not None:
            self._run_stream.finish_run(index, run, None)

    def _report_round(self) -> None:
        assert self.loop is not None
        self.step = self._first_step + self.loop.dense_steps
        rows = 0
        for own in self._lane_runs:
            for part, predictions in own.done:
                rows += len(part)
                self.callback.on_trained(part, predictions)
            own.done = []
        self.callback.on_stepped(self.step, rows)
        self.coordinator.end_round()

    def _new_lanes(self) -> list[LaneRound]:
        return [LaneRound() for _ in range(self.lanes)]

    def _trace(self, index: int, run: TrainRun, ran: Ran) -> None:
        moments = ran.moments_ns
        if moments is None:
            return
        starts = run.starts
        for k, ranges in enumerate(run.batches.ranges[: ran.trained]):
            at = dict(zip(MOMENTS, moments[k].tolist(), strict=True))
            request_ids = run.samples.request_ids[starts[k] : starts[k + 1]]
            training = start_training(ranges, request_ids, at["looked_up"])
            if training is not None:
                error = "" if k < ran.pushed else "the push was refused"
                end_training(training, error, at["pushed"], lane=index, step=self.step, learned=True)


def _counted(run: TrainRun, verdicts: Sequence[BatchVerdict], ran: Ran) -> Iterator[tuple[TrainBatch, F32]]:
    """Yield the samples that count with their predictions (B, L), adjacent batches of one kind together."""
    starts = run.starts
    first = 0
    learned = [verdict is BatchVerdict.LEARN for verdict in verdicts]
    kinds = list(zip(learned, run.replayed, strict=False))
    for k, kind in enumerate(kinds):
        if k + 1 < len(kinds) and kinds[k + 1] == kind:
            continue
        counts, replayed = kind
        low, high = starts[first], starts[k + 1]
        first = k + 1
        if counts:
            whole = (low, high) == (0, len(run.samples))
            part = run.samples if whole else run.samples.part(low, high)
            yield (replace(part, replayed=True) if replayed else part), ran.predictions[low:high]
