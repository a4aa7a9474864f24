"""Avro records as JSON events, for topics in JSON and for a gateway's clients. Needs the extra `replay`
(fastavro)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from freshet.spec.avro import Array, Fixed, Map, Primitive, Record, Type, Union, to_json
from freshet.types import BytesColumn

__all__ = ["json_events"]


def json_events(records: BytesColumn, schema: Record) -> Sequence[bytes]:
    """Each record as one line of JSON, as `JsonTranscoder` reads it back: logical types by their numbers,
    bytes as characters to U+00FF."""
    import fastavro  # noqa: PLC0415 - only needed here

    parsed = fastavro.parse_schema(to_json(_bare(schema)))
    return [
        orjson.dumps(fastavro.schemaless_reader(io.BytesIO(record), parsed, None), default=_latin)
        for record in records
    ]


def _latin(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    raise TypeError(type(value).__name__)


def _bare(type_: Type) -> Any:  # noqa: PLR0911 - one for each kind of type
    """The type without logical types."""
    match type_:
        case Primitive():
            return Primitive(type_.name)
        case Fixed():
            return replace(type_, logical=None, attributes=())
        case Array(items):
            return Array(_bare(items))
        case Map(values):
            return Map(_bare(values))
        case Union(branches):
            return Union(tuple(_bare(b) for b in branches))
        case Record(_, fields):
            return replace(type_, fields=tuple(replace(f, type=_bare(f.type)) for f in fields))
        case _:
            return type_
