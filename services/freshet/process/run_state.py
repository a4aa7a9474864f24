"""The state of a run folder, `state/services.json`: its services, and the processes that ended.

The supervisor writes it; `freshet status` and the console read it, also while no process runs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from freshet.config.settings import RunFolder
from freshet.errors import ConfigError, Corrupt, Unavailable


def replace_file(path: Path, content: bytes) -> os.stat_result:
    """Replace a file atomically, and return the status that it had then: the path may have changed since.

    Raises OSError, with the old content kept and the temporary file removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        found = temporary.stat()
        temporary.replace(path)
        return found
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def existing_folder(folder: Path) -> Path:
    """Return `folder`. Raises ConfigError if `freshet up`, `demo`, `run` or `replay` did not create it."""
    if _is_run(folder):
        return folder
    if (folder / "log").is_dir() and (folder / "state").is_dir():
        return folder  # its creator ended, or found the disk full, before it wrote the log
    fault = "is a file" if folder.is_file() else "is no run folder" if folder.exists() else "does not exist"
    near = sorted(str(one) for one in Path().glob("*/") if _is_run(one) and one != folder)
    raise ConfigError(
        "--folder",
        "",
        f"{folder} {fault}",
        "a folder that `freshet up SPEC` or `freshet demo` has made (it holds log/)",
        f"did you mean --folder {' or '.join(near[:3])}?" if near else "`freshet demo` creates an example",
    )


def _is_run(folder: Path) -> bool:
    return (folder / "log" / "catalog.sqlite").is_file()


STATE_FILE = "services.json"

HISTORY = 50
"""Ended processes that the file keeps, so that it stays at a few KiB."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One process that ended without a request to stop."""

    name: str  # of the service, or "supervisor"
    time_ms: int  # of detection; for a supervisor, of the last write to the run folder
    how: str  # "signal 9 (SIGKILL)", "exit code 1"
    why: str = ""  # the exit reason, if its log holds one
    up_s: float | None = None  # how long it had run
    again_ms: int | None = None  # when its replacement started; None: not yet


@dataclass(frozen=True, slots=True)
class RunState:
    """The processes of a run folder, as its supervisor last wrote them."""

    supervisor: int  # process id
    services: Mapping[str, Mapping[str, Any]]  # name -> pid, birth, host, port, since_s, …
    again: str = ""  # the command that continues the run
    stopped_ms: int | None = None  # time of a regular stop; None: the run is active, or was killed
    history: Sequence[Ended] = ()  # oldest first
    birth: str = ""  # of the supervisor, see `freshet.process.process_info`


def read_run(folder: RunFolder) -> RunState | None:
    """Read the state; None if no supervisor ever ran in this folder.

    Raises Corrupt if the file does not parse, Unavailable if it cannot be read.
    """
    path = folder.state / STATE_FILE
    try:
        return _parse(orjson.loads(path.read_bytes()))
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
"""The end of the year 9999, the last that `datetime` can hold."""

_Check = Callable[[Any], bool]


def _is_int_to(most: int) -> _Check:
    return lambda value: type(value) is int and 0 <= value <= most


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= _LATEST_MS / 1000


_PID, _TIME = _is_int_to(1 << 31), _is_int_to(_LATEST_MS)
_RUN: Mapping[str, _Check] = {
    "supervisor": _PID,
    "stopped_ms": _or_none(_TIME),
    "again": _is_text,
    "birth": _is_text,
}
_SERVICE: Mapping[str, _Check] = {
    "pid": _or_none(_PID),
    "birth": _is_text,
    "host": _is_text,
    "port": _is_int_to(65_535),
    "since_s": _is_seconds,
    "restarts": _is_int_to(1 << 31),
    "last_exit": _is_text,
}
_ENDED: Mapping[str, _Check] = {
    "name": _is_text,
    "time_ms": _TIME,
    "how": _is_text,
    "why": _is_text,
    "up_s": _or_none(_is_seconds),
    "again_ms": _or_none(_TIME),
}


def _parse(found: Any) -> RunState:
    """Raises KeyError, TypeError, ValueError or AttributeError if `found` is no state of services."""
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
    """Return {service: pid, birth, host, port, since_s, restarts, last_exit}; raises as `read_run`."""
    run = read_run(folder)
    return run.services if run is not None else {}


def write_run(folder: RunFolder, run: RunState) -> os.stat_result:
    """Replace the state atomically; return the file's status. Raises OSError."""
    target = folder.state / STATE_FILE
    history = [asdict(one) for one in run.history[-HISTORY:]]
    return replace_file(target, orjson.dumps({**asdict(run), "history": history}))


def last_sign_ms(folder: RunFolder) -> int:
    """Return the time of the last write to the event log or a process's log; 0 if there is no file."""
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
