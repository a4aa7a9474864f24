"""Readers against failing servers: visits end, retries are idempotent, errors are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson
import pytest

from freshet.demo.connections import Outbox
from freshet.demo.news_site import NewsSite
from freshet.demo.readers import Pace, Readers, Windows
from freshet.errors import Unavailable
from freshet.testing.clock import SettableClock

AWAY = Unavailable("connection refused")
BUSY = (503, b'{"error": {"message": "later"}}')


class ScriptedConnection:
    """Gives the answers of `script`, then those of `always`; keeps the requests."""

    def __init__(self, always: Callable[[Any], tuple[int, bytes]], script: Sequence[Any] = ()) -> None:
        self.always, self.script = always, list(script)
        self.sent: list[Any] = []

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.sent.append(orjson.loads(body))
        if self.script:
            answer = self.script.pop(0)
            if isinstance(answer, Exception):
                raise answer
            scripted: tuple[int, bytes] = answer
            return scripted
        return self.always(self.sent[-1])

    def close(self) -> None:
        """Do nothing."""


def ranked(request: Any) -> tuple[int, bytes]:
    """Rank the candidates in their order, by the model."""
    items = [{"index": i} for i in range(request["k"])]
    return 200, orjson.dumps(
        {"request_id": request["context"]["request_id"], "items": items, "explored": False}
    )


def accepted(events: Any) -> tuple[int, bytes]:
    """Accept all events."""
    return 202, orjson.dumps({"acks": [{}] * len(events)})


class Bench:
    """Readers of the site with seed 5, on a settable clock."""

    def __init__(self) -> None:
        self.clock = SettableClock()
        self.outbox = Outbox(self.clock)
        self.pace = Pace(1_000, self.clock.monotonic())
        self.readers = Readers(NewsSite(5), self.outbox, self.pace, self.clock, began_ms=self.clock.now_ms())

    def wait(self, seconds: float) -> bool:
        self.clock.advance(seconds)
        return False

    def visit(self, number: int, connection: ScriptedConnection) -> None:
        self.readers.visit(number, connection, self.wait)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def visits_until_clicks(bench: Bench, wanted: int) -> int:
    """Visit until so many actions wait; return the number of visits."""
    number = 0
    while bench.outbox.waiting() < wanted:
        bench.visit(number, ScriptedConnection(ranked))
        number += 1
    return number


def test_page_is_counted_with_clicks_of_best_order(bench: Bench) -> None:
    bench.visit(0, ScriptedConnection(ranked))
    bench.clock.advance(13.0)

    [window] = bench.readers.windows.closed(bench.clock.now_ms())

    site, visit = bench.readers.site, bench.readers.site.visit(0, 0.0)
    expected = float(site.expected(visit, np.arange(10)).sum())
    assert window["model"]["impressions"] == window["best"]["impressions"] == 10
    assert window["model"]["expected"] == pytest.approx(expected, abs=1e-3)
    assert window["best"]["clicks"] == pytest.approx(site.best(visit), abs=1e-3)
    assert window["random"] == {"impressions": 0, "clicks": 0.0, "expected": 0.0}


def test_rank_request_is_retried_with_same_id(bench: Bench) -> None:
    connection = ScriptedConnection(ranked, [AWAY, BUSY])

    bench.visit(3, connection)

    assert len({request["context"]["request_id"] for request in connection.sent}) == 1
    assert len(connection.sent) == 3
    assert (bench.readers.counts.errors, bench.readers.counts.impressions) == (2, 10)


def test_visit_without_page_is_abandoned(bench: Bench) -> None:
    bench.visit(0, ScriptedConnection(lambda request: BUSY))

    counts = bench.readers.counts
    assert (counts.abandoned, counts.impressions, bench.outbox.waiting()) == (1, 0, 0)
    assert counts.errors > 10


def test_refused_rank_request_is_not_retried(bench: Bench) -> None:
    connection = ScriptedConnection(lambda request: (400, b"{}"))

    bench.visit(0, connection)

    assert (len(connection.sent), bench.readers.counts.abandoned) == (1, 1)


def test_clicks_are_sent_at_their_time(bench: Bench) -> None:
    visits_until_clicks(bench, 5)
    gateway = ScriptedConnection(accepted)
    sent_at = []
    for _ in range(200):
        bench.clock.advance(0.1)
        if bench.outbox.send_due(gateway):
            sent_at += [(bench.clock.now_ms(), action["ts"]) for action in gateway.sent[-1]]

    assert bench.outbox.waiting() == 0
    assert all(0 <= now - ts <= 100 for now, ts in sent_at)


def test_actions_are_retried_with_same_event_ids(bench: Bench) -> None:
    visits_until_clicks(bench, 5)
    bench.clock.advance(20.0)
    gateway = ScriptedConnection(accepted, [AWAY, BUSY, (429, b"")])

    outcomes = [bench.outbox.send_due(gateway) for _ in range(5)]

    assert outcomes == [False, False, False, True, None]
    assert all(events == gateway.sent[0] for events in gateway.sent)
    ids = [action["event_id"] for action in gateway.sent[0]]
    assert len(ids) == len(set(ids)) == bench.outbox.sent
    assert bench.outbox.errors == 3


def test_actions_wait_while_gateway_is_unavailable(bench: Bench) -> None:
    visits = visits_until_clicks(bench, 3)
    bench.clock.advance(20.0)
    gateway = ScriptedConnection(accepted, [AWAY])
    bench.outbox.send_due(gateway)
    while bench.outbox.waiting() < 6:
        bench.visit(visits, ScriptedConnection(ranked))
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

    bench.outbox.send_due(ScriptedConnection(accepted, [(422, refusal)]))

    assert (bench.outbox.refused, bench.outbox.sent, bench.outbox.waiting()) == (1, waiting - 1, 0)


def test_batch_refused_as_a_whole_is_counted(bench: Bench) -> None:
    visits_until_clicks(bench, 3)
    bench.clock.advance(20.0)
    waiting = bench.outbox.waiting()

    bench.outbox.send_due(ScriptedConnection(accepted, [(413, b'{"error": "too large"}')]))

    assert (bench.outbox.refused, bench.outbox.sent) == (waiting, 0)


def test_full_outbox_counts_dropped_actions() -> None:
    outbox = Outbox(SettableClock(), largest=5)
    for n in range(8):
        outbox.put({"event_id": n, "ts": n})

    assert (outbox.waiting(), outbox.dropped) == (5, 3)


def test_window_closes_after_longest_click() -> None:
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


def test_visits_are_due_at_the_given_rate() -> None:
    pace = Pace(100, 0.0)

    assert [pace.next_due(0.0, 10) for _ in range(3)] == pytest.approx([0.0, 0.1, 0.2])
    pace.record_events(0.25, 5, scheduled=False)
    assert pace.next_due(0.25, 10) == pytest.approx(0.35)


def test_no_burst_follows_an_outage() -> None:
    pace = Pace(100, 0.0)
    pace.next_due(0.0, 10)

    assert pace.next_due(60.0, 10) == pytest.approx(59.5)


def test_the_rate_is_measured_over_the_last_seconds() -> None:
    pace = Pace(100, 0.0)
    for n in range(2_000):
        pace.record_events(n / 100, 1, scheduled=True)

    assert pace.measured_rate(20.0) == pytest.approx(100, rel=0.01)
    assert pace.measured_rate(40.0) == 0
