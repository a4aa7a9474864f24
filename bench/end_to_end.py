"""From log bytes to the updated model in one process, beside the dense roofline of the same run.

    python -m bench.end_to_end [--quick] [--json] [--rounds 5] [--peers none|torch,torchrec,...]

Everything is on: reading and decoding blocks of the SQLite log, rows, the model's step, measures, publishing,
flushing, versions. `plain` is the model that peers train (`bench.workload`), at 2 lanes of 2,048 rows and of
256; `default` is the default hedge at 2 lanes of 256 and of 64. The log holds the same rows several times;
the first pass creates the rows of the table and is not counted. A share is that of the roofline
(`bench.roofline`). Installed peers (`bench.peers.setup`) train `plain` on the same rows in the same rounds,
at batches of 4,096; with `--quick` only those that `--peers` names.

Bound by the dense part where batches are large; by fetching rows from memory, and by the work per batch,
where they are small.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.peers.registry import PEERS
from bench.peers.running import environment_of, not_installed, training_job
from bench.report import Figures, command
from bench.rounds import Figure, interleaved
from bench.workload import Arrays, Workload, append, plain_spec
from freshet import _native
from freshet.apps.batch_sources import OwnRows
from freshet.apps.pipeline import Pipeline
from freshet.apps.trainer import TrainerOptions, TrainerProcess
from freshet.config.spec.model import Spec

CASES = {
    # name: lines of [model], rows of a lane, whether a batch has several steps; the peers make one
    "plain_2048": ('kind = "mlp"\ndeep = [512, 256]', 2048, False),
    "plain_2048_in_steps": ('kind = "mlp"\ndeep = [512, 256]', 2048, True),
    "plain_256": ('kind = "mlp"\ndeep = [512, 256]', 256, True),
    "default_256": ("", 256, True),
    "default_64": ("", 64, True),
}
VARIANTS = ("torch_one_lane", "onednn_one_lane", "torch_lanes", "onednn_lanes")
"""Variants of the roofline; those of several threads before those whose lanes set one."""
LANES = 2
BF16 = "x86-64-v4-bf16"
"""Kernels of processors that multiply bf16; on others only fp32 is measured."""
PEER_BATCH = 4096
LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Passed:
    """The figures of one run over the log, its first pass left out."""

    samples_per_s: float
    cpu_s_per_s: float  # of the whole process
    stages_us: dict[str, float]  # of a lane, a batch
    flushed_rows: int
    published_rows: int


def spec_of(case: str, precision: str) -> Spec:
    """Return the spec of a case. Staleness is raised so that large batches may be in flight."""
    model, rows, in_steps = CASES[case]
    train = (
        f'precision = "{precision}"\nstaleness_rows = {max(512, rows)}\n'
        f"batch = {{ rows = {rows}, behind = {rows}, steps = {str(in_steps).lower()} }}"
    )
    return replace(plain_spec(model, train), partitions=LANES)


def run(case: str, precision: str, data: Path, passes: int) -> Passed:
    """Train on a fresh log that holds the rows `passes` times, at least twice."""
    arrays = Arrays.read(data)
    with tempfile.TemporaryDirectory() as folder:
        pipeline = Pipeline(spec_of(case, precision), Path(folder) / "run", LANES)
        try:
            total = append(pipeline, arrays, passes)
            rows = partial(OwnRows, rows=pipeline.rows)
            training = TrainerProcess(pipeline.context, pipeline.versions, rows, TrainerOptions(LANES))
            return observed(training, len(arrays), total)
        finally:
            pipeline.close()


def observed(training: TrainerProcess, first: int, total: int) -> Passed:
    """Run, and compare the state after the first pass with the state near the end."""
    seen: list[tuple[int, float, float, int, dict[str, float]]] = []
    done, source = threading.Event(), training.source
    assert isinstance(source, OwnRows)

    def look() -> None:
        progress, shard = training.trainer.progress, source.shard.counts
        while not done.wait(LOOK_S):
            stages = {**source.seconds(), **training.trainer.stage_seconds()}
            now = progress.samples, time.perf_counter(), time.process_time(), shard.pushes, stages
            if not seen or (first <= now[0] <= 0.97 * total):
                seen[1 if len(seen) > 1 else len(seen) :] = [now] if len(seen) < 2 else [seen[1], now]

    watcher = threading.Thread(target=look, name="watcher")
    watcher.start()
    try:
        training.run_to_the_end()
    finally:
        done.set()
        watcher.join()
    (began, at, cpu, pushes, stages), (ended, until, cpu_until, pushed, staged) = seen[1], seen[-1]
    batches = (pushed - pushes) / LANES
    return Passed(
        (ended - began) / (until - at),
        (cpu_until - cpu) / (until - at),
        {name: 1e6 * (staged[name] - stages[name]) / (batches * LANES) for name in staged},
        source.shard.counts.flushed_rows,
        source.shard.counts.published_rows,
    )


def measure(
    quick: bool = False, rounds: int | None = None, data: str | None = None, peers: str | None = None
) -> Figures:
    """Measure freshet, the roofline and the peers in interleaved rounds, each in a process of its own.

    peers: jobs separated by commas, or "none"; by default all that are installed, and none if `quick`.
    """
    rounds = rounds or (1 if quick else 5)
    passes, seconds = (3, 1.0) if quick else (4, 4.0)
    cases = ("plain_2048", "default_256", "default_64") if quick else tuple(CASES)
    jobs, absent = _peers("none" if quick and peers is None else peers)
    with tempfile.TemporaryDirectory() as folder:
        at = Path(data) if data else Path(folder)
        Workload(rows=1 << 17 if quick else 1 << 19).write(at)
        found = {
            p: _precision(p, cases, jobs, rounds, passes, seconds, at, together=quick)
            for p in ("bf16", "fp32")
            if p == "fp32" or BF16 in _native.kernel_names()
        }
    return found | ({"not_installed": absent} if absent else {})


def _peers(wanted: str | None) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return the jobs that train the plain model, and for the others how to install them."""
    if wanted == "none":
        return (), {}
    every = [job for name, peer in PEERS.items() for job in (name, *peer.also)]
    advice = {job: not_installed(environment_of(job)) for job in (wanted.split(",") if wanted else every)}
    return [job for job, missing in advice.items() if not missing], {j: a for j, a in advice.items() if a}


