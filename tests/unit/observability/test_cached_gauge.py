"""Gauges that query another component, which may not answer."""

from __future__ import annotations

import threading

import pytest

from freshet.errors import Corrupt, Unavailable
from freshet.observability.metrics import CachedGauge
from freshet.testing.conditions import wait_until


class Log:
    """Answers with the number of its queries, once `answers` is set."""

    def __init__(self) -> None:
        self.queries = 0
        self.answers = threading.Event()
        self.error: Exception | None = None

    def __call__(self) -> int:
        self.queries += 1
        mine = self.queries
        assert self.answers.wait(60)
        if self.error is not None:
            raise self.error
        return mine


@pytest.fixture
def log() -> Log:
    return Log()


def test_each_call_asks_anew(log: Log) -> None:
    log.answers.set()
    gauge = CachedGauge(log, 0, wait_s=30)

    assert [gauge(), gauge()] == [1, 2]


def test_the_former_value_is_returned_while_a_query_runs(log: Log) -> None:
    log.answers.set()
    gauge = CachedGauge(log, 0, wait_s=30)
    assert gauge() == 1
    log.answers.clear()
    short_wait = CachedGauge(log, 7, wait_s=0.01)

    assert [short_wait(), short_wait(), short_wait()] == [7, 7, 7]
    wait_until("a query began", lambda: log.queries > 1, within_s=60)
    assert log.queries == 2

    log.answers.set()


def test_an_answer_too_late_for_one_call_is_kept(log: Log) -> None:
    gauge = CachedGauge(log, 0, wait_s=0.01)
    assert gauge() == 0
    log.answers.set()

    wait_until("the answer is returned", lambda: gauge() >= 1, within_s=60)


def test_a_damaged_log_is_an_error_and_an_absent_one_is_none(log: Log) -> None:
    log.answers.set()
    log.error = Unavailable("no broker answers")
    gauge = CachedGauge(log, 5, wait_s=30)
    assert gauge() == 5

    log.error = Corrupt("a damaged record")
    with pytest.raises(Corrupt):
        gauge()
    log.error = None
    assert gauge() == 3
