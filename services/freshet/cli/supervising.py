"""The services of a spec as supervised processes: what `freshet up` does."""

from __future__ import annotations

import shlex
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import click
import orjson

from freshet.cli.kept import keep_spec, refuse_another_model
from freshet.cli.run import ROLES
from freshet.errors import ConfigError
from freshet.runtime.lifecycle import stop_on_signals
from freshet.runtime.logging import configure_logging
from freshet.runtime.ports import owner_of_port
from freshet.runtime.supervisor import Process, Supervisor, read_state
from freshet.seams.open import open_eventlog
from freshet.settings import Settings, load_settings
from freshet.spec import load_spec
from freshet.spec.schemas import load_schemas

__all__ = ["is_ready", "ports_of", "processes", "run_up"]

READY_WAIT_S = 60.0
"""How long the terminal waits for all services to be ready before it says which are not; they go on
meanwhile."""


def run_up(spec_file: Path, folder: Path, *, as_json: bool) -> None:
    """Start the services and keep them running until Ctrl-C; then say how each ended."""
    spec = load_spec(spec_file)
    schemas = load_schemas(spec, str(spec_file))  # one that cannot be read is said here, not in four logs
    settings = load_settings(run_folder=folder)
    run = settings.common.run.create()
    configure_logging("up", level=settings.common.log_level, form="text")
    wanted = processes(spec_file, folder, settings)
    again = shlex.join(["freshet", "up", str(spec_file), "--folder", str(folder)])
    supervisor = Supervisor(run, wanted, again=again)  # the folder is ours from here on
    _refuse_taken_ports(settings)
    open_eventlog(settings.common.log_url).close()  # a damaged one is said here, not in each service's log
    refuse_another_model(spec, schemas, settings)
    keep_spec(spec, settings)
    stop = threading.Event()
    stop_on_signals(stop)
    teller = threading.Thread(target=_tell_ready, args=(wanted, folder, stop, as_json), daemon=True)
    teller.start()
    began = time.monotonic()
    ended = supervisor.run(stop, drain_s=settings.common.drain_ms / 1000)
    restarts = {name: state["restarts"] for name, state in read_state(run).items()}
    summary = {"seconds": round(time.monotonic() - began, 1), "ended": dict(ended), "restarts": restarts}
    if as_json:
        click.echo(orjson.dumps(summary).decode())
        return
    click.echo(f"stopped after {summary['seconds']} s; everything is kept in {folder}")
    for name, how in ended.items():
        click.echo(f"  {name:10} {how}, restarted {restarts.get(name, 0)} times")


def processes(spec_file: Path, folder: Path, settings: Settings) -> list[Process]:
    """The services of a run, in the order of an event's way through them."""
    ports = ports_of(settings)
    return [
        Process(
            role,
            [sys.executable, "-m", "freshet.cli", "run", role, str(spec_file), "--folder", str(folder)],
            ports[role],
        )
        for role in ROLES
    ]


def ports_of(settings: Settings) -> Mapping[str, int]:
    """{service: the port where it answers /health/ready}."""
    return {
        "gateway": settings.gateway.port,
        "joiner": settings.joiner.admin_port,
        "trainer": settings.trainer.admin_port,
        "inference": settings.inference.port,
    }


def is_ready(port: int) -> bool:
    """Whether the service on this port says that it is ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _refuse_taken_ports(settings: Settings) -> None:
    for role, port in ports_of(settings).items():
        owner = owner_of_port(port) if port else None
        if owner is not None:
            option = "PORT" if role in ("gateway", "inference") else "ADMIN_PORT"
            raise ConfigError(
                "up",
                f"{role} port",
                port,
                f"a free port ({owner})",
                f"stop that process, or set FRESHET_{role.upper()}_{option} to another port",
            )


def _tell_ready(wanted: list[Process], folder: Path, stop: threading.Event, as_json: bool) -> None:
    waiting = {p.name: p for p in wanted}
    deadline = time.monotonic() + READY_WAIT_S
    while waiting and not stop.wait(0.1):
        for name in [n for n, p in waiting.items() if is_ready(p.port)]:
            process = waiting.pop(name)
            if not as_json:
                click.echo(f"  {name:10} ready at http://127.0.0.1:{process.port}")
        if time.monotonic() > deadline and waiting:
            for name in waiting:
                click.echo(f"  {name:10} is not ready yet; see {folder}/logs/{name}.log", err=True)
            return
    if not waiting and not as_json:
        click.echo(f"all ready; `freshet status --folder {folder}` says how it goes, Ctrl-C stops everything")
