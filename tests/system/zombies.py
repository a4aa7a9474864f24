"""Processes that stand still for longer than their lease, are replaced, and come back."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import freshet
from freshet.config.settings import RunFolder
from freshet.testing.waiting import wait_until
from tests.servers.processes import pause
from tests.system.killing import Killer

GOES_ON_S = 45.0  # a lease, a start, and a busy machine


def replace_while_it_stands_still(
    killer: Killer, role: str, progress: Callable[[], float | None], *, ends_by_itself: bool
) -> float:
    """Stop a service (SIGSTOP), let another process take its place, wake it up, and see it go.

    Args:
        progress: of the role, whichever process does the work.
        ends_by_itself: whether the process in its place is fenced by the restarted one; else it is killed.

    Returns how many seconds the work stood still.
    """
    wait_until(f"{role} runs", lambda: killer.pid(role) is not None, within_s=GOES_ON_S)
    pid = killer.pid(role)
    assert pid is not None
    stop_between_transactions(pid, killer.folder)
    before = progress() or 0.0
    other = _start(role, killer.folder)
    try:
        stood_s = wait_until(
            f"another {role} goes on", lambda: (progress() or 0.0) > before, within_s=GOES_ON_S
        )
        os.kill(pid, signal.SIGCONT)
        wait_until(f"the former {role} ends", lambda: killer.pid(role) != pid, within_s=GOES_ON_S)
        if not ends_by_itself:
            other.kill()
        wait_until(f"the {role} in its place ends", lambda: other.poll() is not None, within_s=GOES_ON_S)
        after = progress() or 0.0
        wait_until(f"the supervised {role} goes on", lambda: (progress() or 0.0) > after, within_s=GOES_ON_S)
    finally:
        if killer.pid(role) == pid:
            os.kill(pid, signal.SIGCONT)
        if other.poll() is None:
            other.kill()
        other.wait()
    return stood_s


def stop_between_transactions(pid: int, folder: Path) -> None:
    """SIGSTOP while the process holds no lock of SQLite's: a lock of a living process can be taken by nobody,
    so that a machine's whole log waits for it; leases are about the others."""

    def stopped() -> bool:
        pause(pid)
        if not _locked(folder):
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    wait_until("it stands still without a lock", stopped, within_s=GOES_ON_S)


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


def _start(role: str, folder: Path) -> subprocess.Popen[bytes]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        f"FRESHET_{role.upper()}_ADMIN_PORT": str(port),
        "PYTHONPATH": str(Path(freshet.__file__).parents[1]),
    }
    run = RunFolder(folder)
    with (run.logs / f"{role}-in-its-place.log").open("ab") as file:
        command = ["run", role, str(run.state / "spec.toml"), "--folder", str(folder)]
        return subprocess.Popen(
            [sys.executable, "-m", "freshet.cli", *command], env=environment, stdout=file, stderr=file
        )
