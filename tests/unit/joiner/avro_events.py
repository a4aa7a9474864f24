"""Events of three roles as Avro, framed with schema ids."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import numpy as np

from freshet.config.avro.schema import Written, parse_schema
from freshet.types import BytesColumn, Records

SPEC = """
name = "shop"
[events]
served = { topic = "served", schema = "s.avsc", explode = "items", key = ["r", "items.id"], time = "ts:ms" }
shown  = { topic = "shown", schema = "v.avsc", key = ["r", "id"], time = "ts:s" }
action = { topic = "actions", schema = "a.avsc", key = ["r", "id"], time = "ts:ms", id = "e" }
[join]
emit = "window"
grace = "1s"
[labels]
click = { on = "action.type == 'click'", window = "2s" }
[labels.watch]
on = "action.type == 'play' and action.seconds > 1"
value = "sum(action.seconds)"
loss = "huber"
window = "2s"
[tables]
item = { dim = 4 }
[features]
item = { field = "items.id", table = "item" }
[serve]
score = "click"
"""
ITEM: dict[str, Any] = {
    "type": "record",
    "name": "Item",
    "fields": [{"name": "id", "type": "long"}, {"name": "p", "type": "double"}],
}
SERVED: dict[str, Any] = {
    "type": "record",
    "name": "Served",
    "fields": [
        {"name": "r", "type": "string"},
        {"name": "ts", "type": "long"},
        {"name": "items", "type": {"type": "array", "items": ITEM}},
        {"name": "after", "type": "string"},
    ],
}
WIDER: dict[str, Any] = {**SERVED, "fields": [{"name": "new", "type": "long"}, *SERVED["fields"]]}
SHOWN: dict[str, Any] = {
    "type": "record",
    "name": "Shown",
    "fields": [
        {"name": "r", "type": "string"},
        {"name": "id", "type": "int"},
        {"name": "ts", "type": "double"},
    ],
}
ACTION: dict[str, Any] = {
    "type": "record",
    "name": "Action",
    "fields": [
        {"name": "r", "type": "string"},
        {"name": "id", "type": "long"},
        {"name": "e", "type": "string"},
        {"name": "ts", "type": "long"},
        {"name": "type", "type": "string"},
        {"name": "seconds", "type": ["null", "double"]},
    ],
}
LEFT_OUT: dict[str, Any] = {**ACTION, "fields": ACTION["fields"][:-1]}


class Fixed:
    """A source of schemas set by the test."""

    def __init__(self) -> None:
        self.known: dict[int, Written] = {
            i: parse_schema(json.dumps(schema))
            for i, schema in enumerate([SERVED, WIDER, SHOWN, ACTION, LEFT_OUT], start=1)
        }

    def get(self, schema_id: int, came_s: float | None = None) -> Written:
        return self.known[schema_id]

    def register(self, schema: Written) -> int:
        for schema_id, known in self.known.items():
            if known == schema:
                return schema_id
        self.known[len(self.known) + 1] = schema
        return len(self.known)


def framed(schema_id: int, schema: Any, **fields: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), fields)
    return b"\0" + schema_id.to_bytes(4, "big") + out.getvalue()


def records(*values: bytes, start: int = 100, time_ms: int = 10_000) -> Records:
    n = len(values)
    offsets = np.arange(start, start + n, dtype=np.int64)
    return Records(
        offsets, np.full(n, time_ms, np.int64), BytesColumn.of([b""] * n), BytesColumn.of(values), start + n
    )


def served(r: str, ts: int, *ids: int) -> bytes:
    return framed(1, SERVED, r=r, ts=ts, items=[{"id": i, "p": i / 2} for i in ids], after="!")


def wider(r: str, ts: int, *ids: int) -> bytes:
    return framed(2, WIDER, new=7, r=r, ts=ts, items=[{"id": i, "p": i / 2} for i in ids], after="?")


def action(
    r: str, id: int, ts: int, type: str = "click", seconds: float | None = None, e: str = "e"
) -> bytes:
    return framed(4, ACTION, r=r, id=id, e=f"{e}{r}{id}{ts}", ts=ts, type=type, seconds=seconds)
