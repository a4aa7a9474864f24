"""`make bench`: run the measurements of this package, one after the other, each in a process of its own.

    python -m bench                      all that take seconds or a few minutes
    python -m bench table log --quick    some of them, with less of everything
    python -m bench --json               only the JSON line
    python -m bench --list               all measurements

Prints a table of each and, last, one JSON line: {"machine": {...}, "table": {...}, ...}. If a measurement
fails, the others still run, `failed` names it there, and the exit status is 1. Quote ratios of one run: the
speed of a shared machine drifts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec

from bench.machine import machine
from bench.report import Figures, table
from bench.runner import run_measurement

NAMES = {
    "limits": "the bounds of the machine: multiply, copy, fetch from memory, write durably, wake",
    "log": "appends to the SQLite log, and reads in blocks",
    "rowstore": "flushes to the SQLite row store, scans, reads by key",
    "codecs": "codecs of rows, and publish and flush through the shard",
    "table": "lookups and steps of rows, plans of batches",
    "decode": "records a second from Avro to keys and columns",
    "gateway": "events a second through the gateway, on disk, beside a bare uvicorn; needs wrk",
    "join": "events a second through the joiner's core",
    "measures": "the cost of measures in the trainer, a batch",
    "model_step": "the default model's step, fp32 and bf16",
    "end_to_end": "log bytes to the updated model, everything on, beside the dense roofline",
    "rank": "rank requests, stage by stage and over HTTP",
    "versus_vw": "AUC and logloss beside Vowpal Wabbit on real streams from packages; needs pandas",
    "freshness": "from a click to the score that has learned from it, beside 5,000 events a second",
}
"""Measurements that `make bench` runs. They follow the contract of `bench.report`."""
BY_HAND = {
    "learning_check": "the hedge beside each of its experts alone",
    "demo_seeds": "how well the demo learns, for several seeds, with all services",
    "dense_engines": "the dense part by our functions, ONNX Runtime and torch; needs onnx, onnxruntime",
    "tracing": "the cost of tracing in gateway, inference and trainer; needs wrk",
    "kafka": "the log on Kafka: appends, reads, transactions; needs ops/install-kafka",
    "redis": "flushes to a Redis Cluster and scans, beside redis-benchmark; needs redis-server",
    "remote_rows": "lookups and pushes of a shard over gRPC, beside the same in its process",
    "remote_batches": "batches to a trainer over gRPC: bytes of a sample and time of a batch, by codec",
    "modes": "training modes with a delay between trainer and shard: rates and AUC; needs the retail stream",
    "resharding": "a shard joins and leaves under load: the longest wait, rows lost or doubled",
    "spread": "end to end with one and two shards and embedders, beside one process",
    "early": "AUC of early emission as served, beside emission by windows; needs the retail stream",
    "live": "AUC of two lanes, shards and embedders beside a backtest of one; needs the retail stream",
    "wires": "bytes a sample on each wire by codec, and the AUC with each; needs the retail stream",
    "dense_links": "sums of dense gradients over a slow link, by reducer; needs root and iproute2",
    "links": "codecs and modes over a slow link between network namespaces; needs root and iproute2",
    "hidden_cut": "thresholds at a hidden cut or on rows, beside int8 rows: bytes, and AUC of cold ids too",
    "roles": "the demo on processes apart, in fp32 and in int8: click rates, bytes; needs Kafka and Redis",
    "publish": "bytes of published rows by codec, and the AUC of serving; needs the retail stream",
    "reducers": "bytes of dense gradients by reducer, and AUC with each, on a stream that drifts",
    "streams": "downloads real streams from packages as ready samples; lists sources and licences",
    "table_beside_fbgemm": "our table and FBGEMM's kernels in turns; needs bench.peers.setup torchrec",
    "placement": "how evenly shards share a batch's rows, by slices, by tables and by columns; computed",
    "table_sizes": "the table from 1e5 to 5e7 rows: growth, rates, update rules, small tables, eviction",
    "ssd_training": "training with most rows on a local disk, beside all of them in memory",
    "tiered_serving": "rankings by a server with memory for a part of the rows",
    "ssd_rows": "rows on a local disk beside rows in memory and beside RocksDB; needs rocksdict",
    "linear": "`freshet backtest` of a linear model beside Vowpal Wabbit's driver, on the retail stream",
}
"""Measurements that take minutes, data or other programs: the docstring of each says how."""
PROGRAMS = {"gateway": "wrk", "rank": "wrk"}
"""Programs by which measurements load servers. `make bench` installs them."""
PACKAGES = {"versus_vw": "pandas"}
"""Python packages of no extra of freshet."""
QUICK_LIMIT_S, LIMIT_S = 180.0, 1200.0
"""Longer than any measurement takes; then a hanging one is ended."""


def main(words: Sequence[str] | None = None, names: Mapping[str, str] = NAMES) -> int:
    """Run the named measurements, or all.

    Returns the exit status: 1 if a measurement failed, 2 for an unknown name or a missing program.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="less of everything: 3 minutes in all")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--list", action="store_true", help="list the measurements")
    options = parser.parse_args(words)
    if options.list:
        print("\n".join(f"{name:15} {text}" for name, text in names.items()))
        print("\nby hand (python -m bench.NAME):")
        print("\n".join(f"{name:15} {text}" for name, text in BY_HAND.items()))
        return 0
    unknown = [name for name in options.names if name not in names]
    if unknown:
        there = f"there are {', '.join(names)}"
        hint = "it is run by hand" if unknown[0] in BY_HAND else there
        print(f"no measurement {unknown[0]!r} for `python -m bench`; {hint}", file=sys.stderr)
        return 2
    missing = _missing(options.names or names)
    if missing:
        print("\n".join(missing), file=sys.stderr)
        return 2

    figures: Figures = {"machine": machine(), "quick": options.quick}
    failed: dict[str, str] = {}
    began = time.monotonic()
    for name in options.names or names:
        if not options.json:
            print(f"\n== {name}: {names[name]}", flush=True)
        limit_s = QUICK_LIMIT_S if options.quick else LIMIT_S
        found = run_measurement(f"bench.{name}", ["--quick"] if options.quick else [], limit_s)
        if isinstance(found, str):
            failed[name] = found
            print(f"{name} failed: {found}", file=sys.stderr, flush=True)
            continue
        figures[name] = found
        if not options.json:
            print(table(found), flush=True)
    figures["took_s"] = round(time.monotonic() - began, 1)
    if failed:
        figures["failed"] = failed
    print(json.dumps(figures), flush=True)
    return 1 if failed else 0


def _missing(names: Iterable[str]) -> list[str]:
    """Return a line for each program or package that a measurement needs and this machine lacks."""
    lines = []
    for name in names:
        program, package = PROGRAMS.get(name), PACKAGES.get(name)
        if program is not None and shutil.which(program) is None:
            lines.append(
                f"{name} needs {program} on the PATH: `make bench` installs it, or apt-get install {program}"
            )
        if package is not None and find_spec(package) is None:
            lines.append(f"{name} needs {package}: pip install {package}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
