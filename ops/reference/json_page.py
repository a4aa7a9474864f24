"""Events as JSON: what is taken, in answers that the parser gives while this page is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from freshet.config.avro.schema import parse_schema
from freshet.features import JsonTranscoder
from freshet.types import BytesColumn
from ops.reference.markdown import escaped, grid, header

SCHEMA = parse_schema(
    {
        "type": "record",
        "name": "Action",
        "fields": [
            {"name": "request_id", "type": "string"},
            {"name": "item", "type": "long"},
            {"name": "ts", "type": "long"},
            {"name": "score", "type": ["null", "double"], "default": None},
            {"name": "note", "type": ["null", "string"], "default": None},
            {"name": "tags", "type": {"type": "map", "values": "long"}, "default": {}},
        ],
    }
)
"""The events of the examples."""

START = b'{"request_id":"r","item":1,"ts":1'


@dataclass(frozen=True, slots=True)
class Event:
    """One event, sent by every way in."""

    about: str
    more: bytes  # after START
    taken: bool
    kept: str = ""  # what of it is worth a word
    whole: bytes = b""  # instead of START, `more` and a brace

    @property
    def text(self) -> bytes:
        """The event."""
        return self.whole or START + self.more + b"}"


@dataclass(frozen=True, slots=True)
class Body:
    """A body of HTTP or gRPC, of any media type of JSON."""

    about: str
    body: bytes
    taken: Sequence[int]  # indexes of events
    refused: Sequence[bytes]  # as they are kept


def _item(number: bytes) -> bytes:
    return b'{"request_id":"r","item":%s,"ts":1}' % number


EVENTS = (
    Event("a name twice", b',"item":2', taken=False),
    Event("a name twice, one of them escaped", b',"\\u0069tem":2', taken=False),
    Event("a key twice in a map", b',"tags":{"a":1,"a":2}', taken=False),
    Event("a whole number beyond 2^53", b"", taken=True, kept="exactly", whole=_item(b"9007199254740993")),
    Event("the largest of 64 bits", b"", taken=True, kept="exactly", whole=_item(b"9223372036854775807")),
    Event("a whole number beyond 64 bits", b"", taken=False, whole=_item(b"9223372036854775808")),
    Event("a whole number with a fraction of 0", b"", taken=True, kept="1", whole=_item(b"1.0")),
    Event("a whole number with an exponent", b"", taken=True, kept="1000", whole=_item(b"1e3")),
    Event("the same from 2^53 on", b"", taken=False, whole=_item(b"9007199254740993.0")),
    Event("a fraction for a whole number", b"", taken=False, whole=_item(b"1.5")),
    Event("-0 for a whole number", b"", taken=True, kept="0", whole=_item(b"-0")),
    Event("-0 for a double", b',"score":-0', taken=True, kept="-0.0"),
    Event("2^53 + 1 for a double", b',"score":9007199254740993', taken=True, kept="the nearest double"),
    Event("a number too near to 0 for a double", b',"score":1e-400', taken=True, kept="0"),
    Event("a number too large for a double", b',"score":1e400', taken=False),
    Event("NaN", b',"score":NaN', taken=False),
    Event("infinity", b',"score":-Infinity', taken=False),
    Event("a number with leading zeros", b',"score":007', taken=False),
    Event("half of a surrogate pair", b',"note":"\\ud83d"', taken=False),
    Event("a whole surrogate pair", b',"note":"\\ud83d\\ude00"', taken=True, kept="one character"),
    Event("bytes that are no UTF-8", b',"note":"\xff"', taken=False),
    Event("a surrogate in UTF-8", b',"note":"\xed\xa0\xbd"', taken=False),
    Event("a zero byte, escaped", b',"note":"\\u0000"', taken=True, kept="that character"),
    Event("a control character in a string", b',"note":"\x01"', taken=False),
    Event("a number for a string", b',"note":7', taken=False),
    Event("a comma before the brace", b",", taken=False),
    Event("single quotes", b"", taken=False, whole=b"{'request_id':'r','item':1,'ts':1}"),
    Event("a comment", b"/* one */", taken=False),
    Event("65 levels", b',"tags":' + b"[" * 64 + b"]" * 64, taken=False),
    Event("an array for an event", b"", taken=False, whole=b'[{"request_id":"r","item":1,"ts":1}]'),
    Event("a text for an event", b"", taken=False, whole=b'"text"'),
)  # fmt: skip
"""An event alone: over HTTP, gRPC, from JSON lines of `freshet replay files`, in a topic of JSON."""

TORN = b'{"note":"torn},'
A, B = b'{"request_id":"a","item":1,"ts":1}', b'{"request_id":"b","item":2,"ts":2}'

BODIES = (
    Body("an object", A, [0], []),
    Body("an array", b"[" + A + b"," + B + b"]", [0, 1], []),
    Body("lines, with CRLF and empty ones", A + b"\r\n\r\n" + B + b"\r\n", [0, 1], []),
    Body("objects one after the other", A + B, [0, 1], []),
    Body("lines that are arrays", b"[" + A + b"]\n[" + B + b"]", [0, 1], []),
    Body("an object over several lines", A.replace(b",", b",\n  "), [0], []),
    Body("a byte-order mark before it", b"\xef\xbb\xbf" + A, [0], []),
    Body("nothing, white space, `[]`", b" \r\n[]", [], []),
    Body("an element that is wrong", b"[" + A + b', {"item":NaN} ,' + B + b"]", [0, 2], [b'{"item":NaN}']),
    Body("an array in an array", b"[[" + A + b"]," + B + b"]", [1], [b"[" + A + b"]"]),
    Body("a comma at the end of an array", b"[" + A + b",]", [0], [b","]),
    Body("an array that is cut off", b"[" + A + b"," + B[:20], [0], [B[:20]]),
    Body("an array whose last bracket is missing", b"[" + A + b"," + B, [0], [B]),
    Body("an element without a certain end", b"[" + TORN + A + b"]", [], [TORN + A + b"]"]),
    Body("a line that is torn", A[:20] + b"\n" + B, [1], [A[:20]]),
    Body("a line with something after its event", A + b",\n" + B, [1], [A + b","]),
    Body("a line that is no object", b"garbage, 1\n" + A, [1], [b"garbage, 1"]),
    Body("something after an array", b"[" + A + b"] x", [0], [b"x"]),
)  # fmt: skip
"""Bodies that hold events A and B, over HTTP and gRPC."""

INTRO = """\
One parser reads events that are JSON, over every way in: HTTP as `application/json`, `application/x-ndjson`
or `application/jsonl`; gRPC as `JSON` or `JSON_LINES`, by `Put` and `PutStream`; JSON lines of
`freshet replay files`; topics of the format `json` that others write. The tables are written from its
answers, and tests send each case by every one of these ways.

