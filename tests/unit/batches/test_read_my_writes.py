"""Rows of a stream contain all its pushes, even those that their lookup missed."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from freshet.batches.read_my_writes import LookupResult, ReadMyWrites
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.rows.service import RowStates
from freshet.tables import KnownPushes
from freshet.tables.plan import RowSteps
from freshet.testing.contracts.batches import await_batch, gradients_of
from freshet.testing.contracts.rowservice import BUCKETS, WIDTH, A, B, C, keys_of
from freshet.types import F32, OffsetRange, bucket_of
from tests.fixtures.embedder import SPEC, PipelinedScene, RemoteScene
from tests.fixtures.row_services import HeldRows

DEADLINE_S = 60.0
BATCH = 4
NO_STATE = np.empty((1, 0), np.float32)


class Writes:
    """Pending writes of one-row batches, block by block of partition 0; records the freed ones."""

    def __init__(self) -> None:
        self.own = ReadMyWrites(layout_of(parse_spec(SPEC)))
        self.freed: list[int] = []
        self.blocks = 0

    def give(self, row=A, gradient: float = 1.0):
        group, _ = keys_of([row])
        gradients: F32 = np.full((1, WIDTH), gradient, np.float32)
        block, self.blocks = self.blocks, self.blocks + 1
        return self.own.add(
            [OffsetRange(0, block, block + 1)], [group], [gradients], lambda: self.freed.append(block)
        )

    def row_of(self, begun=None, row=A, pushed: int = 0) -> float:
        """Return a row's first float after pending writes; it was 0, with the blocks below `pushed`."""
        group, _ = keys_of([row])
        values = np.zeros((1, WIDTH), np.float32)
        states = RowStates([NO_STATE], KnownPushes(np.array([[pushed]])))
        self.own.apply_pending(LookupResult([group], states), [values], begun)
        return float(values[0, 0])


@pytest.fixture
def writes() -> Writes:
    return Writes()


def test_rows_get_the_writes_that_their_lookup_missed(writes):
    for gradient in (1.0, 10.0, 100.0):
        writes.give(gradient=gradient)
    assert [writes.row_of(pushed=n) for n in range(4)] == [-111.0, -110.0, -100.0, 0.0]
    assert writes.own.stepped_rows == 6


def test_partition_without_known_pushes_contains_no_write(writes):
    writes.give()
    group, _ = keys_of([A])
    values = np.zeros((1, WIDTH), np.float32)
    writes.own.apply_pending(
        LookupResult([group], RowStates([NO_STATE], KnownPushes(np.empty((1, 0), np.int64)))), [values]
    )
    assert values[0, 0] == -1.0


def test_rows_get_writes_that_other_buckets_contain(writes):
    """A push had reached some of the buckets when the rows were read."""
    group, rows = keys_of([A, C])
    assert len({int(bucket) for bucket in bucket_of(group.keys, BUCKETS)}) == 2
    gradients: F32 = np.full((2, WIDTH), 1.0, np.float32)
    writes.own.add([OffsetRange(0, 0, 1)], [group], [gradients])
    for reached in (A, C):
        moments = np.zeros(BUCKETS, np.uint32)
        moments[bucket_of(group.keys[[rows.index(reached)]], BUCKETS)] = 1
        values = np.zeros((2, WIDTH), np.float32)
        states = RowStates([np.empty((2, 0), np.float32)], KnownPushes(np.array([[0], [1]]), {0: moments}))
        writes.own.apply_pending(LookupResult([group], states), [values])
        assert dict(zip(rows, values[:, 0].tolist(), strict=True)) == {A: -1.0, C: -1.0} | {reached: 0.0}


def test_lookup_contains_writes_acknowledged_before_it(writes):
    """A new owner of a shard does not know which pushes are applied."""
    early = writes.own.begin_lookup()
    write = writes.give()
    writes.own.acknowledge(write)
    late = writes.own.begin_lookup()
    assert (writes.row_of(late), writes.row_of(early)) == (0.0, -1.0)


def test_only_rows_of_the_write_are_stepped(writes):
    writes.give(row=A)
    assert [writes.row_of(row=row) for row in (A, B, C)] == [-1.0, 0.0, 0.0]


def test_write_is_kept_while_a_lookup_may_have_missed_it(writes):
    early = writes.own.begin_lookup()
    write = writes.give()
    other = writes.own.begin_lookup()
    writes.own.acknowledge(write)
    after = writes.own.begin_lookup()
    assert writes.freed == []
    assert writes.row_of(early) == -1.0
    assert writes.freed == []
    writes.own.end_lookup(other)
    assert writes.freed == [0]
    assert writes.row_of(after) == 0.0


def test_dropped_write_steps_no_rows_and_is_freed(writes):
    begun = writes.own.begin_lookup()
    for write in (writes.give(), writes.give()):
        writes.own.drop(write)
    assert writes.freed == [0, 1]
    assert writes.row_of(begun) == 0.0


