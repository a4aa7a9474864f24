"""The command in this process as a shell sees it, and the states of a machine that it must put up with."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog

from freshet.__main__ import main
from freshet.adapters import open_eventlog
from freshet.config.settings import RunFolder
from freshet.process.run_state import RunState, write_run

NOBODY = 65_534


@dataclass(frozen=True, slots=True)
class Said:
    """What a command left: its exit code and all that it said."""

    code: int
    text: str


class Shell:
    """Runs `freshet ...` and returns what it said; an exception that escapes it fails the test."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: object) -> Said:
        self._capsys.readouterr()
        self._monkeypatch.setattr(sys, "argv", ["freshet", *map(str, arguments)])
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        code = 0
        try:
            main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            structlog.reset_defaults()  # the log is each process's own
            structlog.contextvars.clear_contextvars()
        said = self._capsys.readouterr()
        return Said(code, said.out + said.err)


# --- states of a run folder; each makes what `name` then names


def missing(name: Path) -> None:
    """Nothing at all."""


def a_file(name: Path) -> None:
    """A file stands where a folder is expected."""
    name.write_text("mine")


def empty(name: Path) -> None:
    """A folder with nothing in it."""
    name.mkdir()


def somebody_elses(name: Path) -> None:
    """A folder of another purpose."""
    (name / "notes").mkdir(parents=True)
    (name / "notes" / "todo.txt").write_text("mine")


def without_data(name: Path) -> None:
    """A run folder in which nothing has happened."""
    RunFolder(name).create()
    open_eventlog(f"sqlite:{name / 'log'}").close()


def ended(name: Path) -> None:
    """A run that was stopped: its services are known and do not run."""
    without_data(name)
    state = {"pid": None, "port": 9, "since_s": 0.0, "restarts": 0, "last_exit": ""}
    services = dict.fromkeys(("gateway", "joiner", "trainer", "inference"), state)
    write_run(RunFolder(name), RunState(1, services, "freshet up here", stopped_ms=1))


def damaged_log(name: Path) -> None:
    """The log's catalog is no SQLite file."""
    RunFolder(name).create()
    (name / "log" / "catalog.sqlite").write_bytes(b"damaged" * 1000)


def damaged_state(name: Path) -> None:
    """The state of the services does not parse."""
    without_data(name)
    (name / "state" / "services.json").write_text("{")


State = Callable[[Path], None]


@contextlib.contextmanager
def no_permission(folder: Path) -> Iterator[None]:
    """No user may enter or write to the folder; root, which always may, becomes another user meanwhile."""
    mode = folder.stat().st_mode
    folder.chmod(0)
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        folder.chmod(mode)


@contextlib.contextmanager
def no_space() -> Iterator[None]:
    """No file can grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder: Path) -> dict[str, str]:
    """{path: what it is}: to see that nothing was made, changed or left behind."""
    found = {}
    for path in sorted(folder.rglob("*")):
        is_file = path.is_file() and not path.name.endswith(("-wal", "-shm"))  # SQLite's own, of any reader
        if is_file or path.is_dir():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12] if is_file else "folder"
            found[str(path.relative_to(folder))] = digest
    return found
