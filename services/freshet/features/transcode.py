"""Transcoder from JSON events to Avro records, strict by the schema; one native call per request or batch.

- An int or long is a JSON number without fraction or exponent, in range, kept exactly; -0 is 0. Float and
  double take the nearest value of any number within their range, and 0 for one that is nearer to 0.
- A decimal is a number that fits its precision and scale, or its bytes, as below.
- A string is a string. Bytes and fixed are strings of the characters U+0000 to U+00FF, as in Avro's own JSON.
- A union takes the first branch that fits (no `{"string": ...}` wrapping).
- A missing field takes its default, or null if it may be null; a field that the schema does not have is
  refused.
- A name stands once in an object, also in objects that the schema does not have.
- Text is JSON of RFC 8259 in UTF-8: no NaN, no half of a surrogate pair, at most 64 levels in an event. A
  byte-order mark at the beginning is skipped.

Letters: R bodies of requests, N events, G good events, P partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from freshet import _native
from freshet.config.avro.schema import Array, Enum, Fixed, Primitive, Record, Type, Union, spell
from freshet.config.avro.types import decimal_scale
from freshet.features.events import EventExtractor
from freshet.features.program import compile_program
from freshet.features.writer import Writer, compile_writer
from freshet.types import I32, I64, Append, BytesColumn

# --- Validation of Avro from clients, before it is acknowledged


class AvroValidator:
    """Validator of records of one schema, to the last byte: bounds, branches, symbols, UTF-8. Thread-safe."""

    def __init__(self, schema: Record) -> None:
        self._program = compile_program(schema, [])

    def refused(self, values: BytesColumn, *, framed: bool) -> list[RefusedEvent]:
        """Return the records, of (N,) `values`, that are not of this schema, ascending by index.

        With `framed`, each record starts with a Confluent frame.
        """
        failures = _native.validate_avro(self._program.native, values.data, values.ends, framed)
        return [
            RefusedEvent(
                index,
                self._program.places[node][0],
                self._program.places[node][1],
                self._program.explain(why, 0, offset),
            )
            for index, _, why, node, offset in failures.tolist()
        ]


# --- Bodies of requests to records for the log: many bodies in one native call, no Python object per event
#
# A body is accepted whole or not at all. A body with an invalid event, or with an event time that is too
# late, is skipped: the caller must validate its events one by one to give reasons.


@dataclass(frozen=True, slots=True, eq=False)
class AcceptedBodies:
    """The N events of the accepted ones among R bodies, by partition."""

    counts: I64  # (R,) events of each body; -1: the body was skipped
    partitions: I32  # (N,) partition of each event, in the order of the bodies
    positions: I64  # (N,) position of each event within its partition
    starts: I64  # (P + 1,) first row of each partition in `records` and `keys`
    records: BytesColumn  # (N,) by partition, then in the order of the bodies
    keys: BytesColumn  # (N,) the request's id as text, in the order of `records`

    @property
    def size(self) -> int:
        """Bytes of records and keys."""
        return len(self.records.data) + len(self.keys.data)

    def without_records(self) -> AcceptedBodies:
        """Return what answers to the bodies need, without the memory of their events."""
        return replace(self, records=BytesColumn.of(()), keys=BytesColumn.of(()))

    def appends(self, topic: str) -> list[Append]:
        """Return an append for each partition with events, ascending; records share this object's memory."""
        used = self._used.tolist()
        bounds = self.starts.tolist()
        return [
            Append(
                topic,
                p,
                self.records.slice(bounds[p], bounds[p + 1]),
                self.keys.slice(bounds[p], bounds[p + 1]),
            )
            for p in used
        ]

    def offsets(self, firsts: Sequence[int]) -> I64:
        """Return the (N,) offsets of the events. `firsts` has the first offset of each of `appends`."""
        by_partition = np.zeros(len(self.starts) - 1, np.int64)
        by_partition[self._used] = firsts
        return np.asarray(by_partition[self.partitions] + self.positions)

    def answers(self, topic: str, firsts: Sequence[int]) -> list[bytes]:
        """Return the (R,) JSON responses with the offset of every event; b"" for skipped bodies.

        Args:
            topic: Topic as JSON, quotes included.
            firsts: First offset of each of `appends`.
        """
        by_partition = np.zeros(len(self.starts) - 1, np.int64)
        by_partition[self._used] = firsts
        return _native.write_acks(topic, self.counts, self.partitions, self.positions, by_partition)

    def bodies_in(self, partition: int) -> NDArray[np.bool_]:
        """Return (R,) whether a body has events in this partition."""
        bodies = np.repeat(np.arange(len(self.counts)), np.maximum(self.counts, 0))
        found = np.zeros(len(self.counts), np.bool_)
        found[bodies[self.partitions == partition]] = True
        return found

    @property
    def _used(self) -> I64:
        return np.flatnonzero(np.diff(self.starts))


