import threading
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest

from freshet.batches.stream import BatchStream, TrainBatch
from freshet.errors import Refused
from freshet.model import DenseModel, StepResult
from freshet.model.inputs import ModelInputs
from freshet.trainer.lanes import Lanes
from freshet.trainer.process_group import LocalProcessGroup
from freshet.trainer.step_coordinator import DenseLedger, StepCoordinator
from freshet.types import Fence, OffsetRange

EMPTY = ModelInputs(1, (), np.empty((1, 0), np.float32), None)


def batch(partition, start, stop):
    ids = np.zeros(1, np.int64)
    return TrainBatch(
        (OffsetRange(partition, start, stop),), Fence(1), EMPTY, ids, ids.view(np.uint64), ids, {}, {}
    )


@dataclass
class Stream:
    """A stream of given batches by lane; stops the lanes after the last."""

    batches: list[deque[TrainBatch]]
    stop: threading.Event
    given_back: list[Any] = field(default_factory=list)
    refuse: set[OffsetRange] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_batch(self, lane, wait_s):
        with self.lock:
            queue = self.batches[lane]
            if queue:
                return queue.popleft()
            if not any(self.batches):
                self.stop.set()
        return None

    def push_gradients(self, lane, batch, gradients, counts=None):
        with self.lock:
            self.given_back.append((lane, batch.ranges[0], None if gradients is None else list(gradients)))
        if batch.ranges[0] in self.refuse:
            raise Refused("not next", {})


@dataclass
class CountingModel:
    """Counts the rows of a step, with weight 1 or 0."""

    rows: float = 0.0
    steps: int = 0
    fail_at: int | None = None

    def lane(self):
        return CountingLane(self)

    def step(self, lanes):
        self.steps += 1
        for lane in lanes:
            self.rows += lane.sum
            lane.sum = 0.0


@dataclass
class CountingLane:
    model: CountingModel
    sum: float = 0.0
    calls: int = 0

    def forward_backward(self, inputs, dense_weight=1.0):
        self.calls += 1
        if self.calls == self.model.fail_at:
            raise RuntimeError("out of tune")
        self.sum += dense_weight
        return StepResult(
            np.zeros((1, 1), np.float32), [np.full((1, 1), dense_weight)], np.ones(1), np.ones((1, 1))
        )


@dataclass
class Notes:
    trained_ranges: list[OffsetRange] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)

    def on_trained(self, batch, result):
        self.trained_ranges.append(batch.ranges[0])

    def on_stepped(self, step, rows):
        self.steps.append((step, rows))


def run(batches, applied, *, fail_at=None, refuse=()):
    stop, notes, model = threading.Event(), Notes(), CountingModel(fail_at=fail_at)
    stream = Stream([deque(b) for b in batches], stop, refuse=set(refuse))
    ledger = DenseLedger(dict(applied))
    rounds = StepCoordinator(LocalProcessGroup(Fence(1)), ledger)
    Lanes(cast(BatchStream, stream), cast(DenseModel, model), rounds, notes, len(batches), 0.02, stop).run()
    return stream, model, ledger, notes


def test_lanes_step_together_and_return_gradients():
    stream, model, ledger, notes = run([[batch(0, 0, 1), batch(0, 1, 2)], [batch(1, 0, 5)]], {0: 0, 1: 0})

    assert model.rows == 3.0
    assert ledger.applied == {0: 2, 1: 5}
    assert len(stream.given_back) == 3
    assert all(gradients is not None for _, _, gradients in stream.given_back)
    assert len(notes.trained_ranges) == 3


def test_lane_without_data_does_not_delay_the_others():
    _, model, ledger, _ = run([[batch(0, i, i + 1) for i in range(20)], []], {0: 0, 1: 0})

    assert model.rows == 20.0
    assert ledger.applied == {0: 20, 1: 0}


def test_applied_batch_pushes_rows_and_is_not_counted():
    stream, model, _, notes = run([[batch(0, 0, 3)]], {0: 5})

    assert model.rows == 0.0
    assert stream.given_back == [(0, OffsetRange(0, 0, 3), [np.zeros((1, 1))])]
    assert notes.trained_ranges == []


def test_batch_that_misses_the_vector_is_returned_unused():
    stream, model, ledger, _ = run([[batch(0, 7, 9)]], {0: 5})

    assert stream.given_back == [(0, OffsetRange(0, 7, 9), None)]
    assert ledger.applied == {0: 5}
    assert model.steps == 0


