"""Sources of recorded events, as an iterator of pieces: files, and topics of another run."""

from __future__ import annotations

import gzip
import heapq
import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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
from freshet.config.spec.inputs import UNIT_NS
from freshet.config.spec.model import Files, TimeField
from freshet.config.spec.schemas import streams_of
from freshet.errors import BadInput, ConfigError, Mismatch
from freshet.features import frame_ids, take
from freshet.log import EventLog
from freshet.log.schema_ids import FRAME_BYTES, SchemaRegistry
from freshet.recordings.csv_text import other_format
from freshet.recordings.event_times import EventTimes, SetAside
from freshet.types import I64, BytesColumn, Records, TopicPartition

if TYPE_CHECKING:
    from freshet.config.spec import Spec

Role = Literal["served", "shown", "action"]

PIECE_EVENTS = 2_000
UNIT_MS = {unit: ns / 1e6 for unit, ns in UNIT_NS.items()}


@dataclass(frozen=True, slots=True, eq=False)
class AvroRecords:
    """Avro events of one stream, all written with one schema."""

    role: Role
    schema: Written
    payloads: BytesColumn  # without framing


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive events; impressions come before their actions."""

    lines: Mapping[Role, bytes]  # newline-delimited JSON
    events: int
    records: Sequence[AvroRecords] = ()
    places: Mapping[Role, Callable[[int], str]] = field(default_factory=dict)  # place of an event by index
    texts: Mapping[Role, BytesColumn] = field(default_factory=dict)  # JSON that may hold line breaks
    set_aside: SetAside | None = None  # counts unreadable events; without it the first one is an error

    def place(self, role: Role, index: int) -> str:
        """Return the place of an event, for messages."""
        place = self.places.get(role)
        return f"{role} stream, event {index}" if place is None else place(index)


def events_of_files(
    files: Mapping[Role, Path],
    times: Mapping[Role, TimeField],
    schemas: Mapping[Role, Record] | None = None,
    form: Files | None = None,
    seen: Mapping[Role, EventTimes] | None = None,
) -> Iterator[Piece]:
    """Read one file for each stream and merge their events by time. Formats: JSON lines, csv, Parquet, Arrow.

    A column has the path of its field as its name (`user.id`), or is part of a struct; its values are read as
    the field's type. JSON lines stay unchanged.

    Args:
        files: by stream, each in order of time.
        times: the time fields by stream.
        schemas: by stream, required for files with columns.
        form: format of csv files.
        seen: checks of event times by stream.

    Raises BadInput, with file and row, for a row that is no event, does not fit its field, or has no time.
    """
    streams = {
        role: _read_columns(path, times[role], (schemas or {})[role], form or Files())
        if is_columnar(path)
        else _read_json(path, times[role])
        for role, path in files.items()
    }
    gathered: dict[Role, list[_Event]] = {}
    count, served = 0, False
    for event in heapq.merge(*(_tagged(role, events) for role, events in streams.items())):
        gathered.setdefault(event.role, []).append(event)
        served |= event.role == "served"
        count += 1
        if count == PIECE_EVENTS:
            yield _piece(gathered, seen)
            gathered, count = {}, 0
    if "served" in files and not served:
        raise BadInput(f"{files['served']}: expected events that were served, found no events")
    if count:
        yield _piece(gathered, seen)


class _Event(NamedTuple):
    """An event, ordered by time, stream and number."""

    time_ms: float
    role: Role
    number: int  # in its file
    event: bytes
    of: _Source


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """A file of events."""

    where: Callable[[int], str]  # place of an event by its number
    schema: Record | None = None  # of rows in Avro; None: JSON lines


Timed = Iterator[tuple[float, int, bytes, _Source]]


def _tagged(role: Role, events: Timed) -> Iterator[_Event]:
    return (_Event(time_ms, role, number, event, of) for time_ms, number, event, of in events)


def _piece(gathered: Mapping[Role, Sequence[_Event]], seen: Mapping[Role, EventTimes] | None) -> Piece:
    lines: dict[Role, bytes] = {}
    records: list[AvroRecords] = []
    places: dict[Role, Callable[[int], str]] = {}
    for role, events in gathered.items():
        of = events[0].of
        places[role] = partial(_place, events)
        if of.schema is None:
            lines[role] = b"\n".join(e.event for e in events)
        else:
            records.append(AvroRecords(role, of.schema, BytesColumn.of(e.event for e in events)))
        if seen is not None:
            times_ms = np.array([e.time_ms for e in events])
            seen[role].add(np.clip(times_ms, -(2.0**62), 2.0**62).astype(np.int64), places[role])
    return Piece(lines, sum(map(len, gathered.values())), records, places)


def _place(events: Sequence[_Event], index: int) -> str:
    return events[index].of.where(events[index].number)


def _read_columns(path: Path, time: TimeField, schema: Record, files: Files) -> Timed:
    from freshet.recordings.sample_files import event_rows  # noqa: PLC0415 - pyarrow is slow to import

    of: _Source | None = None
    for first, times_us, records, where in event_rows(path, time, schema, files):
        of = of or _Source(where, schema)
        for i, (at_us, record) in enumerate(zip(times_us.tolist(), records, strict=True)):
            yield at_us / 1000, first + i, record, of


def _read_json(path: Path, time: TimeField) -> Timed:
    of = _Source(lambda number: f"{path}, line {number}")
    for number, line in _json_lines(path):
        event = _parse_object(path, number, line)
        found: Any = event
        for part in time.path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        at_ms = _ms(found, time.unit)
        if at_ms is None:
            wanted = "ISO 8601 text" if time.unit == "iso" else f"a number of {time.unit}"
            raise BadInput(
                f"{path}, line {number}: expected a time at {time.path!r} ({wanted}), found {found!r:.60}"
            )
        yield at_ms, number, line.strip().replace(b"\r", b" "), of


def _parse_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        hint = "one object a line, as `jq -c` writes it" if number == 1 else ""
        if number == 1 and line.lstrip()[:1] == b"[":
            hint = "an array is not read: write one object a line, as `jq -c '.[]'` does"
        elif number == 1 and line.lstrip()[:1] not in (b"{", b'"'):
            hint = "files with columns are named .csv, .tsv, .parquet or .arrow (and .gz)"
        raise BadInput(
            f"{path}, line {number}: expected a JSON object, found {error}" + (f"\n  {hint}" if hint else "")
        ) from None
    if not isinstance(event, dict):
        hint = "\n  one object a line, as `jq -c '.[]'` writes an array" if isinstance(event, list) else ""
        raise BadInput(f"{path}, line {number}: expected a JSON object, found {event!s:.60}{hint}")
    return event


def _json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the non-empty lines with their numbers."""
    try:
        with path.open("rb") as raw:
            head = raw.peek(2)[:2]  # peeked, because a pipe cannot be read twice
            zipped = head == b"\x1f\x8b"
            if path.suffix == ".gz" and head and not zipped:
                raise BadInput(f"{path}: expected gzip, as its name ends in .gz; found other bytes")
            file: Any = gzip.GzipFile(fileobj=raw) if zipped else raw
            for number, line in enumerate(file, 1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                other = other_format(text) if number == 1 else None
                if other is not None:
                    raise BadInput(f"{path}: expected JSON lines, csv, Parquet or Arrow, found {other}")
                if text[:2] in (b"\xff\xfe", b"\xfe\xff") and number == 1:
                    raise BadInput(f"{path}: expected JSON lines in UTF-8, found UTF-16: convert it first")
                if text.strip():
                    yield number, text
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise BadInput(
            f"{path}: expected whole gzip data, found an end or damage on the way: is it cut?"
        ) from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from error


def _ms(found: Any, unit: str) -> float | None:
    """Convert a value to ms since 1970, without an offset as UTC; None if it is no time."""
    if unit == "iso":
        try:
            moment = datetime.fromisoformat(found)
        except (TypeError, ValueError):
            return None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) * UNIT_MS[unit]