What is refused over HTTP and gRPC is kept in `<model>.refused` byte for byte as it was sent, with its index
and the reason; only bytes beyond the topic's largest record are left out, and counted. The others are
accepted. In a topic of others a refused record becomes a dead letter. `freshet replay files` stops at it and
names the line. What is taken stands in a topic of the format `json` as it was sent, in others as Avro by the
stream's schema.
"""

VALUES = """
## An event
JSON is that of RFC 8259 in UTF-8. A name stands once in each object, also in objects that the schema does not
have: a topic of the format `json` takes fields beyond the schema, others refuse them. The example has the
fields `request_id` (string), `item` and `ts` (long), `score` (null or double), `note` (null or string) and
`tags` (map of long).

`freshet.client` writes the JSON itself: it raises `BadInput` for NaN, infinities, half surrogate pairs and
integers beyond 64 bits before it sends anything. `/v1/rank` refuses a name that stands twice as well (400).
"""

BODY = """
## A body
The media type says that a body is JSON, and no more. A body holds values one after the other, with or without
white space and new lines between: an object is an event, an array holds as many as it has elements. Each
event is judged alone, and one that is wrong is refused alone, where its end is certain:

- An element of an array ends at the comma or bracket that quotes and brackets say.
- An object ends at the brace that they say. After one that is broken no object reaches beyond the next line
  that begins with a brace, so a torn line takes no other with it.
- A value that is no object or array is refused with its line, as is one with something else after it.
- Where quotes and brackets say no end, everything up to the next line that begins with a brace, or to the end
  of the body, is refused as one.

A body without any event is answered with 400, one with more than `FRESHET_GATEWAY_MAX_EVENTS` with 413. `A`
is `{"request_id":"a","item":1,"ts":1}` here, and `B` another event.
"""


@cache
def _transcoder() -> JsonTranscoder:
    return JsonTranscoder(SCHEMA)


def page() -> str:
    """The whole page. Raises AssertionError if the parser answers otherwise than is stated."""
    events = grid(map(_event_row, EVENTS), ("an event with", "such as", "is", "because, or kept as"))
    bodies = grid(map(_body_row, BODIES), ("body", "such as", "accepted", "refused, and kept"))
    return "\n".join(
        [header("Events as JSON", "ops/reference/json_page.py"), INTRO, VALUES, *events, BODY, *bodies, ""]
    )


def _event_row(event: Event) -> tuple[str, ...]:
    made = _transcoder().column(BytesColumn.of([event.text]))
    assert bool(made.bad) is not event.taken, event
    why = event.kept
    if made.bad:
        [bad] = made.bad
        why = f"{bad.path + ': ' if bad.path else ''}expected {bad.expected}, found {bad.found}"
    shown = event.whole or event.more.removeprefix(b",") or b","
    return escaped(event.about), _code(shown), "taken" if event.taken else "refused", escaped(why)


def _body_row(body: Body) -> tuple[str, ...]:
    made = _transcoder().body(body.body)
    refused = [body.body[made.begins[b.index] : made.ends[b.index]] for b in made.bad]
    assert (made.events.tolist(), refused) == ([*body.taken], [*body.refused]), body
    kept = ", ".join(map(_code, body.refused))
    return escaped(body.about), _code(body.body), str(len(body.taken)) if made.total else "400", kept


def _code(text: bytes) -> str:
    """Bytes in a cell, control characters and bytes that are no UTF-8 as escapes."""
    found = text.replace(A, b"A").replace(B, b"B").decode("utf-8", "backslashreplace")
    shown = "".join(
        c if c.isprintable() and c != "\ufeff" else c.encode("unicode_escape").decode() for c in found
    )
    shown = shown if len(shown) <= 60 else f"{shown[:40]}…"
    return f"`{shown}`".replace("|", "\\|")
