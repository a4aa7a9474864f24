"""Lanes of a native model: native code trains on a run of batches without returning to Python between them.

The coordinator decides on all batches of a run before it begins, in the order of its steps. A lane stops at a
refused push; the vector then loses the batches after it before any other component reads it.

Letters: K batches of a lane's run, L labels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from freshet.batches.stream import RunStream, TrainBatch, TrainRun
from freshet.errors import Refused
from freshet.model.native_loop import MOMENTS, Ended, NativeLoop, Ran
from freshet.observability.spans import end_training, start_training
from freshet.trainer.lanes import LaneRound, Lanes, OtherLaneFailed
from freshet.trainer.step_coordinator import AgreedRuns, BatchVerdict, LocalStepCoordinator
from freshet.types import F32

__all__ = ["RunLanes"]


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
        assert isinstance(self.coordinator, LocalStepCoordinator), "several ranks agree at every step"
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

    def _push_gradients(self, index: int, lane: LaneRound) -> None:
        assert isinstance(self.coordinator, LocalStepCoordinator)
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
            self._run_stream.push_run(index, run, ran)

    def _return_unused(self, index: int, lane: LaneRound) -> None:
        run, self._lane_runs[index].run = self._lane_runs[index].run, None
        if run is not None:
            self._run_stream.push_run(index, run, None)

    def _report_round(self) -> None:
        assert self.loop is not None
        self.step = self._first_step + self.loop.dense_steps
        rows = 0
        for own in self._lane_runs:
            for part, predictions in own.done:
                rows += len(part)
                self.observer.on_trained(part, predictions)
            own.done = []
        self.observer.on_stepped(self.step, rows)

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
