"""The feature spec as frozen objects: what `freshet.toml` says, with every default filled in.

Each field carries its kind: `identity` changes the model's meaning (a new model, or a replay), `tunable`
may change while it runs, `deployment` says where it runs. Only identity keys make the hash that a store is
tied to. Beside the kind stand the key of `freshet.toml` (if not the field's name), the form of its value
and what it means: the parser, the errors, the reference in the docs and `freshet check` all follow from
these. Durations are integers with their unit in the name. The parser (`freshet.spec.parse`) is the only
maker of these.
"""

# ruff: noqa: RUF009  option() makes dataclass fields; nothing is computed once and shared
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from freshet.options import (
    Boolean,
    Choice,
    Duration,
    Integer,
    ListOf,
    Number,
    Text,
    Wrong,
    option,
)

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000  # milliseconds

NAME = Text(
    "a name of letters, digits and _, starting with a letter, at most 64 long", r"[A-Za-z]\w*", longest=64
)
PATH = Text('the path of a field, such as "user.id"', r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeField:
    """Where an event's time stands and how it is written, `"ts:ms"`."""

    path: str
    unit: Literal["s", "ms", "us", "iso"]


class TimeText:
    """The form `"ts:ms"`: a path and how the time is written there."""

    expected = 'a path and a unit, "field:ms", the unit one of s, ms, us, iso'

    def read(self, value: Any) -> TimeField:
        """The path and unit."""
        path, colon, unit = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        if not colon or unit not in ("s", "ms", "us", "iso"):
            raise Wrong(self.expected)
        return TimeField(path=PATH.read(path), unit=unit)  # type: ignore[arg-type]


class Constant:
    """The form of a value of the user's own: text or a number."""

    expected = "text, an integer of 64 bits or a finite number"

    def read(self, value: Any) -> str | int | float:
        """The value."""
        if isinstance(value, str):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        raise Wrong(self.expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One stream of the user's events: topic, format, and where the envelope stands in the user's fields."""

    role: Literal["served", "shown", "action"]
    topic: str = option(
        "deployment",
        "topic of the event log; without it impressions, shown or actions",
        Text("a topic's name", r"[a-z0-9][a-z0-9._-]{0,200}"),
    )
    format: Literal["avro", "json"] = option(
        "deployment", "how records are written", Choice(("avro", "json")), default="avro"
    )
    schema: str | None = option(
        "deployment",
        "path of the Avro schema of the events, relative to the spec; its content counts for identity",
        Text("the path of an .avsc file"),
        default=None,
    )
    explode: str | None = option(
        "identity", "array field of which each element is an impression", PATH, default=None
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
        "identity", "only impressions that were shown", Choice(("shown",)), default=None
    )
    grace_ms: int = option(
        "identity",
        "how long after a window late events still count",
        Duration(0, DAY),
        key="grace",
        default=30 * SECOND,
    )
    emit: Literal["early", "window"] = option(
        "identity",
        "positives at once (freshest), or all when the window closes (unbiased order)",
        Choice(("early", "window")),
        default="early",
    )
    negatives: float = option(
        "identity",
        "share of negatives kept, weighted by 1/share; repeatable by a hash of the id",
        Number(0, 1, open_low=True),
        default=1.0,
    )
    max_ahead_ms: int = option(
        "identity",
        "an event further ahead of the log's time is refused",
        Duration(SECOND, DAY),
        key="max_ahead",
        default=MINUTE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One thing to predict, with its window and head."""

    name: str
    index: int  # position in the spec; the label's number in samples
    on: str = option("identity", "condition on an action that makes the label true", Text("an expression"))
    value: str | None = option(
        "identity",
        "number the label takes: sum(), max(), last() or count() over matching actions",
        Text("an expression"),
        default=None,
    )
    loss: Literal["logloss", "huber", "mse"] = option(
        "identity",
        "loss of the head; without it logloss, or huber if there is a value",
        Choice(("logloss", "huber", "mse")),
        default="logloss",
    )
    window_ms: int = option(
        "identity",
        "how long after the impression an action counts",
        Duration(SECOND, 30 * DAY),
        key="window",
        default=2 * MINUTE,
    )
    given: str | None = option(
        "identity", "only impressions for which this label is true teach it", NAME, default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An update rule with its parameters; which it takes is said by its rule in `freshet.spec.optimizers`."""

    name: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]
    parameters: Mapping[str, float]  # complete: defaults filled in

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.parameters.items()))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A family of rows with one dim and optimiser; features may share it."""

    name: str
    id: int  # given once, by position; lives in the store
    dim: int = option(
        "identity",
        "length of the embedding vectors",
        Integer(1, 4096),
        default=16,
        hint="a table's dim is the length of its embedding vectors; 16 is a good start",
    )
    optimizer: Optimizer = option("identity", "of the vectors; a name, or { name, lr, ... }")
    scalar_optimizer: Optimizer = option("identity", "of the linear scalars; a name, or { name, lr, ... }")
    init: float = option(
        "identity",
        "initial values are uniform in ± this, from (seed, table, key)",
        Number(0, 10),
        default=0.01,
    )
    precision: Literal["fp32", "bf16"] = option(
        "identity", "how vectors are held in memory", Choice(("fp32", "bf16")), default="fp32"
    )
    ttl_ms: int | None = option(
        "tunable",
        "rows not touched for this long of event time are evicted; false: kept",
        Duration(MINUTE, 3650 * DAY, never=True),
        key="ttl",
        default=30 * DAY,
    )
    admission: int = option(
        "tunable", "occurrences before a key gets a row of its own", Integer(1, 255), default=1
    )
    max_rows: int | None = option(
        "tunable",
        "least recently used rows are evicted above this; without it: unbounded",
        Integer(1_024, 2**40),
        default=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One input of the model. Which fields are set depends on `kind`."""

    name: str
    index: int  # position in the spec
    kind: Literal["id", "list", "dense", "time", "bucket", "cross"]
    field: str | None = option(
        "identity",
        "path of the field in the served event (`items.id` for exploded ones)",
        PATH,
        default=None,
    )
    table: str | None = option("identity", "table of its rows; none for dense", NAME, default=None)
    max: int | None = option(
        "identity",
        "longest list used, the first elements count; 50 for a list without it",
        Integer(1, 10_000),
        default=None,
    )
    pool: Literal["sum", "mean"] | None = option(
        "identity",
        "how a list becomes one vector; mean for a list without it",
        Choice(("sum", "mean")),
        default=None,
    )
    dense: tuple[Literal["raw", "log1p", "standard"], ...] = option(
        "identity",
        "a number, with these transforms in order",
        ListOf(Choice(("raw", "log1p", "standard")), 1, 2, lone=True),
        default=(),
    )
    missing: Literal["zero", "flag"] = option(
        "identity",
        "a missing number is 0, or 0 with a flag column beside it",
        Choice(("zero", "flag")),
        default="zero",
    )
    buckets: tuple[float, ...] = option(
        "identity", "rising edges that turn a number into an id", ListOf(Number(), 1, 1_000), default=()
    )
    time: Literal["hour", "weekday", "hour_of_week"] | None = option(
        "identity",
        "part of the event's time (UTC) used as an id",
        Choice(("hour", "weekday", "hour_of_week")),
        default=None,
    )
    parts: tuple[str, ...] = option("identity", "names of the features that a cross combines", default=())
    serve_as: str | int | float | None = option(
        "identity", "constant taken at serving: trained on, not known then", Constant(), default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is learned."""

    kind: str = option(
        "identity",
        "the family of models",
        Text(
            'one of "hedge", "dlrm", "deepfm", "dcnv2", "linear", or "package.module:Class"',
            r"hedge|dlrm|deepfm|dcnv2|linear|[A-Za-z_][\w.]*:[A-Za-z_]\w*",
        ),
        default="hedge",
    )
    mix: Literal["hedge"] = option(
        "identity",
        "how experts are mixed: by exponential weights of their discounted losses",
        Choice(("hedge",)),
        default="hedge",
    )
    experts: tuple[str, ...] = option(
        "identity",
        "members of the hedge; without it wide, fm, deep, and cross if there are crosses",
        ListOf(Choice(("wide", "cross", "fm", "deep")), 1, 4),
        default=("wide", "fm", "deep"),
    )
    crosses: tuple[tuple[str, ...], ...] = option(
        "identity",
        "features of the cross expert, two to four a cross",
        ListOf(ListOf(NAME, 2, 4), 0, 256),
        default=(),
    )
    deep: tuple[int, ...] = option(
        "identity", "hidden widths of the MLP", ListOf(Integer(1, 8_192), 1, 8), default=(256, 128)
    )
    seed: int = option("identity", "of initial rows and weights", Integer(0, 2**63 - 1), default=0)
    hedge_discount: float = option(
        "tunable", "of an expert's past loss, per row", Number(0.5, 1, open_low=True), default=0.999
    )
    dense_lr: float = option(
        "tunable", "Adam's step size for dense weights", Number(0, 1, open_low=True), default=1e-3
    )
    dense_warmup_steps: int = option(
        "tunable", "steps over which it rises from 0", Integer(0, 1_000_000), default=100
    )
    bias_lr: float = option(
        "tunable", "Adagrad's step size for the biases", Number(0, 100, open_low=True), default=0.5
    )
    options: Mapping[str, Any] = option("identity", "arguments of a custom class", default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """How it is learned."""

    batch_rows: int = option(
        "tunable", "rows a lane takes at most", Integer(1, 65_536), key="batch.rows", default=256
    )
    batch_wait_ms: int = option(
        "tunable",
        "how long a lane waits to fill a batch",
        Duration(0, MINUTE),
        key="batch.wait",
        default=20,
    )
    batch_behind_rows: int = option(
        "tunable",
        "rows a lane takes when it is behind, at least batch.rows, which is the default",
        Integer(1, 65_536),
        key="batch.behind",
        default=256,
    )
    staleness_rows: int = option(
        "tunable",
        "rows of other batches in flight when a batch is looked up",
        Integer(0, 1_048_576),
        default=512,
    )
    lanes: int | None = option(
        "deployment",
        "threads that train; without it min(cores, 8, 1 + staleness_rows / batch rows)",
        Integer(1, 64),
        default=None,
    )
    precision: Literal["fp32", "bf16"] = option(
        "tunable", "of the dense part's matrix products", Choice(("fp32", "bf16")), default="fp32"
    )
    version_interval_ms: int = option(
        "tunable",
        "how often a dense version is written",
        Duration(100, DAY),
        key="version_interval",
        default=5 * SECOND,
    )
    keep_versions: int = option(
        "tunable",
        "how many versions are kept beside those that aliases point at",
        Integer(1, 100_000),
        default=10,
    )
    flush_interval_ms: int = option(
        "tunable",
        "how often rows are flushed to the row store",
        Duration(100, HOUR),
        key="flush_interval",
        default=2 * SECOND,
    )
    publish_interval_ms: int = option(
        "tunable",
        "how often changed rows are published",
        Duration(1, MINUTE),
        key="publish_interval",
        default=50,
    )
    segments: tuple[str, ...] = option(
        "tunable", "features by whose values measures are split", ListOf(NAME, 0, 16), default=()
    )
    measure_window_ms: int = option(
        "tunable",
        "length of a window of measures, in event time",
        Duration(SECOND, DAY),
        key="measure_window",
        default=MINUTE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """When a version may serve (PROTOCOL 23)."""

    ne_worse: float = option(
        "tunable",
        "largest relative rise of normalised entropy over `stable`",
        Number(0, 10),
        default=0.01,
    )
    calibration: tuple[float, float] = option(
        "tunable", "allowed mean prediction / mean label", ListOf(Number(0, 1_000), 2, 2), default=(0.9, 1.1)
    )
    samples: int = option(
        "tunable", "newest samples on which it judges", Integer(1, 10_000_000), default=2_000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Explore:
    """How serving explores."""

    policy: Literal["none", "epsilon"] = option(
        "tunable",
        "epsilon: that share of requests in random order",
        Choice(("none", "epsilon")),
        default="none",
    )
    share: float = option("tunable", "share of requests that explore", Number(0, 1), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """How it is served."""

    score: str = option(
        "tunable",
        "expression over the labels' predictions, which orders candidates; without it the first label",
        Text("an expression"),
        default="",
    )
    explore: Explore = option("tunable", "exploration", default_factory=Explore)
    unknown: Literal["zeros"] = option(
        "identity", "what a row never learned looks like", Choice(("zeros",)), default="zeros"
    )
    gate: Gate = option("tunable", "promotion", default_factory=Gate)
    log_served: bool = option(
        "deployment", "append what was served to the served topic", Boolean(), default=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A whole spec. `labels`, `tables` and `features` are in file order; their indexes and ids are
    positions.
    """

    name: str = option(
        "identity",
        "names the model's topics and store",
        Text(
            "a name of a-z, 0-9, - and _, starting with a letter, at most 64 long", r"[a-z][a-z0-9_-]{0,63}"
        ),
    )
    events: Events
    join: Join
    labels: tuple[Label, ...]
    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    model: Model
    train: Train
    serve: Serve
    partitions: int = option("identity", "of impressions, actions and samples", Integer(1, 256), default=8)
    buckets: int = option(
        "identity",
        "of the parameter server, the unit of ownership",
        Integer(2, 65_536, power_of_two=True),
        default=1024,
    )
    folder: str = field(default="", compare=False)  # where the spec file lies; its paths are relative to this

    @staticmethod
    def load(path: str | Path) -> Spec:
        """Read a `freshet.toml`. Raises ConfigError, which says what to mend."""
        from freshet.spec.parse import load_spec  # noqa: PLC0415 - the parser makes these objects

        return load_spec(path)

    def table(self, name: str) -> Table:
        """The table of that name. Raises KeyError."""
        return {t.name: t for t in self.tables}[name]

    def feature(self, name: str) -> Feature:
        """The feature of that name. Raises KeyError."""
        return {f.name: f for f in self.features}[name]

    def label(self, name: str) -> Label:
        """The label of that name. Raises KeyError."""
        return {label.name: label for label in self.labels}[name]