class EventIntake:
    """Converter of request bodies of one stream and schema to records for the log. Thread-safe."""

    def __init__(
        self, extractor: EventExtractor, *, schema_id: int, partitions: int, max_events: int
    ) -> None:
        """Create an intake for a topic of `partitions`; bodies of more than `max_events` are skipped."""
        self._plan, self._program = extractor.native
        self._schema_id, self._partitions, self._max_events = schema_id, partitions, max_events

    def json(
        self, transcoder: JsonTranscoder, bodies: list[bytes], *, latest_ms: int, keep_text: bool
    ) -> AcceptedBodies:
        """Convert bodies of JSON: an object, an array of objects, or an object per line.

        Args:
            transcoder: Transcoder to framed Avro of the schema.
            bodies: R bodies.
            latest_ms: Latest event time; a body with a later event is skipped.
            keep_text: Records are the events' JSON text, not their Avro.
        """
        writer, prefix, ignore_unknown = transcoder.native
        result = _native.intake_json(
            self._plan, self._program, writer, bodies, ignore_unknown, prefix, keep_text,
            self._partitions, latest_ms, self._max_events,
        )  # fmt: skip
        return _accepted(result)

    def avro(self, bodies: list[bytes], *, latest_ms: int, lengths: bool) -> AcceptedBodies:
        """Convert bodies of framed Avro; records stay byte for byte.

        A body is one record; with `lengths` any number of records, each after its length (u32, big-endian).
        """
        result = _native.intake_avro(
            self._plan, self._program, self._schema_id, bodies, lengths,
            self._partitions, latest_ms, self._max_events,
        )  # fmt: skip
        return _accepted(result)


def _accepted(result: _native.IntakeTuple) -> AcceptedBodies:
    counts, partitions, positions, starts, records, keys = result
    return AcceptedBodies(counts, partitions, positions, starts, BytesColumn(*records), BytesColumn(*keys))


# JsonWhy in json_avro.hpp
SYNTAX, TYPE, RANGE, SYMBOL, SIZE, MISSING, UNKNOWN, DUPLICATE, MORE = range(1, 10)

MOST_EVENTS = 1_000_000
"""Default limit of events in one body."""


@dataclass(frozen=True, slots=True)
class RefusedEvent:
    """An invalid event, with the reason for the client."""

    index: int  # index of the event in the request or column
    path: str  # "items[3].id"; "" for the event as a whole
    expected: str
    found: str

    def __str__(self) -> str:
        return f"event {self.index}: {self.path or 'the event'}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True, eq=False)
class Transcoded:
    """Avro records of the good events of a request or column, and the bad events."""

    records: BytesColumn  # (G,) Avro of the good events, framed if a schema id was given
    events: I64  # (G,) index of each among all events, ascending
    bad: Sequence[RefusedEvent]  # ascending by index
    begins: I64  # (N,) start of each event's text in the body, or in its own value
    ends: I64  # (N,) its end

    @property
    def total(self) -> int:
        """Number of events, good and bad."""
        return len(self.begins)