COLUMNAR = (".csv", ".tsv", ".psv", ".txt", ".dat", ".parquet", ".pq", ".arrow", ".feather")


def is_columnar(path: Path) -> bool:
    """Report whether a file has columns, by its name or the first bytes of Parquet and Arrow."""
    if path.name.lower().removesuffix(".gz").endswith(COLUMNAR):
        return True
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(6).startswith((b"PAR1", b"ARROW1"))
    except OSError:
        return False


# --- Acknowledged events in the topics of another run, from which a new model learns.


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
class _Topic:
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
        s.topic: _Topic(s.role, s.format == "json")
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
    log: EventLog, streams: Mapping[str, _Topic], since_ms: int | None, until_ms: int | None
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
    stream: _Topic, records: Records, registry: SchemaRegistry, at: TopicPartition, set_aside: SetAside
) -> Iterator[Piece]:
    """Yield a piece for each schema of the records."""
    role = stream.role
    set_aside.read[role] += len(records)
    if stream.json:
        places = {role: partial(_offset_place, at, records.offsets)}
        yield Piece({}, len(records), places=places, texts={role: records.values}, set_aside=set_aside)
        return
    ids = frame_ids(records.values)
    for schema_id in np.unique(ids).tolist():
        rows = np.flatnonzero(ids == schema_id)
        place = partial(_offset_place, at, records.offsets[rows])
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


def _offset_place(at: TopicPartition, offsets: I64, index: int) -> str:
    return f"{at}, offset {offsets[index]}"
