"""The peers' training of the plain model: samples/s in bf16 and fp32, all on the same data, in turns.

    python -m bench.peers.setup                  first, once
    python -m bench.peers_run [--batch 4096] [--rounds 7] [--only torch,torchrec] [--quick] [--json]

The figures are the peers' at their best: ids are decoded and in their own tensors before the clock starts,
and nothing is logged, published or flushed. Peers without an environment are listed under `not_installed`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.peers.registry import PEERS
from bench.peers.running import environment_of, not_installed, training_job
from bench.peers.setup import FOLDER
from bench.report import Figures, command
from bench.rounds import Figure, interleaved
from bench.workload import Workload

PRECISIONS = ("bf16", "fp32")


def data_of(workload: Workload) -> Path:
    """The workload's folder, written if it is not there."""
    parts = (workload.rows, workload.cardinality, workload.skew, workload.seed)
    folder = FOLDER / ("data-" + "-".join(map(str, parts)))
    workload.write(folder)
    return folder


def in_turns(
    sides: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int
) -> dict[str, dict[str, Figure]]:
    """Call every side once a round; the figures of each key that it tells."""
    said: dict[str, list[Mapping[str, float]]] = {name: [] for name in sides}

    def case(name: str) -> Callable[[], float]:
        def once() -> float:
            said[name].append(sides[name]())
            return 0.0

        return once

    interleaved({name: case(name) for name in sides}, rounds)
    return {
        name: {key: Figure.of([one[key] for one in all_of]) for key in all_of[0]}
        for name, all_of in said.items()
    }


def figures_of(told: Mapping[str, Figure]) -> Figures:
    """A job's figures over its rounds."""
    rate = told["samples_per_s"]
    return {
        "samples_per_s": rate.median,
        "low_samples_per_s": rate.low,
        "high_samples_per_s": rate.high,
        "samples_per_cpu_s": told["samples_per_cpu_s"].median,
        "logloss": told["logloss"].low,
    }


def measure(
    quick: bool = False, batch: int = 4096, rounds: int | None = None, only: str | None = None
) -> Figures:
    """Every job of the model, in both precisions."""
    wanted = only.split(",") if only else [job for name, peer in PEERS.items() for job in (name, *peer.also)]
    advice = {job: not_installed(environment_of(job)) for job in wanted}
    there = [job for job in wanted if advice[job] is None]
    data = data_of(Workload(rows=1 << 17) if quick else Workload())
    seconds, rounds = (1.0, rounds or 3) if quick else (2.0, rounds or 7)
    figures: Figures = {"batch": batch, "threads": 2}
    for precision in PRECISIONS:
        with contextlib.ExitStack() as stack:
            jobs = {
                job: stack.enter_context(training_job(job, data, precision, batch, seconds)) for job in there
            }
            for job in jobs.values():
                job.ready()
            told = in_turns({name: job.measured for name, job in jobs.items()}, rounds)
        figures[precision] = {name: figures_of(figure) for name, figure in told.items()}
    absent = {job: said for job, said in advice.items() if said}
    return figures | ({"not_installed": absent} if absent else {})


def main() -> None:
    """Measure and print."""
    command(measure, __doc__, {"batch": int, "rounds": int, "only": str})


if __name__ == "__main__":
    main()
