"""The supervisor of `freshet up`: it starts the services, restarts those that end or hang, stops them all.

It owns the run folder by a lock, and writes the state of its children to `state/services.json`.
"""

from __future__ import annotations

import fcntl
import os
import signal
import ssl
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import structlog

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.settings import RunFolder
from freshet.errors import ConfigError, Corrupt, Unavailable
from freshet.http.endpoint import LIVE
from freshet.http.service_client import ask
from freshet.observability.skipped_state import skip
from freshet.process.process_info import activity_of, birth_of, exit_reason
from freshet.process.restart_policy import HangPolicy, Silence, Watch, exit_in_words
from freshet.process.run_state import STATE_FILE, Ended, RunState, last_sign_ms, read_run, write_run

log = structlog.get_logger("freshet.supervisor")

DEFAULT_HANG = HangPolicy()
LOCK_FILE = "supervisor.lock"
POLL_EVERY_S = 0.05
"""Interval at which the supervisor polls its children: the largest delay of a restart."""

CHECK_EVERY_S = 2.0
CHECK_WITHIN_S = 5.0
"""Interval and time-out of the requests for a child's `/health/live`."""


@dataclass(frozen=True, slots=True)
class Process:
    """One service to run."""

    name: str
    command: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"  # the address for requests from this machine
    watched: bool = True  # poll `/health/live`, and restart the process if it hangs


@dataclass(slots=True)
class _Child:
    process: Process
    watch: Watch = field(default_factory=Watch)
    popen: subprocess.Popen[bytes] | None = None
    birth: str = ""
    since: float = 0.0  # start of the process, wall clock, s
    log_start: int = 0  # byte of the log at which the output of this process begins
    hung: str = ""  # the reason to kill this process


