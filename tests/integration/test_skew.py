"""Training-serving skew: what serving computed for an impression, against what training makes of its log.

The loop is closed with real parts: an inference server answers requests and logs what it served, a trainer
learns from that log, the server follows its rows and version. Then training stops (nothing is published any
more), more is served, and the logged bytes go through the trainer's own path: the registered schema, the
spliced samples, batches that cut across requests, rows of the trainer's shard, the model of the version.

    FRESHET_SKEW_IMPRESSIONS=10000 pytest -s tests/integration/test_skew.py     # prints the figures
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from freshet.apps.trainer import TrainerProcess
from freshet.config.spec.layout import layout_of
from freshet.errors import BadInput
from freshet.features import Decoded, DecodedRequests, SampleDecoder
from freshet.inference.pipeline import Encoded, Lookup, Pipeline, Scored
from freshet.inference.versions import Scorer
from freshet.model import build_model
from freshet.model.inputs import GroupInputs, ModelInputs
from freshet.rows.service import KeyGroup
from freshet.tables import Plan
from freshet.testing.conditions import wait_for
from freshet.types import F32, I64
from tests.fixtures.trainers import shard_of
from tests.integration.closed_loop import SCORE, SPEC, Answer, Logged, Loop

IMPRESSIONS = int(os.environ.get("FRESHET_SKEW_IMPRESSIONS", "2000"))
LEARNED = 8_000  # impressions served, logged and trained on before
BATCH = 256  # of the trainer's side: no multiple of a request, so that batches cut across requests
LAYOUT = layout_of(SPEC)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Loop, str]]:
    """A trained model, and a server that was there from before the first sample."""
    made = Loop(tmp_path_factory.mktemp("skew"))
    with made.serving() as url:
        made.ask(url, 1, LEARNED)
        made.train(made.logged(LEARNED))
        wait_for(lambda: made.caught_up(url))
        yield made, url
    made.close()


# --- the two sides


Keys = list[tuple[tuple[int, ...], ...]]  # of each sample: for each feature, its keys


@dataclass(eq=False)
class Side:
    """What one side made of the impressions, in the order of the log."""

    keys: Keys
    dense: F32
    predictions: F32


def keys_of(decoded: Decoded) -> Keys:
    """The keys of each sample, feature by feature."""
    columns: list[list[tuple[int, ...]]] = []
    for group in decoded.groups:
        starts = group.feature_starts.tolist()
        for start, stop, ends in zip(starts, starts[1:], group.list_ends, strict=False):
            span = group.keys[start:stop]
            bounds = np.arange(1, decoded.size + 1) if ends is None else ends
            columns.append([tuple(part.tolist()) for part in np.split(span, bounds[:-1].astype(np.int64))])
    return list(zip(*columns, strict=True))


def keys_of_one(decoded: DecodedRequests) -> Keys:
    """The keys of each candidate of one request; what the candidates share stands there once."""
    columns: list[list[tuple[int, ...]]] = []
    for group, shared in zip(decoded.groups, decoded.shared, strict=True):
        starts = group.feature_starts.tolist()
        for f, (start, stop, ends) in enumerate(zip(starts, starts[1:], group.list_ends, strict=False)):
            span = group.keys[start:stop]
            if shared[f]:
                columns.append([tuple(span.tolist())] * decoded.size)
                continue
            bounds = np.arange(1, decoded.size + 1) if ends is None else ends
            columns.append([tuple(part.tolist()) for part in np.split(span, bounds[:-1].astype(np.int64))])
    return list(zip(*columns, strict=True))


def trainers_side(loop: Loop, logged: Logged, version: int) -> Side:
    """The logged bytes by the trainer's own decoder, rows and model, in serving mode."""
    decoder = SampleDecoder(SPEC, LAYOUT, loop.registry.get)
    model = build_model(SPEC, training=False)
    model.load_state(loop.versions.get(version).tensors, weights_only=True)
    keys: Keys = []
    dense, predictions = [], []
    for start in range(0, len(logged.samples), BATCH):
        stop = min(start + BATCH, len(logged.samples))
        times: I64 = logged.columns.times_ms[start:stop]
        batch = decoder.decode(
            logged.samples.slice(start, stop), logged.sample_schema_id, times, serving=True
        )
        assert not len(batch.bad), batch.why
        keys += keys_of(batch)
        dense.append(batch.dense)
        predictions.append(model.score(looked_up(loop.training, batch)).copy())
    return Side(keys, np.concatenate(dense), np.concatenate(predictions))


