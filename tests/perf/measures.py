"""What measuring costs the trainer: processor time of `Quality.add` and `finished_windows` a batch.

    PYTHONPATH=services python -m tests.perf.measures [--beside ../other/services]

Batches of 256 samples at 4,000 a second, two labels (windows of 10 and 20 s), a segment of 100 values, a
tenth explored, 2,000 items. The time is the thread's own. With `--beside` the code of another checkout is
measured in turns with this one, in processes of their own, and both are told: machines are shared and their
speed drifts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from freshet.model.inputs import Labels, ModelInputs
from freshet.seams.batches import TrainBatch
from freshet.spec.model import Explore
from freshet.spec.parse import parse_spec
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
TELL_EVERY = 16  # batches: about once a second, as the trainer asks for windows


def batches(count: int) -> Iterator[tuple[TrainBatch, F32]]:
    """Batches with what the model says of them: positives some seconds after they were served, negatives
    when their windows have closed."""
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


def measure(count: int) -> dict[str, float]:
    """Milliseconds of this thread's time a batch."""
    spec = parse_spec(SPEC)
    quality = Quality(replace(spec, serve=replace(spec.serve, explore=Explore(policy="epsilon", share=0.1))))
    adding = telling = 0
    for turn, (batch, predictions) in enumerate(batches(count)):
        start = time.thread_time_ns()
        quality.add(batch, predictions)
        added = time.thread_time_ns()
        adding += added - start
        if turn % TELL_EVERY == TELL_EVERY - 1:
            quality.finished_windows()
            telling += time.thread_time_ns() - added
    return {"add ms a batch": adding / count / 1e6, "windows ms a batch": telling / count / 1e6}


def in_turns(folders: list[Path], count: int, rounds: int) -> None:
    """Measure checkouts one after the other, again and again; prints the medians."""
    found: dict[Path, list[dict[str, float]]] = {folder: [] for folder in folders}
    for _ in range(rounds):
        for folder in folders:
            words = [sys.executable, "-m", "tests.perf.measures", "--batches", str(count)]
            path = os.pathsep.join([str(folder), str(Path.cwd())])
            told = subprocess.check_output(words, env={**os.environ, "PYTHONPATH": path})
            found[folder].append(json.loads(told))
    for folder, runs in found.items():
        print(
            json.dumps({"code": str(folder), **{k: statistics.median(r[k] for r in runs) for k in runs[0]}})
        )


def main() -> None:
    """Measure as the words of the command say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=3_000)
    parser.add_argument("--beside", type=Path, help="the folder `services` of another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.beside is None:
        print(json.dumps(measure(options.batches)))
    else:
        here = Path(__file__).resolve().parents[2] / "services"
        in_turns([options.beside.resolve(), here], options.batches, options.rounds)


if __name__ == "__main__":
    main()
