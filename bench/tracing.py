"""What tracing costs gateway, inference and trainer: off, for a hundredth of events, for all of them.

    python -m bench.tracing [--quick] [--json] [--what gateway,rank,train] [--before CHECKOUT]

Cases take turns in rounds of one run. The figures are ratios: each round's figure over that of `off` in the
same round, the median of the rounds. With `--before` another checkout of freshet (one without tracing, with
its native core built) is a case, too; it shows what the checks cost whether tracing is on. Spans go to a
receiver in this process that reads requests and keeps nothing. The gateway takes single events and batches of
500 from wrk, inference requests of 100 candidates from wrk; the trainer's lanes are those of
`bench.end_to_end`, the default model at 256 rows. Rates are per CPU second of the server.

Bound by Python: a traced event costs some tens of microseconds for each span, any other its share of hashing
the ids of a whole request.
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

from bench import rank_system, wrk
from bench.gateway import BATCH, BATCHES, SINGLES, Case, Server, gateway
from bench.machine import cpu_s
from bench.rank import BODIES, CANDIDATES
from bench.report import Figures, command
from bench.rounds import turns
from bench.services import ready_service
from bench.workload import Workload
from freshet.config.settings import load_settings
from freshet.process.ports import lease_ports
from freshet.process.telemetry import start_traces
from tests.servers.otlp import receiver

ROOT = Path(__file__).parents[1]
RATIOS = {"off": "0", "hundredth": "0.01", "all": "1"}
CLIENTS = 4

Rate = Callable[[], float]


def environments(url: str, before: str) -> dict[str, dict[str, str]]:
    """Return the environment variables of each case."""
    cases = {
        name: {"FRESHET_TRACES_RATIO": ratio, "FRESHET_TRACES_ENDPOINT": url}
        for name, ratio in RATIOS.items()
    }
    if not before:
        return cases
    path = os.pathsep.join([str(Path(before) / "services"), str(ROOT)])
    return {"before": {"PYTHONPATH": path}, **cases}


def compared(cases: Mapping[str, Rate], rounds: int) -> Figures:
    """Return each case's ratio to `off`, and its own rate."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for name in turns(list(cases), rounds):
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
    """Measure events a CPU second, one a request and many."""
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
    """Measure rank requests a CPU second of inference servers of one model."""
    script = wrk.posts("/v1/rank", rank_system.bodies(BODIES, CANDIDATES))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(rank_system.system(folder))
        servers = {
            name: stack.enter_context(inference(folder, environment))
            for name, environment in environments.items()
        }

        def rate(server: Server) -> Rate:
            def run() -> float:
                before = cpu_s(server.pid)
                found = wrk.load(server.port, script, CLIENTS, seconds)
                return float(found["requests"]) / (cpu_s(server.pid) - before)

            return run

        return compared({name: rate(server) for name, server in servers.items()}, rounds)


@contextlib.contextmanager
def inference(folder: Path, more: Mapping[str, str]) -> Iterator[Server]:
    """Run one more inference server of a system's model."""
    port = lease_ports(1)[0]
    environment = {
        **os.environ,
        "FRESHET_INFERENCE_PORT": str(port),
        "FRESHET_COMMON_RUN_FOLDER": str(folder / "run"),
        "FRESHET_COMMON_LOG_LEVEL": "error",
        **more,
    }
    words = [sys.executable, "-m", "freshet.cli", "run", "inference", str(folder / "freshet.toml")]
    with ready_service(words, environment, port) as process:
        yield Server(process.pid, port)


def of_training(environments: Mapping[str, dict[str, str]], rounds: int, passes: int) -> Figures:
    """Measure samples a CPU second of two lanes, each round in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        Workload(rows=1 << 15).write(Path(folder))

        def rate(environment: dict[str, str]) -> Rate:
            run_it = f"end_to_end.run('default_256', 'bf16', Path({folder!r}), {passes})"
            lines = ["from pathlib import Path", "from bench import end_to_end", f"passed = {run_it}"]
            if environment.get("FRESHET_TRACES_RATIO", "0") != "0":  # else nothing of it is loaded
                lines[2:] = ["from bench.tracing import begin", "stop = begin()", lines[2], "stop()"]
            code = "\n".join([*lines, "print(passed.samples_per_s / passed.cpu_s_per_s)"])

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
    """Trace this process as its settings say; the returned function ends it."""
    return start_traces(load_settings(), role="trainer", instance="", model="plain")


def measure(quick: bool = False, what: str = "gateway,rank,train", before: str = "") -> Figures:
    """Measure the ratios of each part of `what`."""
    rounds, seconds = (2, 1) if quick else (5, 1)
    parts: dict[str, Callable[[Mapping[str, dict[str, str]]], Figures]] = {
        "gateway": lambda cases: of_gateway(cases, rounds, seconds),
        "rank": lambda cases: of_rank(cases, rounds, seconds),
        "train": lambda cases: of_training(cases, rounds, 4 if quick else 12),
    }
    with receiver(keep=False) as traces:
        cases = environments(traces.url, before)
        return {name: parts[name](cases) for name in what.split(",")}


if __name__ == "__main__":
    command(measure, __doc__)
