"""Promises of every batch stream; see `freshet.batches.stream`.

The adapter's fixture gives a `Scene`: an empty `samples` topic of PARTITIONS partitions, a row service like
the one of the row service's contract (rows stepped by SGD with learning rate 1, nothing applied), and
streams over both.

A stream may look up ahead and push asynchronously. A test that reads the rows therefore calls `flush`
first, and a test in which a batch must contain the one before allows no staleness.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import pytest

from freshet.batches.stream import BatchStream, TrainBatch
from freshet.errors import Refused
from freshet.rows.service import RowService
from freshet.testing.contracts.rowservice import PARTITIONS, push_of
from freshet.types import F32

__all__ = ["BatchStreamContract", "Scene"]

DEADLINE_S = 60.0
WAIT_S = 0.02
"""Wait for a batch that must not come."""


class Scene(Protocol):
    """Log and rows of a stream."""

    rows: RowService
    dense_applied: dict[
        int, int
    ]  # offsets that the trainer reports as applied; a test may set them before `stream`

    def append(self, partition: int, sample_ids: Sequence[int]) -> None:
        """Append one block of samples, which need only their ids and one feature with a table."""

    def stream(
        self, *, lanes: int = 1, batch_rows: int = 8, staleness_rows: int = 1000, mode: str = "hybrid"
    ) -> BatchStream:
        """Return a new stream from the applied offsets, as after a restart; `mode`: `train.mode`."""


def await_batch(stream: BatchStream, lane: int = 0) -> TrainBatch:
    """Return the next batch, which must come."""
    deadline = time.monotonic() + DEADLINE_S
    while (batch := stream.next_batch(lane, 1.0)) is None:
        assert time.monotonic() < deadline, "no batch came"
    return batch


def await_any_batch(stream: BatchStream, lanes: Sequence[int]) -> tuple[int, TrainBatch]:
    """Return the next batch of any lane that has one, and the lane."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        for lane in lanes:
            if (batch := stream.next_batch(lane, WAIT_S)) is not None:
                return lane, batch
        assert time.monotonic() < deadline, "no batch came"


def flush(stream: BatchStream) -> None:
    """Wait until all pushes were answered."""
    assert stream.flush(DEADLINE_S), "pushes were not answered"


def gradients_of(batch: TrainBatch, value: float = 0.0) -> list[F32]:
    """Return the same gradient for every row."""
    return [np.full(group.rows.shape, value, np.float32) for group in batch.inputs.groups]


def train(stream: BatchStream, samples: int, lane: int = 0) -> list[TrainBatch]:
    """Take batches and push their gradients until so many samples came."""
    batches: list[TrainBatch] = []
    while sum(map(len, batches)) < samples:
        batches.append(await_batch(stream, lane))
        stream.push_gradients(lane, batches[-1], gradients_of(batches[-1]))
    flush(stream)
    return batches


def spans(batch: TrainBatch) -> dict[int, tuple[int, int]]:
    """Return {partition: (start, stop)}."""
    return {r.partition: (r.start, r.stop) for r in batch.ranges}


