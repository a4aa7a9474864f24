"""Samples/s of the default model's step: gather, forward, loss, backward, row gradients and dense step.

    python -m bench.model_step [--seconds 3] [--quick] [--json]

Bound by the multiply-adds of its matrices where batches are large, and by passing over rows where they are
small. The model of the budgets: 26 ids, 13 dense numbers, dim 16, MLP 256-128; lanes of 256 rows in
lock-step, as the trainer runs them. Rows are looked up beforehand: tables are not part of this.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from bench.report import Figures, command
from freshet.model.hedge import HedgeDense
from tests.fixtures.specs import make_batch, make_spec


def samples_per_s(
    precision: str, lanes: int, rows: int, seconds: float, kernels: str | None = None
) -> tuple[float, str]:
    """Return samples/s over all lanes, and the name of the kernels used."""
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


def measure(quick: bool = False, seconds: float | None = None) -> Figures:
    """Measure both precisions, one lane and two, small and larger batches."""
    figures: Figures = {}
    for precision in ("fp32", "bf16"):
        figures[precision] = {}
        for lanes, rows in ((1, 256), (2, 256), (1, 1024), (2, 1024)):
            rate, kernels = samples_per_s(precision, lanes, rows, seconds or (0.5 if quick else 3.0))
            figures[precision][f"lanes_{lanes}_rows_{rows}"] = {"samples_per_s": rate}
        figures[precision]["kernels"] = kernels
    return figures


if __name__ == "__main__":
    command(measure, __doc__)
