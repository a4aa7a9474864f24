"""Rank requests of 100 candidates of the feed example: CPU by stage, requests a second, latency.

    python -m bench.rank [--seconds 5] [--rate 600] [--quick] [--json]

Bound by instructions: Python's and HTTP's, encoding the candidates, the multiply-adds of the dense part.
Budget: >= 1,200 requests per CPU-second of the inference process, saturated, served log on; at 600 a second
p50 <= 1 ms and p99 <= 10 ms beside a trainer that is pinned to the last CPU at nice 10. Saturation is
measured by a closed loop (`bench.wrk`), latency by an open one (`bench.open_loop`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import open_loop, rank_system, wrk
from bench.rank_system import System
from bench.report import Figures, command
from bench.rounds import micros
from freshet.config.spec.model import Explore
from freshet.inference.pipeline import Pipeline, Scored
from freshet.inference.requests import events_of, order, parse_rank
from freshet.inference.served_log import served_events
from freshet.model import build_model
from tests.fixtures.inference import SPEC, greedy, trained
from tests.fixtures.trained_model import World

CANDIDATES, BODIES = 100, 64
RATE = 600.0
CLIENTS = (1, 4, 16)
FED_PER_S = 120_000
"""Samples for each second of measuring beside training: more than one lane trains on, so it never idles."""


def stages(world: World, seconds: float) -> Figures:
    """Return the median microseconds of each stage of a request, on one thread, with warm caches."""
    spec = world.spec
    pipeline = Pipeline(spec, world.served)
    model = build_model(spec, training=False)
    model.load_state(world.versions.get(0).tensors, weights_only=True)
    (body,) = rank_system.bodies(1, CANDIDATES)
    request = parse_rank(body, CANDIDATES)
    context = {**request.context, "request_id": 1}
    events = events_of(spec, context, request.candidates)
    encoded = pipeline.encoded(events, CANDIDATES)
    table = world.rows
    (scored,) = pipeline.score_all([encoded], table, model)
    assert isinstance(scored, Scored)
    found = order(scored.scores, request.k, Explore(), np.random.default_rng())  # type: ignore[arg-type]
    work: dict[str, Callable[[], Any]] = {
        "parse": lambda: parse_rank(body, CANDIDATES),
        "encode": lambda: pipeline.encoded(events, CANDIDATES),
        "decode": lambda: pipeline.requests([encoded]),
        "decode_to_scores": lambda: pipeline.score_all([encoded], table, model),
        "order": lambda: order(scored.scores, request.k, Explore(), np.random.default_rng()),  # type: ignore[arg-type]
        "served_event": lambda: served_events(
            spec, context, request.candidates, found, scored.scores, scored.predictions, 0
        ),
    }
    return {f"{name}_us": micros(call, seconds) for name, call in work.items()}


def saturated(system: System, bodies: list[bytes], seconds: float) -> Figures:
    """Measure requests a second, and a CPU-second of inference, by clients."""
    figures: Figures = {}
    script = wrk.posts("/v1/rank", bodies)
    for clients in CLIENTS:
        cpu = system.cpu_s("inference")
        found = wrk.load(system.ports["inference"], script, clients, seconds)
        cpu = system.cpu_s("inference") - cpu
        requests = found.pop("requests")
        figures[f"clients_{clients}"] = {
            "requests_per_cpu_s": requests / cpu,
            "requests_per_s": requests / found.pop("seconds"),
            **found,
        }
    return figures


def half_load(system: System, bodies: list[bytes], rate: float, seconds: float) -> Figures:
    """Measure latency at a fixed rate, and the share of a CPU that inference used."""
    cpu, began = system.cpu_s("inference"), time.monotonic()
    found = open_loop.load(system.ports["inference"], bodies, rate, seconds)
    return {**found, "cpu_share": (system.cpu_s("inference") - cpu) / (time.monotonic() - began)}


def beside_training(system: System, bodies: list[bytes], rate: float, seconds: float) -> Figures:
    """The same beside a busy trainer. Raises RuntimeError if it ran out of samples."""
    system.feed(int(FED_PER_S * seconds * (1 + len(CLIENTS)) + FED_PER_S))
    began, before = time.monotonic(), system.status("trainer")["samples"]
    figures = {
        "half_load": half_load(system, bodies, rate, seconds),
        "saturated": saturated(system, bodies, seconds),
    }
    after = system.status("trainer")
    if not after["lag_blocks"]:
        raise RuntimeError("the trainer ran out of samples: raise FED_PER_S")
    trained_per_s = (after["samples"] - before) / (time.monotonic() - began)
    return {**figures, "trained_samples_per_s": trained_per_s}


def measure(quick: bool = False, seconds: float | None = None, rate: float = RATE) -> Figures:
    """Measure stages; saturated and at a fixed rate, alone and beside a trainer."""
    seconds = seconds or (2.0 if quick else 5.0)
    bodies = rank_system.bodies(BODIES, CANDIDATES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("world", "system"):
            (folder / name).mkdir()
        world = trained(folder / "world", greedy(SPEC))
        figures: Figures = {"candidates": CANDIDATES, "stages": stages(world, seconds / 10)}
        world.close()
        with rank_system.system(folder / "system") as system:
            wrk.load(system.ports["inference"], wrk.posts("/v1/rank", bodies), 4, 1)  # warms caches
            figures["saturated"] = saturated(system, bodies, seconds)
            figures["half_load"] = half_load(system, bodies, rate, seconds)
            figures["beside_training"] = beside_training(system, bodies, rate, seconds)
    best = max(v["requests_per_cpu_s"] for v in figures["saturated"].values())
    return {"requests_per_cpu_s": best, **figures}


if __name__ == "__main__":
    command(measure, __doc__)
