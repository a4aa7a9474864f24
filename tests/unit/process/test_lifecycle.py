"""Signals as processes get them: each test runs a small process, as handlers belong to a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest

from freshet.process.lifecycle import Cleanup, Drain, join_all, within
from freshet.testing.clock import SettableClock

BEGIN = """
import signal, threading
from freshet.process.lifecycle import stop_on_signals
stop = threading.Event()
stop_on_signals(stop)
"""


def run(code: str, command: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, sys.executable, "-c", BEGIN + code],
        capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_a_signal_that_comes_within_a_wait_does_not_wait_for_that_wait() -> None:
    done = run("""
with stop._cond:  # held for a moment by every stop.wait(), with the signal's handler on top
    signal.raise_signal(signal.SIGTERM)
print(stop.wait(20))
""")

    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_a_terminal_that_is_closed_stops_as_ctrl_c_does_however_often_it_is_said() -> None:
    done = run("""
signal.raise_signal(signal.SIGHUP)
signal.raise_signal(signal.SIGHUP)
print(stop.wait(20))
""")

    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_under_nohup_a_closed_terminal_changes_nothing() -> None:
    done = run("signal.raise_signal(signal.SIGHUP); print(stop.is_set())", ["nohup"])

    assert done.stdout == "False\n", done.stderr


def test_a_second_request_ends_the_process_at_once_with_what_shells_say() -> None:
    done = run("signal.raise_signal(signal.SIGTERM); signal.raise_signal(signal.SIGINT); print('no')")

    assert (done.stdout, done.returncode) == ("", 128 + signal.SIGINT)


def test_the_first_ctrl_c_drains_even_if_the_process_was_about_to_stop_by_itself() -> None:
    done = run("stop.set(); signal.raise_signal(signal.SIGINT); print('drained')")

    assert (done.stdout, done.returncode) == ("drained\n", 0)


def test_a_drain_is_one_time_for_all_stages_and_begins_once() -> None:
    clock = SettableClock()
    drain = Drain(10.0, clock)
    clock.advance(60)
    assert drain.left_s() == 10.0  # nothing has stopped yet

    drain.begin()
    clock.advance(7)
    drain.begin()
    assert drain.left_s() == pytest.approx(3.0)

    clock.advance(7)
    assert (drain.left_s(), drain.left_s(least_s=1.0)) == (0.0, 1.0)


def test_what_is_not_done_in_time_is_left_and_what_it_raises_in_time_is_raised() -> None:
    go_on = threading.Event()
    assert not within(0.01, "hangs", go_on.wait)
    assert within(60.0, "done", lambda: None)
    assert within(None, "as long as it takes", lambda: go_on.wait(0.01))
    with pytest.raises(ZeroDivisionError):
        within(60.0, "fails", lambda: 1 // 0)
    go_on.set()


def test_threads_are_waited_for_together_and_those_left_are_named() -> None:
    go_on = threading.Event()
    threads = [threading.Thread(target=work, name=name) for work, name in ((go_on.wait, "a"), (int, "b"))]
    for thread in threads:
        thread.start()
    threads[1].join(60)  # it has had its turn

    assert join_all(threads, 0.05) == ["a"]
    go_on.set()
    assert join_all(threads, 60.0) == []


def test_a_block_closes_what_was_opened_in_it_unless_it_was_taken_out() -> None:
    closed: list[str] = []

    def made(*, fails: bool) -> Cleanup:
        with Cleanup() as cleanup:
            cleanup.add("a", lambda: closed.append("a"))
            cleanup.add("b", lambda: closed.append("b"))
            if fails:
                raise ZeroDivisionError
            return cleanup.pop_all()

    with pytest.raises(ZeroDivisionError):
        made(fails=True)
    assert closed == ["b", "a"]

    taken = made(fails=False)
    assert closed == ["b", "a"]
    taken.run()
    assert closed == ["b", "a"] * 2


def test_a_cleanup_leaves_what_does_not_close_in_time_and_names_it() -> None:
    go_on, closed = threading.Event(), list[str]()
    cleanup = Cleanup()
    cleanup.add("later", lambda: closed.append("later"))
    cleanup.add("hangs", go_on.wait)
    cleanup.add("first", lambda: closed.append("first"))

    assert cleanup.run(within_s=2.0) == ["hangs"]
    assert closed == ["first"]
    go_on.set()
