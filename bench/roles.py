"""The demo on processes apart, in fp32 and in int8: click rates and bytes of a sample.

    python -m bench.roles [--minutes 10] [--rate 60] [--seed 7] [--codecs fp32,int8] [--quick] [--json]

Two systems run at the same time on one Kafka and one Redis Cluster: a gateway, a joiner, two shards
(`paramserver`), an embedder, two trainer ranks and an inference server each, and simulated readers with the
same seed. The first has fp32 on every wire, the second int8: rows and gradients on both wires of rows, sums
of dense gradients, and rows to serving. A run is one draw, as the slates decide the clicks, and windows that
follow each other are alike: compare several runs, and `--codecs fp32,fp32`, whose difference is chance alone.

`click_rate` is that of the slates that the model ordered, by the clicks that the simulator's truth expects of
them; `random_rate` of the slates in random order. Both leave out the first two minutes. `± 95 %` is that of
the mean over windows of 5 s, and of the difference of the two means. Bytes are those of a
sample on each wire as the processes count them (`freshet status`). Needs ops/install-kafka and redis-server.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.demo_seeds import LAST_CLICKS_S, LOOK_S, WINDOW_S, Windows, simulator_status
from bench.report import Figures, command
from freshet.demo import write_spec
from freshet.process.ports import lease_ports
from tests.fixtures.fleet import Fleet
from tests.servers.kafka import Kafka
from tests.servers.redis_cluster import RedisCluster

COUNTS = {"joiner": 1, "paramserver": 2, "embedder": 1, "trainer": 2, "inference": 1, "gateway": 1}
CODEC_SETTINGS = ("TRAINER_ROWS", "TRAINER_GRADIENTS", "EMBEDDER_ROWS", "EMBEDDER_GRADIENTS")
WIRES: Mapping[str, Sequence[str]] = {
    "trainer": ("batch", "gradients", "dense"),
    "embedder": ("lookup", "push"),
    "paramserver": ("publish",),
}
"""By role the wires that are counted there, at one of their ends."""
LEARNED_S = 120.0


@dataclass
class DemoRun:
    """A system and its readers."""

    name: str
    fleet: Fleet
    simulator: subprocess.Popen[bytes]
    port: int  # of the simulator
    status: dict[str, Any] = field(default_factory=dict)
    windows: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def look(self) -> None:
        """Take the simulator's windows. Raises RuntimeError if it has ended."""
        if self.simulator.poll() is not None:
            raise RuntimeError(f"the simulator of {self.name} ended with {self.simulator.returncode}")
        self.status = simulator_status(self.port) or self.status
        for window in self.status.get("windows", ()):
            self.windows[round((window["start_ms"] - self.status["began_ms"]) / 1_000)] = window

    def figures(self, end_s: float) -> Figures:
        """Return the click rates, and bytes of a sample by wire."""
        figures: Figures = {}
        for name, kind in (("click_rate", "model"), ("random_rate", "random")):
            rates = rates_of(self.windows, kind, end_s)
            figures[name] = statistics.fmean(rates)
            figures[f"{name}_95"] = 1.96 * statistics.stdev(rates) / math.sqrt(len(rates))
        trainers = [self.fleet.status(name) for name in self.fleet.of("trainer")]
        samples = sum(one["samples"] for one in trainers)
        figures["samples"] = samples
        figures["versions"] = max(one["version"] for one in trainers)
        raw = sent = 0.0
        for role, wires in WIRES.items():
            for wire in wires:
                counts = self._counts(role, wire)
                figures[f"{wire}_bytes_per_sample"] = counts["bytes_wire"] / samples
                raw, sent = raw + counts["bytes_raw"], sent + counts["bytes_wire"]
        return figures | {"bytes_per_sample": sent / samples, "times_shorter": raw / sent}

    def _counts(self, role: str, wire: str) -> dict[str, float]:
        found = {"bytes_raw": 0.0, "bytes_wire": 0.0}
        for name in self.fleet.of(role):
            for codecs in self.fleet.status(name).get("wires", {}).get(wire, {}).values():
                for counts in codecs.values():
                    found["bytes_raw"] += counts["bytes_raw"]
                    found["bytes_wire"] += counts["bytes_wire"]
        return found


def rates_of(windows: Windows, kind: str, end_s: float) -> list[float]:
    """Return the expected clicks of an item shown, of each window."""
    chosen = [w[kind] for s, w in windows.items() if LEARNED_S <= s <= end_s - WINDOW_S]
    return [w["expected"] / w["impressions"] for w in chosen if w["impressions"]]


def start(
    name: str,
    codec: str,
    folder: Path,
    kafka: Kafka,
    redis: RedisCluster,
    seed: int,
    rate: float,
    stack: ExitStack,
) -> DemoRun:
    """Start a system and its readers."""
    spec = write_spec(folder / "spec")
    train = f'[train]\nreduce = "{codec}"\npublish_codec = "{codec}"'
    spec.write_text(spec.read_text().replace("[train]", train))
    stores = {
        "FRESHET_COMMON_LOG_URL": f"kafka://{kafka.bootstrap}/{name}?replication=1",
        "FRESHET_COMMON_ROWS_URL": f"redis://{redis.addresses}/{name}",
        "FRESHET_COMMON_VERSIONS_URL": f"file:{folder / 'versions'}",
        **{f"FRESHET_{setting}": codec for setting in CODEC_SETTINGS},
    }
    fleet = Fleet(spec, folder, stores, COUNTS)
    stack.callback(fleet.kill)
    fleet.start()
    (port,) = lease_ports(1)
    ports = {role: fleet.url(f"{role}-0").rpartition(":")[2] for role in ("gateway", "inference")}
    environment = {
        **os.environ,
        "FRESHET_GATEWAY_PORT": ports["gateway"],
        "FRESHET_INFERENCE_PORT": ports["inference"],
        "FRESHET_SIMULATOR_ADMIN_PORT": str(port),
    }
    words = ["simulate", "--folder", str(folder / "readers"), "--seed", str(seed), "--rate", str(rate)]
    simulator = subprocess.Popen([sys.executable, "-m", "freshet.cli", *words], env=environment)
    stack.callback(simulator.wait)
    stack.callback(simulator.kill)
    return DemoRun(name, fleet, simulator, port)


def measure(
    quick: bool = False,
    minutes: float = 10.0,
    rate: float = 60.0,
    seed: int = 7,
    codecs: str = "fp32,int8",
) -> Figures:
    """Run two systems for so long, each with one of two codecs."""
    end_s = 60 * (3.0 if quick else minutes)
    first, second = codecs.split(",")
    names = {"first": first, "second": second}
    pause = threading.Event()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="freshet-roles-")))
        kafka = stack.enter_context(Kafka(folder / "kafka"))
        redis = stack.enter_context(RedisCluster(folder / "redis"))
        systems = [
            start(name, codec, folder / name, kafka, redis, seed, rate, stack)
            for name, codec in names.items()
        ]
        while not all(
            w.status and time.time() >= w.status["began_ms"] / 1_000 + end_s + LAST_CLICKS_S for w in systems
        ):
            pause.wait(LOOK_S)
            for system in systems:
                system.look()
        figures: Figures = {
            system.name: {"codec": names[system.name]} | system.figures(end_s) for system in systems
        }
    exact, short = figures["first"], figures["second"]
    figures["difference"] = short["click_rate"] - exact["click_rate"]
    figures["difference_95"] = math.hypot(exact["click_rate_95"], short["click_rate_95"])
    return figures | {"minutes": end_s / 60, "rate": rate, "seed": seed}


if __name__ == "__main__":
    command(measure, __doc__)
