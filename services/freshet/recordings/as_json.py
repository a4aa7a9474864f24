"""Avro records as JSON events, for topics in JSON and for a gateway's clients. Needs the extra `replay`
(fastavro)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from freshet.config.avro.schema import (
    Array,
    Fixed,
    Map,
    Primitive,
    Record,
    Type,
    Union,
    Written,
    canonical,
    to_json,
    without_defaults,
)
from freshet.errors import BadInput
from freshet.types import BytesColumn

__all__ = ["json_events"]


def json_events(records: BytesColumn, schema: Written, reader: Record | None = None) -> Sequence[bytes]:
    """Each record as one line of JSON, as `JsonTranscoder` reads it back: logical types by their numbers,
    bytes as characters to U+00FF.

    Args:
        records: (N,) Avro without framing.
        schema: by which they were written.
        reader: what they are read as; None: as they were written.

    Raises BadInput for a record that cannot be read so.
    """
    import fastavro  # noqa: PLC0415 - only needed here

    same = reader is None or canonical(reader) == canonical(schema)
    written = fastavro.parse_schema(without_defaults(to_json(_bare(schema))))
    read = None if same or reader is None else fastavro.parse_schema(to_json(_bare(reader), aliases=True))
    lines = []
    for i, record in enumerate(records):
        try:
            value = fastavro.schemaless_reader(io.BytesIO(record), written, read)
        except Exception as error:  # of bytes and schemas of others: its types are not promised
            raise BadInput(f"record {i} cannot be read as the spec's schema: {error}") from error
        lines.append(orjson.dumps(value, default=_latin))
    return lines


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
