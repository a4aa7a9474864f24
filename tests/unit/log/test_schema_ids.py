"""Schema registry on a SQLite log."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.avro.schema import parse_schema
from freshet.errors import ConfigError, Corrupt, Unavailable
from freshet.log import EventLog
from freshet.log.schema_ids import (
    FRAME_BYTES,
    MAX_MISSED_IDS,
    MAX_SILENT_POLLS,
    REREAD_S,
    SchemaRegistry,
    SchemasUnread,
    frame,
    framed_id,
)
from freshet.log.sqlite.event_log import open_url
from freshet.testing.clock import SettableClock
from freshet.types import Append, BytesColumn, Records, TopicPartition

CLICK = '{"type": "record", "name": "Click", "fields": [{"name": "id", "type": "long"}]}'
PLAY = '{"type": "record", "name": "Play", "fields": [{"name": "seconds", "type": "double"}]}'


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    log = open_url(f"sqlite:{tmp_path}/log")
    yield log
    log.close()


def test_a_schema_registered_twice_has_one_id(log: EventLog) -> None:
    registry = SchemaRegistry(log)

    assert registry.register(CLICK) == registry.register(CLICK) == 1
    assert registry.register(PLAY) == 2


def test_the_spelling_of_the_json_does_not_matter(log: EventLog) -> None:
    registry = SchemaRegistry(log)

    assert registry.register(CLICK) == registry.register(CLICK.replace(" ", "")) == 1
    assert registry.register(parse_schema(CLICK)) == 1


def test_another_process_reads_the_same_ids(log: EventLog) -> None:
    written = SchemaRegistry(log).register(PLAY)

    other = SchemaRegistry(log)
    assert other.get(written) == parse_schema(PLAY)
    assert other.register(PLAY) == written


def test_a_schema_that_arrives_later_is_found(log: EventLog) -> None:
    early, late = SchemaRegistry(log), SchemaRegistry(log)
    early.register(CLICK)
    new = late.register(PLAY)

    assert early.get(new) == parse_schema(PLAY)


def test_when_two_register_at_once_the_first_in_the_log_names_it(log: EventLog) -> None:
    registries = [SchemaRegistry(log) for _ in range(4)]
    barrier = threading.Barrier(4)
    ids: list[int] = []

    def register(registry: SchemaRegistry) -> None:
        barrier.wait()
        ids.append(registry.register(CLICK))

    threads = [threading.Thread(target=register, args=(r,)) for r in registries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert ids == [1, 1, 1, 1]


def test_an_unknown_id_is_a_key_error(log: EventLog) -> None:
    with pytest.raises(KeyError, match="no schema has id 9"):
        SchemaRegistry(log).get(9)


class Counted:
    """A log that counts the reads of a topic."""

    def __init__(self, log: EventLog) -> None:
        self._log, self.looks = log, 0
        self.create_topic, self.reader, self.writer = log.create_topic, log.reader, log.writer

    def bounds(self, partition: TopicPartition) -> Any:
        self.looks += 1
        return self._log.bounds(partition)


class Silent:
    """A log whose readers get no response for a number of polls."""

    def __init__(self, log: EventLog, times: int) -> None:
        self._log, self.times = log, times
        self.create_topic, self.bounds, self.writer = log.create_topic, log.bounds, log.writer

    def reader(self) -> Silent:
        self._reader = self._log.reader()
        self.assign, self.close = self._reader.assign, self._reader.close
        return self

    def poll(self, max_records: int, wait_s: float) -> Sequence[tuple[TopicPartition, Records]]:
        self.times -= 1
        if self.times >= 0:
            raise Unavailable("the brokers gave no answer")
        return self._reader.poll(max_records, wait_s)


@pytest.fixture
def registered(log: EventLog) -> int:
    """Id of a schema that another process has registered."""
    return SchemaRegistry(log).register(CLICK)


def test_registration_waits_for_a_silent_log(log: EventLog, registered: int) -> None:
    """A starting service would end otherwise."""
    registry = SchemaRegistry(cast(EventLog, Silent(log, MAX_SILENT_POLLS - 1)))

    assert registry.register(CLICK) == registered


def test_registration_fails_if_the_log_stays_silent(log: EventLog, registered: int) -> None:
    registry = SchemaRegistry(cast(EventLog, Silent(log, MAX_SILENT_POLLS)))

    with pytest.raises(Unavailable, match="no answer"):
        registry.register(CLICK)
    assert registry.register(CLICK) == registered


def test_lookup_fails_at_once_if_the_log_is_silent(log: EventLog, registered: int) -> None:
    """The caller may be a server's event loop."""
    registry = SchemaRegistry(cast(EventLog, Silent(log, 1)))

    with pytest.raises(Unavailable, match="no answer"):
        registry.get(registered)


