import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from freshet.errors import DataLost, Fenced, Refused, Unavailable
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.testing.conditions import wait_for as condition
from freshet.testing.contracts.batches import await_batch, gradients_of
from freshet.testing.contracts.rowservice import WIDTH
from freshet.testing.faults import Faulty
from freshet.testing.reference import ReferenceRowService
from freshet.trainer.lanes import Lanes
from freshet.trainer.process_group import LocalProcessGroup
from freshet.trainer.step_coordinator import BatchVerdict, DenseLedger, StepCoordinator
from freshet.types import Fence
from tests.fixtures.embedder import IdDecoder, PipelinedScene
from tests.fixtures.row_services import HeldRows, HeldRowsAfter, LateRows, LossyRows

DEADLINE_S = 60.0
BATCH = 4


@pytest.fixture
def scene(tmp_path: Path):
    log = SqliteEventLog(tmp_path)
    yield PipelinedScene(log)
    log.close()


def wait_for(condition, of: HeldRows):
    with of.changed:
        assert of.changed.wait_for(condition, DEADLINE_S)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_staleness_of_k_batches_allows_k_plus_1_in_flight(scene, k):
    scene.rows = rows = HeldRows()
    for i in range(12):
        scene.append(0, [i] * BATCH)
    stream = scene.stream(batch_rows=BATCH, staleness_rows=k * BATCH)
    wait_for(lambda: rows.lookups_asked == 1 + k, rows)

    for _ in range(12):
        rows.lookups.release()
    batches = [await_batch(stream) for _ in range(1 + k)]
    assert stream.next_batch(0, 0.1) is None
    assert rows.lookups_asked == 1 + k, "a lookup went ahead without a credit"
    assert stream.limiter.batches() == 1 + k

    stream.push_gradients(0, batches[0], gradients_of(batches[0]))
    wait_for(lambda: rows.pushes_asked == 1, rows)
    assert stream.next_batch(0, 0.05) is None, "the push is not acknowledged: its permit is not free"
    rows.pushes.release()
    batches.append(await_batch(stream))
    assert stream.limiter.batches() == 1 + k
    for _ in range(12):
        rows.pushes.release()
    for batch in batches[1:]:
        stream.push_gradients(0, batch, gradients_of(batch))
    stream.close()


def test_prefetching_lane_leaves_a_permit_to_the_other(scene):
    scene.rows = rows = HeldRows()
    for _ in range(30):
        rows.lookups.release()
        rows.pushes.release()
    for i in range(10):
        scene.append(0, [i] * BATCH)
    stream = scene.stream(lanes=2, batch_rows=BATCH, staleness_rows=BATCH)
    first = [await_batch(stream, 0), await_batch(stream, 0)]
    scene.append(1, [100] * BATCH)
    deadline = time.monotonic() + DEADLINE_S
    while stream.limiter.waiting() < 2:
        assert time.monotonic() < deadline

    stream.push_gradients(0, first[0], gradients_of(first[0]))

    other = await_batch(stream, 1)
    assert other.sample_ids.tolist() == [100] * BATCH
    stream.push_gradients(1, other, gradients_of(other))
    stream.push_gradients(0, first[1], gradients_of(first[1]))
    stream.close()


def test_gradients_are_copied_before_the_call_returns(scene):
    scene.rows = rows = HeldRows()
    scene.append(0, [1])
    rows.lookups.release()
    stream = scene.stream(batch_rows=1)
    batch = await_batch(stream)
    before = batch.inputs.groups[0].rows.copy()
    gradients = gradients_of(batch, 1.0)
    stream.push_gradients(0, batch, gradients)
    for gradient in gradients:
        gradient[:] = 1e9
    rows.pushes.release()
    stream.close()
    (values,) = rows.rows().values()
    np.testing.assert_allclose(before[0] - np.array(values), 1.0, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("mode", "lanes"), [("hybrid", 2), ("sync", 1), ("sync", 2)])
