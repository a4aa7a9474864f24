"""Streams of events with their join, labels, tables, features and csv files, as a spec states them.

The forms of their values are here too, and the detection of event times in another unit than the spec states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from freshet.config.options import (
    Boolean,
    Choice,
    Duration,
    Integer,
    ListOf,
    Number,
    Text,
    Wrong,
    deployment,
    identity,
    tunable,
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number that configures an update rule or a transform: its spec key, default, range and meaning."""

    name: str
    default: float
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False  # excludes `low` itself
    doc: str = ""

    def allows(self, value: float) -> bool:
        """Return whether the value is in the range."""
        return self.low <= value <= self.high and not (self.low_open and value == self.low)

    @property
    def expected(self) -> str:
        """The range in words, for an error."""
        return self.form.expected

    @property
    def form(self) -> Number:
        """The form of the value in the spec."""
        return Number(self.low, self.high, open_low=self.low_open)


SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000  # milliseconds

NAME = Text(
    "a name of letters, digits and _, starting with a letter, at most 64 long", r"[A-Za-z]\w*", longest=64
)
PATH = Text('the path of a field, such as "user.id"', r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class Constant:
    """Form of a constant: text or a number."""

    expected = "text, an integer of 64 bits or a finite number"

    def read(self, value: Any) -> str | int | float:
        """Return the value. Raises Wrong."""
        if isinstance(value, str):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        raise Wrong(self.expected)

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of text or a number."""
        return {"type": ["string", "number"]}


@dataclass(frozen=True, slots=True)
class Step:
    """A transform of a number with parameters that are not its defaults."""

    name: str
    parameters: tuple[tuple[str, float], ...]  # by name

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value:g}' for name, value in self.parameters)})"

    def as_written(self) -> Mapping[str, str | float]:
        """Return the TOML table."""
        return {"name": self.name, **dict(self.parameters)}


TRANSFORM_NAME = Text(
    'the name of a transform, or "package.module:function"',
    r"[A-Za-z]\w*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*",
)


class StepForm:
    """Form of a transform: its name, or a table with its name and parameters."""

    expected = 'a transform: its name, or { name = "...", parameter = number }'

    def read(self, value: Any) -> str | Step:
        """Return the name, or a step for a table. `config.spec.transforms` checks the names. Raises Wrong."""
        if not isinstance(value, Mapping):
            return TRANSFORM_NAME.read(value)
        name = TRANSFORM_NAME.read(value["name"]) if "name" in value else None
        if name is None:
            raise Wrong(self.expected)
        parameters = []
        for key, given in value.items():
            if key != "name":
                try:
                    parameters.append((str(key), Number().read(given)))
                except Wrong as wrong:
                    raise Wrong(wrong.expected, f"a parameter of {name}", f".{key}", given) from None
        return Step(name, tuple(sorted(parameters)))

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of a name or a table; `config.spec.json_schema` adds the known names."""
        name = TRANSFORM_NAME.json_schema()
        table = {
            "type": "object",
            "properties": {"name": name},
            "required": ["name"],
            "additionalProperties": Number().json_schema(),
        }
        return {"anyOf": [name, table]}


# --- Times, and the detection of those in another unit than the spec states.

UNIT_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1, "days": 86_400 * 10**9}
"""Nanoseconds of a tick, by unit of numeric times."""
UNIT_OF_NS = {ns: unit for unit, ns in UNIT_NS.items()}


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


YEAR_2000_S = 946_684_800
DAY_S = 86_400
WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_FINER = frozenset({"ms", "us", "ns"})


def likely_unit(time_ms: int, unit: str, now_ms: int) -> str | None:
    """Return the first unit other than `unit` by which the time lies between the year 2000 and tomorrow."""
    if unit == "iso":
        return None
    number = time_ms * 10**6 // UNIT_NS[unit]
    for other in WORDS:
        if other != unit and YEAR_2000_S <= number * UNIT_NS[other] / 1e9 < now_ms / 1000 + DAY_S:
            return other
    return None


def written_in_larger_unit(time_ms: int, unit: str, latest_ms: int) -> bool:
    """Return whether a live event's time falls in January 1970 because its unit is 1000 times the spec's.

    Seconds read as milliseconds do. The native `is_doubtful_time` has the same bounds.
    """
    return unit in _FINER and YEAR_2000_S <= time_ms <= latest_ms // 1000


