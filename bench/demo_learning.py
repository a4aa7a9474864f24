"""Measure how the demo's spec learns the simulated site: minutes of it in less than one, without servers.

    python -m bench.demo_learning --seeds 1 2 --minutes 5 [--spec FOLDER/freshet.toml] [--ramp 4]

The simulator's readers run on a clock that jumps from visit to visit. Their connections end in the spec's
decoder, tables and model, which learns a sample when the joiner would have emitted it, and serves it at once.
`bench.demo_seeds` measures a run with all services; this script compares specs, sites and the start of
early emission (ADR 0011).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bench.demo_seeds import DRIFT_S, SETTLED_MS, figures
from freshet.config.avro.schema import sample_schema
from freshet.config.spec import Spec, load_spec
from freshet.config.spec.layout import layout_of
from freshet.config.spec.schemas import load_schemas
from freshet.demo import DEMO_SPEC
from freshet.demo.news_site import DriftPlan, NewsSite
from freshet.demo.outbox import Outbox
from freshet.demo.readers import Pace, Readers
from freshet.evaluation import auc
from freshet.features import EventExtractor, JsonTranscoder, SampleDecoder
from freshet.inference.core import events_of, order, parse_rank
from freshet.inference.pipeline import Pipeline
from freshet.inference.served_log import served_events
from freshet.joiner.plan import RAMP
from freshet.model import GroupInputs, Labels, ModelInputs, build_model
from freshet.rows.service import KeyGroup
from freshet.tables import Plan, Store
from freshet.testing.clock import SettableClock
from freshet.types import BytesColumn, OffsetRange

TICK_S = 0.1
STEP_ROWS = 16  # rows are stepped so often within a batch, as the native loop does
VERSION_S = 5.0
CLICK, PURCHASE = 0, 1  # the labels of the demo's spec


@dataclass(frozen=True, slots=True, order=True)
class Sample:
    """A sample, and when it is decided."""

    due_ms: int
    tie: int
    label: int = field(compare=False)
    value: float = field(compare=False)
    key: tuple[str, str] = field(compare=False)  # of the impression: request and item
    weight: float = field(compare=False, default=1.0)


class Learner:
    """Rows and model of a spec: a batch is learned at once, and served at once."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self._layout = spec, layout_of(spec)
        served = load_schemas(spec).served
        schema = sample_schema(served, spec.events.served.explode)
        self._decoder = SampleDecoder(spec, self._layout, lambda _: schema)
        self.store = Store.of(spec, self._layout)
        self.model = build_model(spec, training=True)
        self.scorer = build_model(spec, training=False)
        self._lane, self._offset = self.model.lane(), 0
        self.publish()

    def publish(self) -> None:
        """Serve the dense weights as they are."""
        self.scorer.load_state(self.model.state(), weights_only=True)

    def learn(self, samples: Sequence[Sample], shown: Sequence[tuple[bytes, int]]) -> None:
        """One batch, rows stepped every 16 samples and dense weights at its end, as a live trainer does.

        `shown`: payload and time of each sample.
        """
        for i in range(0, len(samples), STEP_ROWS):
            self._step_rows(samples[i : i + STEP_ROWS], shown[i : i + STEP_ROWS])
        self.model.step([self._lane])

    def _step_rows(self, samples: Sequence[Sample], shown: Sequence[tuple[bytes, int]]) -> None:
        times = np.array([time_ms for _, time_ms in shown], np.int64)
        decoded = self._decoder.decode(BytesColumn.of([payload for payload, _ in shown]), 0, times)
        inputs, pushed = [], []
        for group, keys in zip(self._layout.groups, decoded.groups, strict=True):
            tables = [self._spec.table(self._spec.features[f].table or "").id for f in group.features]
            plan = Plan(tables=np.array(tables, np.uint8), buckets=self._spec.buckets)
            rows = np.empty((plan.build(keys.keys, keys.feature_starts), group.width), np.float32)
            self.store.lookup(group.index, plan, rows)
            inputs.append(GroupInputs(rows, plan.positions, keys.feature_starts, keys.list_ends))
            pushed.append(KeyGroup(group.index, plan.keys, plan.tables, plan.bucket_starts))
        labels = Labels(
            np.array([s.label for s in samples], np.uint8),
            np.array([s.value for s in samples], np.float32),
            np.array([s.weight for s in samples], np.float32),
        )
        made = self._lane.forward_backward(ModelInputs(len(samples), inputs, decoded.dense, labels))
        span = OffsetRange(0, self._offset, self._offset + 1)
        self.store.push([span], int(times.max()), pushed, made.gradients)
        self._offset += 1