def misses(registry: SchemaRegistry, ids: Iterable[int], came_s: float | None = None) -> int:
    missed = 0
    for schema_id in ids:
        try:
            registry.get(schema_id, came_s)
        except KeyError:
            missed += 1
    return missed


def test_unknown_ids_cause_one_read_per_half_second(log: EventLog) -> None:
    clock, counted = SettableClock(), Counted(log)
    registry = SchemaRegistry(cast(EventLog, counted), clock)

    assert misses(registry, range(100, 10_100)) == 10_000
    assert counted.looks == 1
    clock.advance(REREAD_S)
    assert misses(registry, range(100, 10_100)) == 10_000
    assert counted.looks == 2


class Away:
    """A log that is away: each read of its offsets fails after five seconds."""

    def __init__(self, log: EventLog, clock: SettableClock) -> None:
        self._log, self._clock, self.looks = log, clock, 0
        self.error: Exception | None = Unavailable("no broker answers")
        self.create_topic, self.reader, self.writer = log.create_topic, log.reader, log.writer

    def bounds(self, partition: TopicPartition) -> Any:
        self.looks += 1
        if self.error is None:
            return self._log.bounds(partition)
        self._clock.advance(5.0)
        raise self.error


def unread(registry: SchemaRegistry, ids: Iterable[int], came_s: float) -> int:
    count = 0
    for schema_id in ids:
        for look in (lambda i: registry.find(i, came_s), registry.get, registry.get_now):
            with pytest.raises(SchemasUnread, match="no broker answers"):
                look(schema_id)
            count += 1
    return count


def test_while_the_log_is_away_ids_cost_one_read(log: EventLog, registered: int) -> None:
    clock = SettableClock()
    away = Away(log, clock)
    registry = SchemaRegistry(cast(EventLog, away), clock)

    assert unread(registry, range(registered, 1_000), clock.monotonic()) == 3 * 999
    clock.advance(4.9)  # the read took five seconds
    assert unread(registry, [registered], clock.monotonic()) == 3
    assert away.looks == 1
    clock.advance(0.2)
    away.error = None
    assert registry.find(registered, clock.monotonic()) == parse_schema(CLICK)
    assert away.looks == 2


def test_a_failure_at_once_is_remembered_for_half_a_second(log: EventLog, registered: int) -> None:
    clock = SettableClock()
    registry = SchemaRegistry(cast(EventLog, Silent(log, 1)), clock)

    for _ in range(2):
        with pytest.raises(SchemasUnread, match="no answer"):
            registry.get(registered)
    clock.advance(REREAD_S)
    assert registry.get(registered) == parse_schema(CLICK)


def test_a_missing_right_of_the_reader_spoils_no_schema(log: EventLog, registered: int) -> None:
    clock = SettableClock()
    away = Away(log, clock)
    away.error = ConfigError("event log", "", "no broker answers us", "the right to do so", "add an ACL")
    registry = SchemaRegistry(cast(EventLog, away), clock)

    assert unread(registry, [registered], clock.monotonic()) == 3


def test_schema_is_found_half_a_second_after_an_unknown_id(log: EventLog) -> None:
    clock = SettableClock()
    registry = SchemaRegistry(log, clock)
    assert misses(registry, [9]) == 1
    new = SchemaRegistry(log).register(PLAY)

    assert misses(registry, [new]) == 1
    clock.advance(REREAD_S)
    assert registry.get(new) == parse_schema(PLAY)


