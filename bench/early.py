"""The cost of early emission in quality: requests scored as they come, beside emission by windows.

    python -m bench.early --file online_retail_ii_events.csv.gz [--samples 300000]

The retail stream by the spec of examples/online-retail, one lane in one process, in event time. A request is
scored as it comes, by a model that has learned what was decided up to a second before, in batches of 64
samples. `early` decides what is bought when its action comes, the rest once window and grace have passed;
`window` decides all of it then. `served` are figures of these scores. `training` are figures of what the
model predicts before it learns from a sample: with early emission an invoice is a run of positives, and later
a run of negatives, so they say little about serving.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet

from bench.live import samples_of, spec_of
from bench.report import Figures, command
from freshet.apps.sample_files import block_ends, ready_samples
from freshet.config.avro.schema import Record
from freshet.config.spec import Spec
from freshet.config.spec.layout import layout_of
from freshet.evaluation import LabelKind
from freshet.evaluation.predictions import LearnerPredictions
from freshet.features import GroupKeys, SampleDecoder
from freshet.model.inputs import GroupInputs, Labels, ModelInputs
from freshet.model.native_loop import BUCKETS, NativePass
from freshet.tables import Plan
from freshet.types import F32, I64, U64

LAG_MS = 1_000
"""From the decision of a sample until a request is scored by a model that has learned from it."""

ROWS = 64


@dataclass(frozen=True, slots=True)
class Decoded:
    """N samples in the order of their impressions. All features have one value a sample."""

    keys: Sequence[U64]  # (F_g, N) of each store group
    dense: F32  # (N, D)
    labels: F32  # (N,)
    requests: U64  # (N,)
    shown_ms: I64  # (N,)

    @classmethod
    def of(cls, spec: Spec, file: Path) -> Decoded:
        schemas: list[Record] = []
        decoder = SampleDecoder(spec, layout_of(spec), schemas.__getitem__)
        parts, decoded = list(ready_samples(spec, [file], "request_id")), []
        for part in parts:
            if part.schema not in schemas:
                schemas.append(part.schema)
            decoded.append(decoder.decode(part.payloads, schemas.index(part.schema), part.times_ms))
        groups = range(len(decoded[0].groups))
        return cls(
            [
                np.concatenate([m.groups[g].keys.reshape(-1, len(m.dense)) for m in decoded], axis=1)
                for g in groups
            ],
            np.concatenate([m.dense for m in decoded]),
            np.concatenate([p.values for p in parts]),
            np.concatenate([p.requests for p in parts]),
            np.concatenate([p.times_ms for p in parts]),
        )

    def groups(self, at: I64) -> list[GroupKeys]:
        """Return the keys of some samples."""
        return [
            GroupKeys(
                np.ascontiguousarray(keys[:, at]).reshape(-1),
                (np.arange(len(keys) + 1) * len(at)).astype(np.uint32),
                [None] * len(keys),
            )
            for keys in self.keys
        ]


class Model:
    """Learns from samples, and scores others as an inference server does."""

    def __init__(self, spec: Spec, samples: Decoded) -> None:
        self._pass, self._samples, self._layout = NativePass(spec), samples, layout_of(spec)
        tables = [
            [spec.table(spec.features[f].table or "").id for f in g.features] for g in self._layout.groups
        ]
        self._plans = [Plan(tables=np.array(of, np.uint8), buckets=BUCKETS) for of in tables]
        self._learned = 0

    def learn(self, at: I64) -> F32:
        """Learn from some samples; returns their (N,) predictions, each from before its batch was learned."""
        samples = self._samples
        labels = Labels(np.zeros(len(at), np.uint8), samples.labels[at], np.ones(len(at), np.float32))
        ends = block_ends(samples.requests[at], ROWS, self._learned)
        self._learned += len(at)
        return self._pass.run(samples.groups(at), samples.dense[at], labels, samples.shown_ms[at], ends)[:, 0]

    def score(self, at: I64) -> F32:
        """Return (N,) scores of some samples; the model learns nothing."""
        groups = []
        for g, keys in enumerate(self._samples.groups(at)):
            plan, group = self._plans[g], self._layout.groups[g]
            rows = np.empty((plan.build(keys.keys, keys.feature_starts), group.width), np.float32)
            self._pass.store.lookup(g, plan, rows, create=False)
            groups.append(GroupInputs(rows, plan.positions, keys.feature_starts, keys.list_ends))
        return self._pass.model.score(ModelInputs(len(at), groups, self._samples.dense[at], None))[:, 0]


def predicted(model: Model, samples: Decoded, decided_ms: I64) -> tuple[F32, F32]:
    """Return (N,) scores as served, and (N,) predictions before learning."""
    served, training = np.empty_like(samples.labels), np.empty_like(samples.labels)
    order = np.argsort(decided_ms, kind="stable")
    when, learned = decided_ms[order], 0
    edges = [0, *(np.flatnonzero(np.diff(samples.requests)) + 1), len(served)]
    for first, last in pairwise(edges):
        stop = int(np.searchsorted(when, samples.shown_ms[first] - LAG_MS, "right"))
        if stop > learned:
            training[order[learned:stop]] = model.learn(order[learned:stop])
            learned = stop
        served[first:last] = model.score(np.arange(first, last))
    training[order[learned:]] = model.learn(order[learned:])
    return served, training


def measure(
    quick: bool = False,
    file: Path = Path("online_retail_ii_events.csv.gz"),
    days: int = 200,
    samples: int = 300_000,
) -> Figures:
    """Measure AUC, logloss and calibration of both ways of emission."""
    spec = spec_of(1, ROWS, None)
    with tempfile.TemporaryDirectory() as name, LearnerPredictions([LabelKind("buy", False)]) as scored:
        table = samples_of(file, days, spec).slice(0, min(samples, 30_000) if quick else samples)
        parquet = Path(name, "samples.parquet")
        pyarrow.parquet.write_table(table.drop(["decided_ms"]), parquet)
        decoded, ids = Decoded.of(spec, parquet), np.arange(len(table))
        scored.add_samples(ids, decoded.labels, decoded.shown_ms)
        early = replace(spec, join=replace(spec.join, emit="early"))
        decided_ms = table["decided_ms"].to_numpy()
        for emit, own, known_ms in (("window", spec, _closed(spec, decoded)), ("early", early, decided_ms)):
            served, training = predicted(Model(own, decoded), decoded, known_ms)
            scored.add_predictions(f"{emit}_served", ids, served)
            scored.add_predictions(f"{emit}_training", ids, training)
        return {"samples": len(table)} | {name: _figures(scored, name) for name in scored.learners}


def _closed(spec: Spec, samples: Decoded) -> I64:
    return samples.shown_ms + spec.labels[0].window_ms + spec.join.grace_ms


def _figures(scored: LearnerPredictions, learner: str) -> Figures:
    found = scored.figures(learner).all["buy"]
    return {
        "auc_1e_5": round(found["auc"] * 1e5),
        "logloss_1e_5": round(found["logloss"] * 1e5),
        "calibration_1e_3": round(found["calibration"] * 1e3),
    }


if __name__ == "__main__":
    command(measure, __doc__)
