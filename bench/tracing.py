"""What tracing costs gateway, inference and trainer: off, for a hundredth of events, for all of them.

    python -m bench.tracing [--quick] [--json] [--what gateway,rank,train] [--before CHECKOUT]

Cases take turns in rounds of one run, and what is told are ratios: each round's figure over that of `off` in
the same round, the median of the rounds. With `--before` another checkout of freshet (one without tracing,
with its native core built) is a case, too: what the looks whether tracing is on cost. Spans go to a receiver
in this process that reads requests and keeps nothing. The gateway takes single events and batches of 500 from
wrk, inference requests of 100 candidates from wrk; the trainer's lanes are those of `bench.end_to_end`,
the default model at 256 rows. All is counted a CPU second of the server.

Bound by Python: a traced event costs some tens of microseconds wherever it is told of, one that is not its
share of a look at the hashes of a whole request.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench import rank_system
from bench.gateway import (
    BATCH,
    BATCHES,
    SINGLES,
    Case,
    Server,
    ended,
    gateway,
    wait_until_ready,
)
from bench.rank import BODIES, CANDIDATES
from bench.rank_load import closed
from bench.report import Figures, command
from bench.workload import Workload
from freshet.config.settings import load_settings
from freshet.process.ports import free_ports
from freshet.process.traces import start_traces
from tests.servers.otlp import receiver

ROOT = Path(__file__).parents[1]
RATIOS = {"off": "0", "hundredth": "0.01", "all": "1"}
CLIENTS = 4

Rate = Callable[[], float]


def environments(url: str, before: str) -> dict[str, dict[str, str]]:
    """Variables of each case's process."""
    cases = {
        name: {"FRESHET_TRACES_RATIO": ratio, "FRESHET_TRACES_ENDPOINT": url}
        for name, ratio in RATIOS.items()
    }
    if not before:
        return cases
    path = os.pathsep.join([str(Path(before) / "services"), str(ROOT)])
    return {"before": {"PYTHONPATH": path}, **cases}


def compared(cases: Mapping[str, Rate], rounds: int) -> Figures:
    """Each case's ratio to `off`, and its own rate; cases take turns."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(cases[name]())
    ratios = {
        name: [a / b for a, b in zip(rates, found["off"], strict=True)] for name, rates in found.items()
    }
    return {
        name: {
            "per_s": statistics.median(found[name]),
            "of_off": statistics.median(of),
            "least_of_off": min(of),
            "most_of_off": max(of),
        }
        for name, of in ratios.items()
    }


def of_gateway(environments: Mapping[str, dict[str, str]], rounds: int, seconds: int) -> Figures:
    """Events a CPU second, one a request and many."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, environment in environments.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            servers[name] = stack.enter_context(gateway(folder, environment))

        def rate(name: str, connections: int, events: int) -> Rate:
            case = Case(servers[name], connections, events)

            def run() -> float:
                case.run(seconds)
                return case.rounds[-1]["events_per_cpu_s"]

            return run

        loads = {"single": (SINGLES, 1), "batch": (BATCHES, BATCH)}
        return {
            kind: compared({name: rate(name, *load) for name in servers}, rounds)
            for kind, load in loads.items()
        }


def of_rank(environments: Mapping[str, dict[str, str]], rounds: int, seconds: int) -> Figures:
    """Rank requests a CPU second, of inference servers of one model, beside each other."""
    bodies = rank_system.bodies(BODIES, CANDIDATES)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wrk = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(rank_system.system(folder))
        servers = {
            name: stack.enter_context(inference(folder, environment))
            for name, environment in environments.items()
        }

        def rate(server: Server) -> Rate:
            def run() -> float:
                before = server.cpu_s()
                found = closed(server.port, bodies, CLIENTS, seconds, wrk)
                return float(found["requests"]) / (server.cpu_s() - before)

            return run

        return compared({name: rate(server) for name, server in servers.items()}, rounds)


@contextlib.contextmanager
def inference(folder: Path, more: Mapping[str, str]) -> Iterator[Server]:
    """One more inference server of a system's model."""
    port = free_ports(1)[0]
    environment = {
        **os.environ,
        "FRESHET_INFERENCE_PORT": str(port),
        "FRESHET_COMMON_RUN_FOLDER": str(folder / "run"),
        "FRESHET_COMMON_LOG_LEVEL": "error",
        **more,
    }
    command = [sys.executable, "-m", "freshet.cli", "run", "inference", str(folder / "freshet.toml")]
    started = subprocess.Popen(command, env=environment, text=True)  # its errors are ours
    with ended(started) as process:
        wait_until_ready(port, process)
        yield Server(process, port)


def of_training(environments: Mapping[str, dict[str, str]], rounds: int, passes: int) -> Figures:
    """Samples a CPU second of two lanes, each round in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        Workload(rows=1 << 15).write(Path(folder))

        def rate(environment: dict[str, str]) -> Rate:
            run_it = f"end_to_end.run('default_256', 'bf16', Path({folder!r}), {passes})"
            lines = ["from pathlib import Path", "from bench import end_to_end", f"made = {run_it}"]
            if environment.get("FRESHET_TRACES_RATIO", "0") != "0":  # else nothing of it is loaded
                lines[2:] = ["from bench.tracing import begin", "stop = begin()", lines[2], "stop()"]
            code = "\n".join([*lines, "print(made.samples_per_s / made.cpu_s_per_s)"])

            def run() -> float:
                done = subprocess.run(
                    [sys.executable, "-c", code],
                    env={**os.environ, **environment},
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                return float(done.stdout.splitlines()[-1])

            return run

        return compared({name: rate(environment) for name, environment in environments.items()}, rounds)


def begin() -> Callable[[], None]:
    """Trace this process as its settings say; returns what ends it."""
    return start_traces(load_settings(), role="trainer", instance="", model="plain")


def measure(quick: bool = False, what: str = "gateway,rank,train", before: str = "") -> Figures:
    """The ratios of each of `what`."""
    rounds, seconds = (2, 1) if quick else (5, 1)
    parts: dict[str, Callable[[Mapping[str, dict[str, str]]], Figures]] = {
        "gateway": lambda cases: of_gateway(cases, rounds, seconds),
        "rank": lambda cases: of_rank(cases, rounds, seconds),
        "train": lambda cases: of_training(cases, rounds, 4 if quick else 12),
    }
    with _swallowing() as url:
        cases = environments(url, before)
        return {name: parts[name](cases) for name in what.split(",")}


@contextlib.contextmanager
def _swallowing() -> Iterator[str]:
    with receiver(keep=False) as made:
        yield made.url


if __name__ == "__main__":
    command(measure, __doc__, {"what": str, "before": str})
