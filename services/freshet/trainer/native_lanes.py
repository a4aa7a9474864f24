"""Lanes of a native model: a round is a run of batches, which native code goes through without Python between
two of them.

All batches of a run are judged before it begins, in the order of its steps. A lane whose push is refused
stops there, and the vector is set back to what the lane has learned before anything reads it.

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
from freshet.trainer.lanes import Lanes, OtherFailed, Seat
from freshet.trainer.step_coordinator import AgreedRuns, AloneRounds, Counts
from freshet.types import F32

__all__ = ["RunLanes"]


@dataclass(slots=True)
class _Brought:
    """What one lane brings to the round."""

    run: TrainRun | None = None
    verdicts: list[Counts] = field(default_factory=list)  # of batches that are trained on
    ran: Ran | None = None
    done: list[tuple[TrainBatch, F32]] = field(default_factory=list)  # counted, not reported yet


@dataclass
class RunLanes(Lanes):
    """See `Lanes`; of one process, on rows of the same process."""

    loop: NativeLoop | None = None
    _brought: list[_Brought] = field(default_factory=list)
    _round: AgreedRuns = field(default_factory=lambda: AgreedRuns((), trains=False))
    _first_step: int = 0

    def __post_init__(self) -> None:
        assert self.loop is not None, "the loop that the lanes run"
        assert self.loop.lanes == self.lanes, "as many lanes as the loop has"
        self._first_step = self.step - self.loop.dense_steps
        self._brought = [_Brought() for _ in range(self.lanes)]

    @property
    def _runs(self) -> RunStream:
        return self.stream  # type: ignore[return-value]  # whoever has a loop has such a stream

    def _abort(self) -> None:
        super()._abort()
        assert self.loop is not None
        self.loop.abort()

    def _poll(self, index: int, seat: Seat, wait_s: float) -> bool:
        brought = self._brought[index]
        brought.run = self._runs.take_run(index, wait_s)
        return brought.run is not None

    def _judge(self, *, stopping: bool) -> None:
        assert isinstance(self.rounds, AloneRounds), "other ranks are met at every step"
        self._round = self.rounds.agree_runs([b.run for b in self._brought], stopping=stopping)
        self._over = self._round.over
        for brought, verdicts in zip(self._brought, self._round.verdicts, strict=True):
            brought.verdicts, brought.ran = [v for v in verdicts if v is not Counts.BACK], None

    def _train(self, index: int, seat: Seat) -> None:
        brought, loop, trains = self._brought[index], self.loop, self._round.trains
        assert loop is not None
        run, count = brought.run, len(brought.verdicts)
        self._stepped = True
        if run is not None and count:
            learn = np.array([v is Counts.WHOLE for v in brought.verdicts], np.uint8)
            ran = loop.run(index, run.batches, learn, keep=run.keep[:count], moments=run.traced)
            brought.ran = ran
        elif trains:
            ran = loop.join(index)
        else:
            return
        for stage in ("wait", "forward_backward", "step"):
            seat.stages.seconds[stage] += ran.seconds[stage]
        if ran.ended is Ended.BROKEN:
            raise OtherFailed

    def _give_back(self, index: int, seat: Seat) -> None:
        assert isinstance(self.rounds, AloneRounds)
        brought = self._brought[index]
        run, verdicts, ran = brought.run, brought.verdicts, brought.ran
        brought.run = brought.ran = None
        if run is None:
            return
        trained = 0 if ran is None else ran.trained
        brought.done = [] if ran is None else list(_counted(run, verdicts[:trained], ran))
        self.rounds.ledger.set_back(run.batches.ranges[trained : len(verdicts)], verdicts[trained:])
        if ran is not None and run.traced:
            self._trace(index, run, ran)
        # Refused: the stream rewinds this lane; what it issues next continues what is applied (PROTOCOL 6).
        with contextlib.suppress(Refused):
            self._runs.give_back_run(index, run, ran)

    def _give_back_unused(self, index: int, seat: Seat) -> None:
        run, self._brought[index].run = self._brought[index].run, None
        if run is not None:
            self._runs.give_back_run(index, run, None)

    def _tell(self) -> None:
        assert self.loop is not None
        self.step = self._first_step + self.loop.dense_steps
        rows = 0
        for brought in self._brought:
            for part, predictions in brought.done:
                rows += len(part)
                self.observer.trained(part, predictions)
            brought.done = []
        self.observer.stepped(self.step, rows)

    def _new_seats(self) -> list[Seat]:
        return [Seat() for _ in range(self.lanes)]

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


def _counted(run: TrainRun, verdicts: Sequence[Counts], ran: Ran) -> Iterator[tuple[TrainBatch, F32]]:
    """Samples that count, with their predictions: batches side by side that are all replayed, or none."""
    starts = run.starts
    first = 0
    kinds = [(verdict is Counts.WHOLE, again) for verdict, again in zip(verdicts, run.replayed, strict=False)]
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