def _precision(
    precision: str,
    cases: Sequence[str],
    peers: Sequence[str],
    rounds: int,
    passes: int,
    seconds: float,
    data: Path,
    together: bool,
) -> Figures:
    """Measure one precision.

    together: the variants of the roofline share a process, which spares three of four starts of torch.
    """
    details: dict[str, dict[str, Any]] = {}

    def ours(case: str) -> float:
        words = ["--case", case, "--precision", precision, "--passes", str(passes), "--data", str(data)]
        details[case] = _child("bench.end_to_end", words)
        return float(details[case]["samples_per_s"])

    rooflines: dict[str, list[float]] = {}

    def roof(*variants: str) -> float:
        words = ["--variant", *variants, "--precision", precision, "--seconds", str(seconds)]
        found = _child("bench.roofline", words)
        for variant, figure in found.items():
            rooflines.setdefault(variant, []).append(float(figure))
        return max(map(float, found.values()))

    sides: dict[str, Callable[[], float]] = {case: partial(ours, case) for case in cases}
    if together:
        sides["roofline"] = partial(roof, *VARIANTS)
    else:
        sides |= {f"roofline {variant}": partial(roof, variant) for variant in VARIANTS}
    with contextlib.ExitStack() as stack:
        jobs = {
            name: stack.enter_context(training_job(name, data, precision, PEER_BATCH, seconds))
            for name in peers
        }
        for name, job in jobs.items():
            job.ready()
            sides[f"peer {name}"] = partial(lambda job: float(job.measured()["samples_per_s"]), job)
        found = interleaved(sides, rounds)
    figures = {variant: Figure.of(rooflines[variant]) for variant in VARIANTS}
    roofline = max(figures.values(), key=lambda figure: figure.median)
    return {
        "samples_per_s": found["plain_2048"].median,
        "share": found["plain_2048"].median / roofline.median,
        "roofline_samples_per_s": roofline.median,
        **{case: _case(found[case], roofline, details[case]) for case in cases},
        "roofline": {variant: figure.median for variant, figure in figures.items()},
        **({"peers": {name: _peer(found, cases, name) for name in peers}} if peers else {}),
    }


def _peer(found: Mapping[str, Figure], cases: Sequence[str], name: str) -> Figures:
    """Return a peer's figure, and each of our cases as a multiple of it."""
    figure = found[f"peer {name}"]
    times = {f"{case}_times": found[case].median / figure.median for case in cases}
    return {"samples_per_s": figure.as_json(), **times}


def _case(figure: Figure, roofline: Figure, last: dict[str, Any]) -> Figures:
    return {
        "samples_per_s": figure.as_json(),
        "share": figure.median / roofline.median,
        "cpu_s_per_s": last["cpu_s_per_s"],
        "stages_us_per_batch": last["stages_us"],
    }


def _child(module: str, words: list[str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run one case (as a child of the measurement), or the measurement."""
    if "--case" not in sys.argv:
        return command(measure, __doc__)
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--precision", choices=("bf16", "fp32"))
    parser.add_argument("--passes", type=int)
    parser.add_argument("--data", type=Path)
    passed = run(**vars(parser.parse_args()))
    print(json.dumps({name: getattr(passed, name) for name in Passed.__slots__}))
    return None


if __name__ == "__main__":
    main()
