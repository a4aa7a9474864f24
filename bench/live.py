"""The cost of several processes in quality: AUC and logloss beside a backtest of one lane.

    python -m bench.live --file online_retail_ii_events.csv.gz [--samples 1000000] [--ways …]

The retail stream by the spec of examples/online-retail. `backtest` is one lane over the samples in order of
their impressions. `live_int8` is a rank of two lanes that takes the same samples from two embedders, which
look rows up in two shards over gRPC: rows and gradients in int8, each in a process of its own
(`bench.apart`); `live_fp32` is the same without rounding. Batches have up to `--behind` rows, as lanes
of a live system are not behind. How far the lanes are from each other differs from run to run, and with it
the AUC of 300,000 samples by .002: take a million.

`backtest_early` and `live_early_int8` are over the samples in the order in which early emission decides them:
what is bought when its action comes, the rest once window and grace have passed. An invoice of this stream is
then a run of positives, and later a run of negatives, so these figures compare with each other alone. Every
figure is progressive, over all samples.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from bench.apart import Apart
from bench.modes import log_of
from bench.report import Figures, command
from bench.retail import SPEC, retail_table
from freshet.apps.backtest import backtest
from freshet.apps.local import with_absolute_paths
from freshet.config.spec import Spec, load_spec

LANES = 2


def samples_of(source: Path, days: int, spec: Spec) -> pa.Table:
    """Return the samples of the first days, with the time at which early emission decides each."""
    (label,) = spec.labels
    return retail_table(source, days, label.window_ms + spec.join.grace_ms)


def by_decision(table: pa.Table) -> pa.Table:
    """Return the samples in the order of their decisions, then of their impressions."""
    order = np.argsort(table["decided_ms"].to_numpy(), kind="stable")
    return table.take(order).drop(["decided_ms"])


def spec_of(lanes: int, behind: int, staleness_rows: int | None) -> Spec:
    """Return the example's spec with as many partitions as lanes."""
    spec = with_absolute_paths(load_spec(SPEC))
    train = replace(spec.train, lanes=lanes, batch_behind_rows=behind)
    if staleness_rows is not None:
        train = replace(train, staleness_rows=staleness_rows)
    return replace(spec, train=train, partitions=lanes)


def measure(
    quick: bool = False,
    file: Path = Path("online_retail_ii_events.csv.gz"),
    days: int = 200,
    samples: int = 1_000_000,
    behind: int = 64,
    staleness: int | None = None,
    ways: str = "backtest,live_fp32,live_int8,backtest_early,live_early_int8",
) -> Figures:
    """Measure each way, beside the backtest of the same order."""
    samples = min(samples, 30_000) if quick else samples
    spec, figures = spec_of(LANES, behind, staleness), Figures()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = samples_of(file, days, spec).slice(0, samples)
        plain, early = folder / "plain.parquet", folder / "early.parquet"
        for one in (plain, early):
            (folder / one.stem).mkdir()
        pyarrow.parquet.write_table(table.drop(["decided_ms"]), plain)
        pyarrow.parquet.write_table(by_decision(table), early)
        logs = dict[Path, Path]()
        for way in ways.split(","):
            file = early if "early" in way else plain
            if way.startswith("live") and file not in logs:
                logs[file] = log_of(file, samples, LANES, folder / file.stem)
            figures[way] = found = _passed(way, spec, file, logs.get(file))
            base = figures.get("backtest_early" if "early" in way else "backtest")
            if base is not None and base is not found:
                found["auc_beside_backtest_1e_5"] = found["auc_1e_5"] - base["auc_1e_5"]
                found["logloss_beside_backtest_1e_5"] = found["logloss_1e_5"] - base["logloss_1e_5"]
            print(f"{way}: {found}", file=sys.stderr, flush=True)
    return {"samples": len(table)} | figures


def _passed(way: str, spec: Spec, file: Path, log: Path | None) -> Figures:
    if log is None or way.startswith("backtest"):
        outcome = backtest(spec, [file], request="request_id")
        found = outcome.measures["buy"]
        return {"auc_1e_5": round(found["auc"] * 1e5), "logloss_1e_5": round(found["logloss"] * 1e5)}
    with tempfile.TemporaryDirectory() as run:
        codec = "fp32" if way.endswith("fp32") else "int8"
        passed = Apart(shards=2, embedders=2, codec=codec).train(spec, log, Path(run))
    return {
        "auc_1e_5": round(passed.auc * 1e5),
        "logloss_1e_5": round(passed.logloss * 1e5),
        "samples_per_s": passed.samples_per_s,
        "received_bytes_per_sample": passed.received_bytes,
        "sent_bytes_per_sample": passed.sent_bytes,
    }


if __name__ == "__main__":
    command(measure, __doc__)