class JsonTranscoder:
    """Transcoder for JSON events of one schema. Thread-safe."""

    def __init__(self, schema: Record, *, schema_id: int | None = None, ignore_unknown: bool = False) -> None:
        """Compile the schema.

        Args:
            schema: Schema of the records to write.
            schema_id: Id for a Confluent frame before each record; None writes no frames.
            ignore_unknown: Skip fields that the schema lacks, for topics of external producers.

        Raises:
            ConfigError: A default in the schema is not of its field's type.
        """
        self._writer = compile_writer(schema)
        self._prefix = b"" if schema_id is None else b"\x00" + schema_id.to_bytes(4, "big")
        self._ignore_unknown = ignore_unknown

    @property
    def native(self) -> tuple[_native.WriterSchema, bytes, bool]:
        """Native schema, prefix and `ignore_unknown`, for other native calls of this package."""
        return self._writer.native, self._prefix, self._ignore_unknown

    def column(self, events: BytesColumn) -> Transcoded:
        """Transcode N events, each one JSON object."""
        return self._transcoded(
            _native.transcode_each(
                self._writer.native, events.data, events.ends, self._ignore_unknown, self._prefix
            )
        )

    def body(self, body: bytes, max_events: int = MOST_EVENTS) -> Transcoded:
        """Transcode a request's body: a sequence of objects, on lines or not, and arrays of objects.

        An invalid event is refused alone if its end is certain: an array's element ends at its comma, an
        object at its brace, other text at the end of its line. Otherwise all text up to the next line that
        begins with a brace is refused as one event. Stops after `max_events` + 1 events.
        """
        return self._transcoded(
            _native.transcode_body(self._writer.native, body, self._ignore_unknown, self._prefix, max_events)
        )

    def _transcoded(self, result: _native.TranscodedTuple) -> Transcoded:
        records, events, bad, begins, ends = result
        return Transcoded(
            BytesColumn(*records), events, [_refused(self._writer, failure) for failure in bad], begins, ends
        )


def _refused(writer: Writer, failure: tuple[int, int, int, int, str, str, str]) -> RefusedEvent:
    index, why, node, position, path, found, syntax = failure
    expected = _expected(writer.types[node], why, syntax, position)
    if why == MISSING:
        found = "nothing"
    elif why == UNKNOWN:
        found = "a field that the schema does not have"
    elif why == DUPLICATE:
        found = "it again"
    return RefusedEvent(index, path, expected, found)


def _expected(type_: Type, why: int, syntax: str, position: int) -> str:
    inner = type_.others[0] if isinstance(type_, Union) and len(type_.others) == 1 else type_
    if why in (SYNTAX, MORE):
        return f"{syntax}, at byte {position}"
    if why == UNKNOWN and isinstance(inner, Record):
        return f"one of {', '.join(f.name for f in inner.fields)}"
    if why == DUPLICATE:
        return "each field once"
    if why == SYMBOL and isinstance(inner, Enum):
        return f"one of {', '.join(inner.symbols)}"
    if why == SIZE and isinstance(inner, Fixed):
        return f"{inner.size} bytes, a character each"
    return _in_json(type_)


def _in_json(type_: Type) -> str:
    """Describe a type in terms of JSON."""
    scale = decimal_scale(type_)
    if scale is not None and isinstance(type_, Primitive | Fixed):
        digits = dict(type_.attributes)["precision"]
        return f"a number (decimal of {digits} digits, {scale} of them behind the point)"
    match type_:
        case Record():
            return "an object"
        case Array():
            return f"an array ({spell(type_)})"
        case Union(branches):
            return " or ".join(dict.fromkeys(_in_json(b) for b in branches))
        case Enum(_, symbols):
            return f"one of {', '.join(symbols)}"
        case _:
            words = {
                "int": "an int (whole, 32 bits)",
                "long": "a long (whole, 64 bits)",
                "float": "a number (float)",
                "double": "a number (double)",
                "boolean": "true or false",
                "string": "a string",
                "bytes": "a string of bytes (characters to U+00FF)",
            }
            return words.get(spell(type_), spell(type_))
