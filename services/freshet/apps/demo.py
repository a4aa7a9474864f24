"""The demo: every service and a simulator of readers under one supervisor, in one folder."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freshet.apps.ports import PORT_SETTINGS, optional_ports_of, ports_of
from freshet.apps.supervision import Run, console_address, prepare, report_ready
from freshet.config.settings import RunFolder, Settings, load_settings
from freshet.demo import DEMO_FOLDER, DRIFT_AT, DRIFT_EVERY, UNFINISHED, write_spec
from freshet.demo.start_time import RunStart, stored_start
from freshet.errors import ConfigError
from freshet.http.addresses import reachable_host
from freshet.http.service_client import figures_of
from freshet.process.lifecycle import stop_on_signals
from freshet.process.ports import lease_ports, owner_of_port
from freshet.process.supervisor import Process
from freshet.terminal import emit_end, say


def seconds_of(option: str, text: str) -> float:
    """Parse a duration of the command line, in seconds. Raises ConfigError that names the option."""
    from freshet.config.options import Duration, Wrong

    form = Duration(1_000, 365 * 86_400_000)
    try:
        return float(form.read(text) or 0) / 1_000
    except Wrong as wrong:
        raise ConfigError(option, "", text, wrong.expected, wrong.hint) from None


RECENT_WINDOWS = 6
"""Windows (of 5 s) that a line covers: in half a minute random slates have about a hundred clicks even at a
low rate."""


@dataclass(frozen=True, slots=True)
class ClickRates:
    """Clicks per item shown, 0 to 1; None where nothing was shown."""

    model: float | None
    random: float | None
    best: float | None  # the best possible order of the requests that the model ranked

    def as_json(self) -> dict[str, float | None]:
        """Return the object for `--json`."""
        return {"model": self.model, "random": self.random, "best": self.best}

    def __str__(self) -> str:
        parts = [f"model {_percent(self.model)}", f"random {_percent(self.random)}"]
        if self.model is not None and self.random:
            parts[1] += f" ({self.model / self.random:.1f}x)"
        parts.append(f"best possible {_percent(self.best)}")
        if self.model is not None and self.best:
            parts[2] += f" ({100 * self.model / self.best:.0f} %)"
        return ", ".join(parts)


def click_rates(windows: Sequence[Mapping[str, Any]]) -> ClickRates | None:
    """Return the rates over the last windows of a simulator's `/status`; None before the first has closed."""
    recent = windows[-RECENT_WINDOWS:]
    if not recent:
        return None

    def rate(policy: str) -> float | None:
        shown = sum(window[policy]["impressions"] for window in recent)
        return sum(window[policy]["clicks"] for window in recent) / shown if shown else None

    return ClickRates(rate("model"), rate("random"), rate("best"))


def progress_line(seconds: float, simulator: Mapping[str, Any], inference: Mapping[str, Any]) -> str:
    """Return click rates, freshness and event rate in one line."""
    rates = click_rates(simulator.get("windows", ()))
    clicks = (
        f"clicks: {rates}" if rates is not None else "clicks: known once they have had their time to come"
    )
    parts = [clicks]
    if (fresh := inference.get("freshness_ms")) is not None:
        parts.append(f"fresh to {fresh / 1000:.1f} s")
    if (rate := simulator.get("measured_rate")) is not None:
        parts.append(f"{rate:,.0f} events/s")
    return f"{span_of(seconds):>6}  " + "; ".join(parts)


def drift_lines(seconds: float, drifts: Sequence[Mapping[str, Any]], reported: int) -> Iterator[str]:
    """Yield a line for each drift after the first `reported` ones."""
    for drift in drifts[reported:]:
        yield f"{span_of(seconds):>6}  DRIFT: {drift['what']}; watch the model fall back and learn again"


