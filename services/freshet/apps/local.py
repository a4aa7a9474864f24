"""`freshet.local(spec)`: the processes of `freshet up`, as a context manager."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from freshet.apps.ports import PORT_SETTINGS
from freshet.apps.supervision import is_ready
from freshet.client import Ack, Client, Ranking, Receipt
from freshet.config.settings import RunFolder, load_settings
from freshet.config.spec import Spec, load_spec
from freshet.config.spec.identity import render
from freshet.errors import Unavailable
from freshet.http import tls
from freshet.http.addresses import Address, reachable_host
from freshet.http.token_files import read_token
from freshet.process.lifecycle import KILL_AFTER_S
from freshet.process.ports import lease_ports, release_ports

__all__ = ["Local", "local", "with_absolute_paths"]

STOP_WAIT_S = 10.0
"""Time for the supervisor itself to end, after the drain and kill time of its services."""

POLL_S = 0.05


class Local:
    """A running system on this machine."""

    def __init__(self, folder: Path, ports: Mapping[str, int]) -> None:
        self.folder, self.ports = folder, ports
        settings = load_settings(run_folder=folder)
        tls.use(settings)
        self._host = reachable_host(settings.common.bind_address)
        self.client = Client(
            gateway=self._url("gateway"),
            inference=self._url("inference"),
            token=read_token(settings.common.client_token_file),
            **tls.client_files(),
        )

    def send(
        self,
        *,
        impressions: Sequence[Mapping[str, Any]] = (),
        shown: Sequence[Mapping[str, Any]] = (),
        actions: Sequence[Mapping[str, Any]] = (),
    ) -> Receipt:
        """Send impressions, then shown items, then actions; return when the log has acknowledged all."""
        receipts = [
            send(events)
            for send, events in (
                (self.client.impressions, impressions),
                (self.client.shown, shown),
                (self.client.actions, actions),
            )
            if events
        ]
        return Receipt(tuple(ack for r in receipts for ack in r.acks))

    def wait_until_served(self, ack: Ack | Receipt, *, timeout_s: float = 30.0) -> bool:
        """Wait until the rows served have learned from an event; see `freshet.Client.wait_until_served`."""
        return self.client.wait_until_served(ack, timeout_s=timeout_s)

    def rank(
        self,
        context: Mapping[str, Any],
        candidates: Sequence[Mapping[str, Any]],
        *,
        k: int | None = None,
        request_id: str | int | None = None,
        dry_run: bool = False,
        explain: bool = False,
    ) -> Ranking:
        """Order candidates by the spec's score, best first; see `freshet.Client.rank`."""
        return self.client.rank(
            context, candidates, k=k, request_id=request_id, dry_run=dry_run, explain=explain
        )

    @property
    def console(self) -> str | None:
        """Address of the console, without the token; None if it does not run."""
        return self._url("console") if "console" in self.ports else None

    def is_ready(self, role: str) -> bool:
        """Return whether a service reports that it is ready."""
        return is_ready(self.ports[role], self._host)

    def _url(self, role: str) -> str:
        return f"{tls.scheme()}://{Address(self._host, self.ports[role])}"

    def status(self) -> dict[str, Any]:
        """Return the object of `freshet status --json`."""
        from freshet.apps.status import collect

        return collect(self.folder)


@contextmanager
def local(
    spec: Spec | str | Path,
    *,
    folder: str | Path | None = None,
    ready_s: float = 60.0,
    console: bool = False,
) -> Iterator[Local]:
    """Run every service of a spec on this machine, on free ports, until the block ends.

    The services drain also if this process is killed, once no forked copy of it lives; a temporary folder is
    left then.

    Args:
        spec:    a spec or the path of one.
        folder:  run folder to keep; None: a temporary one.
        ready_s: time limit for all services to become ready.
        console: run the console, too; `Local.console` is its address.

    Raises:
        ConfigError: the spec is invalid.
        Unavailable: a service is not ready in time; the message holds the end of the logs.
    """
    if not isinstance(spec, Spec):
        spec = load_spec(spec)
    with tempfile.TemporaryDirectory(prefix="freshet-") as temporary, ExitStack() as ending:
        run = Path(folder) if folder is not None else Path(temporary) / "run"
        spec_file = Path(temporary) / "freshet.toml"
        spec_file.write_text(render(with_absolute_paths(spec)), encoding="utf-8")
        roles = [role for role in PORT_SETTINGS if console or role != "console"]
        ports = dict(zip(roles, lease_ports(len(roles)), strict=True))
        ending.callback(release_ports, ports.values())
        command = ["up", str(spec_file), "--folder", str(run), "--stop-on-stdin", "--json"]
        command += [] if console else ["--no-console"]
        environment = {
            **os.environ,
            **{PORT_SETTINGS[role]: str(port) for role, port in ports.items()},
            "PYTHONPATH": _python_path(os.environ.get("PYTHONPATH", ""), spec),
        }
        drain_s = load_settings(run_folder=run).common.drain_ms / 1000
        output = Path(temporary) / "up.log"  # a full pipe without a reader would block the supervisor
        with output.open("wb") as file:
            process = subprocess.Popen(  # nosec B603  # our own command, no shell
                [sys.executable, "-m", "freshet.cli", *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C reaches the caller only
            )
        ending.callback(_stop, process, drain_s + KILL_AFTER_S + STOP_WAIT_S)
        system = Local(run, ports)
        ending.callback(system.client.close)
        _wait_until_ready(process, output, system, ready_s)
        yield system


def _wait_until_ready(process: subprocess.Popen[bytes], output: Path, system: Local, ready_s: float) -> None:
    deadline = time.monotonic() + ready_s
    pause = threading.Event()
    waiting = set(system.ports)
    while waiting:
        if process.poll() is not None:
            raise Unavailable(f"freshet up ended with {process.returncode}:\n{_tail(output)}")
        waiting = {role for role in waiting if not system.is_ready(role)}
        if waiting and time.monotonic() > deadline:
            logs = "\n".join(_tail(RunFolder(system.folder).process_log(role)) for role in sorted(waiting))
            raise Unavailable(f"{', '.join(sorted(waiting))} not ready after {ready_s:g} s:\n{logs}")
        pause.wait(POLL_S)


def _stop(process: subprocess.Popen[bytes], wait_s: float) -> None:
    """Stop `freshet up` in order; kill it after `wait_s`, or at a Ctrl-C meanwhile."""
    try:
        with suppress(subprocess.TimeoutExpired):
            process.communicate(b"\n", wait_s)  # a forked copy of this process may hold the pipe open
    finally:
        process.kill()
        process.wait()


def _tail(path: Path) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-20:])
    except OSError:
        return f"{path}: no log"


def with_absolute_paths(spec: Spec) -> Spec:
    """Return the spec with absolute paths, so that its file may be written to any folder."""
    folder = Path(spec.folder or ".").resolve()
    events = spec.events

    def absolute(stream: Any) -> Any:
        if stream is None or stream.schema is None:
            return stream
        return replace(stream, schema=str(folder / stream.schema))

    return replace(
        spec,
        events=replace(
            events,
            served=absolute(events.served),
            shown=absolute(events.shown),
            action=absolute(events.action),
        ),
    )


def _python_path(path: str, spec: Spec) -> str:
    """Return a PYTHONPATH with this freshet, installed or not, and with the spec's folder if the spec names
    modules in it: the processes read a copy of the spec in another folder."""
    steps = [str(step) for feature in spec.features for step in feature.dense]
    names_code = any(":" in name for name in (spec.model.kind, *steps))
    beside = [str(Path(spec.folder or ".").resolve())] if names_code else []
    return os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [path]), *beside])
