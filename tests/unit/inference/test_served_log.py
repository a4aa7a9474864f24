"""The log of what was served: bounded, patient with the log, and never silent about what it lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from weakref import WeakKeyDictionary

import numpy as np
import orjson
import pytest
from prometheus_client import CollectorRegistry

from freshet.config.avro.schema import parse_schema
from freshet.config.spec.layout import Layout
from freshet.config.spec.parse import parse_spec
from freshet.errors import Corrupt, Unavailable
from freshet.features import JsonTranscoder, partition_of
from freshet.inference.rows import ServingTable
from freshet.inference.served_log import Served, ServedLogger
from freshet.log import Answered, EventLog, GroupOutcome, GroupWriter
from freshet.log.records import CombinedWriter
from freshet.log.sqlite.event_log import open_url
from freshet.tables.runs import runs_of, widths_of
from freshet.testing.conditions import wait_for
from freshet.types import Append, BytesColumn, RowRuns, Run, TopicPartition, bucket_of
from tests.fixtures.tables import counting_group, keys_of

SPEC = parse_spec("""
name = "shop"
partitions = 2
[events]
served = { key = ["request", "item"], time = "at:ms" }
action = { key = ["request", "item"], time = "at:ms" }
[labels]
buy = { on = "action.kind == 'buy'" }
[tables]
item = { dim = 4 }
[features]
item = { field = "item", table = "item" }
""")
SCHEMA = parse_schema(
    {
        "type": "record",
        "name": "S",
        "fields": [{"name": n, "type": "long"} for n in ("request", "item", "at")],
    }
)


class Flaky:
    """A writer that raises what stands in `errors`, one an append, then writes."""

    def __init__(self, log: EventLog, *errors: Exception) -> None:
        self.inner, self.errors = log.writer(), list(errors)

    def append(self, appends: Sequence[Append]) -> Sequence[int]:
        if self.errors:
            raise self.errors.pop(0)
        return self.inner.append(appends)

    def close(self) -> None:
        self.inner.close()


class LostPartition:
    """A group writer whose groups of one partition have no answer until it is back; then those fail first."""

    def __init__(self, log: EventLog, partition: int) -> None:
        self.inner, self.partition = log.group_writer(), partition
        self.back = threading.Event()
        self.unanswered: list[Callable[[GroupOutcome], None]] = []
        self.failed = 0

    def append(self, groups: Sequence[Sequence[Append]], answered: Answered) -> None:
        for index, group in enumerate(groups):
            answer = partial(answered, index)
            if self.failed or group[0].partition != self.partition:
                self._append(group, answer)
            else:
                self.unanswered.append(answer)

    def _append(self, group: Sequence[Append], answer: Callable[[GroupOutcome], None]) -> None:
        self.inner.append([group], lambda _index, outcome: answer(outcome))

    def wait(self, within_s: float) -> None:
        if self.back.wait(within_s) and self.unanswered:
            self.failed += 1
            self.unanswered.pop()(Unavailable("no leader"))

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    log = open_url(f"sqlite:{tmp_path}/log")
    log.create_topic("impressions", partitions=2)
    yield log
    log.close()


def served(request: int, **changes: Any) -> Served:
    return Served.of(SPEC, [{"request": request, "item": 1, "at": 5, **changes}])


def logger_of(
    log: EventLog,
    *errors: Exception,
    writer: GroupWriter | None = None,
    queue_events: int = 100,
    queue_bytes: int = 1 << 20,
    form: Any = "avro",
    ignore_unknown: bool = False,
) -> ServedLogger:
    spec = replace(SPEC, events=replace(SPEC.events, served=replace(SPEC.events.served, format=form)))
    registry = CollectorRegistry()
    made = ServedLogger(
        spec,
        writer or CombinedWriter(Flaky(log, *errors)),
        JsonTranscoder(SCHEMA, schema_id=1, ignore_unknown=ignore_unknown),
        registry,
        queue_events=queue_events,
        queue_bytes=queue_bytes,
    )
    REGISTRIES[made] = registry
    return made


REGISTRIES: WeakKeyDictionary[ServedLogger, CollectorRegistry] = WeakKeyDictionary()


def figure(logger: ServedLogger, name: str, **labels: str) -> float | None:
    return REGISTRIES[logger].get_sample_value(f"freshet_inference_{name}", labels)


def values(log: EventLog) -> list[bytes]:
    found = []
    for p in range(2):
        reader = log.reader()
        reader.assign({TopicPartition("impressions", p): 0})
        found += [v for _, records in reader.poll(1_000, 0) for v in records.values]
        reader.close()
    return found


def run_until(logger: ServedLogger, done: Callable[[], bool], drain_s: float = 5.0) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=logger.run, args=(stop, lambda: drain_s))
    thread.start()
    try:
        wait_for(done)
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def test_a_full_queue_drops_and_says_so(log: EventLog) -> None:
    logger = logger_of(log, queue_events=1)

    assert logger.enqueue(served(1))
    assert not logger.enqueue(served(2))
    assert "too many" in logger.reason


def of_items(count: int) -> Served:
    return Served.of(SPEC, [{"request": 1, "item": item, "at": 5} for item in range(count)])


def test_the_bound_counts_events_not_requests(log: EventLog) -> None:
    logger = logger_of(log, queue_events=10)

    assert logger.enqueue(of_items(6))
    assert not logger.enqueue(of_items(5))
    assert logger.enqueue(of_items(4))
    assert figure(logger, "served_queue") == 10
    assert figure(logger, "served_dropped_total", why="queue") == 5


def test_bytes_are_bounded_too_and_an_empty_queue_takes_anything(log: EventLog) -> None:
    logger = logger_of(log, queue_events=100, queue_bytes=10)

    assert logger.enqueue(served(1)), "larger than the bound, but alone"
    assert not logger.enqueue(served(2))
    assert figure(logger, "served_queue_bytes") == served(1).size > 10


def test_appended_impressions_free_the_queue(log: EventLog) -> None:
    logger = logger_of(log, Unavailable("away"), queue_events=6)
    assert logger.enqueue(of_items(6))

    run_until(logger, lambda: len(values(log)) == 6)

    assert figure(logger, "served_queue") == figure(logger, "served_queue_bytes") == 0
    assert logger.enqueue(of_items(6))


def test_events_that_a_stop_drops_are_counted(log: EventLog) -> None:
    logger, stop = logger_of(log), threading.Event()
    logger.enqueue(of_items(6))
    stop.set()

    logger.run(stop, lambda: -1.0)  # no time is left

    assert figure(logger, "served_dropped_total", why="stopped") == 6


def test_events_wait_while_the_log_is_away(log: EventLog) -> None:
    logger = logger_of(log, Unavailable("away"), Unavailable("away"))
    logger.enqueue(served(1))

    run_until(logger, lambda: len(values(log)) == 1)


def test_a_lost_partition_delays_only_its_own_events(log: EventLog) -> None:
    writer = LostPartition(log, int(partition_of(BytesColumn.of([b"0"]), 2)[0]))
    logger = logger_of(log, writer=writer)
    lost = [n for n in range(50) if partition_of(BytesColumn.of([b"%d" % n]), 2)[0] == writer.partition]
    sent = iter(range(50))

    def written() -> dict[int, int]:
        return {p: log.bounds(TopicPartition("impressions", p)).end for p in range(2)}

    def all_but_lost() -> bool:
        if (request := next(sent, None)) is not None:
            return not logger.enqueue(served(request))
        return written() == {writer.partition: 0, 1 - writer.partition: 50 - len(lost)}

    def all_written() -> bool:
        writer.back.set()
        return sum(written().values()) == 50

    run_until(logger, lambda: (writer.back.is_set() or all_but_lost()) and all_written())

    assert (writer.failed, figure(logger, "served_queue"), figure(logger, "served_queue_bytes")) == (1, 0, 0)
    assert figure(logger, "served_logged_total") == 50
    reader = log.reader()
    reader.assign({TopicPartition("impressions", writer.partition): 0})
    ((_, records),) = reader.poll(100, 0.0)
    reader.close()
    assert list(records.keys) == [b"%d" % n for n in lost], "in order"


def test_what_waits_at_a_stop_is_still_written(log: EventLog) -> None:
    logger = logger_of(log)
    for request in range(20):
        logger.enqueue(served(request))
    stop = threading.Event()
    stop.set()

    logger.run(stop, lambda: 5.0)

    assert len(values(log)) == 20


def test_a_stop_does_not_wait_for_a_log_that_stays_away(log: EventLog) -> None:
    logger = logger_of(log, *[Unavailable("gone")] * 1_000)
    logger.enqueue(served(1))
    stop = threading.Event()
    stop.set()

    logger.run(stop, lambda: 0.1)

    assert logger.reason == "gone"


def test_event_that_does_not_fit_is_dropped_alone(
    log: EventLog,
) -> None:
    logger = logger_of(log)
    logger.enqueue(served(1, item="x"))
    logger.enqueue(served(2))

    run_until(logger, lambda: len(values(log)) == 1)
    assert "item" in logger.reason


def test_unexpected_error_is_logged_and_next_events_are_written(log: EventLog) -> None:
    logger = logger_of(log, RuntimeError("odd"))
    logger.enqueue(served(1))

    def told() -> bool:
        return "RuntimeError: odd" in logger.reason

    def written() -> bool:
        if told() and not values(log):
            logger.enqueue(served(2))
        return bool(values(log))

    run_until(logger, written)


def test_a_late_answer_counts_for_no_later_group(log: EventLog) -> None:
    answers: list[Callable[[GroupOutcome], None]] = []
    writer = Mock(spec=GroupWriter)
    writer.append.side_effect = lambda groups, answered: answers.append(partial(answered, 0))
    writer.wait.side_effect = [RuntimeError("odd"), *[None] * 1_000_000]
    logger = logger_of(log, writer=writer)
    logger.enqueue(served(1))

    def late() -> bool:
        if len(answers) == 1 and "RuntimeError: odd" in logger.reason:
            logger.enqueue(served(1))
        if len(answers) == 2:
            answers[0]([0])
        return len(answers) == 2

    run_until(logger, late, drain_s=0.1)

    assert figure(logger, "served_logged_total") == 0


def test_a_topic_in_json_gets_json(log: EventLog) -> None:
    logger = logger_of(log, form="json")
    logger.enqueue(served(1))

    run_until(logger, lambda: len(values(log)) == 1)
    assert orjson.loads(values(log)[0]) == {"request": 1, "item": 1, "at": 5}


def test_rows_that_do_not_fit_the_spec_are_corrupt() -> None:

    table = ServingTable(Layout((counting_group(),), ()), buckets=16, partitions=2, seed=7)
    keys = keys_of(1, 2)
    bucket = int(bucket_of(keys[:1], 16)[0])

    def run(of: int, table: int, *numbers: int) -> RowRuns:
        records = np.zeros((len(numbers), 16), np.uint8)
        return runs_of([Run(of, table, keys_of(*numbers), keys[:0], records)], widths_of({0: 16, table: 16}))

    with pytest.raises(Corrupt, match="table 9"):
        table.import_runs(run(bucket, 9, 1))
    with pytest.raises(Corrupt, match="another bucket"):
        table.import_runs(run(bucket ^ 1, 0, 1))
    with pytest.raises(Corrupt, match="below 16, found 16"):
        table.import_runs(run(16, 0))
    with pytest.raises(Corrupt, match="3 floats"):
        table.import_values(0, keys, np.zeros((2, 3), np.float32))
    with pytest.raises(Corrupt, match="table 9"):
        table.remove(9, keys)
    assert table.rows() == {0: 0}
    table.import_runs(run(bucket, 0, 1))
    assert table.rows() == {0: 1}


def test_an_event_too_large_for_the_log_is_dropped_alone(log: EventLog) -> None:
    logger = logger_of(log, queue_bytes=1 << 30, form="json", ignore_unknown=True)
    for request in range(5):
        logger.enqueue(served(request, note="x" * (70 << 20 if request == 2 else 1)))
    stop = threading.Event()
    stop.set()
    logger.run(stop, lambda: 10.0)

    assert sorted(orjson.loads(value)["request"] for value in values(log)) == [0, 1, 3, 4]
    assert figure(logger, "served_dropped_total", why="too_large") == 1
    assert figure(logger, "served_logged_total") == 4
    assert "accepts at most" in logger.reason
