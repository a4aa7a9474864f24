"""What the spec says about the join, as numbers: windows, conditions, aggregates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from freshet.config.expression import Expression, LabelValue, compile_condition, compile_value
from freshet.config.spec.label_bounds import Bounds
from freshet.config.spec.model import Spec, TimeField
from freshet.config.spec.schemas import streams_of
from freshet.features.blocks import MAX_SAMPLES, block_samples

__all__ = ["AGGREGATE_KINDS", "RAMP", "JoinPlan", "LabelPlan", "join_plan"]

RAMP = 2
"""Over how many waits (window + grace) early emission begins. Frozen, as replays repeat decisions by it.

For so long a positive is learned from later than it came, at first by a wait. The weight of held ones,
1 - 1/RAMP, keeps any ramp balanced, so the shortest that gives them a weight is taken (ADR 0011).
"""

AGGREGATE_KINDS = ("sum", "count", "max", "min", "last")
"""In the order of the native core's numbers."""


@dataclass(frozen=True, slots=True)
class LabelPlan:
    """One label as the join sees it."""

    name: str
    window_ms: int
    given: int  # index of the label that must be true; -1: none
    condition: Expression  # on an action
    value: LabelValue | None  # None: a binary label
    bounds: Bounds | None = None  # values outside are not learned


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """The join of one model. Letters: L labels, A aggregates over all numeric labels, in label order."""

    labels: tuple[LabelPlan, ...]
    grace_ms: int
    require_shown: bool
    early: bool
    negatives: float
    max_ahead_ms: int
    ramp: int = 0  # waits over which early emission begins; 0: positives come at once from the first on
    times: Mapping[str, TimeField] = field(default_factory=dict)  # role -> how its events' time is written
    block_samples: int = MAX_SAMPLES  # that close a block of `samples`; a replay does not depend on it

    @property
    def aggregates(self) -> tuple[tuple[int, str], ...]:
        """(label index, kind) of each aggregate: the columns of `ActionColumns.values`."""
        return tuple(
            (i, part.name)
            for i, label in enumerate(self.labels)
            if label.value
            for part in label.value.aggregates
        )


def join_plan(spec: Spec, hash_text: Callable[[str], int] | None = None) -> JoinPlan:
    """Compile the join of a spec. `hash_text` is the hash by which text columns of actions arrive."""
    index = {label.name: label.index for label in spec.labels}
    return JoinPlan(
        labels=tuple(
            LabelPlan(
                name=label.name,
                window_ms=label.window_ms,
                given=index[label.given] if label.given else -1,
                condition=compile_condition(label.on, hash_text=hash_text, key=f"labels.{label.name}.on"),
                value=compile_value(label.value, hash_text=hash_text, key=f"labels.{label.name}.value")
                if label.value
                else None,
                bounds=label.bounds,
            )
            for label in spec.labels
        ),
        grace_ms=spec.join.grace_ms,
        require_shown=spec.join.require == "shown",
        early=spec.join.emit == "early",
        negatives=spec.join.negatives,
        max_ahead_ms=spec.join.max_ahead_ms,
        ramp=RAMP,
        times={stream.role: stream.time for stream in streams_of(spec)},
        block_samples=block_samples(spec.train.batch_rows),
    )
