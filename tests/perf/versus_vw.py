"""freshet's defaults beside Vowpal Wabbit 9.11.9, on the very same samples in the very same batches.

    python -m tests.perf.versus_vw online-retail PATH [--days N]     PATH: online_retail_ii_events.csv.gz or
    its folder python -m tests.perf.versus_vw flights|open-bandit FOLDER         downloads the stream's
    package with pip

One partition and one lane, so that both see one order; labels are equally late for both: a batch of whole
blocks, up to 256 rows, is scored before any of it trains. Prints a table, then one JSON object. Needs
`vowpalwabbit==9.11.9` and `fastavro`.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastavro
import numpy as np

from freshet.cli.backtesting import backtest
from freshet.cli.options import table
from freshet.cli.outcome import Outcome
from freshet.cli.replaying import replay
from freshet.embedder.core import Assembler
from freshet.features import read_blocks
from freshet.measures import auc
from freshet.recordings.sources import ONLINE_RETAIL, online_retail
from freshet.seams.open import open_eventlog
from freshet.spec import Spec, load_spec
from freshet.spec.avro import canonical
from freshet.spec.topics import topics_of
from freshet.types import F32, TopicPartition
from freshet.wire.schemas import SchemaRegistry
from tests.perf.streams import STREAMS, make
from tests.perf.vw import CONFIGURATIONS, Runner, line_of, namespaces

Batch = tuple[Sequence[str], Sequence[float]]
HOUR_MS, DAY_MS = 3_600_000, 86_400_000


def batches_of(spec: Spec, folder: Path) -> Iterator[Batch]:
    """The batches that the lane trained on, as VW's lines and labels, from the log of the run."""
    log = open_eventlog(f"sqlite:{folder / 'log'}")
    registry = SchemaRegistry(log)
    at = TopicPartition(topics_of(spec).samples, 0)
    end = log.bounds(at).end
    reader, assembler, names = log.reader(), Assembler({0: 0}), namespaces(spec)
    reader.assign({at: 0})
    schemas: dict[int, Any] = {}
    position = 0
    while position < end or assembler.waiting():
        while position < end and assembler.waiting() < 4096:
            for _, records in reader.poll(64, 1.0):
                assembler.offer(0, records)
                position = records.next_offset
        plan = assembler.next(spec.train.batch_rows)
        assert plan is not None, "blocks are waiting"
        block = read_blocks(plan.blocks)
        lines = []
        for i in range(len(block)):
            schema_id = int(block.schema_ids[i])
            if schema_id not in schemas:
                schemas[schema_id] = fastavro.parse_schema(json.loads(canonical(registry.get(schema_id))))
            event: Any = fastavro.schemaless_reader(io.BytesIO(block.payloads[i]), schemas[schema_id], None)
            lines.append(line_of(values_of(spec, event, int(block.event_times_ms[i])), names))
        yield lines, [float(v) for v in block.values]
    log.close()


def values_of(spec: Spec, event: Mapping[str, Any], time_ms: int) -> dict[str, Any]:
    """What each feature is, as VW is given it."""
    values: dict[str, Any] = {}
    for feature in spec.features:
        if feature.time is not None:
            hour, weekday = time_ms // HOUR_MS % 24, (time_ms // DAY_MS + 3) % 7
            values[feature.name] = f"h{hour}" if feature.time == "hour" else f"w{weekday}"
            continue
        found: Any = event
        for part in (feature.field or "").split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if feature.buckets and found is not None:
            found = f"b{int(np.searchsorted(feature.buckets, found, side='right'))}"
        values[feature.name] = found
    return values


def logloss(predictions: F32, labels: F32) -> float:
    """Mean logloss."""
    p = np.clip(predictions.astype(np.float64), 1e-7, 1 - 1e-7)
    return float(-(labels * np.log(p) + (1 - labels) * np.log1p(-p)).mean())


def run_freshet(stream: str, source: Path, folder: Path, days: int | None) -> tuple[Spec, Outcome]:
    """One pass of freshet, its log kept in `folder`."""
    if stream == "online-retail":
        spec = replace(load_spec(ONLINE_RETAIL), partitions=1)
        return spec, replay(spec, itertools.islice(online_retail(source), days), keep=folder, lanes=1)
    spec_file, file = make(stream, source)
    spec = replace(load_spec(spec_file), partitions=1)
    return spec, backtest(spec, [file], keep=folder, lanes=1)


def main() -> None:
    """Run both and print what they reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stream", choices=["online-retail", *STREAMS])
    parser.add_argument("source", type=Path)
    parser.add_argument("--days", type=int, help="only the first days of the retail stream")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        spec, outcome = run_freshet(options.stream, options.source, Path(temporary), options.days)
        figures: dict[str, dict[str, float]] = {"freshet": dict(next(iter(outcome.measures.values())))}
        runners = {name: Runner(flags) for name, flags in CONFIGURATIONS.items()}
        began = time.monotonic()
        for batch in batches_of(spec, Path(temporary)):
            for runner in runners.values():
                runner.run([batch])
        seconds = time.monotonic() - began
    for name, runner in runners.items():
        predictions, labels = runner.result()
        figures[f"vw {name}"] = {
            "n": float(len(labels)),
            "auc": auc(predictions, labels),
            "logloss": logloss(predictions, labels),
            "calibration": float(predictions.sum() / labels.sum()),
        }
        runner.close()
    names = ("n", "auc", "logloss", "calibration")
    print(table(["learner", *names], [[k, *(v[m] for m in names)] for k, v in figures.items()]))
    print(
        json.dumps({"stream": options.stream, "figures": figures, "vw_seconds": seconds, **outcome.as_json()})
    )


if __name__ == "__main__":
    main()
