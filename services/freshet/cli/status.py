"""`freshet status`: what runs, what it has done, how fresh the served model is, and what happened."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from freshet.cli.options import emit, examples, existing_folder, folder_option, json_option
from freshet.cli.status_text import as_text
from freshet.errors import Corrupt, Unavailable

if TYPE_CHECKING:
    from freshet.runtime.run_state import RunState

__all__ = ["as_text", "collect", "collect_listed", "command"]


@click.command(
    epilog=examples(
        "freshet status",
        "freshet status --folder news-run --json",
        "freshet status --services gateway=gateway-0:7000,joiner=joiner-0:7010",
    )
)
@folder_option
@click.option(
    "--services",
    metavar="LIST",
    help="Ask these, role=host:port and commas between, instead of a run folder's. FRESHET_CONSOLE_SERVICES "
    "says it, too, where no run folder knows of any.",
)
@json_option
def command(folder: Path, services: str | None, as_json: bool) -> None:
    """Say what runs in a run folder, what it has done, how fresh the served model is, and what ended; or how
    services are that run on other machines or in containers."""
    from freshet.settings import load_settings

    if services is None and not _has_run(folder):
        services = load_settings(run_folder=folder).console.services
    status = collect_listed(folder, services) if services else collect(folder)
    emit(status, as_json=as_json, text=as_text(status))


def collect_listed(folder: Path, services: str) -> dict[str, Any]:
    """What services say that are asked at their addresses, and the versions of the settings.

    Raises ConfigError: `services` is no list of role=host:port.
    """
    from freshet.cli.status_listed import ask_all
    from freshet.console.instances import listed_places
    from freshet.runtime import tls
    from freshet.settings import load_settings

    tls.use(load_settings(run_folder=folder))
    return {"services": ask_all(listed_places(services)), "versions": _versions(folder)}


def collect(folder: Path) -> dict[str, Any]:
    """Everything that `freshet status` prints, as one object; also of a run that has ended."""
    from freshet.runtime import tls
    from freshet.runtime.run_state import read_run
    from freshet.settings import RunFolder, load_settings

    tls.use(load_settings(run_folder=existing_folder(folder)))
    run, damage = None, ""
    try:
        run = read_run(RunFolder(existing_folder(folder)))
    except (Corrupt, Unavailable) as error:  # what runs is asked all the same, where the settings say
        damage = str(error)
    if run is None and damage:
        return {"services": _asked(folder), "versions": _versions(folder), "state_damaged": damage}
    return {
        "folder": str(folder),
        "supervisor": _supervisor(folder, run) if run is not None else None,
        "services": {name: _service(state) for name, state in run.services.items()} if run else {},
        "history": [asdict(one) for one in run.history] if run else [],
        "versions": _versions(folder),
    }


def _asked(folder: Path) -> dict[str, Any]:
    """What the services of a run say whose state cannot be read."""
    from freshet.cli.ports import ports_of
    from freshet.cli.status_listed import ask_all
    from freshet.console.instances import listed_places
    from freshet.settings import load_settings

    ports = ports_of(load_settings(run_folder=folder))
    named = [f"{role}=127.0.0.1:{port}" for role, port in ports.items() if port]  # 0 is any free one
    return ask_all(listed_places(",".join(named))) if named else {}


def _has_run(folder: Path) -> bool:
    """Whether `freshet up` ever ran there."""
    from freshet.runtime.run_state import read_run
    from freshet.settings import RunFolder

    try:
        return folder.is_dir() and read_run(RunFolder(folder)) is not None
    except (Corrupt, Unavailable):
        return True


def _supervisor(folder: Path, run: RunState) -> dict[str, Any]:
    from freshet.runtime.processes import is_alive
    from freshet.runtime.run_state import last_sign_ms
    from freshet.settings import RunFolder

    if run.stopped_ms is not None:
        state, at_ms = "stopped", run.stopped_ms
    elif is_alive(run.supervisor, run.birth):
        state, at_ms = "running", None
    else:
        state, at_ms = "gone", last_sign_ms(RunFolder(folder))
    return {"pid": run.supervisor, "state": state, "time_ms": at_ms, "again": run.again}


def _versions(folder: Path) -> dict[str, Any]:
    from freshet.seams.open import open_versions
    from freshet.settings import load_settings

    common = load_settings(run_folder=folder).common
    if common.stores_versions_itself and not common.run.versions.is_dir():
        return {"stored": 0, "newest": None, "verdict": None, "reason": None, "aliases": {}}
    numbers: list[int] = []
    verdict = reason = None
    aliases: dict[str, int] = {}
    damaged: dict[str, str] = {}
    try:
        versions = open_versions(common.versions_url)
        numbers = list(versions.numbers())
        if numbers:
            newest = versions.manifest(numbers[-1])
            verdict, reason = newest.verdict, newest.reason
    except KeyError:
        verdict = "deleted meanwhile"
    except Corrupt as error:  # trainer and inference pass it over; the rest is worth telling
        verdict, reason = "damaged", str(error)
    except Unavailable as error:
        verdict, reason = "not known", str(error)
        return {"stored": len(numbers), "newest": None, "verdict": verdict, "reason": reason, "aliases": {}}
    try:
        pointed = versions.aliases()
        aliases, damaged = dict(pointed), dict(pointed.damaged)
    except Unavailable as error:
        damaged = {"aliases": str(error)}
    return {
        "stored": len(numbers),
        "newest": numbers[-1] if numbers else None,
        "verdict": verdict,
        "reason": reason,
        "aliases": aliases,
        **({"damaged": damaged} if damaged else {}),
    }


def _service(state: Mapping[str, Any]) -> dict[str, Any]:
    from freshet.runtime.processes import is_alive, memory_mb

    pid, host, port = state["pid"], str(state["host"]), int(state["port"])
    alive = pid is not None and is_alive(int(pid), state["birth"])
    reason, figures = _answer(host, port) if alive else (state["last_exit"] or "does not run", {})
    return {
        "pid": pid if alive else None,
        "host": host,
        "port": port,
        "state": "down" if not alive else "starting" if reason else "ready",
        "reason": reason,
        "up_s": round(max(0.0, time.time() - float(state["since_s"])), 1) if alive else None,
        "restarts": state["restarts"],
        "last_exit": state["last_exit"],
        "memory_mb": memory_mb(int(pid)) if alive else None,
        "figures": figures,
    }


def _answer(host: str, port: int) -> tuple[str, dict[str, Any]]:
    """(why the service is not ready, its figures): "" and figures if it is."""
    from freshet.runtime.asking import figures_of, why_unready

    try:
        reason = why_unready(port, host=host)
        return reason, {} if reason else figures_of(port, host=host)
    except OSError as error:
        return f"does not answer on port {port} yet: {error}", {}
