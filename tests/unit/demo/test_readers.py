"""Readers against servers that fail: visits end, nothing is sent twice under another name, nothing dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson
import pytest

from freshet.demo.outbox import Outbox
from freshet.demo.readers import Pace, Readers
from freshet.demo.windows import Windows
from freshet.demo.world import World
from freshet.errors import Unavailable
from freshet.testing.clock import SettableClock

AWAY = Unavailable("connection refused")
BUSY = (503, b'{"error": {"message": "later"}}')


class ScriptedDoor:
    """Answers as the script says, then as it always does; keeps what it was sent."""

    def __init__(self, always: Callable[[Any], tuple[int, bytes]], script: Sequence[Any] = ()) -> None:
        self.always, self.script = always, list(script)
        self.sent: list[Any] = []

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.sent.append(orjson.loads(body))
        if self.script:
            answer = self.script.pop(0)
            if isinstance(answer, Exception):
                raise answer
            made: tuple[int, bytes] = answer
            return made
        return self.always(self.sent[-1])

    def close(self) -> None:
        """Nothing is open."""


def ranked(asked: Any) -> tuple[int, bytes]:
    """The candidates as they came, by the model."""
    items = [{"index": i} for i in range(asked["k"])]
    return 200, orjson.dumps(
        {"request_id": asked["context"]["request_id"], "items": items, "explored": False}
    )


def taken(events: Any) -> tuple[int, bytes]:
    """All accepted."""
    return 202, orjson.dumps({"acks": [{}] * len(events)})


class Bench:
    """Readers of world 5 on a clock that stands still."""

    def __init__(self) -> None:
        self.clock = SettableClock()
        self.outbox = Outbox(self.clock)
        self.pace = Pace(1_000, self.clock.monotonic())
        self.readers = Readers(World(5), self.outbox, self.pace, self.clock, began_ms=self.clock.now_ms())

    def wait(self, seconds: float) -> bool:
        self.clock.advance(seconds)
        return False

    def visit(self, number: int, door: ScriptedDoor) -> None:
        self.readers.visit(number, door, self.wait)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def visits_until_clicks(bench: Bench, wanted: int) -> int:
    """Visits with so many actions to come; returns how many visits it took."""
    number = 0
    while bench.outbox.waiting() < wanted:
        bench.visit(number, ScriptedDoor(ranked))
        number += 1
    return number


def test_a_page_that_is_shown_is_counted_with_what_the_best_would_have_earned(bench: Bench) -> None:
    bench.visit(0, ScriptedDoor(ranked))
    bench.clock.advance(13.0)

    [window] = bench.readers.windows.closed(bench.clock.now_ms())

    world, visit = bench.readers.world, bench.readers.world.visit(0, 0.0)
    expected = float(world.expected(visit, np.arange(10)).sum())
    assert window["model"]["impressions"] == window["best"]["impressions"] == 10
    assert window["model"]["expected"] == pytest.approx(expected, abs=1e-3)
    assert window["best"]["clicks"] == pytest.approx(world.best(visit), abs=1e-3)
    assert window["random"] == {"impressions": 0, "clicks": 0.0, "expected": 0.0}


def test_a_rank_request_is_tried_again_under_the_same_id(bench: Bench) -> None:
    door = ScriptedDoor(ranked, [AWAY, BUSY])

    bench.visit(3, door)

    assert len({asked["context"]["request_id"] for asked in door.sent}) == 1
    assert len(door.sent) == 3
    assert (bench.readers.counts.errors, bench.readers.counts.impressions) == (2, 10)


def test_a_reader_whose_page_never_comes_leaves_and_clicks_nothing(bench: Bench) -> None:
    bench.visit(0, ScriptedDoor(lambda asked: BUSY))

    counts = bench.readers.counts
    assert (counts.abandoned, counts.impressions, bench.outbox.waiting()) == (1, 0, 0)
    assert counts.errors > 10


def test_a_request_that_is_wrong_is_not_tried_again(bench: Bench) -> None:
    door = ScriptedDoor(lambda asked: (400, b"{}"))

    bench.visit(0, door)

    assert (len(door.sent), bench.readers.counts.abandoned) == (1, 1)


def test_clicks_are_sent_when_they_are_made_and_not_before(bench: Bench) -> None:
    visits_until_clicks(bench, 5)
    gateway = ScriptedDoor(taken)
    sent_at = []
    for _ in range(200):
        bench.clock.advance(0.1)
        if bench.outbox.send_due(gateway):
            sent_at += [(bench.clock.now_ms(), action["ts"]) for action in gateway.sent[-1]]

    assert bench.outbox.waiting() == 0
    assert all(0 <= now - ts <= 100 for now, ts in sent_at)


def test_actions_are_sent_again_with_the_same_event_ids_until_the_gateway_has_them(bench: Bench) -> None:
    visits_until_clicks(bench, 5)
    bench.clock.advance(20.0)
    gateway = ScriptedDoor(taken, [AWAY, BUSY, (429, b"")])

    outcomes = [bench.outbox.send_due(gateway) for _ in range(5)]

    assert outcomes == [False, False, False, True, None]
    assert all(events == gateway.sent[0] for events in gateway.sent)
    ids = [action["event_id"] for action in gateway.sent[0]]
    assert len(ids) == len(set(ids)) == bench.outbox.sent
    assert bench.outbox.errors == 3


def test_actions_that_come_while_the_gateway_is_away_wait_their_turn(bench: Bench) -> None:
    visits = visits_until_clicks(bench, 3)
    bench.clock.advance(20.0)
    gateway = ScriptedDoor(taken, [AWAY])
    bench.outbox.send_due(gateway)
    while bench.outbox.waiting() < 6:
        bench.visit(visits, ScriptedDoor(ranked))
        visits += 1
    bench.clock.advance(20.0)

    while bench.outbox.send_due(gateway):
        pass

    ids = [action["event_id"] for events in gateway.sent[1:] for action in events]
    assert len(ids) == len(set(ids)) == bench.outbox.sent >= 6


def test_refused_actions_are_counted_and_not_sent_again(bench: Bench) -> None:
    visits_until_clicks(bench, 3)
    bench.clock.advance(20.0)
    waiting = bench.outbox.waiting()
    refusal = orjson.dumps({"acks": [{}] * (waiting - 1), "refused": [{"index": 0}]})

    bench.outbox.send_due(ScriptedDoor(taken, [(422, refusal)]))

    assert (bench.outbox.refused, bench.outbox.sent, bench.outbox.waiting()) == (1, waiting - 1, 0)


def test_a_batch_that_the_gateway_did_not_look_at_counts_as_refused(bench: Bench) -> None:
    visits_until_clicks(bench, 3)
    bench.clock.advance(20.0)
    waiting = bench.outbox.waiting()

    bench.outbox.send_due(ScriptedDoor(taken, [(413, b'{"error": "too large"}')]))

    assert (bench.outbox.refused, bench.outbox.sent) == (waiting, 0)


def test_an_outbox_that_is_full_drops_and_says_so() -> None:
    outbox = Outbox(SettableClock(), largest=5)
    for n in range(8):
        outbox.put({"event_id": n, "ts": n})

    assert (outbox.waiting(), outbox.dropped) == (5, 3)


def test_a_window_is_told_once_all_its_clicks_are_made() -> None:
    windows = Windows()
    windows.add(12_000, explored=True, impressions=10, clicks=1, expected=0.4, best=1.0)

    assert windows.closed(22_999) == []
    [window] = windows.closed(23_000)
    assert (window["start_ms"], window["stop_ms"]) == (10_000, 15_000)
    assert window["random"] == {"impressions": 10, "clicks": 1, "expected": 0.4}
    assert window["best"] == {"impressions": 0, "clicks": 0.0}


def test_the_last_windows_are_kept() -> None:
    windows = Windows()
    for n in range(300):
        windows.add(n * 5_000, explored=False, impressions=10, clicks=0, expected=0.5, best=1.0)

    kept = windows.closed(10_000_000)

    assert [kept[0]["start_ms"], kept[-1]["start_ms"], len(kept)] == [180 * 5_000, 299 * 5_000, 120]


def test_visits_are_due_at_the_rate_that_was_asked_for() -> None:
    pace = Pace(100, 0.0)

    assert [pace.turn(0.0, 10) for _ in range(3)] == pytest.approx([0.0, 0.1, 0.2])
    pace.made(0.25, 5, counted=False)
    assert pace.turn(0.25, 10) == pytest.approx(0.35)


def test_after_an_outage_readers_do_not_come_all_at_once() -> None:
    pace = Pace(100, 0.0)
    pace.turn(0.0, 10)

    assert pace.turn(60.0, 10) == pytest.approx(59.5)


def test_the_rate_is_measured_over_the_last_seconds() -> None:
    pace = Pace(100, 0.0)
    for n in range(2_000):
        pace.made(n / 100, 1, counted=True)

    assert pace.measured(20.0) == pytest.approx(100, rel=0.01)
    assert pace.measured(40.0) == 0