class Supervisor:
    """Runs the processes of one run folder until it is stopped."""

    def __init__(
        self,
        folder: RunFolder,
        processes: Sequence[Process],
        clock: Clock = SYSTEM_CLOCK,
        *,
        again: str = "",
        hang: HangPolicy = DEFAULT_HANG,
        check_every_s: float = CHECK_EVERY_S,
    ) -> None:
        """Lock the run folder.

        Args:
            again: the command that continues this run, recorded in the state.

        Raises ConfigError if another supervisor holds the lock, Unavailable if the folder cannot be written.
        """
        self._hang, self._check_every_s, self._over = hang, check_every_s, threading.Event()
        self._folder, self._clock, self._again = folder, clock, again
        self._children = [_Child(p) for p in processes]
        self._state_due = 0.0
        self._state_stamp: tuple[int, int, int] | None = None
        self._lock = _take_lock(folder.state / LOCK_FILE)
        self._history = _read_history(folder, clock.now_ms())

    def run(self, stop: threading.Event, *, drain_s: float) -> Mapping[str, str]:
        """Keep all processes running until `stop`, then stop them; return {service: how it ended}.

        A process that is alive `drain_s` after the stop is killed.

        Raises Unavailable, with all processes killed, if the run folder is moved or deleted: services would
        acknowledge events into files that no later run finds.
        """
        for child in self._children:
            if child.process.watched:
                name = f"check {child.process.name}"
                threading.Thread(target=self._check_liveness, args=(child,), name=name, daemon=True).start()
        try:
            while not stop.is_set():
                self._poll_children()
                self._refuse_lost_folder()
                stop.wait(POLL_EVERY_S)
            self._over.set()
            return self._stop_all(drain_s)
        finally:
            self._over.set()
            self._kill_all()  # children are left only after an error
            self.close()

    def close(self) -> None:
        """Release the lock of the run folder, as `run` does at its end."""
        self._lock.close()

    @property
    def restarts(self) -> Mapping[str, int]:
        """{service: its restarts}."""
        return {child.process.name: child.watch.restarts for child in self._children}

    def _refuse_lost_folder(self) -> None:
        mine = os.fstat(self._lock.fileno())
        try:
            found = os.stat(self._folder.state / LOCK_FILE)
        except (FileNotFoundError, NotADirectoryError):
            found = None
        except OSError:
            return  # it cannot be read now, which does not mean that it is gone
        if found is None or (found.st_dev, found.st_ino) != (mine.st_dev, mine.st_ino):
            raise Unavailable(
                f"{self._folder.path} was moved or deleted while it ran; its services were killed\n"
                "  a folder that was moved goes on with `freshet up` where it is now; stop a run before that"
            )

    def _poll_children(self) -> None:
        changed = False
        now = self._clock.monotonic()
        if now >= self._state_due:
            self._state_due = now + CHECK_EVERY_S
            changed = self._state_is_lost()
        for child in self._children:
            code = child.popen.poll() if child.popen is not None else None
            if child.popen is not None and code is not None:
                child.popen = None
                self._record_exit(child, code, now)
                changed = True
            if child.watch.due(now):
                self._start(child, now)
                changed = True
        if changed:
            self._write_state()

    def _check_liveness(self, child: _Child) -> None:
        """Poll one child's liveness and kill it once it hangs. Each child has a thread of its own, because a
        request may take `CHECK_WITHIN_S`."""
        checked: subprocess.Popen[bytes] | None = None
        silence = Silence(self._hang)
        while not self._over.wait(self._check_every_s):
            popen = child.popen
            if popen is None:
                continue
            if popen is not checked:
                checked, silence = popen, Silence(self._hang)
            answer = _request_liveness(child.process)
            reason = silence.add_check(self._clock.monotonic(), answer, activity_of(popen.pid))
            if reason and child.popen is popen and popen.poll() is None and not self._over.is_set():
                log.error("service hangs, killing it", child=child.process.name, reason=reason)
                child.hung = reason
                popen.kill()

    def _record_exit(self, child: _Child, code: int, now: float) -> None:
        path = self._folder.process_log(child.process.name)
        again = child.watch.exited(code, now)
        if child.hung:
            child.watch.last_exit, child.hung = f"{child.hung}, killed", ""
        why = exit_reason(path, child.log_start)
        began = child.watch.started_at  # monotonic, since the wall clock may be set back
        ran = None if began is None else round(now - began, 1)
        self._history.append(Ended(child.process.name, self._clock.now_ms(), child.watch.last_exit, why, ran))
        log.warning(
            "service ended, restarting it",
            child=child.process.name,
            how=child.watch.last_exit,
            **({"last_words": why} if why else {}),
            again_in_s=round(again - now, 2),
            path=str(path),
        )

    def _start(self, child: _Child, now: float) -> None:
        name = child.process.name
        environment = {**os.environ, **child.process.environment, "FRESHET_SUPERVISOR_PID": str(os.getpid())}
        child.watch.started(now)
        try:
            self._folder.logs.mkdir(mode=0o700, exist_ok=True)  # logs may be deleted while it runs
            with self._folder.process_log(name).open("ab") as file:
                child.log_start = os.fstat(file.fileno()).st_size
                child.popen = subprocess.Popen(  # nosec B603  # our own command, no shell
                    child.process.command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches the supervisor only, which stops its children
                )
        except OSError as error:  # no such program, or no process, memory or disk left: the others continue
            child.watch.exited(1, now)
            child.watch.last_exit = f"could not be started: {error}"
            log.error("service could not be started", child=name, reason=str(error))
        else:
            child.since, child.birth = self._clock.now_ms() / 1000, birth_of(child.popen.pid)
            self._history = [
                replace(one, again_ms=self._clock.now_ms())
                if one.name == name and one.again_ms is None
                else one
                for one in self._history
            ]

    def _stop_all(self, drain_s: float) -> dict[str, str]:
        """Send SIGTERM to all children, wait until the deadline, then kill the rest."""
        ended: dict[str, str] = {}
        deadline = self._clock.monotonic() + drain_s
        for child in self._children:
            if child.popen is not None:
                child.popen.send_signal(signal.SIGTERM)
        for child in self._children:
            popen = child.popen
            if popen is None:
                ended[child.process.name] = child.watch.last_exit or "was not running"
                continue
            try:
                code = popen.wait(max(0.1, deadline - self._clock.monotonic()))
                # SIGTERM ends a process that has not installed its handler yet
                stopped = code in (0, -signal.SIGTERM)
                ended[child.process.name] = "stopped" if stopped else exit_in_words(code)
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()
                ended[child.process.name] = f"killed: it had not stopped after {drain_s:g} s"
            child.popen = None
        self._write_state(stopped_ms=self._clock.now_ms())
        return ended

    def _kill_all(self) -> None:
        for child in self._children:
            if child.popen is not None:
                child.popen.kill()
                child.popen.wait()

    def _state_is_lost(self) -> bool:
        """Report whether another program deleted or changed the state; the caller then writes it again."""
        path = self._folder.state / STATE_FILE
        if self._state_stamp is None:
            return False
        with suppress(OSError):
            if _stamp(path.stat()) == self._state_stamp:
                return False
        log.error("the state of the services was changed or deleted, it is written anew", path=str(path))
        skip("run_state", str(path), "it was changed or deleted by something else than its supervisor")
        return True

    def _write_state(self, stopped_ms: int | None = None) -> None:
        services = {
            child.process.name: {
                "pid": child.popen.pid if child.popen is not None else None,
                "birth": child.birth if child.popen is not None else "",
                "host": child.process.host,
                "port": child.process.port,
                "since_s": child.since,
                "restarts": child.watch.restarts,
                "last_exit": child.watch.last_exit,
            }
            for child in self._children
        }
        me = os.getpid()
        run = RunState(me, services, self._again, stopped_ms, self._history, birth_of(me))
        try:
            self._state_stamp = _stamp(write_run(self._folder, run))
        except OSError as error:  # services that need no disk continue on a full one
            log.error(
                "the state of the services could not be written",
                path=str(self._folder.state),
                reason=str(error),
            )


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _request_liveness(process: Process) -> str | None:
    """Request `/health/live`: "" if the process is live, a reason if it is stuck, None without an answer."""
    try:
        code, answer = ask(process.port, LIVE.path, host=process.host, timeout_s=CHECK_WITHIN_S)
    except OSError as error:
        # A refused handshake is an answer too, such as one with an expired certificate; a cut one is none.
        refused = isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError)
        return "" if refused else None
    if code != 503 or not isinstance(answer, dict) or answer.get("status") != "stuck":
        return ""  # any other answer shows that the process is live
    return str(answer.get("reason", "its main loop has stalled"))


