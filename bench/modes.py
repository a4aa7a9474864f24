"""Modes of training with 0, 1 and 5 ms one way between trainer and rows: rates, and the cost of staleness.

    python -m bench.retail online_retail_ii_events.csv.gz build/retail
    python -m bench.modes --file build/retail/retail.parquet --samples 300000 [--delays 0,1,5]

The retail stream (`bench.retail`) by the spec of examples/online-retail. The trainer is one rank that looks
rows up itself in one shard, a process of its own behind a link of that delay (`tests.servers`). One lane, so
that `sync` has one batch in flight, and `hybrid` 1 + staleness_rows / batch rows; with several lanes `sync`
has one a lane. `bound` is 0.8 x min(1 + staleness_rows / batch rows, compute limit): the least that hybrid
should reach, as a multiple of `sync`'s rate at the same delay. The compute limit is the fastest run at no
delay, divided by that rate: two processes and the link share the machine's cores.

`auc_1e_5` is progressive, over all samples: each is scored before it is learned from. It hardly depends on
the delay: the rank looks as far ahead as staleness allows at any.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pyarrow.parquet

from bench.apart import Apart, Passed
from bench.report import Figures, command
from bench.retail import SPEC
from freshet.apps.backtest import write_samples
from freshet.apps.local import with_absolute_paths
from freshet.apps.pipeline import Pipeline
from freshet.config.spec import Spec, load_spec
from freshet.trainer.service import Mode

Case = tuple[float, str, int]
"""Delay in ms, mode, staleness_rows; 0 in mode `sync`."""
STALENESS = (256, 512, 1024, 2048, 4096)
SHARE = 0.8  # of the rate of a perfect overlap


def spec_of(mode: Mode, staleness_rows: int, lanes: int) -> Spec:
    """Return the example's spec in a mode, with as many partitions as lanes, as in a backtest."""
    spec = with_absolute_paths(load_spec(SPEC))
    train = replace(spec.train, mode=mode, staleness_rows=staleness_rows, lanes=lanes)
    return replace(spec, train=train, partitions=lanes)


def log_of(file: Path, samples: int, lanes: int, folder: Path) -> Path:
    """Write a log of the first samples of the file; returns its folder."""
    few = folder / "few.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).slice(0, samples), few)
    pipeline = Pipeline(spec_of("hybrid", 512, lanes), folder / "made", lanes)
    try:
        write_samples(pipeline, [few], "request_id")
    finally:
        pipeline.close()
    return folder / "made" / "log"


def measure(
    quick: bool = False,
    file: Path = Path("build/retail/retail.parquet"),
    samples: int = 300_000,
    delays: str = "0,1,5",
    staleness: str = ",".join(map(str, STALENESS)),
    modes: str = "sync,hybrid",
    lanes: int = 1,
) -> Figures:
    """Measure each delay and mode."""
    samples = min(samples, 30_000) if quick else samples
    found: dict[Case, Passed] = {}
    with tempfile.TemporaryDirectory() as folder:
        log = log_of(file, samples, lanes, Path(folder))
        for delay, (mode, rows) in product(map(float, delays.split(",")), cases(modes, staleness)):
            with tempfile.TemporaryDirectory() as run:
                apart = Apart(delay_ms=delay)
                found[delay, mode, rows] = passed = apart.train(spec_of(mode, rows, lanes), log, Path(run))
                print(f"{delay:g} ms {mode} {rows}: {passed}", file=sys.stderr, flush=True)
    return {"samples": next(iter(found.values())).samples, "lanes": lanes} | figures_of(found)


def cases(modes: str, staleness: str) -> Iterator[tuple[Mode, int]]:
    """Yield (mode, staleness_rows); `sync` has none."""
    kinds: Sequence[Mode] = ("sync", "hybrid", "async")
    for mode in (kind for kind in kinds if kind in modes.split(",")):
        yield from [(mode, 0)] if mode == "sync" else [(mode, int(s)) for s in staleness.split(",")]


def figures_of(found: Mapping[Case, Passed]) -> Figures:
    """Return figures by delay, then mode, with ratios and bounds if the run has their base."""
    fastest = max((p.samples_per_s for (delay, *_), p in found.items() if not delay), default=None)
    figures: Figures = {}
    for (delay, mode, rows), passed in found.items():
        one = {
            "samples_per_s": passed.samples_per_s,
            "auc_1e_5": round(passed.auc * 1e5),
            "logloss_1e_5": round(passed.logloss * 1e5),
            "rank_cpu_us_per_sample": passed.rank_cpu_us,
            "others_cpu_us_per_sample": passed.others_cpu_us,
        }
        if (sync := found.get((delay, "sync", 0))) is not None:
            one["times_sync"] = passed.samples_per_s / sync.samples_per_s
            one["auc_beside_sync_1e_5"] = round((passed.auc - sync.auc) * 1e5)
            if fastest is not None:
                in_flight = 1 + rows / load_spec(SPEC).train.behind_rows(native_loop=False)
                one["bound"] = SHARE * min(in_flight, fastest / sync.samples_per_s)
        figures.setdefault(f"{delay:g}_ms", {})[f"{mode}_{rows}" if rows else mode] = one
    return figures


if __name__ == "__main__":
    command(measure, __doc__)
