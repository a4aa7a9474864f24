"""What the spec says about the join, as numbers: windows, conditions, aggregates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from freshet.config.expression import Expression, LabelValue, compile_condition, compile_value
from freshet.config.spec.model import Spec, TimeField
from freshet.config.spec.rules import Bounds
from freshet.config.spec.schemas import streams_of
from freshet.features.blocks import MAX_SAMPLES, block_samples

__all__ = ["AGGREGATE_KINDS", "RAMP", "Growth", "JoinPlan", "LabelPlan", "join_plan"]

# --- Partitions that input topics got in a model's life: how many there are, are joined, and are read by
# no joiner.


@dataclass(frozen=True, slots=True)
class Growth:
    """Partitions of the joined topics when they were last counted."""

    began_with: int  # the spec's `partitions`: those of `samples`, fixed for the model's life
    joined: int  # of each input topic, by the joiners together
    counts: Mapping[str, int]  # topic -> partitions; empty before the first count, or where none can grow
    why: str = ""  # why partitions that all topics have cannot be joined; "": they can

    @property
    def sizes(self) -> set[int]:
        """How many partitions the topics have, or had."""
        return {self.began_with, self.joined, *self.counts.values()}

    @property
    def unread(self) -> Mapping[str, int]:
        """{topic: partitions that no joiner reads}, without topics of which all are read."""
        return {topic: n - self.joined for topic, n in self.counts.items() if n > self.joined}

    @property
    def trouble(self) -> str:
        """What an operator must mend; "" if nothing."""
        if not self.unread:
            return ""
        found = ", ".join(f"{topic} {n}" for topic, n in sorted(self.counts.items()))
        how = self.why or (
            "topics that are joined need one number of partitions: give the others as many, and all are read"
        )
        return (
            f"partitions that no joiner reads: {self.joined} of each topic are joined, found {found}; {how}"
        )

    @property
    def note(self) -> str:
        """What an operator should know; "" while topics are as they were."""
        if self.unread or self.joined <= self.began_with:
            return self.trouble
        return (
            f"the topics grew from {self.began_with} to {self.joined} partitions, and all are joined; "
            "actions on what was served before the growth are orphans where their key's partition changed"
        )

    def to_json(self) -> dict[str, Any]:
        """As `freshet status --json` shows it."""
        return {
            "began_with": self.began_with,
            "joined": self.joined,
            "topics": dict(self.counts),
            "unread": dict(self.unread),
            "note": self.note,
        }


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
