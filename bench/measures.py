"""The cost of measures in the trainer: processor time of `Quality.add` and `finished_windows` a batch.

    python -m bench.measures [--batches 3000] [--beside ../other/services] [--quick] [--json]

Bound by instructions: measures are computed cell by cell, and histograms are merged when windows close.
Batches of 256 samples at 4,000 a second, two labels (windows of 10 and 20 s), a segment of 100 values, a
tenth explored, 2,000 items. The time is the thread's own. `--beside` measures the code of another checkout in
turns with this one, in processes of their own: the speed of a shared machine drifts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from bench.report import Figures, command
from bench.rounds import figures_by_key
from freshet.batches.stream import TrainBatch
from freshet.config.spec.model import Explore
from freshet.config.spec.parse import parse_spec
from freshet.model.inputs import Labels, ModelInputs
from freshet.trainer.quality import Quality
from freshet.types import F32, Fence, OffsetRange

SPEC = """
name = "perf"
[events]
served = { schema = "s.avsc", key = ["request", "item"], time = "ts:ms" }
action = { schema = "a.avsc", key = ["request", "item"], time = "ts:ms" }
[join]
grace = "2s"
[labels]
click = { on = "action.type == 'click'", window = "10s" }
purchase = { on = "action.type == 'purchase'", window = "20s" }
[tables]
user = { dim = 4 }
item = { dim = 4 }
[features]
user = { field = "user", table = "user" }
item = { field = "item", table = "item" }
[train]
segments = ["user"]
measure_window = "10s"
"""
BATCH = 256
RATE = 4_000  # samples a second of event time
SPREAD = np.uint64(0x9E3779B97F4A7C15)
WINDOWS_EVERY = 16  # batches: about once a second, as the trainer collects windows


def batches_of(count: int) -> Iterator[tuple[TrainBatch, F32]]:
    """Yield batches with the predictions of them.

    Positives are decided some seconds after they were served, negatives when their windows have closed.
    """
    rng = np.random.default_rng(0)
    for turn in range(count):
        now_ms = 1_700_000_000_000 + turn * BATCH * 1_000 // RATE
        label = rng.integers(0, 2, BATCH).astype(np.uint8)
        predictions = (1 / (1 + np.exp(-rng.normal(-3, 1, (3, BATCH, 2))))).astype(np.float32)
        value = (rng.random(BATCH) < predictions[0, np.arange(BATCH), label]).astype(np.float32)
        closed_ms = np.where(label == 0, 12_000, 22_000)
        delay_ms = np.where(value > 0, rng.integers(0, 8_000, BATCH), closed_ms) + rng.integers(0, 60, BATCH)
        labels = Labels(label, value, np.ones(BATCH, np.float32))
        batch = TrainBatch(
            (OffsetRange(0, turn, turn + 1),),
            Fence(1),
            ModelInputs(BATCH, (), np.empty((BATCH, 0), np.float32), labels),
            np.arange(BATCH),
            np.arange(BATCH, dtype=np.uint64),
            now_ms - delay_ms,
            segments={"user": rng.integers(1, 101, BATCH).astype(np.uint64) * SPREAD},
            served={"click": predictions[1, :, 0], "purchase": predictions[1, :, 1]},
            explored=rng.random(BATCH) < 0.1,
            items=rng.integers(1, 2_000, BATCH).astype(np.uint64) * SPREAD,
        )
        yield batch, predictions[2]


def costs(count: int) -> Figures:
    """Return the milliseconds of this thread's time for a batch."""
    spec = parse_spec(SPEC)
    quality = Quality(replace(spec, serve=replace(spec.serve, explore=Explore(policy="epsilon", share=0.1))))
    adding = closing = 0
    for turn, (batch, predictions) in enumerate(batches_of(count)):
        start = time.thread_time_ns()
        quality.add(batch, predictions)
        added = time.thread_time_ns()
        adding += added - start
        if turn % WINDOWS_EVERY == WINDOWS_EVERY - 1:
            quality.finished_windows()
            closing += time.thread_time_ns() - added
    return {"add_ms_per_batch": adding / count / 1e6, "windows_ms_per_batch": closing / count / 1e6}


def costs_of(services: Path, count: int) -> Figures:
    """Measure the checkout whose folder `services` is given, in a process of its own."""
    words = [sys.executable, "-m", "bench.measures", "--json", "--batches", str(count)]
    path = os.pathsep.join([str(services), str(Path.cwd())])
    out = subprocess.check_output(words, env={**os.environ, "PYTHONPATH": path})
    figures: Figures = json.loads(out)
    return figures


def measure(
    quick: bool = False, batches: int | None = None, beside: Path | None = None, rounds: int = 3
) -> Figures:
    """Measure this checkout, in turns with another whose folder `services` is `beside`."""
    count = batches or (600 if quick else 3_000)
    if beside is None:
        return costs(count)
    here = Path(__file__).resolve().parents[1] / "services"
    cases = {
        name: partial(costs_of, at, count) for name, at in (("beside", beside.resolve()), ("here", here))
    }
    found = figures_by_key(cases, rounds)
    return {name: {key: figure.median for key, figure in of.items()} for name, of in found.items()}


if __name__ == "__main__":
    command(measure, __doc__)
