"""Bytes of published rows by codec, and the AUC of a server that follows them, on the retail stream.

    python -m bench.publish --file online_retail_ii_events.csv.gz [--samples 200000] [--rounds 64,1024]

The spec of examples/online-retail, one lane in one process, in batches of 64. After so many samples
(`--rounds`) the changed rows are published: encoded as records of `rows`, decoded, and applied to a serving
table, which with the dense weights of that moment scores the samples of the next round before they are
learned. Training does not depend on the codec, so a seed's runs are paired. `row` bytes are keys and values,
`record` bytes have the heads of records too. AUC and logloss leave the first tenth out; `_beside_fp32` are
means over the seeds, in 1e-5.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pyarrow.parquet

from bench.early import ROWS, Decoded
from bench.live import samples_of, spec_of
from bench.report import Figures, command
from freshet.config.spec import Spec
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Train
from freshet.evaluation.descriptors import auc
from freshet.inference.rows import ServingTable
from freshet.model.hedge import HedgeDense
from freshet.model.inputs import GroupInputs, Labels, ModelInputs
from freshet.model.native_loop import BUCKETS, LoopBatches, NativeLoop
from freshet.rows.deltas import decode_rows, records_of
from freshet.tables import Plan, Store
from freshet.types import F32, I64, OffsetRange
from freshet.wires.codecs import rows_codec
from freshet.wires.row_wire import RowWire

CODECS = get_args(get_type_hints(Train)["publish_codec"])
EVERYTHING = 1 << 40
WARM_UP = 0.1


@dataclass(slots=True)
class Sent:
    """What publishing has cost."""

    rows: int = 0
    passed: int = 0  # changed rows that serving held nearly
    row_bytes: int = 0  # keys and values
    record_bytes: int = 0


class Publisher:
    """A model that learns, and the table of an inference server that follows its rows."""

    def __init__(self, spec: Spec, samples: Decoded) -> None:
        own = replace(spec, buckets=BUCKETS, partitions=1)
        self._layout, self._samples = layout_of(spec), samples
        self._store = Store.of(own, self._layout)
        self._model = HedgeDense(spec, training=True, precision=spec.train.precision)
        self._loop = NativeLoop(own, self._layout, self._model, self._store, 1)
        self._table = ServingTable(self._layout, buckets=BUCKETS, partitions=1, seed=spec.model.seed)
        self._wire, self._codec = RowWire(self._layout.scalars), rows_codec(spec.train.publish_codec)
        tables = [
            [spec.table(spec.features[f].table or "").id for f in group.features]
            for group in self._layout.groups
        ]
        self._plans = [Plan(tables=np.array(of, np.uint8), buckets=BUCKETS) for of in tables]
        self._batches = 0
        self.sent = Sent()

    def score(self, at: I64) -> F32:
        """Return (N,) scores of samples by the served rows."""
        groups = []
        for g, keys in enumerate(self._samples.groups(at)):
            plan = self._plans[g]
            rows = np.empty(
                (plan.build(keys.keys, keys.feature_starts), self._layout.groups[g].width), np.float32
            )
            self._table.lookup(g, plan, rows)
            groups.append(GroupInputs(rows, plan.positions, keys.feature_starts, keys.list_ends))
        return self._model.score(ModelInputs(len(at), groups, self._samples.dense[at], None))[:, 0]

    def learn(self, at: I64) -> None:
        """Learn from samples in batches of ROWS."""
        ends = np.append(np.arange(ROWS, len(at), ROWS), len(at))
        ranges = [(OffsetRange(0, n, n + 1),) for n in range(self._batches, self._batches + len(ends))]
        self._batches += len(ends)
        labels = Labels(np.zeros(len(at), np.uint8), self._samples.labels[at], np.ones(len(at), np.float32))
        batches = LoopBatches(
            self._samples.groups(at),
            self._samples.dense[at],
            labels,
            self._samples.shown_ms[at],
            ends,
            ranges,
        )
        self._loop.run(0, batches, np.ones(len(ends), np.uint8))

    def publish(self) -> None:
        """Send the changed rows through records of `rows`."""
        changed, sent = self._store.collect_publish(EVERYTHING), self.sent
        sent.rows, sent.passed = sent.rows + len(changed), sent.passed + changed.passed
        for append in records_of(changed, "rows", np.ones(BUCKETS, np.int64), self._wire, self._codec):
            for record in append.values:
                delta = decode_rows(bytes(record))
                self._table.import_values(delta.table, delta.keys, delta.values)
                sent.record_bytes += len(record)
        sent.row_bytes = 8 * sent.rows + sum(c.bytes_wire for c in self._wire.counts().values())


def served(spec: Spec, samples: Decoded, every: int) -> tuple[F32, Sent]:
    """Return (N,) scores by rows that are published after so many samples, and what they cost."""
    publisher, scores = Publisher(spec, samples), np.empty_like(samples.labels)
    for first in range(0, len(scores), every):
        at = np.arange(first, min(first + every, len(scores)))
        scores[at] = publisher.score(at)
        publisher.learn(at)
        publisher.publish()
    return scores, publisher.sent


def logloss(scores: F32, labels: F32) -> float:
    """Return the mean logloss of (N,) scores."""
    p = np.clip(scores.astype(np.float64), 1e-7, 1 - 1e-7)
    return float(-np.mean(np.where(labels > 0, np.log(p), np.log1p(-p))))


def measure(
    quick: bool = False,
    file: Path = Path("online_retail_ii_events.csv.gz"),
    samples: int = 200_000,
    days: int = 200,
    rounds: str = "64,1024",
    seeds: int = 3,
) -> Figures:
    """Measure each codec at each interval of publishing."""
    samples, seeds = (min(samples, 20_000), 1) if quick else (samples, seeds)
    spec, figures = spec_of(1, ROWS, None), Figures()
    with tempfile.TemporaryDirectory() as name:
        parquet = Path(name, "samples.parquet")
        table = samples_of(file, days, spec).slice(0, samples).drop(["decided_ms"])
        pyarrow.parquet.write_table(table, parquet)
        decoded = Decoded.of(spec, parquet)
    for every in map(int, rounds.split(",")):
        found = [_of_seed(spec, decoded, every, spec.model.seed + i) for i in range(seeds)]
        figures[f"every_{every}"] = {
            codec: {name: float(np.mean([one[codec][name] for one in found])) for name in found[0][codec]}
            for codec in CODECS
        }
        print(f"{every}: {figures[f'every_{every}']}", file=sys.stderr, flush=True)
    return {"samples": len(decoded.labels), "seeds": seeds} | figures


def _of_seed(spec: Spec, samples: Decoded, every: int, seed: int) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    judged = slice(int(WARM_UP * len(samples.labels)), None)
    labels = samples.labels[judged]
    for codec in CODECS:
        own = replace(
            spec, model=replace(spec.model, seed=seed), train=replace(spec.train, publish_codec=codec)
        )
        scores, sent = served(own, samples, every)
        figures[codec] = one = {
            "row_bytes_per_sample": sent.row_bytes / len(scores),
            "record_bytes_per_sample": sent.record_bytes / len(scores),
            "passed_share": sent.passed / (sent.rows + sent.passed),
            "auc_1e_5": auc(scores[judged], labels) * 1e5,
            "logloss_1e_5": logloss(scores[judged], labels) * 1e5,
        }
        base = figures["fp32"]
        one["times_fewer_row_bytes"] = base["row_bytes_per_sample"] / one["row_bytes_per_sample"]
        one["times_fewer_record_bytes"] = base["record_bytes_per_sample"] / one["record_bytes_per_sample"]
        for name in ("auc_1e_5", "logloss_1e_5"):
            one[name.replace("_1e_5", "_beside_fp32_1e_5")] = one[name] - base[name]
    return figures


if __name__ == "__main__":
    command(measure, __doc__)
