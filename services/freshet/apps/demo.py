"""The demo: the simulator's spec, every service and its readers under one supervisor, in one folder."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freshet.apps.demo_text import (
    DEMO_FOLDER,
    DRIFT_AT,
    DRIFT_EVERY,
    click_rates,
    drift_lines,
    farewell,
    progress_line,
    seconds_of,
    span_of,
)
from freshet.apps.ports import PORT_SETTINGS, optional_ports_of, ports_of
from freshet.apps.supervised import Run, console_address, prepare, tell_ready
from freshet.config.settings import RunFolder, Settings, load_settings
from freshet.demo import UNFINISHED, write_spec
from freshet.demo.start_time import Began, kept_world
from freshet.errors import ConfigError
from freshet.http.addresses import reached_by
from freshet.http.service_client import figures_of
from freshet.process.lifecycle import stop_on_signals
from freshet.process.ports import free_ports, owner_of_port
from freshet.process.supervisor import Process
from freshet.terminal import emit_end, say

__all__ = ["Wish", "run_demo"]

SEED = 7
LINE_EVERY_S = 10.0
LOOK_S = 0.25
"""How often the services are asked: a line about the first prediction, or a drift, is at most this late."""

SIMULATOR_PORT = "FRESHET_SIMULATOR_ADMIN_PORT"


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for on the command line; None and () leave it to the folder, or to the defaults."""

    rate: float
    seed: int | None
    drift_at: tuple[str, ...]

    def options(self, world: Began | None) -> list[str]:
        """For `freshet simulate`: what was not said is as it was when this folder's world began."""
        seed = self.seed if self.seed is not None else world.seed if world else SEED
        at, every = self.drift_at or (DRIFT_AT,), "none" if self.drift_at else DRIFT_EVERY
        if world and not self.drift_at:
            at = tuple(f"{s * 1000:.0f}ms" for s in world.drift_at_s)
            every = "none" if world.drift_every_s is None else f"{world.drift_every_s * 1000:.0f}ms"
        drifts = [word for one in at for word in ("--drift-at", one)]
        return ["--rate", f"{self.rate:g}", "--seed", str(seed), *drifts, "--drift-every", every]

    def again(self, folder: Path) -> list[str]:
        """The command that goes on with this demo."""
        return ["freshet", "demo", str(folder), "--rate", f"{self.rate:g}"]


def run_demo(folder: Path, wish: Wish, *, seconds: float | None, as_json: bool) -> None:
    """Run the demo until Ctrl-C, or for so many seconds; then say what came of it.

    Raises:
        ConfigError: the folder holds something else, is in use, or has another world than was asked for.
    """
    _refuse_other_contents(folder)
    options = wish.options(_world(folder, wish))
    spec_file = write_spec(folder)
    moved = _take_free_ports()

    def simulator(settings: Settings) -> Sequence[Process]:
        command = [sys.executable, "-m", "freshet.cli", "simulate", "--folder", str(folder), *options]
        host = reached_by(settings.common.bind_address)
        return [Process("simulator", command, settings.simulator.admin_port, host=host, watched=False)]

    run = prepare(spec_file, folder, again=wish.again(folder), more=simulator)
    stop = threading.Event()
    stop_on_signals(stop)
    teller = _Teller(run, stop, lambda line: say(line, err=as_json), moved)
    if seconds is not None:
        timer = threading.Timer(seconds, stop.set)
        timer.daemon = True
        timer.start()
    summary = run.until_stopped(stop, teller.tell)
    simulated = {name: value for name, value in teller.simulator.items() if name != "windows"}
    rates = click_rates(teller.simulator.get("windows", ()))
    value = {
        **summary.as_json(),
        "folder": str(folder),
        "simulator": simulated,
        "click_rates": rates.as_json() if rates is not None else None,
        "first_learned_s": teller.first_learned_s,
    }
    emit_end(value, as_json=as_json, text="\n".join(farewell(str(folder), summary.seconds, teller.simulator)))


