from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from freshet.adapters import open_eventlog
from freshet.log import EventLog
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.testing.contracts.eventlog import EventLogContract
from tests.servers.kafka import Kafka, secure_url


class TestSqlite(EventLogContract):
    @pytest.fixture
    def open_log(self, tmp_path: Path) -> Callable[[], EventLog]:
        return lambda: open_eventlog(f"sqlite:{tmp_path}/log")

    def retain(self, log: EventLog) -> bool:
        assert isinstance(log, SqliteEventLog)
        while log.enforce_retention():
            pass
        return True


class TestKafka(EventLogContract):
    @pytest.fixture
    def open_log(self, kafka: Kafka) -> Callable[[], EventLog]:
        given_times = "topic.message.timestamp.type=CreateTime"
        url = f"kafka://{kafka.bootstrap}/{uuid4().hex}?{given_times}"
        return lambda: open_eventlog(url)


class TestKafkaByPassword(EventLogContract):
    """By SCRAM over TLS, as a user who may do what services do, and nothing else."""

    @pytest.fixture
    def open_log(self, kafka: Kafka, tmp_path: Path) -> Callable[[], EventLog]:
        prefix = uuid4().hex
        kafka.allow(prefix)
        url = secure_url(kafka, prefix, tmp_path, "SCRAM-SHA-512")
        return lambda: open_eventlog(f"{url}&topic.message.timestamp.type=CreateTime")
