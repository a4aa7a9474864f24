"""The state of a run, as `freshet status` prints it: services, versions, ended processes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freshet.errors import Corrupt, Unavailable
from freshet.process.run_state import existing_folder

if TYPE_CHECKING:
    from freshet.console.instances import Instance, Places
    from freshet.process.run_state import RunState

AT_ONCE = 32


def collect_listed(folder: Path, services: str) -> dict[str, Any]:
    """Return the state of services at listed addresses, and of the versions by the settings.

    Raises ConfigError if `services` is no list of role=host:port.
    """
    from freshet.config.settings import load_settings
    from freshet.console.instances import listed_places
    from freshet.http import tls

    tls.use(load_settings(run_folder=folder))
    return {"services": _query_all(listed_places(services)), "versions": _versions(folder)}


def collect(folder: Path) -> dict[str, Any]:
    """Return the object of `freshet status --json` for a run folder, also after the run has ended."""
    from freshet.config.settings import RunFolder, load_settings
    from freshet.http import tls
    from freshet.process.run_state import read_run

    tls.use(load_settings(run_folder=existing_folder(folder)))
    run, damage = None, ""
    try:
        run = read_run(RunFolder(existing_folder(folder)))
    except (Corrupt, Unavailable) as error:  # the services may still answer at the ports of the settings
        damage = str(error)
    if run is None and damage:
        return {
            "services": _query_by_settings(folder),
            "versions": _versions(folder),
            "state_damaged": damage,
        }
    return {
        "folder": str(folder),
        "supervisor": _supervisor(folder, run) if run is not None else None,
        "services": {name: _service(state) for name, state in run.services.items()} if run else {},
        "history": [asdict(one) for one in run.history] if run else [],
        "versions": _versions(folder),
    }


def _query_by_settings(folder: Path) -> dict[str, Any]:
    """Return the state of services at the ports of the settings, for a run with an unreadable state."""
    from freshet.apps.ports import ports_of
    from freshet.config.settings import load_settings
    from freshet.console.instances import listed_places

    ports = ports_of(load_settings(run_folder=folder))
    named = [f"{role}=127.0.0.1:{port}" for role, port in ports.items() if port]  # 0: any free port
    return _query_all(listed_places(",".join(named))) if named else {}


def _supervisor(folder: Path, run: RunState) -> dict[str, Any]:
    from freshet.config.settings import RunFolder
    from freshet.process.process_info import is_alive
    from freshet.process.run_state import last_sign_ms

    if run.stopped_ms is not None:
        state, at_ms = "stopped", run.stopped_ms
    elif is_alive(run.supervisor, run.birth):
        state, at_ms = "running", None
    else:
        state, at_ms = "gone", last_sign_ms(RunFolder(folder))
    return {"pid": run.supervisor, "state": state, "time_ms": at_ms, "again": run.again}


def _versions(folder: Path) -> dict[str, Any]:
    from freshet.adapters import open_versions
    from freshet.config.settings import load_settings

    common = load_settings(run_folder=folder).common
    if common.versions_url == common.run.versions_url and not common.run.versions.is_dir():
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
    except Corrupt as error:  # trainer and inference skip it; the other versions are reported
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
    from freshet.process.process_info import is_alive, memory_mb

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
    """Return (reason why the service is not ready, figures); the reason is "" if it is ready."""
    from freshet.http.service_client import figures_of, why_unready

    try:
        reason = why_unready(port, host=host)
        return reason, {} if reason else figures_of(port, host=host)
    except OSError as error:
        return f"does not answer on port {port} yet: {error}", {}


def _query_all(places: Places) -> dict[str, dict[str, Any]]:
    """Return {name: role, address, state, reason and figures} of all instances, in the order of the list."""
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ask") as threads:
        answers = list(threads.map(_listed_service, places.instances))
    return {one.name: service for one, service in zip(places.instances, answers, strict=True)}


def _listed_service(one: Instance) -> dict[str, Any]:
    from freshet.http.service_client import figures_of, why_unready

    host, port = one.address.host, one.address.port
    state, figures = "ready", {}
    try:
        reason = why_unready(port, host=host)
        state = "starting" if reason else "ready"
        figures = figures_of(port, host=host)
    except OSError as error:
        state, reason = "away", f"does not answer: {error}"
    return {
        "role": one.role,
        "address": str(one.address),
        "state": state,
        "reason": reason,
        "figures": figures,
    }
