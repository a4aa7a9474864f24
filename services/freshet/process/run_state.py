"""What runs in a run folder and what happened to it: `state/services.json`, written by the supervisor.

Read by `freshet status` and the console, also while nothing runs: what a killed process cannot say itself
stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from freshet.config.settings import RunFolder
from freshet.errors import Corrupt, Unavailable
from freshet.process.whole_files import replace_file

__all__ = ["STATE_FILE", "Ended", "RunState", "last_sign_ms", "read_run", "read_state", "write_run"]

STATE_FILE = "services.json"

HISTORY = 50
"""Endings that are kept: what an operator looks back at, and a file of a few KiB."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One process that ended without being asked to."""

    name: str  # of the service, or "supervisor"
    time_ms: int  # when that was seen; of a supervisor, when the run folder was last written to
    how: str  # "signal 9 (SIGKILL)", "exit code 1"
    why: str = ""  # its last words, if it had any
    up_s: float | None = None  # how long it had run
    again_ms: int | None = None  # when another was started in its place; None: not yet


@dataclass(frozen=True, slots=True)
class RunState:
    """The processes of a run folder as its supervisor last saw them."""

    supervisor: int  # process id
    services: Mapping[str, Mapping[str, Any]]  # name -> pid, birth, host, port, since_s, …
    again: str = ""  # the command that goes on with this folder
    stopped_ms: int | None = None  # when it was stopped as it should be; None: it runs, or was killed
    history: Sequence[Ended] = ()  # oldest first
    birth: str = ""  # of the supervisor, see `freshet.process.process_info`


def read_run(folder: RunFolder) -> RunState | None:
    """The state as last written; None if nothing ever ran here.

    Raises Corrupt, naming the file, if it does not parse; Unavailable if it cannot be read.
    """
    path = folder.state / STATE_FILE
    try:
        return _parsed(orjson.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Unavailable(f"{path}: cannot be read: {error.strerror}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(
            f"{path}: expected the state of services, found {error}\n"
            "  `freshet up` writes it anew within seconds, and no event, row or version lies in it"
        ) from error


_NO_SERVICE = {
    "pid": None,
    "birth": "",
    "host": "127.0.0.1",
    "port": 0,
    "since_s": 0.0,
    "restarts": 0,
    "last_exit": "",
}
_LATEST_MS = 253_402_300_799_000
"""The end of the year 9999: what comes after is no date."""

_Check = Callable[[Any], bool]


def _whole(most: int) -> _Check:
    return lambda value: type(value) is int and 0 <= value <= most


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _seconds(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= _LATEST_MS / 1000


_PID, _TIME = _whole(1 << 31), _whole(_LATEST_MS)
_RUN: Mapping[str, _Check] = {
    "supervisor": _PID,
    "stopped_ms": _or_none(_TIME),
    "again": _text,
    "birth": _text,
}
_SERVICE: Mapping[str, _Check] = {
    "pid": _or_none(_PID),
    "birth": _text,
    "host": _text,
    "port": _whole(65_535),
    "since_s": _seconds,
    "restarts": _whole(1 << 31),
    "last_exit": _text,
}
_ENDED: Mapping[str, _Check] = {
    "name": _text,
    "time_ms": _TIME,
    "how": _text,
    "why": _text,
    "up_s": _or_none(_seconds),
    "again_ms": _or_none(_TIME),
}


def _parsed(found: Any) -> RunState:
    """Raises KeyError, TypeError, ValueError or AttributeError if that is no state of services."""
    run = RunState(
        supervisor=found["supervisor"],
        services={name: {**_NO_SERVICE, **state} for name, state in found["services"].items()},
        again=found.get("again", ""),
        stopped_ms=found.get("stopped_ms"),
        history=tuple(Ended(**one) for one in found.get("history", ())),
        birth=found.get("birth", ""),
    )
    for name, check in _RUN.items():
        _require(name, getattr(run, name), check)
    for service, state in run.services.items():
        for name, check in _SERVICE.items():
            _require(f"{service}.{name}", state[name], check)
    for one in run.history:
        for name, check in _ENDED.items():
            _require(f"history.{name}", getattr(one, name), check)
    return run


def _require(name: str, value: Any, check: _Check) -> None:
    if not check(value):
        raise ValueError(f"{name} = {value!r}")


def read_state(folder: RunFolder) -> Mapping[str, Mapping[str, Any]]:
    """{service: pid, birth, host, port, since_s, restarts, last_exit}; empty if nothing ever ran here.

    Raises as `read_run`.
    """
    run = read_run(folder)
    return run.services if run is not None else {}


def write_run(folder: RunFolder, run: RunState) -> None:
    """Replace the state, whole or not at all. Raises OSError."""
    target = folder.state / STATE_FILE
    history = [asdict(one) for one in run.history[-HISTORY:]]
    replace_file(target, orjson.dumps({**asdict(run), "history": history}))


def last_sign_ms(folder: RunFolder) -> int:
    """When the log, or a process's log, was last written: the last sign of life of what was killed."""
    times = [_modified_ms(path) for part in (folder.log, folder.logs) for path in _files(part)]
    return max(times, default=0)


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _modified_ms(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns // 1_000_000
    except OSError:
        return 0  # it has just been deleted