@dataclass
class _Teller:
    """Speaks to the terminal while everything runs, and keeps what the simulator said last."""

    run: Run
    stop: threading.Event
    say: Callable[[str], None]
    moved: Sequence[str]
    simulator: Mapping[str, Any] = field(default_factory=dict)
    first_learned_s: float | None = None

    def tell(self) -> None:
        """Until `stop`."""
        began, began_ms = time.monotonic(), time.time_ns() // 1_000_000
        for line in self._beginning():
            self.say(line)
        tell_ready(self.run.processes, self.run.folder, self.stop, self.say)
        address = console_address(self.run)
        if address and not self.stop.is_set():
            self.say(f"\n  look at it: {address}\n")
        told_drifts, next_line_s = 0, LINE_EVERY_S
        while not self.stop.wait(LOOK_S):
            seconds = time.monotonic() - began
            self.simulator = self._figures(self.run.settings.simulator.admin_port) or self.simulator
            inference = self._figures(self.run.settings.inference.port)
            if self.first_learned_s is None and inference.get("freshness_ms") is not None:
                self.first_learned_s = round(seconds, 2)
                self.say(f"{span_of(seconds):>6}  the first predictions by what was learned from clicks")
            drifts = [d for d in self.simulator.get("drifts", ()) if d["time_ms"] >= began_ms]
            for line in drift_lines(seconds, drifts, told_drifts):
                self.say(line)
            told_drifts = len(drifts)
            if seconds >= next_line_s:
                next_line_s = seconds + LINE_EVERY_S
                self.say(progress_line(seconds, self.simulator, inference))

    def _figures(self, port: int) -> Mapping[str, Any]:
        """What /status says; empty while nothing answers."""
        try:
            return figures_of(port, host=reached_by(self.run.settings.common.bind_address))
        except OSError:
            return {}

    def _beginning(self) -> Iterator[str]:
        yield f"freshet demo in {self.run.folder}: readers of a small news site, and a model that learns from"
        yield "every click; Ctrl-C stops everything. Starting:"
        yield from self.moved


def _refuse_other_contents(folder: Path) -> None:
    """Run folders of other specs, and folders of other purposes, are left as they are."""
    try:
        names = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    except NotADirectoryError:
        raise ConfigError(
            "demo", "FOLDER", str(folder), "the path of a folder, or of none yet", "found a file"
        ) from None
    others = names - UNFINISHED
    if others and "freshet.toml" not in names:
        some = ", ".join(sorted(others)[:3])
        raise ConfigError(
            "demo",
            "FOLDER",
            str(folder),
            "an empty folder, one of the demo's, or none yet",
            f"it holds {some}; take another: freshet demo {folder / DEMO_FOLDER}",
        )


def _world(folder: Path, wish: Wish) -> Began | None:
    """The world of an earlier run in this folder. Raises ConfigError if another one is asked for: what was
    learned from it would be wrong."""
    drift_at = tuple(sorted(seconds_of("--drift-at", text) for text in wish.drift_at))
    world = kept_world(RunFolder(folder).state)
    if world is None:
        return None
    for option, asked, kept in (
        ("--seed", wish.seed, world.seed),
        ("--drift-at", drift_at or None, world.drift_at_s),
    ):
        if asked not in (None, kept):
            raise ConfigError(
                "demo",
                option,
                asked,
                f"{kept}, as when the readers of {folder} began, or no {option}",
                "to begin with other readers delete the folder, or take another",
            )
    return world


def _take_free_ports() -> list[str]:
    """Where a default port is taken, use a free one; returns a line for each. Ports that were asked for are
    kept: whether they are free is looked at later."""
    settings = load_settings()
    ports = {**ports_of(settings), **optional_ports_of(settings)}
    variables = {name: PORT_SETTINGS.get(name, SIMULATOR_PORT) for name in ports}
    taken = [
        n for n, port in ports.items() if variables[n] not in os.environ and owner_of_port(port) is not None
    ]
    lines = []
    for name, free in zip(taken, free_ports(len(taken)), strict=True):  # together, so that all are different
        os.environ[variables[name]] = str(free)  # the services, which we start, read it there
        lines.append(f"  port {ports[name]} is taken: {name} uses {free}")
    return lines
