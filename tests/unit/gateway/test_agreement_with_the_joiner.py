"""The gateway accepts exactly the Avro events that the joiner reads, by whatever schema they were written."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import orjson
import pytest

from freshet.config.avro.schema import to_json
from freshet.config.spec.schemas import Schemas, readers_of
from freshet.features import hash_text
from freshet.gateway.codec import StreamCodec
from freshet.gateway.service import codecs_of
from freshet.joiner.decoder import SpecDecoder
from freshet.joiner.plan import join_plan
from freshet.log.schema_ids import SchemaRegistry, frame
from freshet.log.sqlite.event_log import open_url
from freshet.testing.clock import SettableClock
from freshet.types import BytesColumn, Records
from tests.fixtures import gateway
from tests.fixtures.gateway import NOW, SCHEMAS

STREAMS = {role: replace(getattr(gateway.SPEC.events, role), format="avro") for role in SCHEMAS}
SPEC = replace(gateway.SPEC, events=replace(gateway.SPEC.events, **STREAMS))
SHOWN = {"reqId": 1, "item": {"id": 7}, "at": "2023-11-14T22:13:20Z"}
EVENTS = {"served": gateway.ranked(), "shown": SHOWN, "action": gateway.action()}
UNION = ["null", "long", "string", "double"]


def places(record: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of a record's fields, through records and arrays of records."""
    for field in record["fields"]:
        here = (*path, field["name"])
        yield here
        inner = record_in(field["type"])
        if inner is not None:
            yield from places(inner, here)


def record_in(type_: Any) -> Any:
    if isinstance(type_, dict) and type_["type"] == "array":
        return record_in(type_["items"])
    return type_ if isinstance(type_, dict) and type_["type"] == "record" else None


def changed(schema: Any, event: Any, path: tuple[str, ...], type_: Any, value: Any) -> tuple[Any, Any]:
    """Return schema and event with another type and value at a path; without the field for the type None."""
    schema, event = copy.deepcopy(schema), copy.deepcopy(event)
    record, holders = schema, [event]
    for name in path[:-1]:
        record = record_in(next(f for f in record["fields"] if f["name"] == name)["type"])
        inside = [holder[name] for holder in holders]
        holders = [one for each in inside for one in (each if isinstance(each, list) else [each])]
    field = next(f for f in record["fields"] if f["name"] == path[-1])
    field.pop("default", None)
    field["type"] = type_
    if type_ is None:
        record["fields"].remove(field)
    for holder in holders:
        holder.pop(path[-1], None)
        if type_ is not None:
            holder[path[-1]] = value
    return schema, event


def variants(schema: Any, event: Any) -> Iterator[tuple[str, Any, Any]]:
    yield "as the spec has it", schema, event
    for path in places(schema):
        yield f"no {path}", *changed(schema, event, path, None, None)
        for type_, value in (("long", 1), ("string", "x"), *((UNION, v) for v in (None, 1, "x", 1.5))):
            yield f"{path} is {value!r} of {type_}", *changed(schema, event, path, type_, value)


def encoded(schema: Any, event: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(copy.deepcopy(schema)), event)
    return out.getvalue()


def is_accepted(codec: StreamCodec, record: bytes) -> bool:
    """Whether the gateway answers 202; its two ways agree."""
    good = len(codec.from_avro([record]).good) == 1
    fast = codec.accept_avro([record], lengths=False, latest_ms=NOW, max_events=1)
    assert fast is None or (int(fast.counts[0]) == 1) == good
    return good


def is_read(decoder: SpecDecoder, role: str, record: bytes) -> bool:
    """Whether the joiner refuses nothing of an event."""
    zeros, values = np.zeros(1, np.int64), BytesColumn.of([record])
    records = Records(zeros, zeros, BytesColumn.of([b""]), values, 1)
    if role == "served":
        columns, refused = decoder.served(records)
        decoder.fitting(columns, records, refused)
    else:
        _, refused = decoder.shown(records) if role == "shown" else decoder.actions(records)
    return len(refused) == 0


@pytest.mark.parametrize("role", EVENTS)
def test_gateway_and_joiner_refuse_the_same_events(role: str, tmp_path: Path) -> None:
    log, clock = open_url(f"sqlite:{tmp_path}/log"), SettableClock(NOW)
    codec, registry = codecs_of(SPEC, SCHEMAS, log, clock)[role], SchemaRegistry(log, clock)
    readers = readers_of(SPEC, Schemas(**SCHEMAS))
    decoder = SpecDecoder(SPEC, join_plan(SPEC, hash_text), registry, clock=clock, readers=readers)
    found: dict[str, tuple[bool, bool]] = {}

    for name, schema, event in variants(to_json(SCHEMAS[role]), EVENTS[role]):
        schema_id = registry.register(orjson.dumps(schema))
        clock.advance(60)
        record = frame(schema_id, encoded(schema, event))
        found[name] = is_accepted(codec, record), is_read(decoder, role, record)

    log.close()
    assert {name: both for name, both in found.items() if both[0] != both[1]} == {}
    assert found["as the spec has it"] == (True, True)
    assert (False, False) in found.values()
