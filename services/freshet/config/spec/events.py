"""Streams of events, their join and retention, labels, and formats of users' files, as a spec states them."""

# ruff: noqa: RUF009  option() returns a new dataclass field at each call
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from freshet.config.options import Boolean, Choice, Duration, ListOf, Number, Text, Wrong, option
from freshet.config.spec.forms import DAY, MINUTE, NAME, PATH, SECOND

__all__ = ["UNIT_NS", "Events", "Files", "Join", "Label", "Retention", "Stream", "TimeField"]

ENCODINGS = (
    "utf-8", "utf-16", "latin-1", "iso-8859-2", "iso-8859-9", "iso-8859-15", "cp1250", "cp1251", "cp1252",
    "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp437", "cp850", "koi8-r", "koi8-u", "mac-roman",
    "shift_jis", "cp932", "euc-jp", "gb18030", "big5", "euc-kr",
)  # fmt: skip
"""Encodings of texts, by the names of Python's codecs."""

WORD = Text("a word, at most 40 characters", r"[^\r\n]{1,40}", longest=40)
SEPARATOR = Text(
    "one to four characters, no letters, digits, quotes or line ends", r"[^\w\r\n\"]{1,4}", longest=4
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Format of csv files of samples and events. Parquet and Arrow files need none."""

    delimiter: str = option(
        "deployment",
        'separator of cells; "\\t" for tabs, "::" for MovieLens',
        SEPARATOR,
        default=",",
    )
    columns: tuple[str, ...] = option(
        "deployment",
        "names of the columns of a file that has no header line, in their order",
        ListOf(PATH, 0, 4_096),
        default=(),
    )
    encoding: str = option("deployment", "encoding of the text", Choice(ENCODINGS), default="utf-8")
    quotes: bool = option(
        "deployment",
        'whether cells may be quoted, with "" for a quote inside; false: quotes are ordinary characters',
        Boolean(),
        default=True,
    )
    decimal: Literal[".", ","] = option(
        "deployment", "decimal mark of numbers", Choice((".", ",")), default="."
    )
    list_separator: str | None = option(
        "deployment",
        "separator of the values of a list in one cell; without it a cell holds no list",
        SEPARATOR,
        default=None,
    )
    nulls: tuple[str, ...] = option(
        "deployment",
        "cells that mean no value in columns of numbers, truths and times, besides empty cells",
        ListOf(WORD, 0, 64),
        default=("NA", "NaN", "nan", "null"),
    )
    text_nulls: tuple[str, ...] = option(
        "deployment",
        "cells that mean no value in columns of text, besides empty cells without quotes",
        ListOf(WORD, 0, 64),
        default=(),
    )


UNIT_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1, "days": 86_400 * 10**9}
"""Nanoseconds of a tick, by unit of numeric times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeField:
    """Path and unit of an event's time, `"ts:ms"` in the spec."""

    path: str
    unit: Literal["s", "ms", "us", "ns", "days", "iso"]


class TimeText:
    """Form of a path with the unit of the time there, `"ts:ms"`."""

    expected = 'a path and a unit, "field:ms", the unit one of s, ms, us, ns, days, iso'

    def read(self, value: Any) -> TimeField:
        """Return path and unit. Raises Wrong."""
        path, colon, unit = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        if not colon or unit not in (*UNIT_NS, "iso"):
            raise Wrong(self.expected)
        return TimeField(path=PATH.read(path), unit=unit)  # type: ignore[arg-type]

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the text."""
        path = PATH.json_schema()["pattern"].removesuffix("$")
        return {"type": "string", "pattern": f"{path}:(?:{'|'.join((*UNIT_NS, 'iso'))})$"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One stream of the user's events: topic, format, and the fields with key, time and id."""

    role: Literal["served", "shown", "action"]
    topic: str = option(
        "deployment",
        "topic of the event log; without it impressions, shown or actions",
        Text("a topic's name", r"[a-z0-9][a-z0-9._-]{0,200}"),
    )
    format: Literal["avro", "json", "confluent", "bare"] = option(
        "deployment",
        "format of records: avro, with the id of a schema in the topic schemas, or json, both written by "
        "gateway, inference or external writers; confluent, Avro with an id of a schema registry, or bare, "
        "Avro by the stream's schema without a frame, both written by external writers only",
        Choice(("avro", "json", "confluent", "bare")),
        default="avro",
    )
    schema: str | None = option(
        "deployment",
        "path of the Avro schema of the events, relative to the spec; its content counts for identity",
        Text("the path of an .avsc file"),
        default=None,
    )
    explode: str | None = option(
        "identity", "array field; each of its elements is an impression", PATH, default=None
    )
    key: tuple[str, ...] = option(
        "identity",
        "fields that together identify the impression, the request's first",
        ListOf(PATH, 1, 8, lone=True),
    )
    time: TimeField = option("identity", "field that holds the event's time, and its unit", TimeText())
    id: str | None = option(
        "identity",
        "field that identifies the event; without it the record's content does",
        PATH,
        default=None,
    )

    @property
    def external(self) -> bool:
        """Whether only external writers write the topic; freshet then does not set its retention."""
        return self.format in ("confluent", "bare")


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """The three streams; `shown` is optional."""

    served: Stream
    action: Stream
    shown: Stream | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """How impressions and actions become samples (PROTOCOL 18-21)."""

    base: Literal["served"] = option(
        "identity", "a sample per event of this stream", Choice(("served",)), default="served"
    )
    require: Literal["shown"] | None = option(
        "identity", "learn only impressions that were shown", Choice(("shown",)), default=None
    )
    grace_ms: int = option(
        "identity",
        "how long after the end of its window a late event still counts",
        Duration(0, DAY),
        key="grace",
        default=30 * SECOND,
    )
    emit: Literal["early", "window"] = option(
        "identity",
        "positives at once (freshest; the first ones later), or all when the window closes (unbiased order)",
        Choice(("early", "window")),
        default="early",
    )
    negatives: float = option(
        "identity",
        "share of negatives kept, with weight 1/share; chosen by a hash of the id, so repeatable",
        Number(0, 1, open_low=True),
        default=1.0,
    )
    max_ahead_ms: int = option(
        "identity",
        "an event with a time further ahead of the clock is refused",
        Duration(SECOND, DAY),
        key="max_ahead",
        default=MINUTE,
    )

    def is_early(self, label: Label) -> bool:
        """Return whether the label's positives become samples at once, before negatives of their requests."""
        return self.emit == "early" and label.value is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Retention of records in the log. Records that a restart needs are kept regardless of age."""

    events_ms: int | None = option(
        "deployment",
        "age of events, samples and the joiner's commits; a new model can learn from retained events",
        Duration(MINUTE, 3650 * DAY, never=True),
        key="events",
        default=7 * DAY,
    )
    rows_ms: int | None = option(
        "deployment",
        "age of changed rows for serving; the row store has all rows",
        Duration(MINUTE, 3650 * DAY, never=True),
        key="rows",
        default=DAY,
    )
    measures_ms: int | None = option(
        "deployment",
        "age of measures, the console's history, and refused records with the reason",
        Duration(MINUTE, 3650 * DAY, never=True),
        key="measures",
        default=7 * DAY,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A quantity to predict, with its window and loss."""

    name: str
    index: int  # position in the spec and number in samples
    on: str = option("identity", "condition on an action that makes the label true", Text("an expression"))
    value: str | None = option(
        "identity",
        "value of the label: sum(), max(), last() or count() over matching actions",
        Text("an expression"),
        default=None,
    )
    loss: Literal["logloss", "huber", "mse"] = option(
        "identity",
        "loss of the head; without it logloss, or huber if there is a value",
        Choice(("logloss", "huber", "mse")),
        default="logloss",
    )
    bounds: tuple[float, float] | None = option(
        "tunable",
        "least and greatest value, both allowed, beside loss huber or mse; a value outside is not learned",
        ListOf(Number(-3e38, 3e38), 2, 2),
        default=None,
    )
    window_ms: int = option(
        "identity",
        "how long after the impression an action counts",
        Duration(SECOND, 30 * DAY),
        key="window",
        default=2 * MINUTE,
    )
    given: str | None = option(
        "identity", "learn it only from impressions for which this label is true", NAME, default=None
    )
