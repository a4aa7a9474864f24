"""Acknowledged events in the topics of another run, from which a new model learns."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
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
from freshet.config.spec.schemas import streams_of
from freshet.errors import BadInput, ConfigError, Mismatch
from freshet.features import frame_ids, take
from freshet.log import EventLog
from freshet.log.schema_ids import FRAME_BYTES, SchemaRegistry
from freshet.recordings.event_times import SetAside
from freshet.recordings.sources import AvroRecords, Piece, Role
from freshet.types import I64, BytesColumn, Records, TopicPartition

if TYPE_CHECKING:
    from freshet.config.spec import Spec

__all__ = ["events_of_topics", "json_events"]


def json_events(records: BytesColumn, schema: Written, reader: Record | None = None) -> Sequence[bytes]:
    """Convert Avro records to lines of JSON that `JsonTranscoder` can read. Needs the extra `replay`.

    Logical types become their numbers, bytes become characters up to U+00FF.

    Args:
        records: N Avro records without framing.
        schema: the writer's.
        reader: the schema to resolve to; None: `schema`.

    Raises BadInput if a record does not resolve.
    """
    import fastavro  # noqa: PLC0415 - only needed here

    same = reader is None or canonical(reader) == canonical(schema)
    written = fastavro.parse_schema(without_defaults(to_json(_bare(schema))))
    read = None if same or reader is None else fastavro.parse_schema(to_json(_bare(reader), aliases=True))
    lines = []
    for i, record in enumerate(records):
        try:
            value = fastavro.schemaless_reader(io.BytesIO(record), written, read)
        except Exception as error:  # fastavro does not specify the types of its errors
            raise BadInput(f"record {i} cannot be read as the spec's schema: {error}") from error
        lines.append(orjson.dumps(value, default=_latin))
    return lines


def _latin(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    raise TypeError(type(value).__name__)


def _bare(type_: Type) -> Any:  # noqa: PLR0911 - one for each kind of type
    """Remove the logical types."""
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


POLL_RECORDS = 4_096


@dataclass(frozen=True, slots=True)
class _Stream:
    role: Role
    json: bool


def events_of_topics(
    log: EventLog,
    spec: Spec,
    set_aside: SetAside,
    *,
    since_ms: int | None = None,
    until_ms: int | None = None,
) -> Iterator[Piece]:
    """Read the spec's event topics from a log, up to their present ends.

    Args:
        log:       of the other run; it names topics as `spec` does.
        set_aside: counts records without a Confluent frame or with an unknown schema; readers of the pieces
                   add other unreadable ones.
        since_ms:  log time of the first records; None: the start of the topics.
        until_ms:  log time before which records count; None: no limit.

    Raises:
        Mismatch: the log lacks a topic.
        ConfigError: a stream has an external writer, so its schemas are not in the log.
    """
    events = spec.events
    for stream in streams_of(spec):
        if stream.external:
            raise ConfigError(
                "replay topics", f"events.{stream.role}.format", stream.format, "avro or json",
                "what others write is read again from their topic: let a joiner begin at its start",
            )  # fmt: skip
    streams = {
        s.topic: _Stream(s.role, s.format == "json")
        for s in (events.served, events.shown, events.action)
        if s is not None
    }
    ends, position = _range(log, streams, since_ms, until_ms)
    registry = SchemaRegistry(log)
    reader = log.reader()
    reader.assign(position)
    try:
        while any(position[at] < ends[at] for at in ends):
            for at, records in reader.poll(POLL_RECORDS, 1.0):
                wanted = int(np.searchsorted(records.offsets, ends[at]))
                position[at] = records.next_offset
                if wanted:
                    found = records if wanted == len(records) else records.where(range(wanted))
                    yield from _pieces(streams[at.topic], found, registry, at, set_aside)
    finally:
        reader.close()


def _range(
    log: EventLog, streams: Mapping[str, _Stream], since_ms: int | None, until_ms: int | None
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    known = log.topics()
    missing = [topic for topic in streams if topic not in known]
    if missing:
        raise Mismatch(
            f"the log has no topic {missing[0]!r}; it has {', '.join(sorted(known))}\n"
            "  is this the run folder of the model whose events the spec names?"
        )
    places = [TopicPartition(topic, p) for topic in streams for p in range(known[topic].partitions)]
    ends = {at: log.bounds(at).end if until_ms is None else log.offset_at(at, until_ms) for at in places}
    starts = {at: log.bounds(at).start if since_ms is None else log.offset_at(at, since_ms) for at in places}
    return ends, starts


def _pieces(
    stream: _Stream, records: Records, registry: SchemaRegistry, at: TopicPartition, set_aside: SetAside
) -> Iterator[Piece]:
    """Yield a piece for each schema of the records."""
    role = stream.role
    set_aside.read[role] += len(records)
    if stream.json:
        places = {role: partial(_place, at, records.offsets)}
        yield Piece({}, len(records), places=places, texts={role: records.values}, set_aside=set_aside)
        return
    ids = frame_ids(records.values)
    for schema_id in np.unique(ids).tolist():
        rows = np.flatnonzero(ids == schema_id)
        place = partial(_place, at, records.offsets[rows])
        if schema_id < 0:
            found = "expected Avro in a Confluent frame, found other bytes"
            set_aside.add(role, "unreadable", f"{place(0)}: {found}", len(rows))
            continue
        try:
            schema = registry.get(schema_id)
        except (KeyError, ConfigError) as error:
            reason = error.args[0] if isinstance(error, KeyError) else error
            set_aside.add(role, "no_schema", f"{place(0)}: {reason}", len(rows))
            continue
        payloads = take(records.values, rows, FRAME_BYTES)
        yield Piece(
            {},
            len(rows),
            (AvroRecords(role, schema, payloads),),
            places={role: place},
            set_aside=set_aside,
        )


def _place(at: TopicPartition, offsets: I64, index: int) -> str:
    return f"{at}, offset {offsets[index]}"
