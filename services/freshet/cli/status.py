"""`freshet status`: what runs, what it has done, how fresh the served model is, and what happened."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson

from freshet.cli.options import emit, examples, existing_folder, folder_option, json_option
from freshet.cli.status_text import as_text

if TYPE_CHECKING:
    from freshet.runtime.run_state import RunState

__all__ = ["as_text", "collect", "command", "figures_of"]


@click.command(epilog=examples("freshet status", "freshet status --folder news-run --json"))
@folder_option
@json_option
def command(folder: Path, as_json: bool) -> None:
    """Say what runs in a run folder, what it has done, how fresh the served model is, and what ended."""
    status = collect(folder)
    emit(status, as_json=as_json, text=as_text(status))


def collect(folder: Path) -> dict[str, Any]:
    """Everything that `freshet status` prints, as one object; also of a run that has ended."""
    from freshet.runtime.run_state import read_run
    from freshet.settings import RunFolder

    run = read_run(RunFolder(existing_folder(folder)))
    return {
        "folder": str(folder),
        "supervisor": _supervisor(folder, run) if run is not None else None,
        "services": {name: _service(state) for name, state in run.services.items()} if run else {},
        "history": [asdict(one) for one in run.history] if run else [],
        "versions": _versions(folder),
    }


def _supervisor(folder: Path, run: RunState) -> dict[str, Any]:
    from freshet.runtime.run_state import last_sign_ms
    from freshet.settings import RunFolder

    if run.stopped_ms is not None:
        state, at_ms = "stopped", run.stopped_ms
    elif _alive(run.supervisor):
        state, at_ms = "running", None
    else:
        state, at_ms = "gone", last_sign_ms(RunFolder(folder))
    return {"pid": run.supervisor, "state": state, "time_ms": at_ms, "again": run.again}


def _versions(folder: Path) -> dict[str, Any]:
    from freshet.seams.open import open_versions

    if not (folder / "versions").is_dir():
        return {"stored": 0, "newest": None, "verdict": None, "reason": None, "aliases": {}}
    versions = open_versions(f"file:{folder / 'versions'}")
    numbers = list(versions.numbers())
    newest = versions.manifest(numbers[-1]) if numbers else None
    return {
        "stored": len(numbers),
        "newest": newest.number if newest else None,
        "verdict": newest.verdict if newest else None,
        "reason": newest.reason if newest else None,
        "aliases": dict(versions.aliases()),
    }


def _service(state: Mapping[str, Any]) -> dict[str, Any]:
    pid, port = state["pid"], int(state["port"])
    alive = pid is not None and _alive(int(pid))
    ready, reason = _ready(port) if alive else (False, state["last_exit"] or "does not run")
    return {
        "pid": pid if alive else None,
        "port": port,
        "state": "ready" if ready else "starting" if alive else "down",
        "reason": reason,
        "up_s": round(time.time() - float(state["since_s"]), 1) if alive else None,
        "restarts": state["restarts"],
        "last_exit": state["last_exit"],
        "memory_mb": _memory_mb(int(pid)) if alive else None,
        "figures": figures_of(port) if ready else {},
    }


def _alive(pid: int) -> bool:
    """Whether that process runs and is one of ours: ids are given to others after a while."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    try:
        return b"freshet" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True  # no such thing on this system


def _ready(port: int) -> tuple[bool, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=1):
            return True, ""
    except urllib.error.HTTPError as error:
        with error:
            try:
                return False, str(orjson.loads(error.read()).get("reason", error.reason))
            except orjson.JSONDecodeError:
                return False, str(error.reason)
    except OSError as error:
        return False, f"does not answer on port {port} yet: {getattr(error, 'reason', error)}"


def figures_of(port: int) -> dict[str, Any]:
    """`/status` of the service on this port; empty while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=1) as answer:
            figures: dict[str, Any] = orjson.loads(answer.read())
            return figures
    except (OSError, orjson.JSONDecodeError):
        return {}


def _memory_mb(pid: int) -> float | None:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return round(int(line.split()[1]) / 1024, 1)
    except OSError:
        pass  # it has just ended
    return None
