"""The log on a real Kafka whose broker is killed, paused and started again; whose topics vanish."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from freshet.adapters import open_eventlog
from freshet.cli import peek
from freshet.coordination.claims import Claims
from freshet.errors import ConfigError, Corrupt, DataLost, Mismatch, TooLarge, Unavailable
from freshet.log import EventLog, Reader, Writer
from freshet.testing.conditions import wait_until
from freshet.testing.contracts.eventlog import answered, append_to, read_all
from freshet.types import TopicPartition
from tests.servers.kafka import Kafka

T = TopicPartition("t", 0)
DEADLINE_S = 120.0
"""For what must come at last: a broker starts anew in 3 to 20 s."""


@pytest.fixture
def prefix() -> str:
    return uuid4().hex


@pytest.fixture
def log(kafka: Kafka, prefix: str) -> Iterator[EventLog]:
    log = open_eventlog(f"kafka://{kafka.bootstrap}/{prefix}")
    log.create_topic("t", partitions=1)
    yield log
    log.close()
    if not kafka.alive:  # a test failed with the broker away: the next ones need not
        kafka.start()


@pytest.fixture
def admin(kafka: Kafka) -> AdminClient:
    return AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})


@contextmanager
def paused(kafka: Kafka) -> Iterator[None]:
    kafka.pause()
    try:
        yield
    finally:
        kafka.resume()


def poll_patiently(reader: Reader) -> list[bytes]:
    """What comes next; nothing while the log is away."""
    with suppress(Unavailable):
        return [value for _, records in reader.poll(1000, 0.2) for value in records.values]
    return []


def number(value: bytes) -> int:
    return int(value.decode())


class Appending:
    """A thread that appends numbers one after the other, `on_unavailable` deciding how to go on."""

    def __init__(self, log: EventLog, name: str | None) -> None:
        self._log, self._name = log, name
        self.done, self.unavailable = 0, 0
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            writer: Writer | None = self._log.writer(self._name)
            while not self.stop.is_set():
                try:
                    if writer is None:
                        writer = self._log.writer(self._name)
                        self.done = self._written()
                    writer.append([append_to(T, [b"%d" % self.done])])
                    self.done += 1
                except Unavailable:
                    self.unavailable += 1
                    if self._name is not None:  # what became of it, the log says
                        writer = None
        except BaseException as error:
            self.error = error

    def _written(self) -> int:
        reader, last, at, end = self._log.reader(), -1, 0, self._log.bounds(T).end
        reader.assign({T: 0})
        try:
            while at < end:  # a broker that has just come back may answer with nothing for a while
                for _, records in answered(reader, 10_000, 1.0):
                    last, at = number(records.values[-1]) if len(records) else last, records.next_offset
        finally:
            reader.close()
        return last + 1


@pytest.mark.parametrize("name", [None, "w"])
def test_a_killed_broker_loses_no_acknowledged_record(kafka: Kafka, log: EventLog, name: str | None) -> None:
    appending, reader = Appending(log, name), log.reader()
    seen: list[int] = []
    reader.assign({T: 0})

    def read_on() -> None:
        seen.extend(map(number, poll_patiently(reader)))

    def failed_once() -> bool:
        read_on()
        return appending.unavailable > 0

    def read_the_last() -> bool:
        read_on()
        return appending.done - 1 in seen

    def appended_more(than: int) -> bool:
        read_on()
        return appending.done >= than or appending.error is not None

    for wait_for_failure in (True, False):
        wait_until("50 appends", partial(appended_more, appending.done + 50), within_s=DEADLINE_S)
        kafka.kill()
        if wait_for_failure:
            wait_until("an append that fails", failed_once, within_s=DEADLINE_S)
        kafka.start()
    wait_until("50 appends more", partial(appended_more, appending.done + 50), within_s=DEADLINE_S)
    appending.stop.set()
    appending.thread.join()
    assert appending.error is None

    wait_until("the last one", read_the_last, within_s=DEADLINE_S)
    if name is None:  # an append that was tried again may be there twice
        assert sorted(set(seen)) == list(range(appending.done))
    else:
        assert seen == list(range(appending.done))


def test_bounds_are_known_after_a_restart_without_readers(kafka: Kafka, log: EventLog) -> None:
    before = log.bounds(T)
    kafka.restart()

    def known() -> bool:
        with suppress(Unavailable):
            return log.bounds(T) == before
        return False

    wait_until("bounds as before", known, within_s=DEADLINE_S)


def test_a_broker_that_is_paused_is_unavailable_and_goes_on(kafka: Kafka, log: EventLog) -> None:
    reader, writer = log.reader(), log.writer()
    reader.assign({T: 0})
    assert answered(reader, 1, 0.0) == []
    with paused(kafka), pytest.raises(Unavailable):
        reader.poll(1, 0.0)
    writer.append([append_to(T, [b"x"])])
    assert read_all(reader, 1) == {T: [(0, b"x")]}


def test_a_reader_skips_an_aborted_transaction_to_the_end(kafka: Kafka, log: EventLog, prefix: str) -> None:
    writer, reader = log.writer(), log.reader()
    writer.append([append_to(T, [b"a"])])
    reader.assign({T: 0})
    assert read_all(reader, 1) == {T: [(0, b"a")]}
    other = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": prefix, "log_level": 0})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(f"{prefix}.t", b"never", partition=0)
    other.flush(30)
    assert log.bounds(T).end == 1, "what an open transaction wrote is not there yet"
    assert answered(reader, 10, 0.2) == []
    other.abort_transaction(30)
    position = 1
    deadline = time.monotonic() + DEADLINE_S
    while position < log.bounds(T).end or position == 1:
        assert time.monotonic() < deadline
        for _, records in answered(reader, 10, 0.2):
            assert len(records) == 0
            position = records.next_offset
    assert writer.append([append_to(T, [b"b"])]) == [position]


def test_a_topic_made_anew_is_data_lost_to_who_reads_it(
    log: EventLog, admin: AdminClient, prefix: str
) -> None:
    log.writer().append([append_to(T, [b"a", b"b"])])
    reader = log.reader()
    reader.assign({T: 1})
    assert read_all(reader, 1) == {T: [(1, b"b")]}
    earlier = log.topics()["t"].log_id
    admin.delete_topics([f"{prefix}.t"])[f"{prefix}.t"].result(30)
    wait_until("the topic is gone", lambda: "t" not in log.topics(), within_s=DEADLINE_S)
    assert log.create_topic("t", partitions=1).log_id != earlier

    def is_told() -> bool:
        try:
            with suppress(Unavailable):
                reader.poll(1, 0.1)
        except DataLost as lost:
            return "log id" in str(lost) or "removed" in str(lost)
        return False

    wait_until("the reader is told", is_told, within_s=DEADLINE_S)


def test_a_damaged_batch_ends_the_reader_and_is_not_passed(log: EventLog, kafka: Kafka, prefix: str) -> None:
    writer = log.writer()
    for value in (b"a", b"damaged" * 50, b"c"):
        writer.append([append_to(T, [value])])
    segment = kafka.certificate.parent / "data" / f"{prefix}.t-0" / f"{0:020}.log"
    data = segment.read_bytes()
    second = 12 + int.from_bytes(data[8:12], "big")  # the first batch: its offset, its length, the rest
    with segment.open("r+b") as file:
        file.seek(second + data[second:].index(b"damaged"))
        file.write(b"D")
    reader = log.reader()
    reader.assign({T: 0})

    read: list[bytes] = []

    def has_read_all() -> bool:
        read.extend(value for _, records in answered(reader, 10, 0.1) for value in records.values)
        return len(read) > 2

    for _ in range(2):
        with pytest.raises(Corrupt, match="found a damaged batch at offset 1"):
            wait_until("the damage is found, or passed", has_read_all, within_s=DEADLINE_S)
    segment.write_bytes(data)

    def has_gone_on() -> bool:
        with suppress(Corrupt):  # found by a fetch that was under way
            return has_read_all()
        return False

    wait_until("the reader goes on once the batch is whole", has_gone_on, within_s=DEADLINE_S)
    assert read == [b"a", b"damaged" * 50, b"c"]


def test_a_topic_that_takes_smaller_records_says_what_to_change(
    log: EventLog, admin: AdminClient, prefix: str
) -> None:
    alter(admin, f"{prefix}.t", "max.message.bytes", "10000")
    with pytest.raises(TooLarge, match=r"max\.message\.bytes"):
        log.writer().append([append_to(T, [b"x" * 20_000])])
    with pytest.raises(TooLarge, match=r"max_record_bytes"):
        log.writer("w").append([append_to(T, [b"x" * 20_000_000])])
    assert log.writer("w").append([append_to(T, [b"x"])]) == [0]


def test_a_record_of_megabytes_is_taken(log: EventLog) -> None:
    value = np.random.default_rng(0).bytes(8 << 20)
    log.writer("w").append([append_to(T, [value])])
    reader = log.reader()
    reader.assign({T: 0})
    assert read_all(reader, 1) == {T: [(0, value)]}


def test_records_have_the_brokers_time_not_the_writers(log: EventLog) -> None:
    began_ms = time.time_ns() // 1_000_000
    log.writer().append([append_to(T, [b"of 1970", b"too"], times=[5, 6])])
    reader = log.reader()
    reader.assign({T: 0})
    times: list[int] = []
    while len(times) < 2:
        for _, records in answered(reader, 10, 1.0):
            times += records.times_ms.tolist()
    reader.close()

    assert all(began_ms <= ms <= time.time_ns() // 1_000_000 for ms in times)
    assert log.offset_at(T, began_ms) == 0


def settings_of(admin: AdminClient, topic: str, *names: str) -> dict[str, str]:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    found = admin.describe_configs([resource])[resource].result(30)
    return {name: found[name].value for name in names or ("retention.ms", "segment.ms", "segment.bytes")}


def wait_for_settings(admin: AdminClient, topic: str, settings: Mapping[str, str]) -> None:
    """A broker goes by what was altered a moment after it has answered."""
    wait_until(
        f"{topic} has {settings}",
        lambda: settings_of(admin, topic, *settings) == settings,
        within_s=DEADLINE_S,
    )


def alter(admin: AdminClient, topic: str, name: str, value: str) -> None:
    """Set one setting of a topic."""
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(30)
    wait_for_settings(admin, topic, {name: value})


def test_what_is_forgotten_goes_in_small_pieces(
    kafka: Kafka, log: EventLog, admin: AdminClient, prefix: str
) -> None:
    """Kafka forgets whole segments, and by default one is a week: ten minutes would be kept for a week."""
    log.create_topic("short", partitions=1, retention_ms=600_000)
    wait_for_settings(admin, f"{prefix}.short", {
        "retention.ms": "600000", "segment.ms": "75000", "segment.bytes": str(1 << 30)
    })  # fmt: skip
    log.create_topic("short", partitions=1, retention_ms=86_400_000)
    wait_for_settings(admin, f"{prefix}.short", {"segment.ms": "10800000"})
    wait_for_settings(admin, f"{prefix}.t", {
        "retention.ms": "-1", "segment.ms": "604800000", "segment.bytes": str(1 << 26)
    })  # fmt: skip

    own = open_eventlog(f"kafka://{kafka.bootstrap}/{prefix}?topic.segment.ms=120000")
    own.create_topic("own", partitions=1, retention_ms=86_400_000)
    own.create_topic("own", partitions=1, retention_ms=600_000)
    own.close()
    wait_for_settings(admin, f"{prefix}.own", {
        "retention.ms": "600000", "segment.ms": "120000", "segment.bytes": str(1 << 30)
    })  # fmt: skip


def test_peek_shows_the_newest_records_between_transactions(
    kafka: Kafka, log: EventLog, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writer = log.writer("w")
    for i in range(6):
        writer.append([append_to(T, [b'{"n": %d}' % i])])
    log.writer("w")  # opens once the last commit shows, which brokers answer before
    monkeypatch.setenv("FRESHET_COMMON_LOG_URL", f"kafka://{kafka.bootstrap}/{prefix}")

    said = CliRunner().invoke(peek.command, ["t", "-n", "3", "--folder", str(tmp_path), "--json"])

    assert said.exit_code == 0, said.output
    assert [json.loads(line)["value"]["n"] for line in said.output.splitlines()] == [3, 4, 5]


def test_a_compacted_topic_is_refused(log: EventLog, admin: AdminClient, prefix: str) -> None:
    alter(admin, f"{prefix}.t", "cleanup.policy", "compact")
    with pytest.raises(Mismatch, match=r"cleanup\.policy"):
        log.create_topic("t", partitions=1)


def test_a_setting_unknown_to_librdkafka_is_a_config_error(kafka: Kafka) -> None:
    with pytest.raises(ConfigError, match=r"no\.such\.setting"):
        open_eventlog(f"kafka://{kafka.bootstrap}/x?no.such.setting=1")


def test_a_lease_does_not_expire_while_the_broker_is_away(kafka: Kafka, log: EventLog) -> None:
    log.create_topic("control", partitions=1)
    holder, other = Claims(log, "control", lease_s=8.0), Claims(log, "control", lease_s=8.0)
    held = holder.acquire("seat", "a", time.monotonic() + DEADLINE_S)
    kafka.kill()
    with pytest.raises(Unavailable):
        other.acquire("seat", "b", time.monotonic() + 11.0)
    kafka.start()
    with pytest.raises(Unavailable, match="held by a"):
        other.acquire("seat", "b", time.monotonic() + 11.0)
    held.check()
    holder.close()
    assert other.acquire("seat", "b", time.monotonic() + DEADLINE_S).fence > held.fence
    other.close()
