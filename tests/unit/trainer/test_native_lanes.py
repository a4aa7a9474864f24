"""Runs of batches get the verdicts of single batches; the vector names learned batches only."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.batches.stream import RunStream, TrainBatch, TrainRun
from freshet.errors import Refused, Unavailable
from freshet.model import DenseModel
from freshet.model.inputs import Labels, ModelInputs
from freshet.model.native_loop import STAGES, Ended, LoopBatches, NativeLoop, Ran
from freshet.trainer.lanes import RunLanes
from freshet.trainer.process_group import LocalProcessGroup
from freshet.trainer.step_coordinator import BatchVerdict, DenseLedger, StepCoordinator
from freshet.types import Fence, OffsetRange

Ranges = tuple[OffsetRange, ...]


def run_of(ranges: Sequence[Ranges], rows: int = 2, replayed: Sequence[bool] | None = None) -> TrainRun:
    k = len(ranges)
    ids = np.arange(k * rows)
    ones = np.ones(k * rows, np.float32)
    labels = Labels(np.zeros(k * rows, np.uint8), ones, ones)
    dense = np.empty((k * rows, 0), np.float32)
    ends = rows * np.arange(1, k + 1)
    samples = TrainBatch(
        (), Fence(1), ModelInputs(k * rows, (), dense, labels), ids, ids.astype(np.uint64), ids, {}, {}
    )
    batches = LoopBatches((), dense, labels, ids, ends, list(ranges))
    return TrainRun(batches, replayed or [False] * k, np.zeros(k, np.uint8), samples)


def at(partition: int, *offsets: int) -> list[Ranges]:
    return [(OffsetRange(partition, o, o + 1),) for o in offsets]


@dataclass
class Loop:
    """A native loop that trains on every batch except those that a test names."""

    lanes: int
    refuse: set[Ranges] = field(default_factory=set)
    fail: set[Ranges] = field(default_factory=set)
    dense_steps: int = 0
    trained: list[tuple[int, Ranges, int]] = field(default_factory=list)  # lane, ranges, dense weight
    joined: list[int] = field(default_factory=list)
    aborted: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, lane: int, batches: LoopBatches, learn: Any, **_: Any) -> Ran:
        with self.lock:
            self.dense_steps += 1
            n = len(batches.times_ms)
            predictions = np.arange(n, dtype=np.float32)[:, None]
            for k, ranges in enumerate(batches.ranges[: len(learn)]):
                if ranges in self.fail:
                    raise MemoryError("out of tune")
                self.trained.append((lane, ranges, int(learn[k])))
                if ranges in self.refuse:
                    return self.ran(Ended.REFUSED, k + 1, k, predictions)
            return self.ran(Ended.DONE, len(learn), len(learn), predictions)

    def join(self, lane: int) -> Ran:
        self.joined.append(lane)
        return self.ran(Ended.BROKEN if self.aborted else Ended.DONE, 0, 0, np.empty((0, 1), np.float32))

    def abort(self) -> None:
        self.aborted = True

    @staticmethod
    def ran(ended: Ended, trained: int, pushed: int, predictions: Any) -> Ran:
        return Ran(ended, trained, pushed, 0, 0, dict.fromkeys(STAGES, 0.0), predictions)


@dataclass
class Stream:
    """A stream of given runs by lane; stops the lanes after the last."""

    runs: list[deque[TrainRun]]
    stop: threading.Event
    given_back: list[tuple[int, TrainRun, Ran | None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_run(self, lane: int, wait_s: float) -> TrainRun | None:
        with self.lock:
            if self.runs[lane]:
                return self.runs[lane].popleft()
            if not any(self.runs):
                self.stop.set()
        return None

    def finish_run(self, lane: int, run: TrainRun, ran: Ran | None) -> None:
        with self.lock:
            self.given_back.append((lane, run, ran))
        if ran is not None and ran.ended is Ended.REFUSED:
            raise Refused("not next", {})
        if ran is not None and ran.ended is Ended.NOT_HELD:
            raise Unavailable("not held")


@dataclass
class Notes:
    ledger: DenseLedger
    trained_samples: list[tuple[list[int], list[float], bool]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    vectors: list[dict[int, int]] = field(default_factory=list)  # as a version would name them

    def on_trained(self, batch: TrainBatch, predictions: Any) -> None:
        self.trained_samples.append((batch.sample_ids.tolist(), predictions[:, 0].tolist(), batch.replayed))

    def on_stepped(self, step: int, rows: int) -> None:
        self.rows.append(rows)
        self.vectors.append(dict(self.ledger.applied))


def go(
    runs: list[list[TrainRun]], applied: dict[int, int], **options: Any
) -> tuple[Stream, Loop, DenseLedger, Notes]:
    stop, loop, ledger = threading.Event(), Loop(len(runs), **options), DenseLedger(dict(applied))
    stream, notes = Stream([deque(r) for r in runs], stop), Notes(ledger)
    RunLanes(
        cast(RunStream, stream),
        cast(DenseModel, None),
        StepCoordinator(LocalProcessGroup(Fence(1)), ledger),
        notes,
        len(runs),
        0.02,
        stop,
        loop=cast(NativeLoop, loop),
    ).run()
    return stream, loop, ledger, notes


def test_all_batches_of_a_run_count_and_are_reported() -> None:
    _, loop, ledger, notes = go([[run_of(at(0, 0, 1, 2))], [run_of(at(1, 0))]], {0: 0, 1: 0})

    assert ledger.applied == {0: 3, 1: 1}
    assert sorted(loop.trained) == [(0, r, 1) for r in at(0, 0, 1, 2)] + [(1, r, 1) for r in at(1, 0)]
    assert sum(notes.rows) == 8
    assert sorted(len(ids) for ids, _, _ in notes.trained_samples) == [2, 6]
    assert all(ids == predictions for ids, predictions, _ in notes.trained_samples)


def test_lane_without_a_run_joins_the_steps() -> None:
    _, loop, ledger, _ = go([[run_of(at(0, 0, 1, 2))], []], {0: 0, 1: 0})

    assert ledger.applied == {0: 3, 1: 0}
    assert loop.joined == [1]


def test_vector_after_a_refused_push_is_what_was_learned() -> None:
    runs = run_of([*at(0, 0, 1), *at(2, 7), *at(0, 2)])
    stream, _, ledger, notes = go([[runs], [run_of(at(1, 0, 1))]], {0: 0, 1: 0, 2: 7}, refuse={at(2, 7)[0]})

    assert ledger.applied == {0: 2, 1: 2, 2: 8}
    assert notes.vectors == [ledger.applied]
    assert sum(notes.rows) == 2 * (3 + 2)
    assert {ran.pushed for _, _, ran in stream.given_back if ran is not None} == {2}


def test_applied_batches_teach_rows_alone() -> None:
    run = run_of(at(0, 3, 4, 5, 6), replayed=[True, True, True, False])
    _, loop, ledger, notes = go([[run]], {0: 5})

    assert [weight for _, _, weight in loop.trained] == [0, 0, 1, 1]
    assert ledger.applied == {0: 7}
    assert notes.trained_samples == [([4, 5], [4.0, 5.0], True), ([6, 7], [6.0, 7.0], False)]


def test_batches_after_a_returned_one_are_not_learned() -> None:
    run = run_of([*at(0, 0), *at(0, 5), *at(1, 0)])
    stream, loop, ledger, _ = go([[run]], {0: 0, 1: 0})

    assert [ranges for _, ranges, _ in loop.trained] == at(0, 0)
    assert ledger.applied == {0: 1, 1: 0}
    ((_, _, ran),) = stream.given_back
    assert ran is not None
    assert ran.pushed == 1


def test_run_that_misses_the_vector_is_returned_unused() -> None:
    stream, loop, ledger, _ = go([[run_of(at(0, 7, 8))]], {0: 5})

    assert [ran for _, _, ran in stream.given_back] == [None]
    assert loop.trained == []
    assert ledger.applied == {0: 5}


def test_error_in_a_run_ends_all_lanes_and_is_raised() -> None:
    with pytest.raises(MemoryError, match="out of tune"):
        go(
            [[run_of(at(0, i)) for i in range(5)], [run_of(at(1, i)) for i in range(5)]],
            {0: 0, 1: 0},
            fail={at(1, 2)[0]},
        )


LANES = 3
OFFSETS = st.lists(st.integers(0, 6), max_size=6)


@given(st.lists(OFFSETS, min_size=LANES, max_size=LANES), st.data())
def test_verdicts_of_a_run_equal_those_batch_by_batch(lanes: list[list[int]], data: st.DataObject) -> None:
    vector = data.draw(st.fixed_dictionaries({p: st.integers(0, 5) for p in range(2 * LANES)}))
    runs = [
        [(OffsetRange(lane + LANES * data.draw(st.integers(0, 1)), o, o + 1),) for o in offsets]
        for lane, offsets in enumerate(lanes)
    ]
    at_once, one_by_one = DenseLedger(dict(vector)), DenseLedger(dict(vector))

    verdicts = at_once.decide_runs(runs)

    for step in range(max(map(len, runs))):
        offered = [run[step] if step < len(of) else None for run, of in zip(runs, verdicts, strict=True)]
        want = [of[step] if step < len(of) else None for of in verdicts]
        assert one_by_one.decide(offered) == want
    assert at_once.applied == one_by_one.applied
    for run, of in zip(runs, verdicts, strict=True):
        assert BatchVerdict.RETURN not in of[:-1]
        assert len(of) == len(run) or of[-1] is BatchVerdict.RETURN

    # A lane may stop anywhere: the vector then ignores the rest of its run.
    learned = [data.draw(st.integers(0, len(of) - of.count(BatchVerdict.RETURN))) for of in verdicts]
    for run, of, n in zip(runs, verdicts, learned, strict=True):
        at_once.undo(run[n : len(of)], of[n:])
    fresh = DenseLedger(dict(vector))
    fresh.decide_runs([run[:n] for run, n in zip(runs, learned, strict=True)])
    assert at_once.applied == fresh.applied


def test_part_of_a_batch_has_the_columns_of_its_samples() -> None:
    whole = replace(run_of(at(0, 0, 1)).samples, segments={"s": np.arange(4, dtype=np.uint64)})

    part = whole.part(1, 3)

    assert part.sample_ids.tolist() == [1, 2]
    assert part.segments["s"].tolist() == [1, 2]
    assert part.inputs.labels is not None
    assert len(part.inputs.labels.value) == 2
