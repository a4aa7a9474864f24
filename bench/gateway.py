"""Events a second through the gateway, acknowledged: 202 only once the log has them on disk.

    python -m bench.gateway [--quick] [--json]       needs wrk on the PATH

The gateway runs as `freshet run gateway` makes it, with the quickstart's spec and a SQLite log in a temporary
folder. Beside it runs a bare uvicorn (bench/bare_uvicorn.py) that answers the same requests and keeps
nothing: the bound of single requests. wrk has one thread; it sends actions of about 115 bytes of JSON, in
turns to both servers. Budgets, of two cores with wrk on them: single events >= 45 % of what the bare uvicorn
answers, batches of 500 >= 150,000 events a second. At the end the log is counted: it must hold what was
acknowledged.

Bound by the event loop's work a request where requests hold one event, by parsing and encoding where they
hold many, and by the disk where few share an fsync.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench import wrk
from bench.machine import cpu_s
from bench.report import Figures, command
from bench.services import ready_service, running
from freshet.adapters import open_eventlog
from freshet.process.ports import lease_ports
from freshet.types import TopicPartition

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart" / "freshet.toml"
SCRIPT = Path(__file__).with_suffix(".lua")
TOPIC = "actions"
ANSWER_BYTES = 80  # of one acknowledged event
BATCH = 500
SINGLES, BATCHES = 256, 8  # connections


@dataclass(frozen=True, slots=True)
class Server:
    """A process that answers on a port of this machine."""

    pid: int
    port: int


@contextmanager
def bare_uvicorn() -> Iterator[Server]:
    """Run the bare uvicorn."""
    words = [sys.executable, "-m", "bench.bare_uvicorn", str(ANSWER_BYTES)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with running(process):
        assert process.stdout is not None
        yield Server(process.pid, int(process.stdout.readline()))


@contextmanager
def gateway(folder: Path, more: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run a gateway with its log under `folder`; `more` holds further variables of its environment."""
    port = lease_ports(1)[0]
    words = [sys.executable, "-m", "freshet", "run", "gateway", str(QUICKSTART), "--folder", str(folder)]
    environment = {**os.environ, "FRESHET_GATEWAY_PORT": str(port), **(more or {})}
    with ready_service(words, environment, port, quiet=True) as process:
        yield Server(process.pid, port)


@dataclass
class Case:
    """One kind of load on one server, and the figures of each round."""

    server: Server
    connections: int
    events: int  # a request
    acknowledged: int = 0
    rounds: list[dict[str, float]] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Load the server for some seconds. Raises RuntimeError if an answer was not 2xx."""
        before = cpu_s(self.server.pid)
        found = wrk.load(self.server.port, SCRIPT.read_text(), self.connections, seconds, [str(self.events)])
        used_s = cpu_s(self.server.pid) - before
        events = found["requests"] * self.events
        self.acknowledged += events
        self.rounds.append(
            {
                "events_per_s": events / found["seconds"],
                "events_per_cpu_s": events / used_s,
                "cpus": used_s / found["seconds"],
                "p50_ms": found["p50_ms"],
                "p99_ms": found["p99_ms"],
            }
        )

    def figures(self) -> dict[str, float]:
        """Return medians over the rounds."""
        names = self.rounds[0]
        return {name: statistics.median(r[name] for r in self.rounds) for name in names}


def events_in_the_log(folder: Path) -> int:
    """Count the actions in the log."""
    log = open_eventlog(f"sqlite:{folder / 'log'}")
    try:
        partitions = range(log.topics()[TOPIC].partitions)
        return sum(log.bounds(TopicPartition(TOPIC, p)).end for p in partitions)
    finally:
        log.close()


def measure(quick: bool = False) -> Figures:
    """Measure all cases, and the shares that the budgets limit."""
    rounds, seconds = (2, 2) if quick else (5, 4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with bare_uvicorn() as bare, gateway(folder) as server:
            cases = {
                "bare": Case(bare, SINGLES, 1),
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
    figures: Figures = {name: case.figures() for name, case in cases.items()}
    shares = [
        s["events_per_s"] / b["events_per_s"]
        for s, b in zip(cases["single"].rounds, cases["bare"].rounds, strict=True)
    ]
    figures["single"]["share_of_bare"] = statistics.median(shares)
    figures["single"]["share_of_bare_least"] = min(shares)
    return {**figures, "batch_events": BATCH, "single_connections": SINGLES, "batch_connections": BATCHES}


if __name__ == "__main__":
    command(measure, __doc__)
