"""Nouns of a spec, second part: tables with their optimisers, and features."""

# ruff: noqa: RUF009  option() makes dataclass fields; nothing is computed once and shared
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from freshet.config.options import Boolean, Choice, Duration, Integer, ListOf, Number, option
from freshet.config.spec.forms import DAY, MINUTE, NAME, PATH, Constant, Step, StepForm

__all__ = ["Feature", "Optimizer", "Table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An update rule with its parameters, as `freshet.config.spec.optimizers` describes them."""

    name: str  # of a rule
    parameters: Mapping[str, float]  # complete: defaults filled in

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.parameters.items()))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A family of rows with one dim and optimiser, of one feature or of several."""

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
    shared: bool | None = option(
        "identity",
        "whether an id has one row for all features of the table; false: each feature has rows of its own. "
        "Without it false, but true where lists alone, or lists and one id, use the table, as a history of "
        "items and the item do (with `defaults = 1`: true)",
        Boolean(),
        default=None,  # the parser fills it in (`freshet.config.spec.layout`)
    )
    ttl_ms: int | None = option(
        "tunable",
        "rows not touched for this long of event time are evicted; false, or without it: no row goes by age, "
        "and max_rows and memory bound the table",
        Duration(MINUTE, 3650 * DAY, never=True),
        key="ttl",
        default=None,
        former={1: 30 * DAY},
    )
    admission: int = option(
        "tunable", "occurrences before a key gets a row of its own", Integer(1, 255), default=1
    )
    max_rows: int | None = option(
        "tunable",
        "least recently used rows are evicted above this; without it memory bounds the rows: of a trainer "
        "that holds them itself FRESHET_TRAINER_MEMORY_BYTES, of a shard FRESHET_PARAMSERVER_EVICT_BYTES",
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
    dense: tuple[str | Step, ...] = option(
        "identity",
        "a number, with these transforms in order; see below",
        ListOf(StepForm(), 1, 8, lone=True),
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
