"""Speed of rank requests: 100 candidates of the feed example, stage by stage, then over HTTP.

    python -m tests.perf.rank [--seconds 4] [--quick] [--json]

Bound by instructions: encoding the candidates and the multiply-adds of the dense part. Budget: >= 1,200
requests a second and core, served log on; p99 <= 10 ms at half load. The clients are processes of their own;
on two cores one of them is theirs.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from freshet.inference.core import events_of, parse_rank
from freshet.inference.pipeline import Pipeline
from freshet.inference.service import run
from freshet.inference.table import ServingTable
from freshet.model import build_model
from freshet.spec.parse import load_spec
from tests.integration.serving import FEED, running, schema, settings, wait_for
from tests.integration.test_inference import CONTEXT, greedy
from tests.integration.world import World
from tests.perf.report import Figures, command

CANDIDATES = 100


def body() -> bytes:
    candidates = [{"id": i, "age_s": float(i), "ctr_1h": 0.01 * i} for i in range(CANDIDATES)]
    return orjson.dumps({"context": {**CONTEXT, "request_id": 1}, "candidates": candidates, "k": 10})


def micros(work: Callable[[], Any], seconds: float) -> float:
    """Median microseconds of CPU time of one call: what other processes take does not count."""
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - started)
    return float(np.median(times)) / 1e3


def stages(world: World, seconds: float) -> dict[str, float]:
    """Median microseconds of each stage of a request, on one thread."""
    spec = world.spec
    pipeline = Pipeline(spec, world.served)
    table = ServingTable(world.layout, buckets=spec.buckets, partitions=spec.partitions, seed=0)
    model = build_model(spec, training=False)
    model.load_state(world.versions.get(0).tensors, weights_only=True)
    asked = body()
    request = parse_rank(asked, CANDIDATES)
    events = events_of(spec, request.context, request.candidates)
    encoded = pipeline.encoded(events, CANDIDATES)
    samples = pipeline.requests([encoded])
    return {
        "parse_us": micros(lambda: parse_rank(asked, CANDIDATES), seconds),
        "encode_us": micros(lambda: pipeline.encoded(events, CANDIDATES), seconds),
        "decode_us": micros(lambda: pipeline.requests([encoded]), seconds),
        "lookup_and_score_us": micros(lambda: pipeline.score(samples, table, model), seconds),
    }


def ask(port: int, seconds: float, pause_s: float, out: Any) -> None:
    """One keep-alive connection, a request after the other; puts the latencies in seconds."""
    request = b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body()), body())
    latencies: list[float] = []
    bad = 0
    with socket.create_connection(("127.0.0.1", port)) as client:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            started = time.monotonic()
            client.sendall(request)
            answer = client.recv(65_536)
            head, _, rest = answer.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            while len(rest) < length:
                rest += client.recv(65_536)
            latencies.append(time.monotonic() - started)
            bad += not head.startswith(b"HTTP/1.1 200")
            if pause_s:
                time.sleep(pause_s)
    out.put((latencies, bad))


def load(port: int, clients: int, seconds: float, pause_s: float = 0.0) -> dict[str, float]:
    """Requests a second and percentiles of latency."""
    out: Any = multiprocessing.Queue()
    processes = [
        multiprocessing.Process(target=ask, args=(port, seconds, pause_s, out)) for _ in range(clients)
    ]
    cpu = time.process_time()
    for process in processes:
        process.start()
    results = [out.get() for _ in processes]
    for process in processes:
        process.join()
    cpu = time.process_time() - cpu
    latencies = np.concatenate([r[0] for r in results]) * 1e3
    return {
        "requests_per_s": round(len(latencies) / seconds, 1),
        "requests_per_cpu_s": round(len(latencies) / cpu, 1),
        "p50_ms": round(float(np.percentile(latencies, 50)), 2),
        "p99_ms": round(float(np.percentile(latencies, 99)), 2),
        "errors": sum(r[1] for r in results),
    }


def measure(quick: bool = False, seconds: float | None = None) -> Figures:
    """The stages, then the server saturated and at half of that."""
    multiprocessing.set_start_method("spawn", force=True)
    seconds = seconds or (2.0 if quick else 4.0)
    with tempfile.TemporaryDirectory() as folder:
        spec = greedy(load_spec(FEED / "freshet.toml"))
        world = World(Path(folder), spec, schema("ranked"))
        world.create()
        event = {
            **CONTEXT,
            "request_id": 1,
            "items": [{"id": i, "age_s": 1.0, "ctr_1h": 0.1, "pos": 0} for i in range(CANDIDATES)],
        }
        world.learn(event, 1)
        world.publish()
        world.put_version(0)
        world.promote(0)
        figures: dict[str, Any] = {"candidates": CANDIDATES, **stages(world, seconds / 4)}
        made = settings()

        def target(stop: threading.Event, ready: Callable[[str], None]) -> None:
            run(world.parts, made.inference, made.common, stop=stop, ready=ready)

        with running(target) as (url, _):
            import urllib.request  # noqa: PLC0415 - only to wait until it is ready

            def up() -> bool:
                try:
                    with urllib.request.urlopen(f"{url}/health/ready"):
                        return True
                except OSError:
                    return False

            wait_for(up)
            port = int(url.rsplit(":", 1)[1])
            load(port, 1, 0.5)
            figures["one_client"] = load(port, 1, seconds)
            figures["four_clients"] = load(port, 4, seconds)
            pause_s = 2 * 4 / figures["four_clients"]["requests_per_s"]
            figures["half_load"] = load(port, 4, seconds, pause_s)
        world.close()
    return figures


def main() -> None:
    """Measure and print."""
    command(measure, __doc__, {"seconds": float})


if __name__ == "__main__":
    main()
