"""JSON events to Avro records, strictly by the schema; whole requests or whole batches in one native call.

- An int or long is a JSON number without fraction or exponent, in range, kept exactly; -0 is 0. Float and
  double take the nearest value of any number within their range, and 0 for one that is nearer to 0.
- A decimal is a number with no more digits than it has, or its bytes, as below.
- A string is a string. Bytes and fixed are strings of the characters U+0000 to U+00FF, as in Avro's own JSON.
- A union takes the first branch that fits (no `{"string": ...}` wrapping).
- A missing field takes its default, or null if it may be null; a field that the schema does not have is
  refused.
- A name stands once in an object, also in objects that the schema does not have.
- Text is JSON of RFC 8259 in UTF-8: no NaN, no half of a surrogate pair, at most 64 levels in an event. A
  byte-order mark at the beginning is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freshet import _native
from freshet.config.avro.schema import Array, Enum, Fixed, Primitive, Record, Type, Union, spell
from freshet.config.avro.types import decimal_scale
from freshet.features.events import EventExtractor
from freshet.features.program import compile_program
from freshet.features.writer import Writer, compile_writer
from freshet.types import I32, I64, Append, BytesColumn

__all__ = ["AvroValidator", "EventIntake", "JsonTranscoder", "RefusedEvent", "TakenBodies", "Transcoded"]

# --- The check of Avro that others encoded, before it is acknowledged.


class AvroValidator:
    """Checks records of one schema to their last byte: bounds, branches, symbols, UTF-8. Thread-safe."""

    def __init__(self, schema: Record) -> None:
        self._program = compile_program(schema, [])

    def refused(self, values: BytesColumn, *, framed: bool) -> list[RefusedEvent]:
        """The records that are not of this schema, rising; `framed`: each starts with a Confluent frame."""
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


# --- Bodies of requests to what the log takes: many bodies in one native call, no Python object per
# event.
#
# A body is taken whole or not at all: one with an event that does not fit, or is dated too late, is
# left for a closer look by whoever tells its client why.


@dataclass(frozen=True, slots=True, eq=False)
class TakenBodies:
    """R bodies, N events of those that are taken, spread over P partitions."""

    counts: I64  # (R,) events of each body; -1: it needs a closer look, nothing of it is here
    partitions: I32  # (N,) of each event, in the order in which they came
    positions: I64  # (N,) of each event among those of its partition
    starts: I64  # (P + 1,) where each partition's rows start in `records` and `keys`
    records: BytesColumn  # (N,) by partition; within one, in the order in which they came
    keys: BytesColumn  # (N,) likewise: the request's id as text

    @property
    def size(self) -> int:
        """Bytes of records and keys."""
        return len(self.records.data) + len(self.keys.data)

    def appends(self, topic: str) -> list[Append]:
        """One append for each partition that gets any, in the order of partitions; they share memory."""
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
        """(N,) each event's offset. `firsts`: the first offset of each of `appends`."""
        by_partition = np.zeros(len(self.starts) - 1, np.int64)
        by_partition[self._used] = firsts
        return np.asarray(by_partition[self.partitions] + self.positions)

    def answers(self, topic: str, firsts: Sequence[int]) -> list[bytes]:
        """What each body's client is told, as JSON: every event's place in the log; b"" for bodies not taken.

        Args:
            topic: as JSON, quotes included.
            firsts: the first offset of each of `appends`.
        """
        by_partition = np.zeros(len(self.starts) - 1, np.int64)
        by_partition[self._used] = firsts
        return _native.write_acks(topic, self.counts, self.partitions, self.positions, by_partition)

    @property
    def _used(self) -> I64:
        return np.flatnonzero(np.diff(self.starts))


