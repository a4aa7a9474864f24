"""The services of a spec as supervised processes, for `freshet up` and `freshet demo`."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from freshet.adapters import open_eventlog
from freshet.apps.ports import PORT_SETTINGS, ROLES, ports_of
from freshet.apps.recorded_spec import keep_spec, refuse_another_model
from freshet.apps.row_memory import rows_memory
from freshet.config.settings import Settings, load_settings
from freshet.config.spec import Spec, load_spec
from freshet.config.spec.schemas import load_schemas
from freshet.errors import ConfigError
from freshet.http import tls
from freshet.http.addresses import Address, reachable_host
from freshet.http.service_client import why_unready
from freshet.http.token_files import console_token
from freshet.observability.logging import configure_logging
from freshet.process.lifecycle import KILL_AFTER_S, stop_on_signals
from freshet.process.ports import owner_of_port
from freshet.process.supervisor import Process, Supervisor
from freshet.terminal import emit_end, say

READY_WAIT_S = 60.0
"""Time after which the terminal names the services that are not ready; they continue to start."""

STDERR_LINES = 5
"""Last lines of standard error that a report of a failed trial quotes."""


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended."""

    seconds: float
    ended: Mapping[str, str]  # service -> how it ended
    restarts: Mapping[str, int]

    def as_json(self) -> dict[str, object]:
        """Return the object for `--json`."""
        return {
            "seconds": self.seconds,
            "ended": dict(self.ended),
            "restarts": dict(self.restarts),
        }


@dataclass(frozen=True, slots=True)
class Run:
    """A locked run folder and the processes to start in it."""

    folder: Path
    settings: Settings
    processes: Sequence[Process]
    supervisor: Supervisor

    def until_stopped(self, stop: threading.Event, report: Callable[[], None]) -> Summary:
        """Run all processes until `stop`; `report` prints progress meanwhile, on another thread."""
        reporter = threading.Thread(target=report, name="reporter", daemon=True)
        reporter.start()
        began = time.monotonic()
        drain_s = self.settings.common.drain_ms / 1000 + KILL_AFTER_S
        ended = self.supervisor.run(stop, drain_s=drain_s)
        reporter.join(1.0)  # a line may be half printed
        return Summary(round(time.monotonic() - began, 1), ended, self.supervisor.restarts)


def prepare(
    spec_file: Path,
    folder: Path,
    *,
    again: Sequence[str],
    console: bool = True,
    more: Callable[[Settings], Sequence[Process]] = lambda settings: (),
) -> Run:
    """Check spec, settings, ports and stores, and lock the run folder, so that an error appears once and not
    in each service's log.

    Args:
        again:   the command that continues with this folder.
        console: whether the console runs, too.
        more:    processes in addition to the services.

    Raises ConfigError, Mismatch, Corrupt or Unavailable before any process is started.
    """
    spec = load_spec(spec_file)
    schemas = load_schemas(spec, str(spec_file))
    _refuse_bad_model(spec, spec_file)
    settings = load_settings(run_folder=folder)
    tls.use(settings)
    if console:
        _refuse_without_console()
    run = settings.common.run.create()
    configure_logging(again[1], level=settings.common.log_level, form="text")
    wanted = [*processes(spec_file, folder, settings, console=console), *more(settings)]
    supervisor = Supervisor(run, wanted, again=shlex.join(again))  # locks the folder
    try:
        _refuse_bad_ports(wanted)
        open_eventlog(settings.common.log_url).close()
        refuse_another_model(spec, schemas, settings)
        keep_spec(spec, settings)
        if console:
            console_token(settings.console.token, run.state, settings.console.token_file)
    except BaseException:
        supervisor.close()
        raise
    return Run(folder, settings, wanted, supervisor)


def run_up(spec_file: Path, folder: Path, *, console: bool, until_stdin: bool, as_json: bool) -> None:
    """Run the services until Ctrl-C, or until standard input stops them; then print how each ended."""
    again = ["freshet", "up", str(spec_file), "--folder", str(folder), *([] if console else ["--no-console"])]
    run = prepare(spec_file, folder, again=again, console=console)
    stop = threading.Event()
    stop_on_signals(stop)
    if until_stdin:
        stop_on_stdin(stop)
    summary = run.until_stopped(stop, lambda: report_up(run, stop, as_json))
    lines = [f"stopped after {summary.seconds} s; everything is kept in {folder}"]
    lines += [
        f"  {name:10} {how}, restarted {summary.restarts.get(name, 0)} times"
        for name, how in summary.ended.items()
    ]
    emit_end(summary.as_json(), as_json=as_json, text="\n".join(lines))


