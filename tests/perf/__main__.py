"""`make bench`: every measurement of this folder that takes seconds, one after the other.

    python -m tests.perf              all of them
    python -m tests.perf table log    some of them
    python -m tests.perf --list       what there is

Each is a command of its own (`python -m tests.perf.table`) and prints its figures. Quote ratios of one run:
machines are shared and their speed drifts.
"""

from __future__ import annotations

import subprocess
import sys

QUICK = {
    "log": "appends to the SQLite log, and reads in blocks",
    "rowstore": "flushes to the SQLite row store, scans, reads by key",
    "table": "lookups and steps of rows, plans of batches",
    "decode": "records a second from Avro to keys and columns",
    "join": "events a second through the joiner's core",
    "measures": "what measuring costs the trainer a batch",
    "model_step": "the default model's step, fp32 and bf16",
    "rank": "rank requests, stage by stage and over HTTP",
    "freshness": "from a click to the score that has learned from it, under 500 events a second",
}
SLOW = {
    "learning_check": "the hedge beside each of its experts alone",
    "swaps": "twenty version swaps under load from wrk: answers that were not 2xx, latencies",
    "dense_engines": "the dense part by our functions, ONNX Runtime and torch; needs onnx, onnxruntime",
    "versus_vw": "Vowpal Wabbit on the same samples at equal delay",
}


def main() -> int:
    """Run what was asked for; the exit status counts the ones that failed."""
    wanted = [name for name in sys.argv[1:] if not name.startswith("--")] or list(QUICK)
    if "--list" in sys.argv:
        print("\n".join(f"{name:15} {what}" for name, what in {**QUICK, **SLOW}.items()))
        return 0
    unknown = [name for name in wanted if name not in QUICK]
    if unknown:
        print(f"no quick measurement {unknown[0]!r}; there are {', '.join(QUICK)}", file=sys.stderr)
        return 2
    failed = 0
    for name in wanted:
        print(f"\n== {name}: {QUICK[name]}", flush=True)
        failed += subprocess.run([sys.executable, "-m", f"tests.perf.{name}"], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