def _read_history(folder: RunFolder, now_ms: int) -> list[Ended]:
    """Read the processes that ended in earlier runs; a killed supervisor counts as one."""
    try:
        run = read_run(folder)
    except (Corrupt, Unavailable) as error:  # the history is lost, but the run can start
        log.warning("the state of an earlier run could not be read", reason=str(error))
        return []
    if run is None:
        return []
    history = [one if one.again_ms is not None else replace(one, again_ms=now_ms) for one in run.history]
    if run.stopped_ms is None:
        how = "it was killed, or the machine went down"
        history.append(Ended("supervisor", last_sign_ms(folder), how, again_ms=now_ms))
    return history


def _take_lock(path: Path) -> IO[bytes]:
    try:
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().decode(errors="replace").strip()
        file.close()
        raise ConfigError(
            "--folder",
            "",
            f"{path.parent.parent} is in use by process {owner}",
            "a run folder that no other `freshet up` runs in",
            f"stop it (kill {owner}), or take another folder with --folder",
        ) from None
    try:
        file.truncate(0)
        file.write(str(os.getpid()).encode())
    except OSError as error:
        file.close()
        raise _unwritable(path, error) from error
    return file


def _unwritable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(
        f"{path}: cannot be written: {error.strerror}; nothing was started\n"
        "  a run needs a folder that it may write to, and space in it; --folder names another"
    )