def stop_on_stdin(stop: threading.Event) -> None:
    """Set `stop` once standard input has a byte or has ended.

    The kernel ends a pipe when the process that holds its other end ends in any way.
    """

    def wait() -> None:
        if sys.stdin is not None:  # without standard input, 0 may be any file
            with suppress(OSError):  # its terminal is gone
                os.read(0, 1)  # sys.stdin would lock its buffer, which the interpreter's exit waits for
        stop.set()

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def processes(spec_file: Path, folder: Path, settings: Settings, *, console: bool = True) -> list[Process]:
    """Return the processes of a run, in the order of an event's way through them."""
    ports, host = ports_of(settings), reachable_host(settings.common.bind_address)
    return [
        Process(
            role,
            [sys.executable, "-m", "freshet.cli", "run", role, str(spec_file), "--folder", str(folder)],
            ports[role],
            host=host,
        )
        for role in ROLES
        if console or role != "console"
    ]


def is_ready(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether the service on this port reports that it is ready."""
    try:
        return not why_unready(port, host=host)
    except OSError:
        return False


def report_ready(
    wanted: Sequence[Process], folder: Path, stop: threading.Event, say: Callable[[str], None]
) -> bool:
    """Print when each process is ready, and after `READY_WAIT_S` which are not; return True if all are."""
    waiting = {p.name: p for p in wanted}
    deadline = time.monotonic() + READY_WAIT_S
    while waiting and not stop.wait(0.1):
        for name in [n for n, p in waiting.items() if is_ready(p.port, p.host)]:
            process = waiting.pop(name)
            say(f"  {name:10} ready at {tls.scheme()}://{Address(process.host, process.port)}")
        if time.monotonic() > deadline and waiting:
            for name in waiting:
                log = folder / "logs" / f"{name}.log"
                say(f"  {name:10} is not ready yet; `freshet status --folder {folder}` says why, or {log}")
            return False
    return not waiting


def report_up(run: Run, stop: threading.Event, as_json: bool) -> None:
    """Print the memory of rows, when each process is ready, and the console's address."""

    def report(line: str) -> None:
        say(line, err=as_json)

    report(rows_memory(run.settings).text())
    if report_ready(run.processes, run.folder, stop, report):
        address = console_address(run)
        if address is not None:
            report(f"console: {address}")
        report(f"all ready; `freshet status --folder {run.folder}` shows progress, Ctrl-C stops everything")


def console_address(run: Run) -> str | None:
    """Return the URL of a run's console with its token, or None without a console.

    A browser does not send the part after the # to any server, and the page removes it from its address.
    """
    process = next((p for p in run.processes if p.name == "console"), None)
    if process is None:
        return None
    settings = run.settings
    token = console_token(settings.console.token, settings.common.run.state, settings.console.token_file)
    return f"{tls.scheme()}://{Address(process.host, process.port)}/#token={token}"


def _refuse_bad_model(spec: Spec, spec_file: Path) -> None:
    """Raise ConfigError if `model.kind` names a class that cannot be trained and served.

    The trial takes as long as importing the class, in another process; built-in kinds are not tried.
    """
    if ":" not in spec.model.kind:
        return
    command = [sys.executable, "-m", "freshet.model.trial", str(spec_file)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)  # nosec B603  # no shell
    if done.returncode == 0:
        return
    try:
        error = ConfigError(**orjson.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, orjson.JSONDecodeError):
        tail = "\n  ".join(done.stderr.decode(errors="replace").strip().splitlines()[-STDERR_LINES:])
        hint = f"trying it ended with {done.returncode}: {tail}"
        error = ConfigError(str(spec_file), "model.kind", spec.model.kind, "a class that can be used", hint)
    raise error


def _refuse_without_console() -> None:
    if importlib.util.find_spec("fastavro") is None:
        raise ConfigError(
            "console",
            "",
            "the package fastavro is not installed",
            "what the console needs",
            'install it (pip install fastavro; it is of the extra "console"), or go on without: --no-console',
        )


def _refuse_bad_ports(wanted: Sequence[Process]) -> None:
    """Raise ConfigError for ports that are 0, in use, or equal."""
    names: dict[int, str] = {}
    for process in wanted:
        port, hint = process.port, ""
        if not port:
            expected = "a port from 1 to 65535, which other services can know"
        elif port in names:
            expected = f"a port of its own ({names[port]} has this one)"
        elif (owner := owner_of_port(port)) is not None:
            expected, hint = f"a free port ({owner})", "stop that process, or "
        else:
            names[port] = process.name
            continue
        option = PORT_SETTINGS.get(process.name, f"FRESHET_{process.name.upper()}_ADMIN_PORT")
        raise ConfigError("up", f"{process.name} port", port, expected, f"{hint}set {option} to another port")
