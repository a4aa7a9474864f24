"""A joiner put together from a spec: the feed example, served as Avro, shown and acted on as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import orjson
import pytest
from structlog.testing import capture_logs

from freshet.config.spec.parse import load_spec
from freshet.features import read_blocks
from freshet.joiner.start import make
from freshet.log import EventLog, LogTraits
from freshet.log.schema_ids import SchemaRegistry, frame
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.log.topics import ensure_topics
from freshet.types import Append, BytesColumn, TopicPartition

FEED = Path(__file__).parents[2] / "examples" / "feed"

SCHEMA = json.loads((FEED / "ranked.avsc").read_text())
SCHEMA["fields"].pop()  # an older one, without the last field


def served(log: EventLog, request: int, ts: int, *items: int) -> bytes:
    out = io.BytesIO()
    candidates = [{"id": i, "age_s": 1.0, "ctr_1h": None, "pos": 0} for i in items]
    user: dict[str, Any] = {"id": 1, "country": None, "last_items": []}
    event: dict[str, Any] = {
        "request_id": request,
        "ts": ts,
        "user": user,
        "device": "tv",
        "items": candidates,
    }
    fastavro.schemaless_writer(out, fastavro.parse_schema(SCHEMA), event)
    return frame(SchemaRegistry(log).register(json.dumps(SCHEMA)), out.getvalue())


@pytest.mark.parametrize(("events_ms", "warned"), [(48, True), (49, False), (None, False)])
def test_retention_too_short_for_a_restart_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events_ms: int | None, warned: bool
) -> None:
    spec = load_spec(FEED / "freshet.toml")
    kept_ms = None if events_ms is None else events_ms * 3_600_000
    spec = replace(spec, retention=replace(spec.retention, events_ms=kept_ms))
    log = SqliteEventLog(tmp_path)
    short = "the log removes events that a restart of the joiner needs"
    for many_hosts in (False, True):
        monkeypatch.setattr(log, "traits", LogTraits(many_hosts, append_every_ms=20))
        with capture_logs() as logs:
            make(spec, log)
        found = [entry for entry in logs if str(entry["event"]).startswith(short)]
        assert len(found) == (3 if many_hosts and warned else 0)
        assert {entry["expected_ms"] for entry in found} <= {2 * (86_400_000 + 30_000) + 600_000}
    log.close()


def test_a_spec_with_avro_and_json_streams_is_joined_to_its_end(tmp_path: Path) -> None:
    spec = load_spec(FEED / "freshet.toml")
    log = SqliteEventLog(tmp_path)
    topics = ensure_topics(log, spec)
    at = "1970-01-01T00:00:{:02d}Z"
    seen = {"reqId": 4, "item": {"id": 1}, "at": at.format(11)}
    click = {"eventId": "e", "reqId": 4, "item": {"id": 1}, "at": at.format(12), "type": "click"}
    assert topics.shown is not None
    for topic, values in (
        (topics.served, [served(log, 4, 10_000, 1, 2), b"junk"]),
        (topics.shown, [orjson.dumps(seen)]),
        (topics.action, [orjson.dumps(click), b"{"]),
    ):
        times = np.full(len(values), 10_000)
        log.writer().append([Append(topic, 3, BytesColumn.of(values), times_ms=times)])

    joiner = make(spec, log)
    joiner.run(until_end=True)

    status = joiner.status
    assert status is not None
    labels = status.ledger.labels
    assert labels["click"]["trained_positive"] == 1
    assert labels["watch"]["trained_negative"] == 1
    assert labels["buy"]["trained_negative"] == 1
    assert {name: counts["not_shown"] for name, counts in labels.items()} == {
        "click": 1,
        "watch": 1,
        "buy": 1,
    }
    assert status.ledger.refused == 2
    assert status.samples == 3
    reader = log.reader()
    reader.assign({TopicPartition(topics.samples, 3): 0})
    [(_, records)] = reader.poll(100, 5.0)
    block = read_blocks(records.values)
    assert sorted(zip(block.labels.tolist(), block.values.tolist(), strict=True)) == [
        (0, 1.0),
        (1, 0.0),
        (2, 0.0),
    ]
    reader.close()
    log.close()
