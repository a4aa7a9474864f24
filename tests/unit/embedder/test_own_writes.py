"""What a stream has pushed is in the rows that it hands out, whether or not their lookup could know it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from freshet.embedder.own_writes import OwnWrites
from freshet.seams.eventlog.sqlite import SqliteEventLog
from freshet.spec.layout import layout_of
from freshet.spec.parse import parse_spec
from freshet.testing.contracts.batches import gradients_of, take
from freshet.testing.contracts.rowservice import WIDTH, A, B, C, keys_of
from freshet.types import F32
from tests.unit.embedder.linked import HeldRows
from tests.unit.embedder.scene import SPEC, PipelinedScene

DEADLINE_S = 20.0
BATCH = 4
NO_STATE = np.empty((1, 0), np.float32)


class Writes:
    """Own writes of one-row batches, and what was freed."""

    def __init__(self) -> None:
        self.own = OwnWrites(layout_of(parse_spec(SPEC)))
        self.freed: list[str] = []

    def give(self, name: str, row=A, gradient: float = 1.0):
        group, _ = keys_of([row])
        gradients: F32 = np.full((1, WIDTH), gradient, np.float32)
        return self.own.given([group], [gradients], lambda: self.freed.append(name))

    def row_of(self, seen, row=A) -> float:
        """The first float of a row that was 0 when it was looked up."""
        group, _ = keys_of([row])
        values = np.zeros((1, WIDTH), np.float32)
        self.own.bring_up(seen, [group], [values], [NO_STATE])
        return float(values[0, 0])


@pytest.fixture
def writes() -> Writes:
    return Writes()


def test_a_lookup_misses_what_was_not_sent_before_it(writes):
    first, second, third = writes.give("1", gradient=1.0), writes.give("2", gradient=10.0), None
    writes.own.sent(first)
    seen = writes.own.looking()
    writes.own.sent(second)
    third = writes.give("3", gradient=100.0)
    assert writes.row_of(seen) == -110.0
    assert writes.own.stepped_rows == 2
    for write in (first, second, third):
        writes.own.sent(write)
        writes.own.acknowledged(write)
    assert sorted(writes.freed) == ["1", "2", "3"]


def test_only_rows_of_the_write_are_stepped(writes):
    seen = [writes.own.looking() for _ in range(3)]
    writes.give("1", row=A)
    assert [writes.row_of(s, row) for s, row in zip(seen, (A, B, C), strict=True)] == [-1.0, 0.0, 0.0]


def test_a_write_is_kept_until_no_lookup_is_left_that_missed_it(writes):
    early = writes.own.looking()
    write = writes.give("1")
    late_before_sent = writes.own.looking()
    writes.own.sent(write)
    after = writes.own.looking()
    writes.own.acknowledged(write)
    assert writes.freed == []
    assert writes.row_of(early) == -1.0
    assert writes.freed == []
    writes.own.forget(late_before_sent)
    assert writes.freed == ["1"]
    assert writes.row_of(after) == 0.0


def test_what_was_given_up_steps_nothing_and_is_freed_at_once(writes):
    seen = writes.own.looking()
    sent, unsent = writes.give("sent"), writes.give("unsent")
    writes.own.sent(sent)
    writes.own.drop(sent)
    writes.own.drop(unsent)
    assert writes.freed == ["sent", "unsent"]
    assert writes.row_of(seen) == 0.0


def test_what_is_sent_again_was_seen_by_lookups_since_the_first_time(writes):
    write = writes.give("1")
    writes.own.sent(write)
    seen = writes.own.looking()
    writes.own.sent(write)
    assert writes.row_of(seen) == 0.0


def test_a_write_that_is_given_up_while_rows_are_stepped_by_it_is_freed_after(writes):
    """The slot's memory may be used again by the next batch."""
    seen, write = writes.own.looking(), writes.give("1")
    stepping, go_on = threading.Event(), threading.Event()
    steps = writes.own._steps[0]

    class Slow:
        def step(self, *args):
            stepping.set()
            assert go_on.wait(DEADLINE_S)
            return steps.step(*args)

    writes.own._steps = [Slow()]
    thread = threading.Thread(target=writes.row_of, args=(seen,))
    thread.start()
    assert stepping.wait(DEADLINE_S)
    writes.own.drop(write)
    assert writes.freed == []
    go_on.set()
    thread.join()
    assert writes.freed == ["1"]


# --- in a stream


@pytest.fixture
def scene(tmp_path: Path):
    log = SqliteEventLog(tmp_path)
    yield PipelinedScene(log, own_writes=True)
    log.close()


def test_rows_looked_up_ahead_are_as_if_they_had_been_looked_up_now(scene):
    """All lookups are answered before anything is pushed, and all batches are of one row."""
    scene.rows = rows = HeldRows()
    for _ in range(6):
        scene.append(0, [7] * BATCH)
    for _ in range(6):
        rows.lookups.release()
    stream = scene.stream(batch_rows=BATCH, staleness_rows=5 * BATCH)
    with rows.changed:
        assert rows.changed.wait_for(lambda: rows.lookups_asked == 6, DEADLINE_S)

    found = []
    for i in range(6):
        batch = take(stream)
        found.append(batch.inputs.groups[0].rows[0].copy())
        stream.give_back(0, batch, gradients_of(batch, float(10**i)))
    np.testing.assert_allclose(
        [found[0] - row for row in found],
        [[sum(10**j for j in range(i))] * WIDTH for i in range(6)],
        rtol=1e-5,
    )
    for _ in range(6):
        rows.pushes.release()
    assert stream.settled(DEADLINE_S)
    stream.close()
    (values,) = rows.rows().values()
    np.testing.assert_allclose(found[0] - np.array(values), 111111.0, rtol=1e-5)


def test_what_a_lookup_has_seen_is_not_stepped_again(scene):
    scene.rows = rows = HeldRows()
    for _ in range(8):
        rows.lookups.release()
        rows.pushes.release()
    stream = scene.stream(batch_rows=BATCH, staleness_rows=BATCH)
    before = None
    for i in range(4):
        scene.append(0, [7] * BATCH)
        batch = take(stream)
        row = batch.inputs.groups[0].rows[0].copy()
        before = row if before is None else before
        np.testing.assert_allclose(before - row, i, rtol=1e-5, atol=1e-6)
        stream.give_back(0, batch, gradients_of(batch, 1.0))
        assert stream.settled(DEADLINE_S)
    stream.close()


def test_samples_that_come_again_are_not_taken_for_new_ones(scene):
    """A lane starts again from what is applied: nothing that was given up is in its rows."""
    scene.rows = rows = HeldRows()
    for _ in range(8):
        rows.lookups.release()
    for _ in range(3):
        scene.append(0, [7] * BATCH)
    stream = scene.stream(batch_rows=BATCH, staleness_rows=2 * BATCH)
    first = take(stream)
    before = first.inputs.groups[0].rows[0].copy()
    second = take(stream)
    stream.give_back(0, second, None)  # the lane is void: what is out comes again
    stream.give_back(0, first, gradients_of(first, 1.0))
    again = take(stream)
    np.testing.assert_array_equal(again.inputs.groups[0].rows[0], before)
    for _ in range(8):
        rows.pushes.release()
    stream.give_back(0, again, None)
    stream.close()