def test_earlier_batch_drops_the_writes_from_there_on(writes):
    for gradient in (1.0, 10.0, 100.0):
        writes.give(gradient=gradient)
    writes.own.drop_from([OffsetRange(0, 3, 4)])
    writes.own.drop_from([OffsetRange(1, 0, 1)])
    assert writes.freed == []
    writes.own.drop_from([OffsetRange(0, 1, 2)])
    assert writes.freed == [1, 2]
    assert writes.row_of() == -1.0


def test_keep_newest_keeps_only_the_newest_writes(writes):
    for gradient in (1.0, 10.0, 100.0):
        writes.give(gradient=gradient)
    writes.own.keep_newest(2)
    assert writes.freed == [0]
    assert writes.row_of() == -110.0


def test_write_dropped_during_a_step_is_freed_after_it(writes, monkeypatch):
    """The next batch may reuse the memory of the slot."""
    begun, write = writes.own.begin_lookup(), writes.give()
    stepping, go_on = threading.Event(), threading.Event()
    step = RowSteps.step

    def slow(*args):
        stepping.set()
        assert go_on.wait(DEADLINE_S)
        return step(*args)

    monkeypatch.setattr(RowSteps, "step", slow)
    thread = threading.Thread(target=writes.row_of, args=(begun,))
    thread.start()
    assert stepping.wait(DEADLINE_S)
    writes.own.drop(write)
    assert writes.freed == []
    go_on.set()
    thread.join()
    assert writes.freed == [0]


# --- in a stream


@pytest.fixture(params=["in one process", "through an embedder"])
def scene(tmp_path: Path, request: pytest.FixtureRequest):
    log = SqliteEventLog(tmp_path)
    if request.param == "in one process":
        yield PipelinedScene(log, read_my_writes=True)
    else:
        remote = RemoteScene(log, read_my_writes=True)
        yield remote
        remote.close()
    log.close()


def test_prefetched_rows_equal_rows_looked_up_now(scene):
    """All lookups are answered before the first push, and every batch has one row."""
    scene.rows = rows = HeldRows()
    for _ in range(6):
        scene.append(0, [7] * BATCH)
    for _ in range(6):
        rows.lookups.release()
    stream = scene.stream(batch_rows=BATCH, staleness_rows=5 * BATCH)
    batch = await_batch(stream)
    with rows.changed:
        assert rows.changed.wait_for(lambda: rows.lookups_asked == 6, DEADLINE_S)

    found = []
    for i in range(6):
        batch = batch if i == 0 else await_batch(stream)
        found.append(batch.inputs.groups[0].rows[0].copy())
        stream.push_gradients(0, batch, gradients_of(batch, float(10**i)))
    np.testing.assert_allclose(
        [found[0] - row for row in found],
        [[sum(10**j for j in range(i))] * WIDTH for i in range(6)],
        rtol=1e-5,
    )
    assert stream.stepped_rows == sum(range(6))
    for _ in range(6):
        rows.pushes.release()
    assert stream.flush(DEADLINE_S)
    stream.close()
    (values,) = rows.rows().values()
    np.testing.assert_allclose(found[0] - np.array(values), 111111.0, rtol=1e-5)


def test_writes_in_a_lookup_are_not_applied_again(scene):
    scene.rows = rows = HeldRows()
    for _ in range(8):
        rows.lookups.release()
        rows.pushes.release()
    stream = scene.stream(batch_rows=BATCH, staleness_rows=BATCH)
    before = None
    for i in range(4):
        scene.append(0, [7] * BATCH)
        batch = await_batch(stream)
        row = batch.inputs.groups[0].rows[0].copy()
        before = row if before is None else before
        np.testing.assert_allclose(before - row, i, rtol=1e-5, atol=1e-6)
        stream.push_gradients(0, batch, gradients_of(batch, 1.0))
        assert stream.flush(DEADLINE_S)
    stream.close()


def test_reissued_samples_do_not_count_as_new(scene):
    """After a rewind the rows contain no dropped write."""
    scene.rows = rows = HeldRows()
    rows.lookups.open()  # how many lookups there are depends on how many batches were out at a rewind
    for _ in range(3):
        scene.append(0, [7] * BATCH)
    stream = scene.stream(batch_rows=BATCH, staleness_rows=2 * BATCH)
    first = await_batch(stream)
    before = first.inputs.groups[0].rows[0].copy()
    second = await_batch(stream)
    stream.push_gradients(0, second, None)  # voids the lane: batches that are out are issued again
    stream.push_gradients(0, first, gradients_of(first, 1.0))
    again = await_batch(stream)
    while again.ranges != first.ranges:  # sent before the embedder rewound
        stream.push_gradients(0, again, None)
        again = await_batch(stream)
    np.testing.assert_array_equal(again.inputs.groups[0].rows[0], before)
    rows.pushes.open()
    stream.push_gradients(0, again, None)
    stream.close()