def looked_up(training: TrainerProcess, batch: Decoded) -> ModelInputs:
    """Rows of the trainer's shard, as they are."""
    groups = []
    for g, (keys, group) in enumerate(zip(batch.groups, LAYOUT.groups, strict=True)):
        tables = [SPEC.table(SPEC.features[f].table or "").id for f in group.features]
        plan = Plan(tables=np.array(tables, np.uint8), buckets=SPEC.buckets)
        rows = np.empty((plan.build(keys.keys, keys.feature_starts), group.width), np.float32)
        asked = KeyGroup(g, plan.keys, plan.tables, plan.bucket_starts)
        shard_of(training).lookup([asked], [rows], create=False)
        groups.append(GroupInputs(rows, plan.positions.copy(), keys.feature_starts, keys.list_ends))
    return ModelInputs(batch.size, groups, batch.dense, None)


def served_side(answers: list[Answer], seen: list[tuple[DecodedRequests, Scored]], logged: Logged) -> Side:
    """What the server worked with, put into the order of the log."""
    keys: Keys = []
    dense, predictions = [], []
    by_request = {a.request_id: (a, *s) for a, s in zip(answers, seen, strict=True)}
    for request_id in dict.fromkeys(logged.requests()):
        answer, decoded, scored = by_request[request_id]
        order = [item["index"] for item in answer.body["items"]]
        all_keys = keys_of_one(decoded)
        keys += [all_keys[i] for i in order]
        dense.append(decoded.dense[order])
        predictions.append(scored.predictions[order])
        said = [[item["predictions"][label.name] for label in SPEC.labels] for item in answer.body["items"]]
        np.testing.assert_array_equal(np.array(said, np.float32), scored.predictions[order])
    return Side(keys, np.concatenate(dense), np.concatenate(predictions))


@contextmanager
def watched() -> Iterator[list[tuple[DecodedRequests, Scored]]]:
    """Collects what serving decoded and scored, request by request."""
    seen: list[tuple[DecodedRequests, Scored]] = []
    original = Pipeline.score_all

    def score_all(
        self: Pipeline, asked: Sequence[Encoded], table: Lookup, scorer: Scorer
    ) -> list[Scored | BadInput]:
        scored = original(self, asked, table, scorer)
        for one, made in zip(asked, scored, strict=True):
            assert isinstance(made, Scored)
            seen.append((self.requests([one]), made))
        return scored

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "score_all", score_all)
        yield seen


def assert_no_skew(loop: Loop, url: str, seed: int) -> None:
    with watched() as seen:
        answers = loop.ask(url, seed, IMPRESSIONS)
    logged = loop.logged(IMPRESSIONS)
    (version,) = {answer.body["version"] for answer in answers}
    assert version > 0

    served = served_side(answers, seen, logged)
    trained = trainers_side(loop, logged, version)

    assert len(served.keys) == len(trained.keys) >= IMPRESSIONS
    assert served.keys == trained.keys
    np.testing.assert_array_equal(served.dense, trained.dense)
    np.testing.assert_allclose(served.predictions, trained.predictions, rtol=0, atol=1e-5)
    logged_score = logged.columns.columns[SCORE].values
    click, watch, buy = trained.predictions.T
    np.testing.assert_allclose(
        logged_score, click * (1 + 0.1 * watch) + 20 * click * buy, rtol=1e-5, atol=1e-5
    )
    unknown = sum(sum(s.unknown.values()) for _, s in seen)
    spread = np.ptp(trained.predictions, axis=0)
    assert unknown > 0
    assert (spread > 0.01).all(), "the model has not learned: equal scores would say nothing"
    largest = float(np.abs(served.predictions - trained.predictions).max())
    print(
        f"\n{len(served.keys)} impressions, {sum(len(k) for s in served.keys for k in s)} keys bit-equal, "
        f"{unknown} values without a row; largest difference of a prediction {largest:.1e}, "
        f"spread {spread.round(2).tolist()}, version {version}"
    )


def test_a_server_that_followed_the_training_has_no_skew(loop: tuple[Loop, str]) -> None:
    made, url = loop
    assert_no_skew(made, url, 2)


def test_a_server_started_after_the_training_has_no_skew(loop: tuple[Loop, str]) -> None:
    made, _ = loop
    with made.serving() as url:
        wait_for(lambda: made.caught_up(url))
        assert_no_skew(made, url, 3)
