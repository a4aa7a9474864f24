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

from freshet import _native
from freshet.config.avro.logical_types import decimal_scale
from freshet.config.avro.schema import Array, Enum, Fixed, Primitive, Record, Type, Union, spell
from freshet.features.writer import Writer, compile_writer
from freshet.types import I64, BytesColumn

__all__ = ["JsonTranscoder", "RefusedEvent", "Transcoded"]

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