def test_refused_push_does_not_stop_the_lanes():
    _, _, ledger, _ = run([[batch(0, 0, 1), batch(0, 1, 2)]], {0: 0}, refuse=[OffsetRange(0, 0, 1)])

    assert ledger.applied == {0: 2}


def test_error_of_one_lane_ends_all_and_is_raised():
    with pytest.raises(RuntimeError, match="out of tune"):
        run(
            [[batch(0, i, i + 1) for i in range(5)], [batch(1, i, i + 1) for i in range(5)]],
            {0: 0, 1: 0},
            fail_at=2,
        )


@dataclass
class StepwiseModel(CountingModel):
    """A model that learns batches in steps of two samples and splits its dense steps between lanes."""

    log: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def lane(self):
        return StepwiseLane(self)

    def dense_steps(self, rows):
        return -(-rows // 2)

    def begin_step(self, lanes):
        self.step(lanes)
        self.note("step")

    def step_part(self, lanes, part, parts):
        self.note("share")

    def note(self, what):
        with self.lock:
            self.log.append(what)


@dataclass
class StepwiseLane(CountingLane):
    model: StepwiseModel
    left: int = 0
    weight: float = 0.0

    def begin_batch(self, inputs, states, dense_weight=1.0, *, dense_steps):
        self.left, self.weight = (inputs.size if dense_steps else min(inputs.size, 2)), dense_weight

    def advance(self):
        self.calls += 1
        if self.calls == self.model.fail_at:
            raise RuntimeError("out of tune")
        self.model.note("advance")
        self.sum += self.weight * min(self.left, 2)
        self.left = max(0, self.left - 2)
        return self.left > 0

    def result(self):
        counts = [np.array([3], np.uint32)]
        return StepResult(np.zeros((1, 1), np.float32), [], np.ones(1), np.ones((1, 1)), counts)


def in_steps(partition, start, stop, rows):
    made = batch(partition, start, stop)
    return replace(made, inputs=replace(made.inputs, size=rows), sample_ids=np.arange(rows), states=[])


def test_lanes_make_dense_steps_within_batches_together():
    stop, notes, model = threading.Event(), Notes(), StepwiseModel()
    batches = [[in_steps(0, 0, 1, 7), in_steps(0, 1, 2, 1)], [in_steps(1, 0, 1, 3), in_steps(1, 1, 2, 0)]]
    stream = Stream([deque(b) for b in batches], stop)
    rounds = StepCoordinator(LocalProcessGroup(Fence(1)), DenseLedger({0: 0, 1: 0}))
    lanes = Lanes(cast(BatchStream, stream), cast(DenseModel, model), rounds, notes, 2, 5.0, stop)
    lanes.run()

    assert model.rows == 7 + 1 + 3 + 0
    assert lanes.step == model.steps == 4 + 1
    assert model.log.count("share") == 2 * model.steps
    steps = [i for i, what in enumerate(model.log) if what == "step"]
    for i in steps:
        assert model.log[i + 1 : i + 3] == ["share"] * 2, "a lane went on before the step was shared out"
    assert len(stream.given_back) == 4


def test_applied_batch_makes_no_dense_step():
    stop, notes, model = threading.Event(), Notes(), StepwiseModel()
    stream = Stream([deque([in_steps(0, 0, 1, 7)])], stop)
    rounds = StepCoordinator(LocalProcessGroup(Fence(1)), DenseLedger({0: 5}))
    lanes = Lanes(cast(BatchStream, stream), cast(DenseModel, model), rounds, notes, 1, 5.0, stop)
    lanes.run()

    assert (model.rows, model.steps, lanes.step) == (0, 0, 0)
    assert stream.given_back[0][2] is not None
    assert notes.trained_ranges == []


def test_lane_that_fails_within_a_batch_ends_the_others():
    stop, model = threading.Event(), StepwiseModel(fail_at=3)
    stream = Stream([deque([in_steps(p, 0, 1, 9)]) for p in range(2)], stop)
    rounds = StepCoordinator(LocalProcessGroup(Fence(1)), DenseLedger({0: 0, 1: 0}))
    lanes = Lanes(cast(BatchStream, stream), cast(DenseModel, model), rounds, Notes(), 2, 5.0, stop)
    with pytest.raises(RuntimeError, match="out of tune"):
        lanes.run()
