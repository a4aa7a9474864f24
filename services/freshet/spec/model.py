"""The feature spec as frozen objects: what `freshet.toml` says, with every default filled in.

Each field carries its kind: `identity` changes the model's meaning (a new model, or a replay), `tunable` may change while
it runs, `deployment` says where it runs. Only identity keys make the hash that a store is tied to.
Durations are integers with their unit in the name. The parser (`freshet.spec.parse`) is the only maker of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["identity", "tunable", "deployment"]


def option(kind: Kind, doc: str, **metadata: Any) -> Any:
    """A dataclass field with its kind and documentation; `metadata` may hold default, allowed, unit."""
    default = metadata.pop("default", ...)
    factory = metadata.pop("default_factory", None)
    info = {"kind": kind, "doc": doc, **metadata}
    if factory is not None:
        return field(default_factory=factory, metadata=info)
    return field(metadata=info) if default is ... else field(default=default, metadata=info)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeField:
    """Where an event's time stands and how it is written, `"ts:ms"`."""

    path: str
    unit: Literal["s", "ms", "us", "iso"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One stream of the user's events: the topic, its format, and where the envelope stands in the user's fields."""

    role: Literal["served", "shown", "action"]
    topic: str = option("deployment", "topic of the event log")
    format: Literal["avro", "json"] = option("deployment", "how records are written", default="avro")
    schema: str | None = option(
        "identity", "path of the Avro schema of the events, relative to the spec", default=None
    )
    explode: str | None = option("identity", "array field of which each element is an impression", default=None)
    key: tuple[str, ...] = option("identity", "fields that together identify the impression")
    time: TimeField = option("identity", "field that holds the event's time")
    id: str | None = option(
        "identity", "field that identifies the event; without it the record's content does", default=None
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

    base: Literal["served"] = option("identity", "a sample per event of this stream", default="served")
    require: Literal["shown"] | None = option("identity", "only impressions that were shown", default=None)
    grace_ms: int = option("identity", "how long after a window late events still count", default=30_000)
    emit: Literal["early", "window"] = option(
        "identity", "positives at once, or all when the window closes", default="early"
    )
    negatives: float = option(
        "identity",
        "share of negatives kept, weighted by 1/share; repeatable by a hash of the id",
        default=1.0,
    )
    max_ahead_ms: int = option("identity", "an event further ahead of the log's time is refused", default=60_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One thing to predict, with its window and head."""

    name: str
    index: int  # position in the spec; the label's number in samples
    on: str = option("identity", "condition on an action that makes the label true")
    value: str | None = option(
        "identity",
        "number the label takes, sum(), max(), last() or count() over matching actions",
        default=None,
    )
    loss: Literal["logloss", "huber", "mse"] = option("identity", "loss of the head", default="logloss")
    window_ms: int = option("identity", "how long after the impression an action counts", default=120_000)
    given: str | None = option(
        "identity", "only impressions for which this label is true teach it", default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An update rule with its parameters; which parameters it takes is said by its descriptor in `freshet.tables`."""

    name: Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]
    parameters: Mapping[str, float]  # complete: defaults filled in


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A family of rows with one dim and optimiser; features may share it."""

    name: str
    id: int  # given once, by position; lives in the store
    dim: int = option("identity", "length of the embedding vectors", default=16)
    optimizer: Optimizer = option("identity", "of the vectors")
    scalar_optimizer: Optimizer = option("identity", "of the linear scalars")
    init: float = option(
        "identity", "initial values are uniform in ± this, from (seed, table, key)", default=0.01
    )
    precision: Literal["fp32", "bf16"] = option("identity", "how vectors are held in memory", default="fp32")
    ttl_ms: int | None = option(
        "tunable",
        "rows not touched for this long of event time are evicted; none: kept",
        default=30 * 86_400_000,
    )
    admission: int = option("tunable", "occurrences before a key gets a row of its own", default=1)
    max_rows: int | None = option(
        "tunable", "least recently used rows are evicted above this; none: unbounded", default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One input of the model. Which fields are set depends on `kind`."""

    name: str
    index: int  # position in the spec
    kind: Literal["id", "list", "dense", "time", "bucket", "cross"]
    field: str | None = option(
        "identity", "path of the field in the sample (`items.id` for exploded ones)", default=None
    )
    table: str | None = option("identity", "table of its rows; none for dense", default=None)
    max: int | None = option("identity", "longest list used, the first elements count", default=None)
    pool: Literal["sum", "mean"] | None = option("identity", "how a list becomes one vector", default=None)
    dense: tuple[Literal["raw", "log1p", "standard"], ...] = option(
        "identity", "transforms, applied in order", default=()
    )
    missing: Literal["zero", "flag"] = option(
        "identity", "a missing number is 0, or 0 with a flag column beside it", default="zero"
    )
    buckets: tuple[float, ...] = option("identity", "rising edges that turn a number into an id", default=())
    time: Literal["hour", "weekday", "hour_of_week"] | None = option(
        "identity", "part of the event's time (UTC) used as an id", default=None
    )
    parts: tuple[str, ...] = option("identity", "names of the features that a cross combines", default=())
    serve_as: str | int | float | None = option(
        "identity", "constant taken at serving: trained on, not known then", default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is learned."""

    kind: str = option(
        "identity", "hedge, dlrm, deepfm, dcnv2, linear, or package.module:Class", default="hedge"
    )
    experts: tuple[str, ...] = option("identity", "members of the hedge", default=("wide", "fm", "deep"))
    crosses: tuple[tuple[str, ...], ...] = option("identity", "feature pairs of the cross expert", default=())
    deep: tuple[int, ...] = option("identity", "hidden widths of the MLP", default=(256, 128))
    seed: int = option("identity", "of initial rows and weights", default=0)
    hedge_discount: float = option("tunable", "of an expert's past loss, per row", default=0.999)
    dense_lr: float = option("tunable", "Adam's step size for dense weights", default=1e-3)
    dense_warmup_steps: int = option("tunable", "steps over which it rises from 0", default=100)
    bias_lr: float = option("tunable", "Adagrad's step size for the biases", default=0.5)
    options: Mapping[str, Any] = option("identity", "arguments of a custom class", default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """How it is learned."""

    batch_rows: int = option("tunable", "rows a lane takes at most", default=256)
    batch_wait_ms: int = option("tunable", "how long a lane waits to fill a batch", default=20)
    batch_behind_rows: int = option("tunable", "rows a lane takes when it is behind", default=256)
    staleness_rows: int = option(
        "tunable", "rows of other batches in flight when a batch is looked up", default=512
    )
    lanes: int | None = option(
        "deployment", "none: min(cores, 8, 1 + staleness_rows / batch_rows)", default=None
    )
    precision: Literal["fp32", "bf16"] = option("tunable", "of the dense part's matrix products", default="fp32")
    version_interval_ms: int = option("tunable", "how often a dense version is written", default=5_000)
    keep_versions: int = option(
        "tunable", "how many versions are kept beside those that aliases point at", default=10
    )
    flush_interval_ms: int = option("tunable", "how often rows are flushed to the row store", default=2_000)
    publish_interval_ms: int = option("tunable", "how often changed rows are published", default=50)
    segments: tuple[str, ...] = option("tunable", "features by whose values measures are split", default=())
    measure_window_ms: int = option("tunable", "length of a window of measures, in event time", default=60_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """When a version may serve (PROTOCOL 23)."""

    ne_worse: float = option(
        "tunable", "largest relative rise of normalised entropy over `stable`", default=0.01
    )
    calibration: tuple[float, float] = option(
        "tunable", "allowed mean prediction / mean label", default=(0.9, 1.1)
    )
    samples: int = option("tunable", "newest samples on which it judges", default=2_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explore:
    """How serving explores."""

    policy: Literal["none", "epsilon"] = option(
        "tunable", "epsilon: that share of requests in random order", default="none"
    )
    share: float = option("tunable", "share of requests that explore", default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """How it is served."""

    score: str = option(
        "tunable", "expression over the labels' predictions; candidates are ordered by it", default=""
    )
    explore: Explore = option("tunable", "exploration", default_factory=Explore)
    unknown: Literal["zeros"] = option("identity", "what a row never learned looks like", default="zeros")
    gate: Gate = option("tunable", "promotion", default_factory=Gate)
    log_served: bool = option("deployment", "append what was served to the served topic", default=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A whole spec. `labels`, `tables` and `features` are in file order; their indexes and ids are positions."""

    name: str = option("identity", "names the model's topics and store")
    events: Events
    join: Join
    labels: tuple[Label, ...]
    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    model: Model
    train: Train
    serve: Serve
    partitions: int = option("identity", "of impressions, actions and samples", default=8)
    buckets: int = option("identity", "of the parameter server; a power of two", default=1024)
    folder: str = ""  # where the spec file lies; paths in it are relative to this

    def table(self, name: str) -> Table:
        """The table of that name. Raises KeyError."""
        return {t.name: t for t in self.tables}[name]

    def feature(self, name: str) -> Feature:
        """The feature of that name. Raises KeyError."""
        return {f.name: f for f in self.features}[name]

    def label(self, name: str) -> Label:
        """The label of that name. Raises KeyError."""
        return {label.name: label for label in self.labels}[name]
