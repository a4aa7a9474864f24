"""Nouns of a spec, third part: what is learned, how it is learned, how it is served."""

# ruff: noqa: RUF009  option() makes dataclass fields; nothing is computed once and shared
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from freshet.config.options import Boolean, Choice, Duration, Integer, ListOf, Number, Text, option
from freshet.config.spec.forms import DAY, HOUR, MINUTE, NAME, SECOND

__all__ = ["Explore", "Gate", "Model", "Serve", "Train"]

BEHIND_ROWS = 256
"""Of a batch of a lane that is behind, where each batch costs Python, or a round trip, beside its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is learned."""

    kind: str = option(
        "identity",
        "the family of models",
        Text(
            'one of "hedge", "mlp", "dlrm", "deepfm", "dcnv2", "linear", or "package.module:Class"',
            r"hedge|mlp|dlrm|deepfm|dcnv2|linear|[A-Za-z_][\w.]*:[A-Za-z_]\w*",
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
        "members of the hedge; without it all, cross only if there are crosses, and fast, fm and counts only "
        "if a feature has ids. wide and fast: a weight for each id, in small and in large steps; cross: for "
        "each combination of ids; fm: products of vectors; deep: an MLP; counts: wide's weights, trusted by "
        "how often an id was seen; stack: a learned sum of the others",
        ListOf(Choice(("wide", "fast", "cross", "fm", "deep", "counts", "stack")), 1, 7),
        default=("wide", "fast", "fm", "deep", "counts", "stack"),
        former={1: ("wide", "fm", "deep")},
    )
    crosses: tuple[tuple[str, ...], ...] = option(
        "identity",
        "features of the cross expert, two to four a cross; without it, and without experts, all pairs of "
        "the features with one id a sample if there are 10 of them at most, in a table `crosses` of at most "
        "4194304 rows; []: none",
        ListOf(ListOf(NAME, 2, 4), 0, 256),
        default=(),
    )
    deep: tuple[int, ...] = option(
        "identity", "hidden widths of the MLP", ListOf(Integer(1, 8_192), 1, 8), default=(256, 128)
    )
    seed: int = option("identity", "of initial rows and weights", Integer(0, 2**63 - 1), default=0)
    hedge_discount: float = option(
        "tunable",
        "of an expert's past loss, per row: 0.999 judges experts by the last 1,000 rows, 0.9999 by 10,000",
        Number(0.5, 1, open_low=True),
        default=0.999,
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
        "tunable",
        "rows a lane takes at most, more only of one request that has more; the joiner closes blocks of "
        "samples at so many (256 at most), and a batch is whole blocks; the dense gradient is a mean over a "
        "step's rows, or over so many if it has fewer, so that every row weighs the same",
        Integer(1, 65_536),
        key="batch.rows",
        default=64,
        former={1: 256},
    )
    batch_wait_ms: int = option(
        "tunable",
        "how long a lane waits to fill a batch",
        Duration(0, MINUTE),
        key="batch.wait",
        default=20,
    )
    batch_behind_rows: int | None = option(
        "tunable",
        "rows a lane takes when it is behind, at least batch.rows; without it batch.rows where native code "
        "goes from batch to batch (kinds hedge, mlp and linear, rows in the trainer's process), otherwise "
        "256 if that is more",
        Integer(1, 65_536),
        key="batch.behind",
        default=None,
    )
    staleness_rows: int = option(
        "tunable",
        "rows of other batches in flight when a batch is looked up; mode `sync` has no use for it",
        Integer(0, 1_048_576),
        default=512,
    )
    mode: Literal["hybrid", "sync", "async"] = option(
        "tunable",
        "hybrid: rows are looked up ahead within staleness_rows, dense gradients are summed over ranks; "
        "sync: the next lookup waits for the step's pushes; async: as hybrid, and no rank waits for another",
        Choice(("hybrid", "sync", "async")),
        default="hybrid",
    )
    lanes: int | None = option(
        "deployment",
        "threads that train; without it min(cores, 8, partitions, 1 + staleness_rows / batch rows)",
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
        "how often rows are flushed to the row store; less often where flushing takes over a tenth of a core",
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

    def behind_rows(self, *, native_loop: bool) -> int:
        """Rows of a batch of a lane that is behind; `native_loop`: no Python runs between its batches."""
        least = self.batch_rows if native_loop else max(self.batch_rows, BEHIND_ROWS)
        return self.batch_behind_rows or least


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
        "tunable",
        "newest samples on which it judges; they are kept in memory with copies of their rows",
        Integer(1, 10_000_000),
        default=2_000,
    )
    floor: int = option(
        "tunable",
        "with fewer samples to judge by, no version takes the place of `stable`",
        Integer(0, 10_000_000),
        default=100,
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
