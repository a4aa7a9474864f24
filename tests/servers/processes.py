"""A server's process: started with a log file, waited for by conditions; ended, killed or paused by its
pid."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from freshet.testing.conditions import wait_until

_LOOK_S = 0.02
_STOP_S = 30.0
"""For a server to end by itself; then it is killed, and the test fails."""

_CHILDREN_S = 2.0

_TAIL_CHARS = 4000


class Process:
    """One server process at a time, started again as often as wanted; its output is appended to `log`,
    through a pipe: what it says is written also while it may write no file (`Disk`).

    It ends with the thread that started it (where `setpriv` is there), so that tests which are killed leave
    no servers behind: start it from the main thread, or from one that lives as long as it.
    """

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self._command, self._env, self.log = list(command), env, log
        self._popen: subprocess.Popen[bytes] | None = None
        self._writer: threading.Thread | None = None
        self._said_before = 0

    def start(self, is_ready: Callable[[str], bool], *, within_s: float) -> None:
        """Start it and wait until `is_ready`, which is given what it has said since.

        Raises:
            RuntimeError: it ended, or was not ready in time; with the end of its log. It does not run then.
        """
        self.launch()
        popen = self._popen
        assert popen is not None
        deadline, pause = time.monotonic() + within_s, threading.Event()
        while not is_ready(self.said()):
            if popen.poll() is not None:
                raise RuntimeError(f"it ended with {popen.returncode}; {self._last_words()}")
            if time.monotonic() >= deadline:
                self.kill()
                raise RuntimeError(f"it was not ready within {within_s:g} s; {self._last_words()}")
            pause.wait(_LOOK_S)

    def launch(self) -> None:
        """Start it, and wait for nothing. RuntimeError if it runs."""
        if self.alive:
            raise RuntimeError(f"{self._command[0]} runs already, as process {self.pid}")
        self._all_is_written()
        self._said_before = self.log.stat().st_size if self.log.exists() else 0
        dies_with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        self._popen = subprocess.Popen(
            [*dies_with_us, *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._env,
        )
        out = self.log.open("ab", buffering=0)
        self._writer = threading.Thread(target=_pour, args=(self._popen.stdout, out), daemon=True)
        self._writer.start()

    @property
    def alive(self) -> bool:
        """Does it run, or is it paused?"""
        return self._popen is not None and self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """How the process that was started last ended; None while it runs, or if none was."""
        return None if self._popen is None else self._popen.poll()

    @property
    def pid(self) -> int:
        """Process id of the process that was started last."""
        assert self._popen is not None, "it was never started"
        return self._popen.pid

    def said(self) -> str:
        """What it has said since it was last started; all of it, once it has ended."""
        if not self.alive:
            self._all_is_written()
        with self.log.open("rb") as file:
            file.seek(self._said_before)
            return file.read().decode(errors="replace")

    def stop(self) -> None:
        """End it in its own way (SIGTERM) and wait. RuntimeError if it had to be killed."""
        if not self.alive:
            return
        assert self._popen is not None
        self.resume()
        self._popen.terminate()
        try:
            self._popen.wait(_STOP_S)
            self._all_is_written()
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"it did not end within {_STOP_S:g} s; {self._last_words()}") from None

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone; paused or not. Nothing if it does not run."""
        if self.alive:
            assert self._popen is not None
            self._popen.kill()
            self._popen.wait()
        self._all_is_written()

    def pause(self) -> None:
        """SIGSTOP: it holds its connections and answers no request."""
        assert self._popen is not None, "it was never started"
        assert self._popen.poll() is None, "it has ended"
        pause(self._popen.pid)

    def resume(self) -> None:
        """SIGCONT: it goes on as if nothing had been, clocks apart."""
        self._signal(signal.SIGCONT)

    def _all_is_written(self) -> None:
        if self._writer is not None:
            self._writer.join(_CHILDREN_S)  # no longer, as a process that it started may hold the pipe

    def _signal(self, number: signal.Signals) -> None:
        assert self._popen is not None, "it was never started"
        self._popen.send_signal(number)

    def _last_words(self) -> str:
        return f"the end of {self.log}:\n{self.said()[-_TAIL_CHARS:]}"


def _pour(pipe: IO[bytes], out: IO[bytes]) -> None:
    moment = threading.Event()
    with pipe, out:
        while some := os.read(pipe.fileno(), 1 << 16):
            while some:
                try:
                    some = some[out.write(some) or 0 :]
                except OSError:  # a test lets this process write nothing for a moment
                    moment.wait(_LOOK_S)


def pause(pid: int) -> None:
    """SIGSTOP, and wait until it is obeyed: until the one thread that takes the signal is given a processor,
    the others go on, which on a busy machine takes long enough for them to answer."""
    os.kill(pid, signal.SIGSTOP)
    deadline, moment = time.monotonic() + _STOP_S, threading.Event()
    while not all(_stands_still(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        if time.monotonic() >= deadline:
            raise RuntimeError(f"process {pid} still runs {_STOP_S:g} s after SIGSTOP")
        moment.wait(0.001)


def _stands_still(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has ended


def run_to_end(command: Sequence[str], *, within_s: float) -> str:
    """Run a tool and return what it said; RuntimeError, with that, if it fails."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=within_s, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def stop_between_transactions(pid: int, folder: Path) -> None:
    """SIGSTOP while the process holds no lock of SQLite's: no process can take the lock of a living one,
    so that a machine's whole log waits for it; leases are about the others."""

    def stopped() -> bool:
        pause(pid)
        if not _locked(folder):
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    wait_until("it stands still without a lock", stopped, within_s=45)


def _locked(folder: Path) -> bool:
    for file in (*folder.glob("log/*.sqlite"), *folder.glob("rows/*.sqlite")):
        connection = sqlite3.connect(file, timeout=0.5, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return True
        finally:
            connection.close()
    return False
