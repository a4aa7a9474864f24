"""Signals as processes get them: each test runs a small process, as handlers belong to a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

BEGIN = """
import signal, threading
from freshet.runtime.lifecycle import stop_on_signals
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