@dataclass(frozen=True, slots=True)
class Ramp:
    """How early emission begins, as the joiner's `hold` in `join.cpp`."""

    waits: int  # 0: at once
    discounted: bool = True  # held positives weigh less, as they come in quicker succession

    def hold_ms(self, age_ms: int, wait_ms: int) -> int:
        """How long a positive is held whose impression came `age_ms` after the first."""
        return wait_ms - age_ms // self.waits if age_ms < self.waits * wait_ms else 0

    @property
    def weight(self) -> float:
        """Of a held positive."""
        return 1 - 1 / self.waits if self.waits and self.discounted else 1.0


class Loop:
    """What stands behind both doors: `/v1/rank` and `/v1/actions`, and the joiner between them."""

    def __init__(self, spec: Spec, clock: SettableClock, seed: int, ramp: Ramp) -> None:
        self._spec, self._clock, self._rng = spec, clock, random.Random(seed)
        self._ramp, self._began_ms = ramp, clock.now_ms()
        served = load_schemas(spec).served
        self._pipeline = Pipeline(spec, served)
        self._transcoder = JsonTranscoder(served, ignore_unknown=True)
        self._extract = EventExtractor(spec.events.served, served)
        self.learner = Learner(spec)
        self._ties = itertools.count()
        self._waiting: list[Sample] = []  # a heap by when they are decided
        self._shown: dict[tuple[str, str], tuple[bytes, int]] = {}  # impression -> payload, time
        self._done: set[tuple[int, str, str]] = set()  # label and impression: an action came
        # impression -> time, predicted click, in a random slate
        self.predicted: dict[tuple[str, str], tuple[int, float, bool]] = {}
        self.clicked: set[tuple[str, str]] = set()

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """As the two servers do."""
        return self._rank(body) if path == "/v1/rank" else self._actions(orjson.loads(body))

    def close(self) -> None:
        """Nothing is open."""

    def _rank(self, body: bytes) -> tuple[int, bytes]:
        asked, now_ms = parse_rank(body, 100), self._clock.now_ms()
        context = {**asked.context, "ts": now_ms}
        events = events_of(self._spec, context, asked.candidates)
        encoded = self._pipeline.encoded(events, len(asked.candidates))
        scored = self._pipeline.score_one(encoded, self.learner.store, self.learner.scorer)
        found = order(scored.scores, asked.k, self._spec.serve.explore, self._rng)
        events = served_events(
            self._spec, context, asked.candidates, found, scored.scores, scored.predictions, 0
        )
        made = self._transcoder.body(orjson.dumps(events))
        payloads = self._extract.extract(made.records, framed=False).samples(made.records)
        request = context["request_id"]
        for item, payload, at in zip(events[0]["items"], payloads, found.indices.tolist(), strict=True):
            key = (request, item["item"])
            self._shown[key] = (bytes(payload), now_ms)
            self._decide_later(CLICK, key, 0.0)
            self.predicted[key] = (now_ms, float(scored.predictions[at, CLICK]), found.explored)
        items = [{"index": i} for i in found.indices.tolist()]
        return 200, orjson.dumps({"items": items, "explored": found.explored})

    def _actions(self, actions: Sequence[dict[str, Any]]) -> tuple[int, bytes]:
        for action in actions:
            key = (action["request_id"], action["item"])
            label = CLICK if action["type"] == "click" else PURCHASE
            if label >= len(self._spec.labels):
                continue
            self._done.add((label, *key))
            self._positive(label, key)
            if label == CLICK:
                self.clicked.add(key)
                if len(self._spec.labels) > 1:
                    self._decide_later(PURCHASE, key, 0.0)
        return 202, orjson.dumps({"acks": []})

    def _positive(self, label: int, key: tuple[str, str]) -> None:
        now_ms, shown_ms = self._clock.now_ms(), self._shown[key][1]
        until_ms = shown_ms + self._ramp.hold_ms(shown_ms - self._began_ms, self._wait_ms(label))
        weight = self._ramp.weight if now_ms < until_ms else 1.0
        self._put(max(now_ms, until_ms), label, key, 1.0, weight)

    def _decide_later(self, label: int, key: tuple[str, str], value: float) -> None:
        self._put(self._shown[key][1] + self._wait_ms(label), label, key, value)

    def _wait_ms(self, label: int) -> int:
        return self._spec.labels[label].window_ms + self._spec.join.grace_ms

    def _put(self, due_ms: int, label: int, key: tuple[str, str], value: float, weight: float = 1.0) -> None:
        heapq.heappush(self._waiting, Sample(due_ms, next(self._ties), label, value, key, weight))

    def learn_due(self) -> None:
        """Learn from what is decided by now; a negative whose action came is none."""
        now_ms, rows, due = self._clock.now_ms(), self._spec.train.batch_rows, list[Sample]()
        while self._waiting and self._waiting[0].due_ms <= now_ms:
            sample = heapq.heappop(self._waiting)
            if sample.value or (sample.label, *sample.key) not in self._done:
                due.append(sample)
        for batch in (due[i : i + rows] for i in range(0, len(due), rows)):
            self.learner.learn(batch, [self._shown[sample.key] for sample in batch])

    def auc(self, from_ms: int) -> float:
        """Of what was predicted for random slates from a time on."""
        return self.beginning(from_ms, self._clock.now_ms())["auc"]

    def beginning(self, from_ms: int, to_ms: int) -> dict[str, float]:
        """Predicted over clicked of all slates served in [from, to), and AUC of the random ones."""
        served = [
            (p, float(key in self.clicked), explored)
            for key, (at, p, explored) in self.predicted.items()
            if from_ms <= at < to_ms
        ]
        random_ones = [(p, clicked) for p, clicked, explored in served if explored]
        return {
            "calibration": sum(p for p, _, _ in served) / max(1.0, sum(clicked for _, clicked, _ in served)),
            "auc": auc([p for p, _ in random_ones], [clicked for _, clicked in random_ones]),
        }


