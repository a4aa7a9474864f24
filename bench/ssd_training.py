"""Training with rows on a local disk, beside training with all rows in memory.

    python -m bench.ssd_training [--rows 20000000] [--share 0.1] [--ids 26] [--samples 1000000]
        [--quick] [--json]

The whole trainer, as in `bench.end_to_end`: blocks of the SQLite log, rows, a network of 512 and 256 (fp32,
two lanes of 2,048 rows), publishing, flushing, versions. `ids` fields have `rows` rows together, drawn by
Zipf's law (1.05) in each; a trainer before creates the rows, and the measured one loads them: none waits to
be flushed. `memory` holds all rows; `ssd` may keep a share of those bytes in memory, and reads and writes the
others past the page cache. The peak of the process includes what is no row: Python, the network, buffers of
SQLite.

Bound by the network in memory, and by the disk's reads beyond it.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from bench.end_to_end import LANES, observed
from bench.report import Figures, command
from bench.workload import FIELDS, NUMBERS, Arrays, Workload, append, plain_spec
from freshet.apps.batch_sources import OwnRows
from freshet.apps.pipeline import Pipeline
from freshet.apps.trainer import TrainerOptions, TrainerProcess
from freshet.tables import RowsBound

BATCH_ROWS = 2048
TRAIN = f"staleness_rows = {BATCH_ROWS}\nbatch = {{ rows = {BATCH_ROWS}, behind = {BATCH_ROWS} }}"


def each_id(cardinality: int) -> Arrays:
    """Return samples in which each id of each field occurs once."""
    ids = np.repeat(np.arange(cardinality, dtype=np.uint64)[:, None], FIELDS, axis=1)
    return Arrays(ids, np.zeros((cardinality, NUMBERS), np.float32), np.zeros(cardinality, np.float32))


def run(rows: int, ids: int, samples: int, folder: Path, memory_bytes: int) -> Figures:
    """Train in a new folder; `memory_bytes`: of rows, 0: all."""
    spec = replace(plain_spec('kind = "mlp"\ndeep = [512, 256]', TRAIN, ids=ids), partitions=LANES)
    bound = RowsBound(memory_bytes, str(folder) if memory_bytes else "")
    cardinality = rows // ids
    pipeline = Pipeline(spec, folder / "run", LANES)
    open_source = partial(OwnRows, rows=pipeline.rows, bound=bound)

    def trainer() -> TrainerProcess:
        return TrainerProcess(pipeline.context, pipeline.versions, open_source, TrainerOptions(LANES))

    try:
        append(pipeline, each_id(cardinality))
        trainer().run_to_the_end()
        gc.collect()  # its rows are in cycles of references
        append(pipeline, Workload(rows=samples, cardinality=cardinality).arrays())
        training = trainer()
        passed = observed(training, samples // 10, samples)
        assert isinstance(training.source, OwnRows)
        store = training.source.shard.store
        return {
            **asdict(passed),
            "rows_bytes": store.memory_bytes,
            "rows": sum(store.rows().values()),
            "ssd": asdict(store.ssd_rows()),
            "quality": training.quality.summary(),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
    finally:
        pipeline.close()


def measure(
    quick: bool = False,
    rows: int = 20_000_000,
    share: float = 0.1,
    ids: int = FIELDS,
    samples: int = 1_000_000,
    folder: str = "build",
) -> Figures:
    """Measure both, each in a process of its own, one after the other."""
    if quick:
        rows, samples = min(rows, 500_000), min(samples, 100_000)

    def of(memory_bytes: int) -> Figures:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            words = [
                f"--{k}={v}"
                for k, v in {"rows": rows, "ids": ids, "samples": samples, "folder": name}.items()
            ]
            child = [sys.executable, "-m", "bench.ssd_training", f"--memory-bytes={memory_bytes}", *words]
            found: Figures = json.loads(subprocess.run(child, stdout=subprocess.PIPE, check=True).stdout)
            return found

    memory = of(0)
    ssd = of(int(memory["rows_bytes"] * share))
    of_memory = ssd["samples_per_s"] / memory["samples_per_s"]
    return {"memory": memory, "ssd": ssd, "ssd_of_memory": of_memory}


def main() -> None:
    """Run one side (as a child of the measurement), or the measurement."""
    if not any(word.startswith("--memory-bytes") for word in sys.argv):
        return command(measure, __doc__)
    parser = argparse.ArgumentParser()
    for name in ("rows", "ids", "samples", "memory-bytes"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--folder", type=Path)
    print(json.dumps(run(**vars(parser.parse_args()))))
    return None


if __name__ == "__main__":
    main()