def farewell(folder: str, seconds: float, simulator: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the summary at the end, and the commands to continue."""
    yield f"stopped after {span_of(seconds)}"
    if simulator and "events" in simulator:
        yield (
            f"  sent {simulator['events']:,} events: {simulator['impressions']:,} items shown, "
            f"{simulator['clicks']:,} clicks, {simulator['purchases']:,} purchases"
        )
        rates = click_rates(simulator["windows"])
        if rates is not None:
            yield f"  clicks of items shown, the last half minute: {rates}"
    yield f"everything is kept in {folder}"
    yield f"  freshet status --folder {folder}    what it has learned"
    yield f"  freshet demo {folder}               goes on where it was"
    yield f"  rm -r {folder}                      starts over"
    yield "your own events: freshet init --schema impressions.avsc --schema actions.avsc   writes a spec"


def span_of(seconds: float) -> str:
    """Format as `1:05`, minutes and seconds; as `1:02:05` from an hour on."""
    whole = int(seconds)
    minutes = f"{whole // 60 % 60}:{whole % 60:02d}"
    return minutes if whole < 3600 else f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"


SEED = 7
LINE_EVERY_S = 10.0
POLL_S = 0.25
"""Interval between queries of the services; it bounds the delay of lines about drifts and first
predictions."""

SIMULATOR_PORT = "FRESHET_SIMULATOR_ADMIN_PORT"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the command line; None and () mean the folder's values, or the defaults."""

    rate: float
    seed: int | None
    drift_at: tuple[str, ...]

    def simulator_arguments(self, world: RunStart | None) -> list[str]:
        """Return arguments of `freshet simulate`; omitted options keep the values of the folder's first
        run."""
        seed = self.seed if self.seed is not None else world.seed if world else SEED
        at, every = self.drift_at or (DRIFT_AT,), "none" if self.drift_at else DRIFT_EVERY
        if world and not self.drift_at:
            at = tuple(f"{s * 1000:.0f}ms" for s in world.drift_at_s)
            every = "none" if world.drift_every_s is None else f"{world.drift_every_s * 1000:.0f}ms"
        drifts = [word for one in at for word in ("--drift-at", one)]
        return ["--rate", f"{self.rate:g}", "--seed", str(seed), *drifts, "--drift-every", every]

    def restart_command(self, folder: Path) -> list[str]:
        """Return the command that continues this demo."""
        return ["freshet", "demo", str(folder), "--rate", f"{self.rate:g}"]


def run_demo(folder: Path, demo_options: DemoOptions, *, seconds: float | None, as_json: bool) -> None:
    """Run the demo until Ctrl-C, or for `seconds`; then print a summary.

    Raises ConfigError if the folder has other contents, is in use, or began with other options.
    """
    refuse_other_contents(folder)
    options = demo_options.simulator_arguments(_kept_start(folder, demo_options))
    spec_file = write_spec(folder)
    moved = _replace_taken_ports()

    def simulator(settings: Settings) -> Sequence[Process]:
        command = [sys.executable, "-m", "freshet.cli", "simulate", "--folder", str(folder), *options]
        host = reachable_host(settings.common.bind_address)
        return [Process("simulator", command, settings.simulator.admin_port, host=host, watched=False)]

    run = prepare(spec_file, folder, again=demo_options.restart_command(folder), more=simulator)
    stop = threading.Event()
    stop_on_signals(stop)
    reporter = _Reporter(run, stop, lambda line: say(line, err=as_json), moved)
    if seconds is not None:
        timer = threading.Timer(seconds, stop.set)
        timer.daemon = True
        timer.start()
    summary = run.until_stopped(stop, reporter.report)
    simulated = {name: value for name, value in reporter.simulator.items() if name != "windows"}
    rates = click_rates(reporter.simulator.get("windows", ()))
    value = {
        **summary.as_json(),
        "folder": str(folder),
        "simulator": simulated,
        "click_rates": rates.as_json() if rates is not None else None,
        "first_learned_s": reporter.first_learned_s,
    }
    emit_end(
        value, as_json=as_json, text="\n".join(farewell(str(folder), summary.seconds, reporter.simulator))
    )


@dataclass
class _Reporter:
    """Prints progress while the demo runs, and keeps the simulator's latest figures."""

    run: Run
    stop: threading.Event
    say: Callable[[str], None]
    moved: Sequence[str]
    simulator: Mapping[str, Any] = field(default_factory=dict)
    first_learned_s: float | None = None

    def report(self) -> None:
        """Print progress until `stop`."""
        began, began_ms = time.monotonic(), time.time_ns() // 1_000_000
        for line in self._opening():
            self.say(line)
        report_ready(self.run.processes, self.run.folder, self.stop, self.say)
        address = console_address(self.run)
        if address and not self.stop.is_set():
            self.say(f"\n  console: {address}\n")
        reported_drifts, next_line_s = 0, LINE_EVERY_S
        while not self.stop.wait(POLL_S):
            seconds = time.monotonic() - began
            self.simulator = self._figures(self.run.settings.simulator.admin_port) or self.simulator
            inference = self._figures(self.run.settings.inference.port)
            if self.first_learned_s is None and inference.get("freshness_ms") is not None:
                self.first_learned_s = round(seconds, 2)
                self.say(f"{span_of(seconds):>6}  the first predictions that have learned from clicks")
            drifts = [d for d in self.simulator.get("drifts", ()) if d["time_ms"] >= began_ms]
            for line in drift_lines(seconds, drifts, reported_drifts):
                self.say(line)
            reported_drifts = len(drifts)
            if seconds >= next_line_s:
                next_line_s = seconds + LINE_EVERY_S
                self.say(progress_line(seconds, self.simulator, inference))

    def _figures(self, port: int) -> Mapping[str, Any]:
        """Return the answer of /status; empty while the service does not answer."""
        try:
            return figures_of(port, host=reachable_host(self.run.settings.common.bind_address))
        except OSError:
            return {}

    def _opening(self) -> Iterator[str]:
        yield f"freshet demo in {self.run.folder}: readers of a small news site, and a model that learns from"
        yield "every click; Ctrl-C stops everything. Starting:"
        yield from self.moved


def refuse_other_contents(folder: Path) -> None:
    """Raise ConfigError if `folder` is a file, or holds anything but a demo."""
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


def _kept_start(folder: Path, demo_options: DemoOptions) -> RunStart | None:
    """Return the simulator's options of an earlier run in this folder, or None.

    Raises ConfigError if the command line names others: the model has learned from the earlier readers.
    """
    drift_at = tuple(sorted(seconds_of("--drift-at", text) for text in demo_options.drift_at))
    world = stored_start(RunFolder(folder).state)
    if world is None:
        return None
    for option, asked, kept in (
        ("--seed", demo_options.seed, world.seed),
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


def _replace_taken_ports() -> list[str]:
    """Replace default ports that are in use by free ones; return a line for each. `prepare` checks ports that
    the environment sets."""
    settings = load_settings()
    ports = {**ports_of(settings), **optional_ports_of(settings)}
    variables = {name: PORT_SETTINGS.get(name, SIMULATOR_PORT) for name in ports}
    taken = [
        n for n, port in ports.items() if variables[n] not in os.environ and owner_of_port(port) is not None
    ]
    lines = []
    for name, free in zip(taken, lease_ports(len(taken)), strict=True):
        os.environ[variables[name]] = str(free)  # the services inherit it
        lines.append(f"  port {ports[name]} is taken: {name} uses {free}")
    return lines
