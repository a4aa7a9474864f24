import threading

import pytest

from freshet.errors import Unavailable
from freshet.testing.clock import SettableClock
from freshet.testing.faults import Faulty


def test_the_nth_call_fails_and_the_others_pass() -> None:
    numbers = Faulty([3])
    numbers.script("append", nth=2, error=Unavailable("away"))
    numbers.append(1)
    with pytest.raises(Unavailable, match="away"):
        numbers.append(2)
    numbers.append(3)
    assert numbers.calls("append") == 3
    assert numbers.copy() == [3, 1, 3]


def test_a_call_may_fail_after_it_was_done() -> None:
    numbers = Faulty([])
    numbers.script("append", nth=1, times=2, error=Unavailable("lost answer"), after=True)
    for i in range(2):
        with pytest.raises(Unavailable):
            numbers.append(i)
    assert numbers.copy() == [0, 1]


def test_a_call_waits_until_it_is_released() -> None:
    numbers, go, done = Faulty([]), threading.Event(), threading.Event()
    numbers.script("append", nth=1, before=lambda: go.wait(60))

    def work() -> None:
        numbers.append(1)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not done.is_set()
    go.set()
    assert done.wait(60)
    thread.join()


def test_a_script_counts_from_now_and_names_a_method() -> None:
    numbers = Faulty([])
    numbers.append(1)
    numbers.script("append", nth=1, error=Unavailable("x"))
    with pytest.raises(Unavailable):
        numbers.append(2)
    with pytest.raises(ValueError, match="no_such_method is not a method"):
        numbers.script("no_such_method", nth=1)


def test_a_settable_clock_moves_only_when_it_is_moved() -> None:
    clock = SettableClock(now_ms=5_000, monotonic_s=1.0)
    clock.advance(2.5)
    assert (clock.now_ms(), clock.monotonic()) == (7_500, 3.5)
    clock.jump(100)
    assert (clock.now_ms(), clock.monotonic()) == (100, 3.5)
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1.0)
