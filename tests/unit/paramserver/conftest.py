"""Event logs of the paramserver tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from freshet.log import EventLog
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.log.topics import ensure_topics
from freshet.testing.faults import Faulty
from tests.fixtures.shards import PARSED


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    """A log with the topics of the model."""
    log = SqliteEventLog(tmp_path / "log")
    ensure_topics(log, PARSED)
    yield log
    log.close()


@pytest.fixture
def writer(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """The writer of shards that are made later; its calls can be scripted."""
    writer = Faulty(log.writer())
    monkeypatch.setattr(log, "writer", lambda: writer)
    return writer


@pytest.fixture
def control_log(tmp_path: Path) -> Iterator[SqliteEventLog]:
    """A log with the topic `control` only."""
    log = SqliteEventLog(tmp_path)
    log.create_topic("control", partitions=1)
    yield log
    log.close()
