import os
import signal
import sys
import threading
import time

import pytest

from freshet.errors import ConfigError
from freshet.runtime.supervisor import Process, Supervisor, read_state
from freshet.settings import RunFolder

START = "import signal, time; print('up', flush=True); "
OBEDIENT = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); " + START + "time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + START + "time.sleep(60)"


def until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        pause.wait(0.01)
    return value


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run").create()


class Running:
    def __init__(self, folder, code, drain_s=10.0):
        self.folder, self.stop, self.ended = folder, threading.Event(), {}
        supervisor = Supervisor(folder, [Process("one", [sys.executable, "-c", code], 7000)])
        self.thread = threading.Thread(
            target=lambda: self.ended.update(supervisor.run(self.stop, drain_s=drain_s))
        )
        self.thread.start()

    def lines(self):
        path = self.folder.process_log("one")
        return path.read_text().count("up") if path.exists() else 0

    def pid(self):
        return read_state(self.folder)["one"]["pid"]

    def end(self):
        self.stop.set()
        self.thread.join()
        return self.ended


def test_a_killed_service_is_started_again_and_the_state_says_so(folder):
    running = Running(folder, OBEDIENT)
    until(lambda: running.lines() == 1)
    first = running.pid()

    os.kill(first, signal.SIGKILL)
    until(lambda: running.lines() == 2)

    state = read_state(folder)["one"]
    assert state["pid"] != first
    assert state["restarts"] == 1
    assert state["last_exit"] == "signal 9"
    assert running.end() == {"one": "stopped"}


def test_a_service_that_does_not_stop_in_time_is_killed_and_named(folder):
    running = Running(folder, STUBBORN, drain_s=0.3)
    until(lambda: running.lines() == 1)

    assert running.end() == {"one": "killed: it had not stopped after 0.3 s"}


def test_a_second_supervisor_of_the_folder_is_refused_with_the_first_ones_id(folder):
    running = Running(folder, OBEDIENT)
    until(lambda: running.lines() == 1)

    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        Supervisor(folder, [])
    running.end()


def test_a_folder_where_nothing_ran_has_no_state(folder):
    assert read_state(folder) == {}
