"""What becomes of an explored request's flag and of its items' keys: served, logged, trained on, measured.

Real parts, from the rank request to the trainer's status, its versions and its topics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from freshet.apps.metrics import TRAINER_METRICS
from freshet.log import EventLog
from freshet.observability.metrics import readings
from freshet.types import TopicPartition
from tests.fixtures.trainers import own_trainer
from tests.integration.closed_loop import CANDIDATES, SPEC, TOPICS, Loop

IMPRESSIONS = 2_000


@dataclass(frozen=True)
class Trained:
    """A loop that has been through once."""

    loop: Loop
    status: dict[str, Any]
    explored: int  # impressions of requests that were answered in random order


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    loop = Loop(tmp_path_factory.mktemp("quality"))
    with loop.serving() as url:
        answers = loop.ask(url, 1, IMPRESSIONS)
        loop.train(loop.logged(IMPRESSIONS))
    explored = CANDIDATES * sum(answer.body["explored"] for answer in answers)
    yield Trained(loop, dict(loop.training.status()), explored)
    loop.close()


def records(log: EventLog, topic: str) -> list[dict[str, Any]]:
    reader = log.reader()
    reader.assign({TopicPartition(topic, 0): 0})
    values = [orjson.loads(v) for _, records in reader.poll(100_000, 0) for v in records.values]
    reader.close()
    return values


def counted(measures: dict[str, Any]) -> dict[str, float]:
    """Samples of each kind of prediction, over labels."""
    return {of: sum(values["n"] for values in labels.values()) for of, labels in measures.items()}


def test_explored_requests_measure_random_order_and_popularity(trained: Trained) -> None:
    assert 0 < trained.explored < IMPRESSIONS / 2
    assert counted(trained.status["measures"]) == {
        "training": IMPRESSIONS,
        "served": IMPRESSIONS,
        "random": trained.explored,
        "popularity": trained.explored,
    }


def test_open_windows_and_written_ones_hold_every_sample_once(trained: Trained) -> None:
    windows = [w for w in records(trained.loop.log, TOPICS.measures) if w["segment"] is None]
    for of, samples in counted(trained.status["measures"]).items():
        mine = [w for w in [*windows, *trained.status["open"]] if w["of"] == of]
        assert sum(w["measures"]["n"] for w in mine) <= samples  # late samples count in the total alone
        assert len({(w["start_ms"], w["label"]) for w in mine}) == len(mine)
    assert all(w["v"] == 1 and w["kind"] == "window" for w in [*windows, *trained.status["open"]])


def test_lately_is_a_part_of_what_was_measured(trained: Trained) -> None:
    lately, ever = counted(trained.status["lately"]), counted(trained.status["measures"])
    assert lately.keys() == ever.keys()
    assert all(lately[of] <= n for of, n in ever.items())


def test_a_restarted_trainer_continues_its_figures(trained: Trained) -> None:
    loop = trained.loop
    again = own_trainer(loop.context, loop.rows, loop.versions, lanes=1)
    try:
        measures = again.status()["measures"]
        for of, labels in trained.status["measures"].items():
            for label, values in labels.items():
                assert measures[of][label] == pytest.approx(values, nan_ok=True)
        assert again.status()["published"] == trained.status["published"]
    finally:
        again.stop()
        again.run()  # which ends at once


def test_all_that_was_learned_is_published_at_the_stop(trained: Trained) -> None:
    published, log = trained.status["published"], trained.loop.log
    assert published["applied"] == trained.status["applied"]
    assert published["rows_next"] == {
        p: log.bounds(TopicPartition(TOPICS.rows, p)).end for p in range(len(published["rows_next"]))
    }


def test_tables_have_names_in_status_and_metrics(trained: Trained) -> None:
    names = {table.name for table in SPEC.tables}
    assert trained.status["rows"].keys() == trained.status["evicted"].keys() == names
    assert sum(trained.status["rows"].values()) > 0
    figures = readings(TRAINER_METRICS, trained.status)
    assert figures.keys() == {metric.name for metric in TRAINER_METRICS}
    assert figures["freshet_shard_evicted_rows"] == {(name,): 0.0 for name in names}


def test_versions_carry_the_measures_and_their_records_the_time(trained: Trained) -> None:
    newest = trained.loop.versions.manifest(max(trained.loop.versions.numbers()))
    assert counted(dict(newest.measures)) == counted(trained.status["measures"])
    told = records(trained.loop.log, TOPICS.versions)
    assert {"version", "alias"} <= {record["kind"] for record in told}
    assert all(record["time_ms"] > 0 for record in told)
