"""The base of all peers' jobs; runs inside a peer's environment, which has numpy.

    python -m bench.peers.NAME_job --data FOLDER --precision bf16|fp32 --batch N --seconds S
        [--threads T] [--wait]

A job builds its model, warms up, trains for S seconds and prints one line of JSON:

    {"samples_per_s": ..., "samples_per_cpu_s": ..., "logloss": ..., "batches": ..., "threads": ...}

With `--wait` it prints {"ready": true} once it is warm, and then measures anew for every line of its standard
input until that ends, so that peers take turns in rounds without starting again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

MAX_BATCHES = 128
"""Batches in memory: 0.5 M rows of 4096, so that none is in the caches when its turn comes again."""

WARM_UP_BATCHES = 24


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    data: Path
    precision: str  # "bf16" or "fp32"
    batch: int  # rows
    seconds: float  # of one measurement
    threads: int
    wait: bool


@dataclass(frozen=True)
class Batch:
    """B rows, F = 26 fields, N = 13 numbers."""

    ids: npt.NDArray[np.int64]  # (B, F), each from 0 to below the cardinality
    dense: npt.NDArray[np.float32]  # (B, N)
    labels: npt.NDArray[np.float32]  # (B,) 0 or 1


class Trainer(Protocol):
    """A peer's model."""

    def prepared(self, batch: Batch) -> Any:
        """Convert a batch to the peer's own tensors. Not timed: peers read tensors from memory."""

    def step(self, batch: Any) -> Any:
        """Run forward, backward and update; returns the mean logloss, as anything that `float` takes."""


def run(build: Callable[[Options, Mapping[str, Any]], Trainer]) -> None:
    """Run a job: `build(options, meta)` makes the model, `meta` is the data's meta.json."""
    options = parsed()
    meta = json.loads((options.data / "meta.json").read_text())
    trainer = build(options, meta)
    batches = itertools.cycle([trainer.prepared(batch) for batch in batches_of(options)])
    for batch in itertools.islice(batches, WARM_UP_BATCHES):
        trainer.step(batch)
    serve(lambda: measured(trainer, batches, options), options.wait)


def serve(measure: Callable[[], Mapping[str, float]], wait: bool) -> None:
    """Measure once, or with `--wait` once for every line on standard input."""
    if not wait:
        print(json.dumps(measure()), flush=True)
        return
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


def measured(trainer: Trainer, batches: Iterator[Any], options: Options) -> dict[str, float]:
    """Train for `options.seconds`."""
    losses = []
    began, cpu_began = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < options.seconds:
        losses.append(trainer.step(next(batches)))
    took, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    samples = len(losses) * options.batch
    return {
        "samples_per_s": samples / took,
        "samples_per_cpu_s": samples / cpu,
        "logloss": sum(float(loss) for loss in losses) / len(losses),
        "batches": len(losses),
        "threads": options.threads,
    }


def batches_of(options: Options) -> Iterator[Batch]:
    """Yield full batches of the data, in its order."""
    ids, dense, labels = (
        np.load(options.data / f"{n}.npy", mmap_mode="r") for n in ("ids", "dense", "labels")
    )
    count = min(len(labels) // options.batch, MAX_BATCHES)
    if not count:
        raise SystemExit(f"{options.data}: {len(labels)} rows are less than one batch of {options.batch}")
    for first in range(0, count * options.batch, options.batch):
        part = slice(first, first + options.batch)
        yield Batch(ids[part].astype(np.int64), np.array(dense[part]), np.array(labels[part]))


def parsed() -> Options:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="what `python -m bench.workload` wrote")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--wait", action="store_true")
    return Options(**vars(parser.parse_args()))
