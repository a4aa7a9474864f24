"""Bad records of every kind that reach a service of the ledger's model, and where each must be found."""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import orjson

from freshet.config.avro.schema import sample_schema
from freshet.config.spec import Spec
from freshet.config.spec.layout import layout_of
from freshet.config.spec.schemas import load_schemas
from freshet.config.spec.topics import Topics
from freshet.features import SampleColumns
from freshet.log import EventLog
from freshet.log.schema_ids import SchemaRegistry
from freshet.rows.deltas import RowDelta, encode_rows
from freshet.testing.contracts.eventlog import answered
from freshet.types import Append, BytesColumn, Fence, TimeMs, TopicPartition
from tests.fixtures.blocks import encode_block
from tests.fixtures.commands import LEDGER

UNKNOWN_SCHEMA = 9_999
DEEP = 50_000


@dataclass(frozen=True, slots=True)
class Bad:
    """One bad record."""

    topic: str
    kind: str
    value: bytes
    why: str  # the word of the metric that counts it; "" where it is state that is left out
    letters: str = ""  # the topic of its dead letter


@dataclass(frozen=True, slots=True)
class Found:
    """A bad record in the log, with its dead letter."""

    bad: Bad
    partition: int
    offset: int
    reason: str | None  # None: there is no dead letter


BODIES: Mapping[str, tuple[str, bytes]] = {
    "no JSON": ("application/json", b"{"),
    "no event": ("application/json", b"17"),
    "an event of other types": ("application/json", b'{"request_id": [], "ts": "x", "user": 1, "items": {}}'),
    "an event without fields": ("application/json", b"[{}, {}]"),
    "a number beyond 64 bits": ("application/json", b'{"request_id": "r", "ts": 99999999999999999999}'),
    "bytes that are no UTF-8": ("application/json", b'{"request_id": "\xff"}'),
    "a lone surrogate": ("application/json", b'{"request_id": "\\ud800", "ts": 1, "user": "u", "items": []}'),
    "nesting without end": ("application/json", b"[" * DEEP),
    "lines of junk": ("application/x-ndjson", b"{}\nnull\n\x00\n"),
    "Avro of an unknown schema": ("application/vnd.freshet.avro", b"\0\0\0\x27\x0fabc"),
    "Avro that is cut": ("application/vnd.freshet.avro", b"\0\0"),
    "nothing": ("application/vnd.freshet.avro", b""),
    "a batch of other lengths": ("application/vnd.freshet.avro-batch", b"\xff" * 40),
}
"""Bodies for the gateway, by kind: content type and bytes. None is answered with a 5xx."""

RANK_BODIES: Mapping[str, bytes] = {
    "no JSON": b"{",
    "no object": b"[]",
    "candidates of other types": b'{"context": {"user": 1}, "candidates": [{"item": "x", "seq": []}]}',
    "nesting without end": b'{"context": ' + b"[" * DEEP,
    "bytes that are no UTF-8": b'{"context": {"user": "\xff"}, "candidates": []}',
}
"""Rank requests, by kind. None is answered with a 5xx."""


