"""Samples/s of the default model's step: gather, forward, loss, backward, row gradients and dense step.

    python -m tests.perf.model_step [seconds a case]

The model of the budgets: 26 ids, 13 dense numbers, dim 16, MLP 256-128; lanes of 256 rows in lock-step, as
the trainer runs them. Rows are looked up beforehand: tables are not part of this.
"""

from __future__ import annotations

import sys
import threading
import time

import numpy as np

from freshet.model import build_model
from freshet.model.hedge import HedgeDense
from tests.unit.model.specs import make_batch, make_spec


def measure(
    precision: str, lanes: int, rows: int, seconds: float, kernels: str | None = None
) -> tuple[float, str]:
    """Samples/s over all lanes, and the hot loops used."""
    spec = make_spec(ids=26, dense=((True, False),) * 13, deep=(256, 128))
    model = HedgeDense(
        spec, training=True, precision="bf16" if precision == "bf16" else "fp32", kernels=kernels
    )
    rng = np.random.default_rng(0)
    batches = [[make_batch(spec, rows, rng, unique=rows * 12) for _ in range(8)] for _ in range(lanes)]
    workers = [model.lane() for _ in range(lanes)]
    steps, stop = [0], [False]
    until = time.perf_counter() + seconds

    def step() -> None:
        model.step(workers)
        steps[0] += 1
        stop[0] = time.perf_counter() > until

    done = threading.Barrier(lanes, action=step)

    def run(lane: int) -> None:
        turn = 0
        while not stop[0]:
            workers[lane].forward_backward(batches[lane][turn % 8])
            turn += 1
            done.wait()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(lanes)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return steps[0] * lanes * rows / (time.perf_counter() - begin), model.native.kernels


if __name__ == "__main__":
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
    assert build_model(make_spec(), training=True)
    for precision in ("fp32", "bf16"):
        for lanes, rows in ((1, 256), (2, 256), (1, 1024), (2, 1024)):
            rate, kernels = measure(precision, lanes, rows, seconds)
            print(f"{precision}  {lanes} lanes of {rows:4}  {rate / 1000:6.0f}k samples/s  ({kernels})")
