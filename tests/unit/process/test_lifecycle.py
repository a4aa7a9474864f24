"""Lifecycle: signals, each in a small process of its own, drains, threads and cleanups."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from freshet.process.lifecycle import Cleanup, Drain, join_all, within
from freshet.testing.clock import SettableClock

SPEC = Path(__file__).parents[2] / "system" / "ledger" / "freshet.toml"

BEGIN = """
import signal, threading
from freshet.process.lifecycle import stop_on_signals
stop = threading.Event()
stop_on_signals(stop)
"""


def run(code: str, command: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, sys.executable, "-c", BEGIN + code],
        capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_signal_within_wait_does_not_deadlock() -> None:
    done = run("""
with stop._cond:  # as if the handler ran within stop.wait()
    signal.raise_signal(signal.SIGTERM)
print(stop.wait(60))
""")

    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_repeated_hangup_stops_once() -> None:
    done = run("""
signal.raise_signal(signal.SIGHUP)
signal.raise_signal(signal.SIGHUP)
print(stop.wait(60))
""")

    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_hangup_is_ignored_under_nohup() -> None:
    done = run("signal.raise_signal(signal.SIGHUP); print(stop.is_set())", ["nohup"])

    assert done.stdout == "False\n", done.stderr


def test_second_signal_exits_with_shell_code() -> None:
    done = run("signal.raise_signal(signal.SIGTERM); signal.raise_signal(signal.SIGINT); print('no')")

    assert (done.stdout, done.returncode) == ("", 128 + signal.SIGINT)


SUPERVISED = """
import os, signal
from freshet.apps import services
from freshet.cli import main
from freshet.demo import service

def stopped_twice(*_arguments, stop):
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    print("drained" if stop.wait(20) else "runs on", flush=True)

services.RUNNERS["gateway"] = lambda _spec, _settings, stop: stopped_twice(stop=stop)
service.run = stopped_twice
os.environ["FRESHET_SUPERVISOR_PID"] = str(os.getppid())
main()
"""


@pytest.mark.parametrize("words", [["run", "gateway", str(SPEC)], ["simulate"]], ids=["run", "simulate"])
def test_a_signal_to_all_processes_leaves_services_a_drain(tmp_path: Path, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISED, *words, "--folder", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert (done.stdout, done.returncode) == ("drained\n", 0), done.stderr


def test_first_signal_drains_a_stopping_process() -> None:
    done = run("stop.set(); signal.raise_signal(signal.SIGINT); print('drained')")

    assert (done.stdout, done.returncode) == ("drained\n", 0)


STDIN = "from freshet.apps.supervision import stop_on_stdin; stop_on_stdin(stop); "


@pytest.mark.parametrize("redirect", ["</dev/null", "<&-"], ids=["ended", "closed"])
def test_the_end_of_standard_input_stops(redirect: str) -> None:
    done = run(STDIN + "print(stop.wait(20))", ["sh", "-c", f'"$@" {redirect}', "sh"])

    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_a_byte_on_standard_input_stops() -> None:
    code = BEGIN + STDIN + "print(stop.is_set(), flush=True); print(stop.wait(20), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"False\n"
        process.stdin.write(b"\n")
        assert process.stdout.readline() == b"True\n"  # the pipe is open


def test_drain_is_one_deadline_and_begins_once() -> None:
    clock = SettableClock()
    drain = Drain(10.0, clock)
    clock.advance(60)
    assert drain.left_s() == 10.0  # before the stop

    drain.begin()
    clock.advance(7)
    drain.begin()
    assert drain.left_s() == pytest.approx(3.0)

    clock.advance(7)
    assert (drain.left_s(), drain.left_s(least_s=1.0)) == (0.0, 1.0)


def test_within_gives_up_in_time_and_raises() -> None:
    release = threading.Event()
    assert not within(0.01, "hangs", release.wait)
    assert within(60.0, "done", lambda: None)
    assert within(None, "unlimited", lambda: release.wait(0.01))
    with pytest.raises(ZeroDivisionError):
        within(60.0, "fails", lambda: 1 // 0)
    release.set()


def test_join_all_names_threads_still_alive() -> None:
    release = threading.Event()
    threads = [threading.Thread(target=work, name=name) for work, name in ((release.wait, "a"), (int, "b"))]
    for thread in threads:
        thread.start()
    threads[1].join(60)  # ends at once

    assert join_all(threads, 0.05) == ["a"]
    release.set()
    assert join_all(threads, 60.0) == []


def test_block_closes_resources_that_were_not_moved() -> None:
    closed: list[str] = []

    def open_resources(*, fails: bool) -> Cleanup:
        with Cleanup() as cleanup:
            cleanup.add("a", lambda: closed.append("a"))
            cleanup.add("b", lambda: closed.append("b"))
            if fails:
                raise ZeroDivisionError
            return cleanup.pop_all()

    with pytest.raises(ZeroDivisionError):
        open_resources(fails=True)
    assert closed == ["b", "a"]

    moved = open_resources(fails=False)
    assert closed == ["b", "a"]
    moved.run()
    assert closed == ["b", "a"] * 2


def test_cleanup_names_resource_that_hangs() -> None:
    release, closed = threading.Event(), list[str]()
    cleanup = Cleanup()
    cleanup.add("later", lambda: closed.append("later"))
    cleanup.add("hangs", release.wait)
    cleanup.add("first", lambda: closed.append("first"))

    assert cleanup.run(within_s=5.0) == ["hangs"]
    assert closed == ["first"]
    release.set()
