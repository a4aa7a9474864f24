"""The joiner survives any response of a schema registry: events wait, or become dead letters."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest

from freshet.adapters import open_eventlog
from freshet.config.spec.parse import load_spec
from freshet.features import read_blocks
from freshet.joiner.service import Intervals, JoinerService
from freshet.joiner.start import make
from freshet.log import EventLog
from freshet.log import schema_registry as module
from freshet.log.records import newest
from freshet.log.schema_registry import Access, RestRegistry
from freshet.testing.clock import SettableClock
from freshet.testing.conditions import wait_until
from freshet.types import Append, BytesColumn, TopicPartition
from tests.servers.odd_registry import SCHEMA, UNAVAILABLE, UNUSABLE, OddRegistry, json_answer
from tests.servers.odd_registry import SPEC as VIEWS

SPEC = VIEWS.replace("[events]", "partitions = 2\n[events]", 1)
GOOD = json_answer({"schema": json.dumps(SCHEMA)})
INTERVALS = Intervals(flush_interval_ms=0, commit_interval_ms=0, end_check_interval_ms=10**9, retry_ms=0)
NOW_MS = 10_000


def view(schema_id: int, r: bytes) -> bytes:
    """Return a view of r at 1 s."""
    return b"\0" + schema_id.to_bytes(4, "big") + bytes([2 * len(r)]) + r + b"\xd0\x0f"


def write(log: EventLog, partition: int, *values: bytes) -> None:
    writer = log.writer()
    writer.append([Append("v", partition, BytesColumn.of(list(values)))])
    writer.close()


def world(folder: Path, url: str) -> tuple[EventLog, JoinerService]:
    """Make a log with two partitions of views, and their joiner."""
    (folder / "v.avsc").write_text(json.dumps(SCHEMA))
    (folder / "freshet.toml").write_text(SPEC)
    log = open_eventlog(f"sqlite:{folder / 'log'}")
    for topic in ("v", "d"):
        log.create_topic(topic, partitions=2)
    return log, make(
        load_spec(folder / "freshet.toml"),
        log,
        external_schemas=RestRegistry(Access(url), SettableClock()),
        intervals=INTERVALS,
    )


def samples(log: EventLog) -> int:
    """Return the number of samples."""
    blocks = [b for p in range(2) for _, b in newest(log, TopicPartition("shop.samples", p), 100)]
    return len(read_blocks(BytesColumn.of(blocks)).values) if blocks else 0


def reasons(log: EventLog) -> list[str]:
    """Return the reasons of the dead letters."""
    parts = range(log.topics()["shop.dead-letters"].partitions)
    letters = [b for p in parts for _, b in newest(log, TopicPartition("shop.dead-letters", p), 100)]
    return [orjson.loads(letter)["reason"] for letter in letters]


def test_events_wait_through_every_answer_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    with OddRegistry({1: GOOD}) as odd:
        log, joiner = world(tmp_path, odd.url)
        joiner.open()
        write(log, 0, *(view(2, b"w%d" % i) for i in range(3)))
        for n, (answers, _) in enumerate(UNAVAILABLE.values()):
            odd.answers[2] = answers
            write(log, 1, view(1, b"g%d" % n))
            before = joiner.tasks[1].events

            def goes_on(until: int = before + 1) -> bool:
                joiner.step()
                return joiner.tasks[1].events == until

            wait_until("the other partition goes on", goes_on, within_s=60)
            assert joiner.tasks[0].events == 0
        assert reasons(log) == []
        odd.answers[2] = GOOD
        joiner.run(until_end=True)
        assert samples(log) == 3 + len(UNAVAILABLE)
        assert reasons(log) == []
        log.close()


def test_responses_without_a_schema_refuse_their_records_only(tmp_path: Path) -> None:
    ids = {kind: n for n, kind in enumerate(UNUSABLE, 100)}
    with OddRegistry({1: GOOD} | {n: UNUSABLE[kind][0] for kind, n in ids.items()}) as odd:
        log, joiner = world(tmp_path, odd.url)
        for n in ids.values():
            write(log, n % 2, view(1, b"before%d" % n), view(n, b"bad"), view(1, b"after%d" % n))
        joiner.run(until_end=True)
        assert samples(log) == 2 * len(ids)
        told = reasons(log)
        assert len(told) == len(ids)
        missing = [words for _, words in UNUSABLE.values() if not any(words in reason for reason in told)]
        assert missing == []
        assert all(told)
        log.close()
