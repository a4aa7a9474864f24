"""Processes record the functions of freshet that they enter, by window."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.house import windows as house_windows
from ops.house.windows import Recorded, Windows, path_of

PROGRAM = """
import sys, threading

from freshet import errors, clock

def work():
    clock.SYSTEM_CLOCK.now_ms()

def in_thread():
    errors.Overloaded("full", 1.0)

for line in sys.stdin:
    if line == "work\\n":
        work()
    if line == "thread\\n":
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
    print("done", flush=True)
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request has to end before a window."""
    monkeypatch.setattr(house_windows, "SETTLE_S", 0.0)


def test_functions_are_recorded_in_the_window_in_which_they_run(tmp_path: Path, quick: None) -> None:
    windows = Windows(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | windows.environment(),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        send, answer = process.stdin, process.stdout

        def command(line: str) -> None:
            send.write(f"{line}\n")
            send.flush()
            assert answer.readline() == "done\n"

        command("work")
        numbers = []
        for line in ("work", "thread", "nothing"):
            with windows.open() as number:
                command(line)
            numbers.append(number)
            command("work")
        (recorded,) = windows.read()
        process.stdin.close()

    assert "-c" in recorded.command
    functions = [{name for _, name in recorded.windows.get(number, frozenset())} for number in numbers]
    assert functions == [{"SystemClock.now_ms"}, {"Overloaded.__init__"}, set()]


def test_a_process_that_has_ended_is_not_waited_for(tmp_path: Path, quick: None) -> None:
    windows = Windows(tmp_path)
    subprocess.run([sys.executable, "-c", ""], check=True, env=os.environ | windows.environment())

    assert list(tmp_path.glob("*.started"))
    assert windows.read() == []


def test_modules_of_every_pass_and_no_idle_window_are_counted() -> None:
    def functions(names: str) -> frozenset[tuple[str, str]]:
        return frozenset((f"freshet.{name}", function) for name, function in map(tuple, names.split()))

    one = Recorded("one", {1: functions("af bf xf"), 2: functions("ag bf"), 3: functions("bf")})
    other = Recorded("other", {1: functions("cf bg"), 2: functions("cf bg yf")})

    assert path_of([one, other], passes=[1, 2], idle=[3]) == ["freshet.a", "freshet.b", "freshet.c"]
    assert path_of([one], passes=[1, 2], idle=[3]) == ["freshet.a"]
    assert path_of([other], passes=[1, 2, 3], idle=[]) == []