def test_id_registered_after_the_last_read_is_unavailable_first(log: EventLog) -> None:
    clock = SettableClock()
    registry = SchemaRegistry(log, clock)
    assert misses(registry, [9]) == 1
    clock.advance(0.1)
    new = SchemaRegistry(log).register(PLAY)

    for _ in range(2):
        with pytest.raises(Unavailable, match="send it again"):
            registry.find(new, clock.monotonic())
    clock.advance(REREAD_S)
    assert registry.find(new, clock.monotonic()) == parse_schema(PLAY)


def test_unknown_id_is_refused_after_a_read_since_its_request(log: EventLog) -> None:
    clock, counted = SettableClock(), Counted(log)
    registry = SchemaRegistry(cast(EventLog, counted), clock)

    def found(schema_id: int) -> str:
        try:
            registry.find(schema_id, clock.monotonic())
        except (KeyError, Unavailable) as error:
            return type(error).__name__
        return "found"

    assert found(9) == "KeyError"
    clock.advance(0.1)
    assert [found(9), found(10)] == ["KeyError", "Unavailable"]
    clock.advance(REREAD_S)
    assert found(11) == "KeyError"
    clock.advance(0.1)
    assert [found(9), found(10), found(11), found(12)] == [*["KeyError"] * 3, "Unavailable"]
    assert counted.looks == 2


def test_ids_of_records_before_the_last_read_are_known(log: EventLog) -> None:
    clock = SettableClock()
    registry = SchemaRegistry(log, clock)
    came_s = clock.monotonic()
    clock.advance(0.1)
    assert misses(registry, [9]) == 1
    for made_up in range(10, 20):
        with pytest.raises(KeyError):
            registry.find(made_up, came_s)


def test_number_of_remembered_unknown_ids_is_bounded(log: EventLog) -> None:
    clock = SettableClock()
    registry = SchemaRegistry(log, clock)
    assert misses(registry, [9]) == 1
    clock.advance(0.1)
    for made_up in range(10, 10 + MAX_MISSED_IDS):
        with pytest.raises(Unavailable):
            registry.find(made_up, clock.monotonic())
    with pytest.raises(Unavailable):  # requested once, and forgotten since
        registry.find(9, clock.monotonic())


def test_one_schema_after_another_is_found_at_once(log: EventLog) -> None:
    registry, writer = SchemaRegistry(log, SettableClock()), SchemaRegistry(log)

    assert registry.get(writer.register(CLICK)) == parse_schema(CLICK)
    assert registry.get(writer.register(PLAY)) == parse_schema(PLAY)


def test_record_after_its_schema_finds_it_despite_earlier_misses(log: EventLog) -> None:
    clock, counted = SettableClock(), Counted(log)
    registry = SchemaRegistry(cast(EventLog, counted), clock)
    assert misses(registry, range(100, 200), clock.monotonic()) == 100
    assert counted.looks == 1
    new = SchemaRegistry(log).register(PLAY)
    clock.advance(0.001)

    assert registry.get(new, clock.monotonic()) == parse_schema(PLAY)


def test_invalid_records_of_others_do_not_prevent_registration(log: EventLog) -> None:
    registry = SchemaRegistry(log)
    log.writer().append([Append("schemas", 0, BytesColumn.of([b"\xff not json"]))])

    assert registry.register(CLICK) == 2
    with pytest.raises(ConfigError, match="schemas offset 0"):
        registry.get(1)


def test_invalid_schema_is_refused_unwritten(log: EventLog) -> None:
    registry = SchemaRegistry(log)

    with pytest.raises(ConfigError):
        registry.register("[")
    assert registry.register(CLICK) == 1


@given(st.integers(0, 2**32 - 1), st.binary(max_size=20))
def test_frame_contains_its_id(schema_id: int, payload: bytes) -> None:
    record = frame(schema_id, payload)

    assert framed_id(record) == schema_id
    assert record[FRAME_BYTES:] == payload


@given(st.binary(max_size=10).filter(lambda b: len(b) < 5 or b[0] != 0))
def test_record_without_frame_is_corrupt(record: bytes) -> None:
    with pytest.raises(Corrupt, match="Confluent-framed"):
        framed_id(record)