class Poisoner:
    """Appends bad records to topics of the ledger's model, and finds what became of them."""

    def __init__(self, spec: Spec, log: EventLog, topics: Topics, seed: int) -> None:
        self._spec, self._log, self._topics = spec, log, topics
        self._chance = random.Random(seed)
        self._registry = SchemaRegistry(log)
        self._writer = log.writer()
        self.written: list[tuple[Bad, int, int]] = []  # with partition and offset
        served = load_schemas(spec).served
        other = {"type": "record", "name": "Other", "fields": [{"name": "x", "type": "long"}]}
        self._served_id = self._registry.register(served)
        self._action_id = self._registry.register(load_schemas(spec).of("action"))
        self._other_id = self._registry.register(json.dumps(other))
        self._sample_id = self._registry.register(sample_schema(served, "items"))

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()

    def write(self, more: int = 0) -> None:
        """Append a bad record of each kind, and `more` mutants of each topic with bytes that are checked."""
        for bad in [*self._events(), *self._samples(), *self._state(), *self._mutants(more)]:
            partitions = self._log.topics()[bad.topic].partitions
            partition = self._chance.randrange(partitions)
            (offset,) = self._writer.append([Append(bad.topic, partition, BytesColumn.of([bad.value]))])
            self.written.append((bad, partition, int(offset)))

    def places(self, topic: str) -> set[tuple[int, int]]:
        """(partition, offset) of the bad records of a topic."""
        return {(p, offset) for bad, p, offset in self.written if bad.topic == topic}

    def found(self) -> list[Found]:
        """Return the dead letters of all records that were written."""
        letters: dict[tuple[str, int, int], str] = {}
        for topic in (self._topics.dead_letters, self._topics.refused):
            for value in _values(self._log, topic):
                try:
                    letter = orjson.loads(value)
                    if letter["kind"] not in ("dead-letter", "sample", "block"):
                        continue
                    at = letter.get("topic", self._topics.samples)
                    letters[at, letter["partition"], letter["offset"]] = letter["reason"]
                except (ValueError, KeyError, TypeError):
                    continue  # one of the bad records themselves
        return [Found(bad, p, offset, letters.get((bad.topic, p, offset))) for bad, p, offset in self.written]

    def _events(self) -> Iterator[Bad]:
        now = time.time_ns() // 1_000_000
        page = {"request_id": "bad", "ts": now, "user": "u", "items": [{"item": 1, "seq": 1.0}]}
        action = {"event_id": "e", "request_id": "bad", "item": 1, "type": "click", "ts": now}
        for topic, schema_id, name, event in (
            (self._topics.served, self._served_id, "impressions.avsc", page),
            (self._topics.action, self._action_id, "actions.avsc", action),
        ):
            schema = fastavro.parse_schema(json.loads((LEDGER.parent / name).read_text()))
            good = _avro(schema, schema_id, event)
            frame, body = good[:5], good[5:]
            kinds = {
                "junk": (b"\x80junk", "unreadable"),
                "nothing": (b"", "unreadable"),
                "JSON": (json.dumps(event).encode(), "unreadable"),
                "half a frame": (b"\0\0\0", "unreadable"),
                "an unknown schema": (b"\0" + UNKNOWN_SCHEMA.to_bytes(4, "big") + body, "no_schema"),
                "another schema": (b"\0" + self._other_id.to_bytes(4, "big") + body, "no_schema"),
                "a frame alone": (frame, "unreadable"),
                "a record cut short": (good[:-1], "unreadable"),
                "a record with more bytes": (good + b"\0", "unreadable"),
                "a length below zero": (frame + b"\x01" + body[1:], "unreadable"),
                "a length beyond all": (frame + b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", "unreadable"),
                "a length of 11 bytes": (frame + b"\xff" * 11, "unreadable"),
                "a time before 1970": (_avro(schema, schema_id, {**event, "ts": -1}), "bad_time"),
                "a time far ahead": (
                    _avro(schema, schema_id, {**event, "ts": 4_102_444_800_000}),
                    "bad_time",
                ),
                "a time at the end": (_avro(schema, schema_id, {**event, "ts": 2**63 - 1}), "unreadable"),
                "a time at the start": (_avro(schema, schema_id, {**event, "ts": -(2**63)}), "unreadable"),
            }
            for kind, (value, why) in kinds.items():
                yield Bad(topic, kind, value, why, self._topics.dead_letters)

    def _samples(self) -> Iterator[Bad]:
        good = _block(self._sample_id)
        kinds = {
            "junk": (b"junk", "damaged"),
            "nothing": (b"", "damaged"),
            "a block cut short": (good[:-2], "damaged"),
            "a changed checksum": (good[:12] + b"\0\0\0\0" + good[16:], "damaged"),
            "a count beyond all": (good[:8] + b"\xff" * 4 + good[12:], "damaged"),
            "no samples": (good[:8] + bytes(4) + good[12:], "damaged"),
            "another version": (good[:1] + b"\x09" + good[2:], "damaged"),
            "an unknown schema": (_block(UNKNOWN_SCHEMA), "no_schema"),
            "another schema": (_block(self._other_id), "no_schema"),
            "an unknown label": (_block(self._sample_id, label=200), "label"),
            "other bytes": (_block(self._sample_id, payload=b"\xff" * 30), "unreadable"),
        }
        for kind, (value, why) in kinds.items():
            yield Bad(self._topics.samples, kind, value, why, self._topics.refused)

    def _state(self) -> Iterator[Bad]:
        texts = {
            "junk": b"\xff\x00junk",
            "nothing": b"",
            "no object": b"[1, 2]",
            "an unknown kind": b'{"v": 1, "kind": "unheard-of"}',
            "no kind": b'{"v": 1}',
        }
        control = {
            "a heartbeat of words": b'{"v": 1, "kind": "heartbeat", "fences": ["x", null]}',
            "a plan of nothing": b'{"v": 2, "kind": "plan", "by": "x", "fence": 1, "seats": []}',
            "a load below zero": b'{"v": 1, "kind": "load", "by": "x", "fence": 1, "bytes": -1, '
            b'"limit": 0, "slices": []}',
        }
        versions = {
            "an alias of words": b'{"v": 1, "kind": "alias", "alias": "stable", "number": "x", '
            b'"by": "operator", "pinned": true}',
        }
        schemas = {
            "no schema": b'{"type": "enum"}',
            "nesting without end": b'{"type": "array", "items": ' * 5_000,
        }
        topics = self._topics
        for topic, kinds in (
            (topics.rows, {**texts, **self._deltas(), "damaged": b"\xb2\x01\0\0" + bytes(60)}),
            (topics.control, {**texts, **control}),
            (topics.versions, {**texts, **versions}),
            (topics.measures, {**texts, "a window of words": b'{"v": 1, "kind": "window", "of": 3}'}),
            (topics.refused, {**texts, "a letter of numbers": b'{"v": 1, "kind": "sample", "bytes": 3}'}),
            ("schemas", {**texts, **schemas}),
        ):
            for kind, value in kinds.items():
                yield Bad(topic, kind, value, "")

    def _deltas(self) -> Mapping[str, bytes]:
        """Deltas that fit the spec, with right checksums and the highest fence: only their keys are bad."""
        end = self._log.bounds(TopicPartition(self._topics.control, 0)).end
        group, zero, none = layout_of(self._spec).groups[0], np.zeros(1, np.uint64), np.empty(0, np.uint64)
        row = np.ones((1, group.width), np.float32)
        written = RowDelta(group.tables[0], Fence(end - 1), TimeMs(1), zero, row, none)
        return {
            "key 0": encode_rows(written),
            "key 0 removed": encode_rows(replace(written, keys=none, values=row[:0], removed=zero)),
        }

    def _mutants(self, count: int) -> Iterator[Bad]:
        """Random bytes, and blocks with a bit changed, which their checksum or header shows."""
        good = _block(self._sample_id)
        for _ in range(count):
            junk = b"\x80" + self._chance.randbytes(self._chance.randrange(200))
            topic = self._chance.choice([self._topics.served, self._topics.action])
            yield Bad(topic, "random bytes", junk, "unreadable", self._topics.dead_letters)
            at = self._chance.choice([i for i in range(len(good)) if not 4 <= i < 8])
            changed = good[:at] + bytes([good[at] ^ (1 << self._chance.randrange(8))]) + good[at + 1 :]
            yield Bad(self._topics.samples, "a changed bit", changed, "damaged", self._topics.refused)
            yield Bad(self._topics.rows, "random bytes", b"\xb2" + junk, "")


def _avro(schema: Any, schema_id: int, event: Mapping[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, dict(event))
    return b"\0" + schema_id.to_bytes(4, "big") + out.getvalue()


def _block(schema_id: int, *, label: int = 0, payload: bytes | None = None) -> bytes:
    if payload is None:
        out = io.BytesIO()
        schema = {
            "type": "record",
            "name": "S",
            "fields": [
                {"name": "request_id", "type": "string"},
                {"name": "ts", "type": "long"},
                {"name": "user", "type": "string"},
                {"name": "item", "type": "long"},
                {"name": "seq", "type": "double"},
            ],
        }
        bad = {"request_id": "bad", "ts": 1, "user": "poison", "item": 77, "seq": 7.0}
        fastavro.schemaless_writer(out, fastavro.parse_schema(schema), bad)
        payload = out.getvalue()
    return encode_block(
        schema_id,
        SampleColumns(
            sample_ids=np.array([1], np.int64),
            event_times_ms=np.array([1], np.int64),
            request_ids=np.array([1], np.uint64),
            values=np.array([1], np.float32),
            weights=np.array([1], np.float32),
            labels=np.array([label], np.uint8),
        ),
        payloads=BytesColumn.of([payload]),
    )


def _values(log: EventLog, topic: str) -> Iterator[bytes]:
    for partition in range(log.topics()[topic].partitions):
        at = TopicPartition(topic, partition)
        bounds = log.bounds(at)
        reader, position = log.reader(), bounds.start
        reader.assign({at: position})
        try:
            while position < bounds.end:
                for _, records in answered(reader, 1_000, 1.0):
                    yield from records.values
                    position = records.next_offset
        finally:
            reader.close()


def short_spec(folder: Path) -> Path:
    """The ledger's model with short windows: nothing is killed, so nothing comes late."""
    made = folder / "spec"
    made.mkdir()
    for schema in LEDGER.parent.glob("*.avsc"):
        (made / schema.name).write_text(schema.read_text())
    text = LEDGER.read_text()
    for old, new in (('grace = "20s"', 'grace = "3s"'), ('"4s" }', '"3s" }')):
        assert old in text
        text = text.replace(old, new)
    (made / "freshet.toml").write_text(text)
    return made / "freshet.toml"