def unit_hint(time: TimeField, role: str, time_ms: int, now_ms: int) -> str:
    """Return a hint for an error about a time that is probably in another unit; else ""."""
    unit = likely_unit(time_ms, time.unit, now_ms)
    if unit is None:
        return ""
    stated = WORDS.get(time.unit, time.unit)
    return (
        f"; the number looks like {WORDS[unit]}: send {stated}, or say time = "
        f'"{time.path}:{unit}" in events.{role} of the spec'
    )


# --- Files, streams, join, labels.

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

    delimiter: str = deployment(
        'separator of cells; "\\t" for tabs, "::" for MovieLens', SEPARATOR, default=","
    )
    columns: tuple[str, ...] = deployment(
        "names of the columns of a file that has no header line, in their order",
        ListOf(PATH, 0, 4_096),
        default=(),
    )
    encoding: str = deployment("encoding of the text", Choice(ENCODINGS), default="utf-8")
    quotes: bool = deployment(
        'whether cells may be quoted, with "" for a quote inside; false: quotes are ordinary characters',
        Boolean(),
        default=True,
    )
    decimal: Literal[".", ","] = deployment("decimal mark of numbers", Choice((".", ",")), default=".")
    list_separator: str | None = deployment(
        "separator of the values of a list in one cell; without it a cell holds no list",
        SEPARATOR,
        default=None,
    )
    nulls: tuple[str, ...] = deployment(
        "cells that mean no value in columns of numbers, truths and times, besides empty cells",
        ListOf(WORD, 0, 64),
        default=("NA", "NaN", "nan", "null"),
    )
    text_nulls: tuple[str, ...] = deployment(
        "cells that mean no value in columns of text, besides empty cells without quotes",
        ListOf(WORD, 0, 64),
        default=(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One stream of the user's events: topic, format, and the fields with key, time and id."""

    role: Literal["served", "shown", "action"]
    topic: str = deployment(
        "topic of the event log; without it impressions, shown or actions",
        Text("a topic's name", r"[a-z0-9][a-z0-9._-]{0,200}"),
    )
    format: Literal["avro", "json", "confluent", "bare"] = deployment(
        "format of records: avro, with the id of a schema in the topic schemas, or json, both written by "
        "gateway, inference or external writers; confluent, Avro with an id of a schema registry, or bare, "
        "Avro by the stream's schema without a frame, both written by external writers only",
        Choice(("avro", "json", "confluent", "bare")),
        default="avro",
    )
    schema: str | None = deployment(
        "path of the Avro schema of the events, relative to the spec; its content counts for identity",
        Text("the path of an .avsc file"),
        default=None,
    )
    explode: str | None = identity("array field; each of its elements is an impression", PATH, default=None)
    key: tuple[str, ...] = identity(
        "fields that together identify the impression, the request's first", ListOf(PATH, 1, 8, lone=True)
    )
    time: TimeField = identity("field that holds the event's time, and its unit", TimeText())
    id: str | None = identity(
        "field that identifies the event; without it the record's content does", PATH, default=None
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

    base: Literal["served"] = identity(
        "a sample per event of this stream", Choice(("served",)), default="served"
    )
    require: Literal["shown"] | None = identity(
        "learn only impressions that were shown", Choice(("shown",)), default=None
    )
    grace_ms: int = identity(
        "how long after the end of its window a late event still counts",
        Duration(0, DAY),
        default=30 * SECOND,
    )
    emit: Literal["early", "window"] = identity(
        "positives at once (freshest; the first ones later), or all when the window closes (unbiased order)",
        Choice(("early", "window")),
        default="early",
    )
    negatives: float = identity(
        "share of negatives kept, with weight 1/share; chosen by a hash of the id, so repeatable",
        Number(0, 1, open_low=True),
        default=1.0,
    )
    max_ahead_ms: int = identity(
        "an event with a time further ahead of the clock is refused", Duration(SECOND, DAY), default=MINUTE
    )

    def is_early(self, label: Label) -> bool:
        """Return whether the label's positives become samples at once, before negatives of their requests."""
        return self.emit == "early" and label.value is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Retention of records in the log. An embedded log keeps those that a restart needs regardless of age."""

    events_ms: int | None = deployment(
        "age of events and samples; a new model can learn from retained events",
        Duration(MINUTE, 3650 * DAY, never=True),
        default=7 * DAY,
    )
    rows_ms: int | None = deployment(
        "age of changed rows for serving; the row store has all rows",
        Duration(MINUTE, 3650 * DAY, never=True),
        default=DAY,
    )
    measures_ms: int | None = deployment(
        "age of measures, the console's history, and refused records with the reason",
        Duration(MINUTE, 3650 * DAY, never=True),
        default=7 * DAY,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A quantity to predict, with its window and loss."""

    name: str
    index: int  # position in the spec and number in samples
    on: str = identity("condition on an action that makes the label true", Text("an expression"))
    value: str | None = identity(
        "value of the label: sum(), max(), last() or count() over matching actions",
        Text("an expression"),
        default=None,
    )
    loss: Literal["logloss", "huber", "mse"] = identity(
        "loss of the head; without it logloss, or huber if there is a value",
        Choice(("logloss", "huber", "mse")),
        default="logloss",
    )
    bounds: tuple[float, float] | None = tunable(
        "least and greatest value, both allowed, beside loss huber or mse; a value outside is not learned",
        ListOf(Number(-3e38, 3e38), 2, 2),
        default=None,
    )
    window_ms: int = identity(
        "how long after the impression an action counts", Duration(SECOND, 30 * DAY), default=2 * MINUTE
    )
    given: str | None = identity(
        "learn it only from impressions for which this label is true", NAME, default=None
    )


# --- Tables and features.


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An update rule of `freshet.config.spec.layout` with its parameters."""

    name: str
    parameters: Mapping[str, float]  # complete, with defaults

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.parameters.items()))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A family of rows with one dim and optimiser, for one feature or several."""

    name: str
    id: int  # assigned once, by position; the row store keeps it
    dim: int = identity(
        "length of the embedding vectors",
        Integer(1, 4096),
        default=16,
        hint="a table's dim is the length of its embedding vectors; 16 is a good start",
    )
    optimizer: Optimizer = identity("of the vectors; a name, or { name, lr, ... }")
    scalar_optimizer: Optimizer = identity("of the linear scalars; a name, or { name, lr, ... }")
    init: float = identity(
        "initial values are uniform in ± this, from (seed, table, key)", Number(0, 10), default=0.01
    )
    precision: Literal["fp32", "bf16"] = identity(
        "how vectors are held in memory", Choice(("fp32", "bf16")), default="fp32"
    )
    shared: bool | None = identity(
        "whether an id has one row for all features of the table; false: each feature has rows of its own. "
        "Without it false, but true where lists alone, or lists and one id, use the table, as a history of "
        "items and the item do (with `defaults = 1`: true)",
        Boolean(),
        default=None,  # the parser sets it by `freshet.config.spec.defaults`
    )
    ttl_ms: int | None = tunable(
        "rows not touched for this long of event time are evicted; false, or without it: no row goes by age, "
        "and max_rows and memory bound the table",
        Duration(MINUTE, 3650 * DAY, never=True),
        default=None,
        former={1: 30 * DAY},
    )
    admission: int = tunable("occurrences before a key gets a row of its own", Integer(1, 255), default=1)
    max_rows: int | None = tunable(
        "least recently used rows are evicted above this; without it memory bounds the rows: of a trainer "
        "that holds them itself FRESHET_TRAINER_MEMORY_BYTES, of a shard FRESHET_PARAMSERVER_EVICT_BYTES",
        Integer(1_024, 2**40),
        default=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One input of the model; `kind` determines which options are set."""

    name: str
    index: int  # position in the spec
    kind: Literal["id", "list", "dense", "time", "bucket", "cross"]
    field: str | None = identity(
        "path of the field in the served event (`items.id` for exploded ones)", PATH, default=None
    )
    table: str | None = identity("table of its rows; none for dense", NAME, default=None)
    max: int | None = identity(
        "longest list used, the first elements count; 50 for a list without it",
        Integer(1, 10_000),
        default=None,
    )
    pool: Literal["sum", "mean"] | None = identity(
        "how a list becomes one vector; mean for a list without it", Choice(("sum", "mean")), default=None
    )
    dense: tuple[str | Step, ...] = identity(
        "a number, with these transforms in order; see below", ListOf(StepForm(), 1, 8, lone=True), default=()
    )
    missing: Literal["zero", "flag"] = identity(
        "a missing number is 0, or 0 with a flag column beside it", Choice(("zero", "flag")), default="zero"
    )
    buckets: tuple[float, ...] = identity(
        "rising edges that turn a number into an id", ListOf(Number(), 1, 1_000), default=()
    )
    time: Literal["hour", "weekday", "hour_of_week"] | None = identity(
        "part of the event's time (UTC) used as an id",
        Choice(("hour", "weekday", "hour_of_week")),
        default=None,
    )
    parts: tuple[str, ...] = identity("names of the features that a cross combines", default=())
    serve_as: str | int | float | None = identity(
        "constant taken at serving: trained on, not known then", Constant(), default=None
    )