def test_every_sample_is_learned_once_despite_faults(scene, seed, mode, lanes):
    """Requests and answers are lost; shards restart without their unflushed rows."""
    scene.rows = rows = LossyRows(seed, losses=0.1, deaths=0.03)
    for i in range(400):
        scene.append(i % 2, [i])
    ledger = DenseLedger({0: 0, 1: 0})
    dense: list[int] = []
    scene.told = ledger.applied_offsets
    stream = scene.stream(lanes=lanes, batch_rows=5, staleness_rows=20, mode=mode)
    deadline = time.monotonic() + DEADLINE_S
    while sum(rows.counts().values()) < 400 or not rows.quiet.is_set():
        assert time.monotonic() < deadline, f"{sum(rows.counts().values())} of 400 samples were applied"
        taken = [stream.next_batch(lane, 0.001) for lane in range(lanes)]
        verdicts = ledger.decide([batch and batch.ranges for batch in taken])
        for lane, (batch, verdict) in enumerate(zip(taken, verdicts, strict=True)):
            if batch is not None:
                dense += batch.sample_ids.tolist() if verdict is BatchVerdict.LEARN else []
                stream.push_gradients(
                    lane, batch, None if verdict is BatchVerdict.RETURN else gradients_of(batch, 1.0)
                )
        if sum(rows.counts().values()) >= 300:
            rows.quiet.set()
    stream.close()
    rows.close()

    assert set(rows.counts().values()) == {1}
    assert sorted(dense) == list(range(400))
    assert stream.limiter.batches() == 0
    assert rows.lost > 0
    assert (rows.looked_after > 0) is ((mode, lanes) == ("sync", 1))


def test_owner_change_during_idle_reissues_lost_samples(scene):
    scene.rows = rows = LossyRows(0, losses=0.0, deaths=0.0)
    for i in range(10):
        scene.append(0, [i])
    stream = scene.stream(batch_rows=10, staleness_rows=10)
    batch = await_batch(stream)
    stream.push_gradients(0, batch, gradients_of(batch, 1.0))
    assert stream.flush(DEADLINE_S)
    assert len(rows.counts()) == 10

    rows.die()
    assert rows.counts() == {}

    again = await_batch(stream)
    assert again.sample_ids.tolist() == list(range(10))
    stream.push_gradients(0, again, gradients_of(again, 1.0))
    stream.close()
    rows.close()
    assert set(rows.counts().values()) == {1}


def test_batches_of_a_lost_trainer_are_issued_again(scene):
    for i in range(6):
        scene.append(0, [i])
    stream = scene.stream(batch_rows=2, staleness_rows=2)
    held = [await_batch(stream), await_batch(stream)]
    assert [batch.sample_ids.tolist() for batch in held] == [[0, 1], [2, 3]]

    stream.abandon(0, held)

    for expected in ([0, 1], [2, 3], [4, 5]):
        batch = await_batch(stream)
        assert batch.sample_ids.tolist() == expected
        stream.push_gradients(0, batch, gradients_of(batch))
    assert stream.flush(DEADLINE_S)
    assert scene.rows.applied()[0] == [6]
    stream.close()


def test_a_trainer_lost_during_a_lookup_costs_no_batch(scene):
    """In mode sync the trainer's own call looks up; each loss gives its memory and permit back."""
    scene.rows = rows = HeldRows()
    for i in range(2):
        scene.append(0, [i])
    stream = scene.stream(batch_rows=1, mode="sync")
    for attempt in range(1, 12):  # more than the slots of the lane
        with ThreadPoolExecutor(1) as threads:
            taken = threads.submit(stream.next_batch, 0, DEADLINE_S)
            wait_for(lambda attempt=attempt: rows.lookups_asked == attempt, rows)
            stream.abandon(0, [])
            rows.lookups.release()
            assert taken.result(DEADLINE_S) is None
    for _ in range(2):
        rows.lookups.release()
        rows.pushes.release()

    for expected in ([0], [1]):
        batch = await_batch(stream)
        assert batch.sample_ids.tolist() == expected
        stream.push_gradients(0, batch, gradients_of(batch))
    assert stream.flush(DEADLINE_S)
    assert stream.limiter.batches() == 0
    stream.close()


def late_stream(scene, monkeypatch, **options):
    """Return a stream in mode `sync` that does not wait longer for rows than for a batch, and its rows."""
    monkeypatch.setattr("freshet.embedder.prefetch_lane.ROWS_WAIT_S", 0.0)
    scene.rows = rows = LateRows()
    return scene.stream(batch_rows=1, mode="sync", **options), rows


