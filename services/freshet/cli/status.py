"""`freshet status`: what runs, what it has done, and how fresh the served model is."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import orjson

from freshet.cli.options import emit, existing_folder, folder_option, json_option, table

__all__ = ["as_text", "collect", "command"]


@click.command()
@folder_option
@json_option
def command(folder: Path, as_json: bool) -> None:
    """Say what runs in a run folder, what it has done, and how fresh the served model is."""
    status = collect(folder)
    emit(status, as_json=as_json, text=as_text(status))


def collect(folder: Path) -> dict[str, Any]:
    """Everything that `freshet status` prints, as one object."""
    from freshet.runtime.supervisor import read_state
    from freshet.seams.open import open_versions
    from freshet.settings import RunFolder

    existing_folder(folder)
    services = {name: _service(state) for name, state in read_state(RunFolder(folder)).items()}
    versions = open_versions(f"file:{folder / 'versions'}")
    aliases = dict(versions.aliases())
    numbers = list(versions.numbers())
    newest = versions.manifest(numbers[-1]) if numbers else None
    return {
        "folder": str(folder),
        "services": services,
        "versions": {
            "stored": len(numbers),
            "newest": newest.number if newest else None,
            "verdict": newest.verdict if newest else None,
            "reason": newest.reason if newest else None,
            "aliases": aliases,
        },
    }


def _service(state: Mapping[str, Any]) -> dict[str, Any]:
    pid, port = state["pid"], int(state["port"])
    alive = pid is not None and _alive(int(pid))
    ready, reason = _ready(port) if alive else (False, state["last_exit"] or "not started")
    return {
        "pid": pid if alive else None,
        "port": port,
        "state": "ready" if ready else "starting" if alive else "down",
        "reason": reason,
        "up_s": round(time.time() - float(state["since_s"]), 1) if alive else None,
        "restarts": state["restarts"],
        "last_exit": state["last_exit"],
        "memory_mb": _memory_mb(int(pid)) if alive else None,
        "figures": _figures(port) if ready else {},
    }


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
        return False, f"does not answer on port {port}: {error}"


def _figures(port: int) -> dict[str, Any]:
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


def as_text(status: Mapping[str, Any]) -> str:
    """The status as the terminal shows it."""
    services = status["services"]
    if not services:
        return f"nothing has run in {status['folder']} yet; `freshet up SPEC` starts it"
    rows = [
        [
            name,
            s["state"],
            s["pid"],
            s["port"],
            s["up_s"],
            s["restarts"],
            s["memory_mb"],
            s["reason"] or s["last_exit"],
        ]
        for name, s in services.items()
    ]
    lines = [table(["service", "state", "pid", "port", "up s", "restarts", "MB", "note"], rows), ""]
    joiner, trainer = (
        services.get("joiner", {}).get("figures", {}),
        services.get("trainer", {}).get("figures", {}),
    )
    inference = services.get("inference", {}).get("figures", {})
    if joiner:
        lines.append(f"joined    {joiner.get('samples', 0)} samples of {joiner.get('events', 0)} events")
    if trainer:
        lines.append(
            f"trained   {trainer.get('samples', 0)} samples in {trainer.get('steps', 0)} steps; "
            f"{sum(trainer.get('rows', {}).values())} rows; {trainer.get('lag_blocks', 0)} blocks behind"
        )
        for of, labels in trainer.get("measures", {}).items():
            lines += _measures(of, labels)
    versions = status["versions"]
    if versions["newest"] is not None:
        why = f" ({versions['reason']})" if versions["reason"] else ""
        lines.append(
            f"versions  newest {versions['newest']} {versions['verdict']}{why}; aliases {versions['aliases']}"
        )
    if inference:
        lines.append(
            f"serving   version {inference.get('version')}, fresh to {inference.get('freshness_ms')} ms"
        )
    return "\n".join(lines)


SHOWN_MEASURES = ("n", "auc", "ne", "calibration", "mse")


def _measures(of: str, labels: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """A line a label: what people look at first; `--json` has the rest."""
    lines = []
    for label, values in labels.items():
        known = [(name, values.get(name)) for name in SHOWN_MEASURES]
        parts = [
            f"{name} {value:.0f}" if name == "n" else f"{name} {value:.3f}"
            for name, value in known
            if value is not None
        ]
        lines.append(f"          {label}, {of}: {', '.join(parts)}")
    return lines