def firsts(applied: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Return {partition: offset to rewind to}."""
    return {partition: int(offsets[0]) for partition, offsets in applied.items()}


class BatchStreamContract:
    """Subclass it and define the fixture `scene`."""

    answers_at_once = True
    """False: `push_gradients` returns before its push was answered, so that it cannot raise Refused."""

    @pytest.fixture
    def scene(self) -> Iterator[Scene]:
        """Return an empty scene, see the module."""
        raise NotImplementedError("define the fixture `scene`")

    # Batches

    def test_without_samples_there_is_no_batch(self, scene: Scene) -> None:
        stream = scene.stream()
        assert stream.next_batch(0, WAIT_S) is None
        stream.close()

    def test_every_block_comes_once_in_order_and_ranges_join(self, scene: Scene) -> None:
        for i in range(12):
            scene.append(i % PARTITIONS, [10 * i, 10 * i + 1, 10 * i + 2])
        stream = scene.stream(batch_rows=7)
        batches = train(stream, 36)
        ids = [int(i) for batch in batches for i in batch.sample_ids]
        assert sorted(ids) == sorted(10 * i + j for i in range(12) for j in range(3))
        position = dict.fromkeys(range(PARTITIONS), 0)
        for batch in batches:
            assert len(spans(batch)) == len(batch.ranges), "at most one range per partition"
            for partition, (start, stop) in spans(batch).items():
                assert start == position[partition]
                position[partition] = stop
        assert position == {0: 6, 1: 6}
        assert firsts(scene.rows.applied()) == position
        assert stream.next_batch(0, WAIT_S) is None
        stream.close()

    def test_a_batch_is_whole_blocks_unless_one_exceeds_its_rows(self, scene: Scene) -> None:
        for block in ([1, 2, 3], [4, 5, 6], list(range(10, 30)), [7]):
            scene.append(0, block)
        stream = scene.stream(batch_rows=8)
        sizes = [len(batch) for batch in train(stream, 27)]
        stream.close()
        assert max(sizes) == 20
        assert all(size <= 8 for size in sizes if size != 20)

    def test_little_traffic_makes_a_batch_without_waiting_for_more(self, scene: Scene) -> None:
        stream = scene.stream(batch_rows=256)
        scene.append(1, [5])
        batch = await_batch(stream)
        assert batch.sample_ids.tolist() == [5]
        assert spans(batch) == {1: (0, 1)}
        stream.push_gradients(0, batch, gradients_of(batch))
        stream.close()

    def test_the_columns_of_a_batch_fit_each_other(self, scene: Scene) -> None:
        scene.append(0, [1, 2, 3])
        stream = scene.stream()
        batch = await_batch(stream)
        assert len(batch) == batch.inputs.size == 3
        for column in (batch.request_ids, batch.event_times_ms, *batch.segments.values()):
            assert len(column) == 3
        labels = batch.inputs.labels
        assert labels is not None
        assert len(labels.index) == len(labels.value) == len(labels.weight) == 3
        for group in batch.inputs.groups:
            assert len(group.positions) == int(group.feature_starts[-1])
            assert group.positions.max(initial=-1) < len(group.rows)
        stream.push_gradients(0, batch, gradients_of(batch))
        stream.close()

    def test_lanes_own_partitions_of_their_own(self, scene: Scene) -> None:
        for i in range(8):
            scene.append(i % PARTITIONS, [i])
        stream = scene.stream(lanes=2, batch_rows=1)
        owners: dict[int, set[int]] = {}
        for lane in (0, 1):
            for batch in train(stream, 4, lane):
                for partition in spans(batch):
                    owners.setdefault(partition, set()).add(lane)
        stream.close()
        assert sorted(owners) == list(range(PARTITIONS))
        assert all(len(lanes) == 1 for lanes in owners.values())

    # Gradients

    def test_gradients_reach_the_rows(self, scene: Scene) -> None:
        scene.append(0, [1, 2])
        scene.append(0, [1, 2])
        stream = scene.stream(batch_rows=2, staleness_rows=0)
        first = await_batch(stream)
        before = [group.rows.copy() for group in first.inputs.groups]
        stream.push_gradients(0, first, gradients_of(first, 1.5))
        second = await_batch(stream)
        for rows, group in zip(before, second.inputs.groups, strict=True):
            np.testing.assert_allclose(rows - group.rows, 1.5, rtol=1e-5)
        stream.push_gradients(0, second, gradients_of(second))
        stream.close()

    def test_a_batch_returned_unused_is_issued_again(self, scene: Scene) -> None:
        scene.append(0, [1, 2, 3])
        stream = scene.stream()
        batch = await_batch(stream)
        ids = batch.sample_ids.tolist()
        stream.push_gradients(0, batch, None)
        assert firsts(scene.rows.applied())[0] == 0
        again = await_batch(stream)
        assert again.sample_ids.tolist() == ids
        stream.push_gradients(0, again, gradients_of(again))
        flush(stream)
        assert firsts(scene.rows.applied())[0] == 1
        stream.close()

    def test_a_batch_applied_meanwhile_is_skipped(self, scene: Scene) -> None:
        scene.append(0, [1])
        stream = scene.stream()
        batch = await_batch(stream)
        assert scene.rows.push(push_of({0: (0, 1)}, {}))
        before = batch.inputs.groups[0].rows.copy()
        stream.push_gradients(0, batch, gradients_of(batch, 1.0))
        flush(stream)
        scene.append(0, [1])
        after = await_batch(stream)
        assert spans(after) == {0: (1, 2)}
        np.testing.assert_array_equal(after.inputs.groups[0].rows, before)
        stream.push_gradients(0, after, gradients_of(after))
        stream.close()

    def test_a_refused_batch_voids_the_following_ones(self, scene: Scene) -> None:
        for i in range(4):
            scene.append(0, [i, i])
        stream = scene.stream(batch_rows=4)
        batch = await_batch(stream)
        assert spans(batch) == {0: (0, 2)}
        assert scene.rows.push(push_of({0: (0, 1)}, {}))
        with pytest.raises(Refused) if self.answers_at_once else contextlib.nullcontext():
            stream.push_gradients(0, batch, gradients_of(batch, 1.0))
        flush(stream)
        assert firsts(scene.rows.applied())[0] == 1
        again = await_batch(stream)
        while not self.answers_at_once and spans(again)[0][0] == 2:  # looked up before the refusal: void
            stream.push_gradients(0, again, gradients_of(again, 1.0))
            again = await_batch(stream)
        assert spans(again)[0][0] == 1
        stream.push_gradients(0, again, gradients_of(again))
        train(stream, 8 - 2 - len(again))
        assert firsts(scene.rows.applied())[0] == 4
        stream.close()

    # Permits

    def test_a_lane_gets_no_batch_while_too_many_rows_are_in_flight(self, scene: Scene) -> None:
        for i in range(4):
            scene.append(i % PARTITIONS, [i] * 4)
        stream = scene.stream(lanes=2, batch_rows=4, staleness_rows=3)
        seen: list[int] = []
        lane, held = await_any_batch(stream, (0, 1))
        for turn in range(5):
            assert stream.next_batch(0, WAIT_S) is None if lane == 1 else stream.next_batch(1, WAIT_S) is None
            if turn == 1:
                stream.push_gradients(lane, held, None)
            else:
                stream.push_gradients(lane, held, gradients_of(held))
                seen += held.sample_ids.tolist()
            if turn < 4:
                lane, held = await_any_batch(stream, (0, 1))
        assert sorted(seen) == [i for i in range(4) for _ in range(4)]
        stream.close()

    def test_lanes_work_side_by_side_within_the_bound(self, scene: Scene) -> None:
        for partition in range(PARTITIONS):
            scene.append(partition, [partition] * 4)
        stream = scene.stream(lanes=2, batch_rows=4, staleness_rows=4)
        batches = [await_batch(stream, lane) for lane in (0, 1)]
        for lane, batch in enumerate(batches):
            stream.push_gradients(lane, batch, gradients_of(batch))
        stream.close()

    # Modes

    def test_in_mode_sync_a_batch_has_all_pushes_of_the_former_step(self, scene: Scene) -> None:
        for partition in range(PARTITIONS):
            for _ in range(3):
                scene.append(partition, [7, 7])
        stream = scene.stream(lanes=2, batch_rows=2, mode="sync")
        rows = None
        for _ in range(3):
            step = [await_batch(stream, lane) for lane in (0, 1)]
            (first,), (second,) = (batch.inputs.groups for batch in step)
            np.testing.assert_array_equal(first.rows, second.rows)
            if rows is not None:
                np.testing.assert_allclose(rows - first.rows, 2.0, rtol=1e-5)
            rows = first.rows.copy()
            stream.push_gradients(1, step[1], gradients_of(step[1], 1.0))
            assert stream.next_batch(1, WAIT_S) is None, "the other lane's push is part of the step"
            stream.push_gradients(0, step[0], gradients_of(step[0], 1.0))
        stream.close()

    # Restarts

    def test_a_new_stream_goes_on_where_the_rows_are(self, scene: Scene) -> None:
        for i in range(4):
            scene.append(0, [i])
        stream = scene.stream(batch_rows=1)
        train(stream, 2)
        stream.close()
        again = scene.stream(batch_rows=100)
        batch = await_batch(again)
        assert spans(batch) == {0: (2, 4)}
        assert not batch.replayed
        again.push_gradients(0, batch, None)
        again.close()

    def test_no_range_crosses_an_applied_offset_of_another_store(self, scene: Scene) -> None:
        for i in range(5):
            scene.append(0, [i])
            scene.append(1, [10 + i])
        scene.rows.push(push_of({0: (0, 1)}, {}))
        scene.dense_applied.update({0: 3, 1: 0})
        stream = scene.stream(batch_rows=100)
        batches = train(stream, 9)
        stream.close()
        of_zero = [spans(batch)[0] for batch in batches if 0 in spans(batch)]
        assert of_zero[0] == (1, 3)
        assert of_zero[-1][1] == 5
        for batch in batches:
            if spans(batch).get(0) == (1, 3):
                assert len(batch.ranges) == 1, "while splits lie ahead a batch holds a single range"
                assert batch.replayed, "the trainer had it before: it is not measured again"
            elif 0 in spans(batch):
                assert not batch.replayed

    # Looking

    def test_the_lag_counts_blocks_in_no_batch(self, scene: Scene) -> None:
        for i in range(4):
            scene.append(0, [i])
        stream = scene.stream(batch_rows=3)
        train(stream, 3)
        assert stream.lag()[0] == 1
        train(stream, 1)
        assert stream.lag()[0] == 0
        stream.close()

    def test_the_newest_samples_have_rows_from_before_their_step(self, scene: Scene) -> None:
        for _ in range(4):
            scene.append(0, [7, 7])
        stream = scene.stream(batch_rows=2)
        assert list(stream.recent(10)) == []
        seen = []
        for _ in range(4):
            batch = await_batch(stream)
            seen.append([group.rows.copy() for group in batch.inputs.groups])
            stream.push_gradients(0, batch, gradients_of(batch, 1.0))
        flush(stream)
        recent = stream.recent(4)
        assert sum(inputs.size for inputs in recent) == 4
        for inputs, rows in zip(recent, seen[-2:], strict=True):
            for group, expected in zip(inputs.groups, rows, strict=True):
                np.testing.assert_array_equal(group.rows, expected)
        stream.close()

    def test_samples_that_a_store_has_are_not_among_the_newest(self, scene: Scene) -> None:
        for i in range(4):
            scene.append(0, [i])
        first = scene.stream(batch_rows=1)
        train(first, 2)
        first.close()
        scene.dense_applied.update({0: 0, 1: 0})  # the rows know two samples that come again
        again = scene.stream(batch_rows=1)
        batches = train(again, 4)
        assert [batch.replayed for batch in batches] == [True, True, False, False]
        assert sum(inputs.size for inputs in again.recent(10)) == 2
        again.close()

    def test_closing_twice_is_once(self, scene: Scene) -> None:
        stream = scene.stream()
        stream.close()
        stream.close()