def test_trainer_stops_while_no_shard_can_be_reached(scene, monkeypatch):
    stream, rows = late_stream(scene, monkeypatch)
    rows.down.set()
    rows.answer.set()
    for i in range(2):
        scene.append(0, [i])
    stop, ledger = threading.Event(), DenseLedger(dict.fromkeys(range(2), 0))
    model, callback = Mock(spec=["lane", "step"]), Mock(on_stepped=lambda *_: rounds.append(rows.failed))
    rounds: list[int] = []
    lanes = Lanes(
        stream, model, StepCoordinator(LocalProcessGroup(Fence(1)), ledger), callback, 1, 0.02, stop
    )
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(lanes.run)
        condition(lambda: bool(rounds) and rounds[-1] > 1)
        stop.set()
        ended.result(DEADLINE_S)
    assert stream.limiter.batches() == 0

    rows.down.clear()

    for expected in ([0], [1]):
        batch = await_batch(stream)
        assert batch.sample_ids.tolist() == expected
        stream.push_gradients(0, batch, gradients_of(batch))
    stream.close()


def test_late_rows_are_used_if_no_lane_has_stepped(scene, monkeypatch):
    stream, rows = late_stream(scene, monkeypatch)
    for i in range(2):
        scene.append(0, [i])
    while not rows.looked_up:
        assert stream.next_batch(0, 0.02) is None
    assert stream.limiter.batches() == 0, "no other lane waits for this one"
    rows.answer.set()

    batch = await_batch(stream)

    assert (batch.sample_ids.tolist(), rows.looked_up) == ([0], 1)
    stream.push_gradients(0, batch, gradients_of(batch))
    stream.close()


def test_late_rows_are_looked_up_again_after_a_step(scene, monkeypatch):
    stream, rows = late_stream(scene, monkeypatch, lanes=2)
    for partition in range(2):
        scene.append(partition, [7])
    while not rows.looked_up:
        assert stream.next_batch(1, 0.02) is None
    other = await_batch(stream, 0)
    stream.push_gradients(0, other, gradients_of(other, 1.0))
    assert stream.flush(DEADLINE_S)
    rows.answer.set()

    batch = await_batch(stream, 1)

    (before,), (after,) = other.inputs.groups, batch.inputs.groups
    np.testing.assert_allclose(before.rows - after.rows, 1.0, rtol=1e-5)
    stream.push_gradients(1, batch, gradients_of(batch))
    stream.close()


