"""What runs in a run folder and what happened to it: `state/services.json`, written by the supervisor.

Read by `freshet status` and the console, also while nothing runs: what a killed process cannot say itself
stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from freshet.errors import Corrupt, Unavailable
from freshet.settings import RunFolder

__all__ = ["Ended", "RunState", "last_sign_ms", "read_run", "read_state", "write_run"]

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
    services: Mapping[str, Mapping[str, Any]]  # name -> pid, port, since_s, restarts, last_exit
    again: str = ""  # the command that goes on with this folder
    stopped_ms: int | None = None  # when it was stopped as it should be; None: it runs, or was killed
    history: Sequence[Ended] = ()  # oldest first


def read_run(folder: RunFolder) -> RunState | None:
    """The state as last written; None if nothing ever ran here.

    Raises Corrupt, naming the file, if it does not parse; Unavailable if it cannot be read.
    """
    path = folder.state / STATE_FILE
    try:
        found = orjson.loads(path.read_bytes())
        return RunState(
            supervisor=int(found["supervisor"]),
            services={str(name): dict(state) for name, state in found["services"].items()},
            again=str(found.get("again", "")),
            stopped_ms=found.get("stopped_ms"),
            history=tuple(Ended(**one) for one in found.get("history", ())),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Unavailable(f"{path}: cannot be read: {error.strerror}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(
            f"{path}: expected the state of services, found {error}\n"
            "  delete it: `freshet up` writes it anew, and no event, row or version lies in it"
        ) from error


def read_state(folder: RunFolder) -> Mapping[str, Mapping[str, Any]]:
    """{service: pid, port, since_s, restarts, last_exit}; empty if nothing ever ran here. Raises as
    `read_run`."""
    run = read_run(folder)
    return run.services if run is not None else {}


def write_run(folder: RunFolder, run: RunState) -> None:
    """Replace the state, whole or not at all. Raises OSError."""
    target = folder.state / STATE_FILE
    temporary = target.with_suffix(".new")
    history = [asdict(one) for one in run.history[-HISTORY:]]
    temporary.write_bytes(orjson.dumps({**asdict(run), "history": history}))
    temporary.replace(target)


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
