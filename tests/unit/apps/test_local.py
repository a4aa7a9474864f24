"""`freshet.local` without services, or with a stub of one: what it started ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from freshet.apps import local as module
from freshet.config.settings import RunFolder
from freshet.errors import ConfigError
from freshet.process.process_info import is_alive
from freshet.process.run_state import read_run

SPEC = Path(__file__).parents[2] / "system" / "ledger" / "freshet.toml"


def test_failed_client_leaves_no_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def idle(_command: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "import sys; sys.stdin.read()"], **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", idle)
    monkeypatch.setenv("FRESHET_COMMON_CLIENT_TOKEN_FILE", str(tmp_path / "missing"))
    try:
        with pytest.raises(ConfigError, match="missing"), module.local(SPEC, folder=tmp_path / "run"):
            pass
        assert [process.poll() is not None for process in started] == [True]
    finally:
        for process in started:
            process.kill()
            process.wait()


SERVICE = """
import pathlib, signal, sys, time

def drain(*_):
    print("draining", flush=True)
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    print("drained", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, drain)
print("up", flush=True)
while True:
    signal.pause()
"""
"""A service whose drain ends once a file is there."""

UP = """
import os, sys
from freshet.apps import supervision
from freshet.process.supervisor import Process

def processes(_spec, _folder, settings, *, console):
    command = [sys.executable, "-c", os.environ["SERVICE"], os.environ["GO"]]
    return [Process("gateway", command, supervision.ports_of(settings)["gateway"], watched=False)]

supervision.processes = processes
from freshet.cli import main
main()
"""
"""`freshet up` with that service alone."""

CALLER = """
import os, signal, subprocess, sys
from pathlib import Path
from freshet.apps import local as module

started, popen = [], subprocess.Popen

def stub(command, **kwargs):
    started.append(popen([sys.executable, "-c", os.environ["UP"], *command[3:]], **kwargs))
    return started[-1]

def is_ready(system, _role):
    log = Path(system.folder, "logs", "gateway.log")
    return log.exists() and "up" in log.read_text()

subprocess.Popen, module.Local.is_ready = stub, is_ready
signal.signal(signal.SIGINT, signal.default_int_handler)
with module.local(sys.argv[1], folder=sys.argv[2], ready_s=300.0):
    try:
        print("running", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
print("up ended with", started[0].returncode)
"""


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline, pause = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        pause.wait(0.01)


class Calling:
    """A process in a session of its own, within a block of `freshet.local`."""

    def __init__(self, folder: Path) -> None:
        self.run, self._go = RunFolder(folder / "run"), folder / "go"
        programs = {"UP": UP, "SERVICE": SERVICE, "GO": str(self._go), "TMPDIR": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CALLER, str(SPEC), str(self.run.path)],
            env={**os.environ, **programs, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.line() == "running"
        state = read_run(self.run)
        assert state is not None
        self._up, self._birth = state.supervisor, state.birth

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def log(self) -> list[str]:
        return self.run.process_log("gateway").read_text().splitlines()

    def let_drain(self) -> None:
        until(lambda: "draining" in self.log())
        self._go.touch()

    def up_lives(self) -> bool:
        return is_alive(self._up, self._birth)

    def end(self) -> None:
        self._go.touch()
        self.process.kill()
        self.process.communicate()
        if self.up_lives():
            os.kill(self._up, signal.SIGKILL)


@contextmanager
def calling(folder: Path) -> Iterator[Calling]:
    caller = Calling(folder)
    try:
        yield caller
    finally:
        caller.end()


def test_ctrl_c_reaches_the_caller_alone_and_drains_once(tmp_path: Path) -> None:
    with calling(tmp_path) as caller:
        os.killpg(caller.process.pid, signal.SIGINT)

        assert caller.line() == "interrupted"
        caller.let_drain()
        assert caller.line() == "up ended with 0"
        assert caller.log() == ["up", "draining", "drained"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_services_drain_when_their_caller_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    with calling(tmp_path) as caller:
        caller.process.send_signal(how)
        assert caller.process.wait() == -how

        caller.let_drain()
        until(lambda: not caller.up_lives())
        assert caller.log() == ["up", "draining", "drained"]
        state = read_run(caller.run)
        assert state is not None
        assert state.stopped_ms is not None


def test_stop_does_not_wait_for_a_copy_of_the_pipe() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import os; os.read(0, 1)"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    copy = os.dup(process.stdin.fileno())  # as a forked child of the caller has one
    try:
        module._stop(process, 60.0)
    finally:
        os.close(copy)
    assert process.returncode == 0