def test_a_batch_lost_beside_a_push_is_freed_once(scene):
    """Its batch waits for the push before it while rows are looked up: that memory is freed once."""
    scene.rows = rows = HeldRowsAfter()
    for i in range(2):
        scene.append(0, [i])
    stream = scene.stream(batch_rows=1, mode="sync")
    rows.lookups.release()
    batch = await_batch(stream)
    stream.push_gradients(0, batch, gradients_of(batch))
    wait_for(lambda: rows.lookups_asked == 2 and rows.pushes_asked == 1, rows)
    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(stream.next_batch, 0, DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        while stream.limiter.waiting() < 1:
            assert time.monotonic() < deadline
        stream.abandon(0, [])
        assert taken.result(DEADLINE_S) is None
    for _ in range(2):
        rows.lookups.release()
    rows.pushes.release()

    again = await_batch(stream)  # the last sample: no other batch takes memory
    assert again.sample_ids.tolist() == [1]
    assert len(stream._prefetching[0]._slots) == 1, "of two batches in memory one is out"
    stream.push_gradients(0, again, gradients_of(again))
    rows.pushes.release()
    assert stream.flush(DEADLINE_S)
    stream.close()


def test_void_batch_returned_late_changes_no_row(scene):
    for i in range(4):
        scene.append(0, [i])
    stream = scene.stream(batch_rows=2, staleness_rows=100)
    first, second = await_batch(stream), await_batch(stream)
    stream.push_gradients(0, first, None)
    stream.push_gradients(0, second, gradients_of(second, 5.0))
    again = await_batch(stream)
    assert again.sample_ids.tolist() == [0, 1]
    stream.push_gradients(0, again, gradients_of(again))
    again = await_batch(stream)
    stream.push_gradients(0, again, gradients_of(again))
    stream.close()
    assert scene.rows.applied()[0] == [4]


@pytest.mark.parametrize("method", ["push", "lookup"])
def test_lane_waits_for_an_unreachable_shard(scene, method):
    scene.rows = Faulty(scene.rows)
    for i in range(4):
        scene.append(0, [i])
    scene.rows.script(method, nth=1, times=3, error=Unavailable("away"))
    stream = scene.stream(batch_rows=1)
    for _ in range(4):
        batch = await_batch(stream)
        stream.push_gradients(0, batch, gradients_of(batch, 1.0))
    assert stream.flush(DEADLINE_S)
    assert scene.rows.applied()[0] == [4]
    stream.close()


def test_lost_claim_ends_the_stream(scene):
    scene.rows = Faulty(scene.rows)
    scene.append(0, [1])
    scene.rows.script("push", nth=1, error=Fenced("a higher fence"))
    stream = scene.stream(batch_rows=1)
    batch = await_batch(stream)
    stream.push_gradients(0, batch, gradients_of(batch))
    assert stream.flush(DEADLINE_S)
    with pytest.raises(Fenced):
        stream.next_batch(0, DEADLINE_S)
    stream.close()


def test_samples_lost_by_the_log_end_the_stream(scene):
    scene.rows = ReferenceRowService([WIDTH], {0: 7, 1: 0})
    stream = scene.stream(batch_rows=1)
    with pytest.raises(DataLost):
        stream.next_batch(0, DEADLINE_S)
    stream.close()


def test_memory_is_reused(scene):
    for i in range(40):
        scene.append(0, [i])
    stream = scene.stream(batch_rows=1, staleness_rows=2)
    places = set()
    for _ in range(40):
        batch = await_batch(stream)
        places.add(batch.inputs.groups[0].rows.ctypes.data)
        stream.push_gradients(0, batch, gradients_of(batch))
    stream.close()
    assert len(places) <= 4


def test_closing_leaves_no_thread(scene):
    before = set(threading.enumerate())
    stream = scene.stream(lanes=2)
    stream.close()
    assert set(threading.enumerate()) <= before


def closing(stream, lanes, threads):
    """Close a stream in a thread; returns its end once all lanes are closed."""
    closed = threads.submit(stream.close)
    condition(lambda: all(stream._prefetching[lane]._closed for lane in range(lanes)))
    return closed


def test_closing_lanes_push_side_by_side(scene, monkeypatch):
    """Each lane has as long for its pushes as all together: their waits do not add up."""
    monkeypatch.setattr("freshet.embedder.pipeline.CLOSE_WAIT_S", DEADLINE_S)
    scene.rows = rows = HeldRows()
    rows.lookups.release(2)
    for partition in range(2):
        scene.append(partition, [partition])
    stream = scene.stream(batch_rows=1, lanes=2)
    for lane in range(2):
        batch = await_batch(stream, lane)
        stream.push_gradients(lane, batch, gradients_of(batch))
    wait_for(lambda: rows.pushes_asked == 2, rows)
    with ThreadPoolExecutor(1) as threads:
        try:
            closed = closing(stream, 2, threads)
        finally:
            rows.pushes.release(2)
        closed.result(DEADLINE_S)
    assert scene.rows.applied() == {0: [1], 1: [1]}


def test_refused_push_ends_the_wait_of_a_closing_lane(scene, monkeypatch):
    monkeypatch.setattr("freshet.embedder.pipeline.CLOSE_WAIT_S", DEADLINE_S)
    gate, refused = threading.Event(), Refused("an earlier push is lost", {0: 0})
    scene.rows = Faulty(scene.rows)
    scene.rows.script("push", nth=1, error=refused, before=lambda: gate.wait(DEADLINE_S))
    scene.append(0, [1])
    stream = scene.stream(batch_rows=1)
    batch = await_batch(stream)
    stream.push_gradients(0, batch, gradients_of(batch))
    with ThreadPoolExecutor(1) as threads:
        closed = closing(stream, 1, threads)
        gate.set()
        closed.result(DEADLINE_S / 4)
    assert stream.limiter.batches() == 0
    assert scene.rows.applied()[0] == [0]


@pytest.mark.slow
def test_lane_continues_when_the_log_is_back(scene):
    """Dead letters need the log: each failed attempt releases its memory."""
    scene.append(0, [1] * BATCH)
    attempts: list[int] = []

    class Reporting(IdDecoder):
        def decode(self, *arguments):
            attempts.append(1)
            if len(attempts) <= 12:  # more than the slots of the lane
                raise Unavailable("what cannot be decoded cannot be reported")
            return super().decode(*arguments)

    scene.decoder = Reporting
    stream = scene.stream(batch_rows=BATCH, staleness_rows=BATCH)
    batch = await_batch(stream)
    assert batch.sample_ids.tolist() == [1] * BATCH
    stream.push_gradients(0, batch, gradients_of(batch))
    assert stream.flush(DEADLINE_S)
    stream.close()