def play(spec: Spec, seed: int, minutes: float, rate: float, ramp: Ramp) -> dict[str, Any]:
    """One run, from visit to visit."""
    clock = SettableClock(now_ms=1_700_000_000_000, monotonic_s=0.0)
    began_ms = clock.now_ms()
    loop, outbox, pace = Loop(spec, clock, seed, ramp), Outbox(clock), Pace(rate, 0.0)
    site = NewsSite(seed, DriftPlan((DRIFT_S,)))
    readers = Readers(site, outbox, pace, clock, began_ms=began_ms)
    learned_s = published_s = 0.0
    windows: dict[int, Any] = {}
    while clock.monotonic() < minutes * 60 + 14:  # the last windows close 13 s later
        number, due_s = readers.next_visit()
        clock.advance(max(0.0, due_s - clock.monotonic()))
        now_s = clock.monotonic()
        if now_s >= learned_s + TICK_S:
            learned_s = now_s
            while outbox.send_due(loop):
                pass
            loop.learn_due()
        if now_s >= published_s + VERSION_S:
            published_s = now_s
            loop.learner.publish()
            for window in readers.windows.closed(clock.now_ms()):
                windows[round((window["start_ms"] - began_ms) / 1_000)] = window
        readers.visit(number, loop, lambda seconds: False)
    mixture = dict(zip(loop.learner.model.experts, loop.learner.model.mixture()[CLICK].tolist(), strict=True))
    found = figures(windows, DRIFT_S, minutes * 60)
    beginning = {
        f"{start}-{stop} s": loop.beginning(began_ms + start * 1_000, began_ms + stop * 1_000)
        for start, stop in itertools.pairwise((0, 15, 30, 60, 120))
    }
    return {
        "seed": seed,
        **found,
        "auc": loop.auc(began_ms + SETTLED_MS),
        "beginning": beginning,
        "experts": mixture,
    }


def main() -> None:
    """Run the seeds and print their figures, a JSON object each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=1_000.0)
    parser.add_argument("--spec", type=Path, default=DEMO_SPEC)
    parser.add_argument("--ramp", type=int, default=RAMP, help="waits over which early emission begins")
    parser.add_argument("--undiscounted", action="store_true", help="held positives weigh 1, too")
    options = parser.parse_args()
    ramp = Ramp(options.ramp, not options.undiscounted)
    for seed in options.seeds:
        began = time.process_time()
        found = play(load_spec(options.spec), seed, options.minutes, options.rate, ramp)
        print(json.dumps({**found, "cpu_s": round(time.process_time() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
