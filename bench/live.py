"""What a deployment of several processes costs in quality: AUC and logloss beside a backtest of one lane.

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
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet

from bench.apart import Apart
from bench.modes import SPEC_FILE, log_of
from bench.report import Figures, command
from freshet.apps.backtest import backtest
from freshet.apps.local import with_absolute_paths
from freshet.config.spec import Spec, load_spec
from freshet.recordings.retail import read_lines, slices
from freshet.recordings.sources import EVENTS_FILE

LANES = 2
SCHEMA = pa.schema(
    {
        "decided_ms": pa.int64(),
        "request_id": pa.string(),
        "ts": pa.int64(),
        "customer_id": pa.int64(),
        "country": pa.string(),
        "items.stock_code": pa.string(),
        "items.price": pa.float64(),
        "buy": pa.int8(),
    }
)


def samples_of(source: Path, days: int, spec: Spec) -> pa.Table:
    """The samples of the first days in order of their impressions, with when each is decided."""
    (label,) = spec.labels
    wait_ms = label.window_ms + spec.join.grace_ms
    file = source / EVENTS_FILE if source.is_dir() else source
    impressions, bought = list[dict[str, Any]](), dict[tuple[str, str], int]()
    for day in islice(slices(read_lines(file)), days):
        impressions += map(orjson.loads, day.impressions.splitlines())
        for action in map(orjson.loads, day.actions.splitlines()):
            if action["type"] == "buy":
                bought.setdefault((action["request_id"], action["stock_code"]), action["ts"])
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for row in _rows(impressions, bought, wait_ms):
        for name, value in zip(SCHEMA.names, row, strict=True):
            columns[name].append(value)
    return pa.table(columns, SCHEMA)


def _rows(
    impressions: list[dict[str, Any]], bought: dict[tuple[str, str], int], wait_ms: int
) -> Iterator[tuple[Any, ...]]:
    for event in impressions:
        request, customer, shown_ms = event["request_id"], event["customer_id"], event["ts"]
        for item in event["items"]:
            code = item["stock_code"]
            decided = bought.get((request, code))
            yield (
                shown_ms + wait_ms if decided is None else decided,
                request,
                shown_ms,
                customer,
                event["country"],
                code,
                item["price"],
                int(decided is not None),
            )


def by_decision(table: pa.Table) -> pa.Table:
    """The same in the order in which the samples are decided; of equal times in that of their impressions."""
    order = np.argsort(table["decided_ms"].to_numpy(), kind="stable")
    return table.take(order).drop(["decided_ms"])


def spec_of(lanes: int, behind: int, staleness_rows: int | None) -> Spec:
    """The example's, as many partitions as lanes."""
    spec = with_absolute_paths(load_spec(SPEC_FILE))
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
    """Figures by way, and what those of early emission are beside `backtest`."""
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
            figures[way] = told = _passed(way, spec, file, logs.get(file))
            base = figures.get("backtest_early" if "early" in way else "backtest")
            if base is not None and base is not told:
                told["auc_beside_backtest_1e_5"] = told["auc_1e_5"] - base["auc_1e_5"]
                told["logloss_beside_backtest_1e_5"] = told["logloss_1e_5"] - base["logloss_1e_5"]
            print(f"{way}: {told}", file=sys.stderr, flush=True)
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
    kinds = {"file": Path, "days": int, "samples": int, "behind": int, "staleness": int, "ways": str}
    command(measure, __doc__, kinds)
