"""Events a second through the gateway, acknowledged: 202 only once the log has them on disk.

    python -m bench.gateway [--quick] [--json]       needs wrk on the PATH

The gateway runs as `freshet run gateway` makes it, with the quickstart's spec and a SQLite log in a temporary
folder. Beside it runs a bare uvicorn (bench/bare_uvicorn.py) that answers the same requests and keeps
nothing: what single requests are held against. wrk has one thread; it sends actions of about 115 bytes of
JSON, in turns to both servers. Budgets, of two cores with wrk on them: single events >= 45 % of what the bare
uvicorn answers, batches of 500 >= 150,000 events a second. At the end the log is counted: it must hold what
was acknowledged.

Bound by the event loop's work a request where requests hold one event, by parsing and encoding where they
hold many, and by the disk where few share an fsync.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.report import Figures, command
from freshet.adapters import open_eventlog
from freshet.process.ports import free_ports
from freshet.types import TopicPartition

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart" / "freshet.toml"
SCRIPT = Path(__file__).with_suffix(".lua")
TOPIC = "actions"
ANSWER_BYTES = 80  # of one acknowledged event
BATCH = 500
SINGLES, BATCHES = 256, 8  # connections
START_S = 30.0


@dataclass
class Server:
    """A process that answers on a port of this machine."""

    process: subprocess.Popen[str]
    port: int

    def cpu_s(self) -> float:
        """Seconds of CPU that all its threads have used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """End the process with the block, as a stop of the service would."""
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=START_S)


@contextlib.contextmanager
def bare() -> Iterator[Server]:
    """The bare uvicorn."""
    command = [sys.executable, "-m", "bench.bare_uvicorn", str(ANSWER_BYTES)]
    with ended(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        yield Server(process, int(process.stdout.readline()))


@contextlib.contextmanager
def gateway(folder: Path, more: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A gateway of its own, with its log under `folder`; `more`: variables for it."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "freshet", "run", "gateway", str(QUICKSTART), "--folder", str(folder)]
    environment = {**os.environ, "FRESHET_GATEWAY_PORT": str(port), **(more or {})}
    quiet = subprocess.DEVNULL
    started = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=quiet, stderr=quiet, text=True)
    with ended(started) as process:
        wait_until_ready(port, process)
        yield Server(process, port)


def wait_until_ready(port: int, process: subprocess.Popen[str]) -> None:
    """Return once the service says so. Raises RuntimeError if it ends, or does not get there."""
    pause = threading.Event()
    for _ in range(int(START_S / 0.05)):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready"):
            return
        if process.poll() is not None:
            raise RuntimeError(f"the gateway ended with {process.returncode}")
        pause.wait(0.05)
    raise RuntimeError(f"the gateway was not ready after {START_S} s")


@dataclass
class Case:
    """One kind of load on one server, and what each round of it gave."""

    server: Server
    connections: int
    events: int  # a request
    acknowledged: int = 0
    rounds: list[dict[str, float]] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Load the server for so long. Raises RuntimeError if any answer was not 2xx."""
        command = ["wrk", "-t1", f"-c{self.connections}", f"-d{seconds}s", "-s", str(SCRIPT)]
        command += [f"http://127.0.0.1:{self.server.port}", "--", str(self.events)]
        before = self.server.cpu_s()
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        cpu_s = self.server.cpu_s() - before
        seen = json.loads(out.strip().splitlines()[-1])
        if seen["not_2xx"] or seen["socket_errors"]:
            raise RuntimeError(f"answers that were not 2xx, or errors of sockets: {seen}")
        events = seen["requests"] * self.events
        self.acknowledged += events
        self.rounds.append(
            {
                "events_per_s": events / seen["seconds"],
                "events_per_cpu_s": events / cpu_s,
                "cpus": cpu_s / seen["seconds"],
                "p50_ms": seen["p50_ms"],
                "p99_ms": seen["p99_ms"],
            }
        )

    def figures(self) -> dict[str, float]:
        """Medians over the rounds."""
        names = self.rounds[0]
        return {name: statistics.median(r[name] for r in self.rounds) for name in names}


def events_in_the_log(folder: Path) -> int:
    """How many actions the log holds."""
    log = open_eventlog(f"sqlite:{folder / 'log'}")
    try:
        partitions = range(log.topics()[TOPIC].partitions)
        return sum(log.bounds(TopicPartition(TOPIC, p)).end for p in partitions)
    finally:
        log.close()


def measure(quick: bool = False) -> Figures:
    """Figures of all cases, and the shares that the budgets are about."""
    if shutil.which("wrk") is None:
        raise RuntimeError(
            "this measurement loads the servers with wrk, which is not on the PATH: install it"
        )
    rounds, seconds = (2, 2) if quick else (5, 4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with bare() as bare_server, gateway(folder) as server:
            cases = {
                "bare": Case(bare_server, SINGLES, 1),
                "single": Case(server, SINGLES, 1),
                "batch": Case(server, BATCHES, BATCH),
            }
            for _ in range(rounds):
                for case in cases.values():
                    case.run(seconds)
        acknowledged = cases["single"].acknowledged + cases["batch"].acknowledged
        kept = events_in_the_log(folder)
    if kept < acknowledged:
        raise RuntimeError(f"{acknowledged} events were acknowledged, but the log holds {kept}")
    made: Figures = {name: case.figures() for name, case in cases.items()}
    shares = [
        s["events_per_s"] / b["events_per_s"]
        for s, b in zip(cases["single"].rounds, cases["bare"].rounds, strict=True)
    ]
    made["single"]["share_of_bare"] = statistics.median(shares)
    made["single"]["share_of_bare_least"] = min(shares)
    return {**made, "batch_events": BATCH, "single_connections": SINGLES, "batch_connections": BATCHES}


if __name__ == "__main__":
    command(measure, __doc__)
