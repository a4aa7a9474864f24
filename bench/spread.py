"""End to end with rows in one and two shards, looked up by the rank or by embedders, beside one process.

    python -m bench.spread [--quick] [--json] [--rounds 3]

The default model at 2 lanes of 256 rows, 26 ids and 13 numbers a sample (`bench.workload`), everything
on; each process of its own but for the rank, all on this machine's cores (`bench.apart`). So more processes
do not make it faster here; the figures show the cost of each way. Bytes are those of the rank's wire, both
directions. Rates are the middle of the rounds, shares those of one process in the same rounds.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.apart import Apart, Passed
from bench.report import Figures, command
from bench.workload import Workload, append, plain_spec, schema
from freshet.apps.local import with_absolute_paths
from freshet.apps.pipeline import Pipeline
from freshet.config.avro.types import to_json
from freshet.config.spec.model import Spec

LANES = 2
WAYS = {
    "one_process": Apart(shards=0),
    "1_shard": Apart(),
    "2_shards": Apart(shards=2),
    "1_shard_1_embedder": Apart(embedders=1),
    "2_shards_2_embedders": Apart(shards=2, embedders=2),
}


def spec_in(folder: Path, mode: str = "hybrid", lanes: int = LANES, rows: int = 256) -> Spec:
    """Return the default model on the workload, with a schema of events that other processes can read.

    rows: of a batch.
    """
    events = to_json(schema())
    events["fields"].append({"name": "type", "type": "string"})  # of the action
    (folder / "none.avsc").write_text(json.dumps(events))
    train = f'mode = "{mode}"\nlanes = {lanes}\nbatch = {{ rows = {rows}, behind = {rows} }}'
    return with_absolute_paths(replace(plain_spec("", train), partitions=lanes, folder=str(folder)))


def log_in(folder: Path, spec: Spec, workload: Workload) -> Path:
    """Write a log of the workload; returns its folder."""
    pipeline = Pipeline(spec, folder / "made", spec.train.lanes)
    append(pipeline, workload.arrays())
    pipeline.close()
    return folder / "made" / "log"


def measure(quick: bool = False, rounds: int | None = None, samples: int = 1 << 18) -> Figures:
    """Measure rates, processor time and bytes of each way."""
    rounds, samples = (1, 1 << 15) if quick else (rounds or 3, samples)
    found: dict[str, list[Passed]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        spec = spec_in(Path(folder))
        log = log_in(Path(folder), spec, Workload(rows=samples))
        for _ in range(rounds):
            for way, apart in WAYS.items():
                with tempfile.TemporaryDirectory() as run:
                    found[way].append(apart.train(spec, log, Path(run)))
    base = _middle(found["one_process"], "samples_per_s")
    return {
        way: {
            "samples_per_s": (rate := _middle(passed, "samples_per_s")),
            "share": rate / base,
            "rank_cpu_us_per_sample": _middle(passed, "rank_cpu_us"),
            "others_cpu_us_per_sample": _middle(passed, "others_cpu_us"),
            "rank_sent_bytes_per_sample": _middle(passed, "sent_bytes"),
            "rank_received_bytes_per_sample": _middle(passed, "received_bytes"),
        }
        for way, passed in found.items()
    }


def _middle(passed: list[Passed], name: str) -> float:
    return float(statistics.median(getattr(one, name) for one in passed))


if __name__ == "__main__":
    command(measure, __doc__)
