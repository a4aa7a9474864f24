"""The bounds of the machine, beside which the other measurements are read.

    python -m bench.limits [--folder FOLDER] [--quick] [--json]

Each figure is bound by one resource: multiply-adds (a matrix product of numpy's BLAS, on all cores),
memory bandwidth (copying more than caches hold; read and written bytes are counted), memory latency (rows of
64 bytes, a cache line, at random places of 1 GiB: a miss of all caches, and of the TLB, for each), the disk
of FOLDER (4 KiB appended and made durable, one at a time; default: the folder of temporary files) and waking
a thread that sleeps.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from bench.report import Figures, command
from bench.rounds import interleaved, rate
from bench.table import seconds

LINE_FLOATS = 16
COPIED = 256 << 20
SIDE = 1536  # of the matrices: three of them are 27 MiB


def copying(threads: int) -> Callable[[], float]:
    """Return a case that copies; GB a second, each thread on arrays of its own."""
    arrays = [np.ones((2, COPIED // 8)) for _ in range(threads)]

    def copy(thread: int) -> None:
        np.copyto(arrays[thread][0], arrays[thread][1])

    return lambda: 2 * COPIED * threads / seconds(copy, threads) / 1e9


def fetching(rows: np.ndarray, threads: int, count: int) -> Callable[[], float]:
    """Return a case that fetches rows from random places into a small buffer; rows a second."""
    rng = np.random.default_rng(threads)
    places = [rng.integers(0, len(rows), (count // 8192, 8192)) for _ in range(threads)]
    out = [np.empty((8192, LINE_FLOATS), np.float32) for _ in range(threads)]

    def fetch(thread: int) -> None:
        for part in places[thread]:
            np.take(rows, part, axis=0, out=out[thread], mode="clip")

    return lambda: places[0].size * threads / seconds(fetch, threads)


def multiplying() -> Callable[[], float]:
    """Return a case that multiplies matrices; GFLOP a second in fp32."""
    a, b, c = (np.ones((SIDE, SIDE), np.float32) for _ in range(3))
    return rate(partial(np.matmul, a, b, c), 2 * SIDE**3 / 1e9)


def durable_append_ms(folder: Path, count: int) -> list[float]:
    """Return the milliseconds of each append of 4 KiB with fdatasync."""
    times = []
    with (folder / "appended").open("wb", buffering=0) as file:
        for _ in range(count):
            began = time.perf_counter()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - began) * 1e3)
    return times


def wake_us(count: int) -> list[float]:
    """Return the microseconds from when a thread's event is set until that thread runs."""
    wanted, woken = threading.Event(), threading.Event()
    at = [0.0]

    def wait() -> None:
        for _ in range(count):
            wanted.wait()
            wanted.clear()
            at[0] = time.perf_counter()
            woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        wanted.set()
        woken.wait()
        woken.clear()
        times.append((at[0] - began) * 1e6)
    thread.join()
    return times


def measure(quick: bool = False, folder: Path | None = None) -> Figures:
    """Measure all, in interleaved rounds."""
    rows = np.ones(((1 << 28) // LINE_FLOATS, LINE_FLOATS), np.float32)
    threads = sorted({1, len(os.sched_getaffinity(0))})
    count = 1 << (18 if quick else 20)
    cases: dict[str, Callable[[], float]] = {"multiply": multiplying()}
    for n in threads:
        cases[f"copy_{n}_threads"] = copying(n)
        cases[f"fetch_{n}_threads"] = fetching(rows, n, count)
    found = interleaved(cases, 3 if quick else 7)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        appends = durable_append_ms(Path(temporary), 50 if quick else 300)
    p50, p99 = np.percentile(appends, [50, 99])
    return {
        "multiply": {"fp32_gflop_per_s": found["multiply"].median},
        "copy": {f"gb_per_s_{n}_threads": found[f"copy_{n}_threads"].median for n in threads},
        "fetch_64_bytes": {f"rows_per_s_{n}_threads": found[f"fetch_{n}_threads"].median for n in threads},
        "durable_append": {"p50_ms": float(p50), "p99_ms": float(p99)},
        "wake": {"p50_us": statistics.median(wake_us(500))},
    }


if __name__ == "__main__":
    command(measure, __doc__)