class EventIntake:
    """Takes bodies of one stream, written by one schema, for a topic of so many partitions. Thread-safe."""

    def __init__(
        self, extractor: EventExtractor, *, schema_id: int, partitions: int, max_events: int
    ) -> None:
        """`max_events`: of one body; one with more needs a closer look."""
        self._plan, self._program = extractor.native
        self._schema_id, self._partitions, self._max_events = schema_id, partitions, max_events

    def json(
        self, transcoder: JsonTranscoder, bodies: list[bytes], *, latest_ms: int, keep_text: bool
    ) -> TakenBodies:
        """Bodies of JSON: an object, an array of them, or one a line.

        Args:
            transcoder: to framed Avro of the schema.
            latest_ms: an event that is dated later is not taken.
            keep_text: the log takes each event's text as it came, not its Avro.
        """
        writer, prefix, ignore_unknown = transcoder.native
        made = _native.intake_json(
            self._plan, self._program, writer, bodies, ignore_unknown, prefix, keep_text,
            self._partitions, latest_ms, self._max_events,
        )  # fmt: skip
        return _taken(made)

    def avro(self, bodies: list[bytes], *, latest_ms: int, lengths: bool) -> TakenBodies:
        """Bodies of framed Avro, passed on byte for byte: a record each, or if `lengths` any number, each
        after its length (u32, big-endian)."""
        made = _native.intake_avro(
            self._plan, self._program, self._schema_id, bodies, lengths,
            self._partitions, latest_ms, self._max_events,
        )  # fmt: skip
        return _taken(made)


def _taken(made: _native.IntakeTuple) -> TakenBodies:
    counts, partitions, positions, starts, records, keys = made
    return TakenBodies(counts, partitions, positions, starts, BytesColumn(*records), BytesColumn(*keys))


SYNTAX, TYPE, RANGE, SYMBOL, SIZE, MISSING, UNKNOWN, DUPLICATE, MORE = range(
    1, 10
)  # JsonWhy in json_avro.hpp

MOST_EVENTS = 1_000_000
"""Of one body, where the caller has no bound of its own."""


@dataclass(frozen=True, slots=True)
class RefusedEvent:
    """An event that does not fit, in words for the client that sent it."""

    index: int  # of the event in the request or column
    path: str  # "items[3].id"; "" for the event as a whole
    expected: str
    found: str

    def __str__(self) -> str:
        return f"event {self.index}: {self.path or 'the event'}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True, eq=False)
class Transcoded:
    """What became of the events of a request or column."""

    records: BytesColumn  # (G,) Avro of the good ones, framed if a schema id was given
    events: I64  # (G,) index of each among all events, rising
    bad: Sequence[RefusedEvent]  # rising by index
    begins: I64  # (N,) where the text of each event stands in the body, or in its own value
    ends: I64  # (N,)

    @property
    def total(self) -> int:
        """Events seen."""
        return len(self.begins)


class JsonTranscoder:
    """Transcodes JSON events of one schema. Thread-safe."""

    def __init__(self, schema: Record, *, schema_id: int | None = None, ignore_unknown: bool = False) -> None:
        """Compile.

        Args:
            schema: of the records to write.
            schema_id: put a Confluent frame with this id before each record; None: no frame.
            ignore_unknown: skip fields that the schema does not have, for topics that others write.

        Raises:
            ConfigError: a default in the schema is not of its field's type.
        """
        self._writer = compile_writer(schema)
        self._prefix = b"" if schema_id is None else b"\x00" + schema_id.to_bytes(4, "big")
        self._ignore_unknown = ignore_unknown

    @property
    def native(self) -> tuple[_native.WriterSchema, bytes, bool]:
        """Schema, prefix and whether unknown fields are left out, for other native calls of this package."""
        return self._writer.native, self._prefix, self._ignore_unknown

    def column(self, events: BytesColumn) -> Transcoded:
        """Transcode N events, each a JSON object of its own: records of a topic, items already cut apart."""
        return self._made(
            _native.transcode_each(
                self._writer.native, events.data, events.ends, self._ignore_unknown, self._prefix
            )
        )

    def body(self, body: bytes, max_events: int = MOST_EVENTS) -> Transcoded:
        """Transcode a request's body: objects one after the other (a line each, or not), and arrays of them.

        What is wrong is refused alone with its exact bytes, if its end is certain: an element of an array up
        to its comma, an object up to its brace, another line up to its end. What cannot be split is refused
        as one, up to the next line that begins with a brace. Stops after `max_events` and one more.
        """
        return self._made(
            _native.transcode_body(self._writer.native, body, self._ignore_unknown, self._prefix, max_events)
        )

    def _made(self, made: _native.TranscodedTuple) -> Transcoded:
        records, events, bad, begins, ends = made
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
    """A type in words for somebody who writes JSON."""
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
