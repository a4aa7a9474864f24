"""Figures that are asked for elsewhere, and somebody there who does not answer."""

from __future__ import annotations

import threading

import pytest

from freshet.errors import Corrupt, Unavailable
from freshet.observability.metrics import CachedGauge
from freshet.testing.conditions import wait_until


class Log:
    """Answers with how often it was asked, once it may."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = threading.Event()
        self.error: Exception | None = None

    def __call__(self) -> int:
        self.asked += 1
        mine = self.asked
        assert self.answers.wait(30)
        if self.error is not None:
            raise self.error
        return mine


@pytest.fixture
def log() -> Log:
    return Log()


def test_each_call_asks_anew(log: Log) -> None:
    log.answers.set()
    newest = CachedGauge(log, 0, wait_s=30)

    assert [newest(), newest()] == [1, 2]


def test_while_there_is_no_answer_the_former_one_is_told_and_nobody_else_is_sent(log: Log) -> None:
    log.answers.set()
    newest = CachedGauge(log, 0, wait_s=30)
    assert newest() == 1
    log.answers.clear()
    impatient = CachedGauge(log, 7, wait_s=0.01)

    assert [impatient(), impatient(), impatient()] == [7, 7, 7]
    wait_until("somebody was sent", lambda: log.asked > 1, within_s=30)
    assert log.asked == 2

    log.answers.set()


def test_what_came_too_late_for_one_call_is_not_lost(log: Log) -> None:
    newest = CachedGauge(log, 0, wait_s=0.01)
    assert newest() == 0
    log.answers.set()

    wait_until("it is told", lambda: newest() >= 1, within_s=30)


def test_a_log_that_is_away_is_no_error_and_one_that_is_damaged_is(log: Log) -> None:
    log.answers.set()
    log.error = Unavailable("no broker answers")
    newest = CachedGauge(log, 5, wait_s=30)
    assert newest() == 5

    log.error = Corrupt("a record that nobody wrote")
    with pytest.raises(Corrupt):
        newest()
    log.error = None
    assert newest() == 3
