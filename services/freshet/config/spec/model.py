"""The feature spec as a frozen object: `freshet.toml`, with all defaults.

Each option has a kind: a change of an `identity` key needs a new model or a replay; a `tunable` key may
change during a model's life; `deployment` keys decide where it runs. Durations are integers with the unit in
the name. Only the parser (`freshet.config.spec.parse`) creates these objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from freshet.config.options import (
    Boolean,
    Choice,
    Duration,
    Integer,
    Kind,
    ListOf,
    Number,
    Text,
    deployment,
    identity,
    tunable,
)
from freshet.config.spec.inputs import (
    DAY,
    HOUR,
    MINUTE,
    NAME,
    SECOND,
    Events,
    Feature,
    Files,
    Join,
    Label,
    Optimizer,
    Retention,
    Stream,
    Table,
    TimeField,
)

__all__ = [
    "GENERATION",
    "GENERATION_HINT",
    "MODEL_NAME",
    "NEWEST_DEFAULTS",
    "Events",
    "Explore",
    "Feature",
    "Files",
    "Gate",
    "Join",
    "Kind",
    "Label",
    "Model",
    "Optimizer",
    "Retention",
    "Serve",
    "Spec",
    "Stream",
    "Table",
    "TimeField",
    "Train",
]

BEHIND_ROWS = 256
"""Least rows of a batch of a lane that is behind, if each batch runs Python or makes a round trip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model."""

    kind: str = identity(
        "the family of models",
        Text(
            'one of "hedge", "mlp", "dlrm", "deepfm", "dcnv2", "linear", or "package.module:Class"',
            r"hedge|mlp|dlrm|deepfm|dcnv2|linear|[A-Za-z_][\w.]*:[A-Za-z_]\w*",
        ),
        default="hedge",
    )
    mix: Literal["hedge"] = identity(
        "how experts are mixed: by exponential weights of their discounted losses",
        Choice(("hedge",)),
        default="hedge",
    )
    experts: tuple[str, ...] = identity(
        "members of the hedge; without it all, cross only if there are crosses, and fast, fm and counts only "
        "if a feature has ids. wide and fast: a weight for each id, with small and with large steps; cross: "
        "a weight for each combination of ids; fm: products of vectors; deep: an MLP; counts: wide's "
        "weights, scaled by the count of an id; stack: a learned sum of the others",
        ListOf(Choice(("wide", "fast", "cross", "fm", "deep", "counts", "stack")), 1, 7),
        default=("wide", "fast", "fm", "deep", "counts", "stack"),
        former={1: ("wide", "fm", "deep")},
    )
    crosses: tuple[tuple[str, ...], ...] = identity(
        "features of the cross expert, two to four a cross; without it, and without experts, all pairs of "
        "the features with one id a sample if there are 10 of them at most, in a table `crosses` of at most "
        "4194304 rows; []: none",
        ListOf(ListOf(NAME, 2, 4), 0, 256),
        default=(),
    )
    deep: tuple[int, ...] = identity(
        "hidden widths of the MLP", ListOf(Integer(1, 8_192), 1, 8), default=(256, 128)
    )
    seed: int = identity("seed of initial rows and weights", Integer(0, 2**63 - 1), default=0)
    hedge_discount: float = tunable(
        "discount of an expert's past loss, per row: 0.999 weighs about the last 1,000 rows, 0.9999 10,000",
        Number(0.5, 1, open_low=True),
        default=0.999,
    )
    dense_optimizer: Literal["adam", "lamb"] = tunable(
        "optimiser of dense weights; lamb, for kinds dlrm, deepfm, dcnv2 and networks of your own: each "
        "tensor steps by dense_lr times the norm of its weights, along Adam's update",
        Choice(("adam", "lamb")),
        default="adam",
    )
    dense_lr: float = tunable("step size for dense weights", Number(0, 1, open_low=True), default=1e-3)
    dense_momentum: float = tunable(
        "part of a dense step's direction that the next one keeps, beta1 of Adam and LAMB; 0 follows a "
        "stream faster, for labels that come within seconds",
        Number(0, 0.999),
        default=0.9,
    )
    dense_warmup_steps: int = tunable(
        "steps over which dense_lr rises from 0", Integer(0, 1_000_000), default=100
    )
    bias_lr: float = tunable("Adagrad's step size for the biases", Number(0, 100, open_low=True), default=0.5)
    options: Mapping[str, Any] = identity("arguments of a custom class", default_factory=dict)


Reduce = Literal["fp32", "auto", "int8", "int4", "adaquantfl", "dct", "1bit-adam", "1bit-lamb"]
"""How ranks sum dense gradients, or in mode `async` send their states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Training."""

    batch_rows: int = tunable(
        "most rows of a batch, except of one request that has more; the joiner closes blocks of samples at "
        "this number (256 at most), and a batch has whole blocks; the dense gradient is a mean over the rows "
        "of a step, or over this number if it has fewer, so that all rows have equal weight",
        Integer(1, 65_536),
        key="batch.rows",
        default=64,
        former={1: 256},
    )
    batch_wait_ms: int = tunable(
        "how long a lane waits to fill a batch", Duration(0, MINUTE), key="batch.wait", default=20
    )
    batch_behind_rows: int | None = tunable(
        "most rows of a batch of a lane that is behind, at least batch.rows; without it batch.rows if native "
        "code runs the loop over batches (kinds hedge, mlp and linear, rows in the trainer's process), "
        "otherwise the larger of batch.rows and 256",
        Integer(1, 65_536),
        key="batch.behind",
        default=None,
    )
    batch_steps: bool = tunable(
        "kinds hedge, mlp and linear: step rows every 16 samples of a batch and dense weights every 64; "
        "false: a batch is one step, which learns less from the same samples but trains a large network in "
        "batches of thousands of rows faster",
        Boolean(),
        key="batch.steps",
        default=True,
    )
    staleness_rows: int = tunable(
        "rows of other batches in flight when a batch is looked up; mode `sync` ignores it",
        Integer(0, 1_048_576),
        default=512,
    )
    mode: Literal["hybrid", "sync", "async"] = tunable(
        "hybrid: rows are looked up ahead within staleness_rows, dense gradients are summed over ranks; "
        "sync: the next lookup waits for the step's pushes; async: as hybrid, but each rank, or each site of "
        "ranks, steps alone, and they average their dense states every average_every rounds",
        Choice(("hybrid", "sync", "async")),
        default="hybrid",
    )
    average_every: int = tunable(
        "mode async: rounds that a rank or site makes between two averagings, with a batch a lane each; they "
        "average at least once a second, and if one is lost, the others make their rounds since then again",
        Integer(1, 4096),
        default=16,
    )
    reduce: Reduce = tunable(
        "modes hybrid and sync: how ranks sum dense gradients; fp32: every step sends them whole; the others "
        "send a part in each step, and the rest with later steps (error feedback): int8, int4: rounded; "
        "auto: fp32, int8 or int4, the most exact one that makes no step a twentieth longer; "
        "adaquantfl: rounded to more levels as the loss falls; dct: of Adam's steps the largest, one in two "
        "hundred, without momentum; "
        "1bit-adam, 1bit-lamb (by model.dense_optimizer): signs of momenta, once the variance is steady; "
        "mode async: fp32 or int8, in which averagings send weights and Adam's moments",
        Choice(("fp32", "auto", "int8", "int4", "adaquantfl", "dct", "1bit-adam", "1bit-lamb")),
        default="fp32",
    )
    lanes: int | None = deployment(
        "threads that train; without it min(cores, 8, partitions, 1 + staleness_rows / batch rows)",
        Integer(1, 64),
        default=None,
    )
    precision: Literal["fp32", "bf16"] = tunable(
        "precision of the dense matrix products", Choice(("fp32", "bf16")), default="fp32"
    )
    version_interval_ms: int = tunable(
        "interval of writes of dense versions", Duration(100, DAY), default=5 * SECOND
    )
    keep_versions: int = tunable(
        "number of versions kept besides those with an alias and the newest from which training can start",
        Integer(1, 100_000),
        default=10,
    )
    flush_interval_ms: int = tunable(
        "interval of flushes of rows to the row store; longer if flushes take over a tenth of a core",
        Duration(100, HOUR),
        default=2 * SECOND,
    )
    publish_interval_ms: int = tunable(
        "interval at which changed rows are published", Duration(1, MINUTE), default=50
    )
    publish_codec: Literal["fp32", "bf16", "int8", "int4"] = tunable(
        "encoding of published rows; all but fp32 round, and a row is sent again in fp32 once nothing has "
        "changed for 10 s; int8 and int4 need inference servers of this release or a later one",
        Choice(("fp32", "bf16", "int8", "int4")),
        default="fp32",
    )
    segments: tuple[str, ...] = tunable(
        "features by whose values measures are split", ListOf(NAME, 0, 16), default=()
    )
    measure_window_ms: int = tunable(
        "length of a window of measures, in event time", Duration(SECOND, DAY), default=MINUTE
    )

    def behind_rows(self, *, native_loop: bool) -> int:
        """Return the rows of a batch of a lane that is behind.

        `native_loop`: no Python runs between batches.
        """
        least = self.batch_rows if native_loop else max(self.batch_rows, BEHIND_ROWS)
        return self.batch_behind_rows or least


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The gate: conditions for the promotion of a version (PROTOCOL 23)."""

    ne_worse: float = tunable(
        "largest relative rise over `stable` of normalised entropy (of a number: mean squared error)",
        Number(0, 10),
        default=0.01,
    )
    calibration: tuple[float, float] = tunable(
        "allowed mean prediction / mean label", ListOf(Number(0, 1_000), 2, 2), default=(0.9, 1.1)
    )
    samples: int = tunable(
        "number of newest samples on which versions are compared; kept in memory with copies of their rows",
        Integer(1, 10_000_000),
        default=2_000,
    )
    floor: int = tunable(
        "with fewer labelled samples, no version replaces `stable`, unless that is the untrained first one or"
        " cannot be read",
        Integer(0, 10_000_000),
        default=100,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Explore:
    """Exploration in serving."""

    policy: Literal["none", "epsilon"] = tunable(
        "epsilon: a share of requests gets a random order", Choice(("none", "epsilon")), default="none"
    )
    share: float = tunable("share of requests that explore", Number(0, 1), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Serving."""

    score: str = tunable(
        "expression over the labels' predictions that orders candidates; without it the first label",
        Text("an expression"),
        default="",
    )
    explore: Explore = tunable("exploration", default_factory=Explore)
    unknown: Literal["zeros"] = identity(
        "value of rows that were never learned", Choice(("zeros",)), default="zeros"
    )
    gate: Gate = tunable("promotion", default_factory=Gate)
    log_served: bool = deployment("append served impressions to the served topic", Boolean(), default=True)


MODEL_NAME = Text(
    "a name of a-z, 0-9, - and _, starting with a letter, at most 64 long", r"[a-z][a-z0-9_-]{0,63}"
)

NEWEST_DEFAULTS = 2
"""Newest generation of defaults; it rises when the default of an identity key changes.

1: releases before the key `defaults`. 2: features that use one table have separate rows, unless it is
`shared`.
"""

GENERATION = Integer(1, NEWEST_DEFAULTS)
GENERATION_HINT = (
    f"defaults: the generation of defaults of the spec; this release supports 1 to {NEWEST_DEFAULTS}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A whole spec. `labels`, `tables` and `features` are in file order, which defines indexes and ids."""

    name: str = identity("names the model's topics and store", MODEL_NAME)
    defaults: int = identity(
        "generation of defaults; 1 continues a model of a release without this key",
        GENERATION,
        default=NEWEST_DEFAULTS,
        hint=GENERATION_HINT,
    )
    events: Events
    join: Join
    labels: tuple[Label, ...]
    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    model: Model
    train: Train
    serve: Serve
    retention: Retention
    partitions: int = identity("of impressions, actions and samples", Integer(1, 256), default=8)
    buckets: int = identity(
        "of the parameter server, the unit of ownership", Integer(2, 65_536, power_of_two=True), default=1024
    )
    files: Files = field(default_factory=Files)
    folder: str = field(default="", compare=False)  # folder of the spec file; base of its relative paths
    written: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The parsed TOML, to parse the spec again in another generation of defaults."""

    @staticmethod
    def load(path: str | Path) -> Spec:
        """Read a `freshet.toml`. Raises ConfigError for an unreadable or invalid file."""
        from freshet.config.spec.parse import load_spec  # noqa: PLC0415 - parse imports this module

        return load_spec(path)

    def table(self, name: str) -> Table:
        """Return the table of that name. Raises KeyError."""
        return {t.name: t for t in self.tables}[name]

    def feature(self, name: str) -> Feature:
        """Return the feature of that name. Raises KeyError."""
        return {f.name: f for f in self.features}[name]

    @property
    def bounds(self) -> dict[int, tuple[float, float]]:
        """Index of a label -> least and greatest value, for labels with bounds."""
        return {label.index: label.bounds for label in self.labels if label.bounds is not None}

    def label(self, name: str) -> Label:
        """Return the label of that name. Raises KeyError."""
        return {label.name: label for label in self.labels}[name]
