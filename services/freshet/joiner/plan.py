"""Join plan, compiled from the spec: windows, conditions, aggregates. Also the growth of input topics."""

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


@dataclass(frozen=True, slots=True)
class Growth:
    """Partition counts of the joined topics when they were last read."""

    began_with: int  # the spec's `partitions`: those of `samples`, constant for the model's life
    joined: int  # partitions of each input topic that the joiners read together
    counts: Mapping[str, int]  # topic -> partitions; empty before the first count, or where no topic can grow
    why: str = ""  # why partitions that all topics have cannot be joined; "": they can be

    @property
    def sizes(self) -> set[int]:
        """Partition counts that the topics have, or had."""
        return {self.began_with, self.joined, *self.counts.values()}

    @property
    def unread(self) -> Mapping[str, int]:
        """{topic: partitions that no joiner reads}, without topics that are read completely."""
        return {topic: n - self.joined for topic, n in self.counts.items() if n > self.joined}

    @property
    def trouble(self) -> str:
        """A problem that an operator must fix; "" if there is none."""
        if not self.unread:
            return ""
        found = ", ".join(f"{topic} {n}" for topic, n in sorted(self.counts.items()))
        how = self.why or (
            "joined topics need equal partition counts: add partitions to the smaller ones, and all are read"
        )
        return (
            f"partitions that no joiner reads: {self.joined} of each topic are joined, found {found}; {how}"
        )

    @property
    def note(self) -> str:
        """Information for operators; "" while topics have not grown."""
        if self.unread or self.joined <= self.began_with:
            return self.trouble
        return (
            f"the topics grew from {self.began_with} to {self.joined} partitions, and all are joined; "
            "actions on what was served before the growth are orphans where their key's partition changed"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object of `freshet status --json`."""
        return {
            "began_with": self.began_with,
            "joined": self.joined,
            "topics": dict(self.counts),
            "unread": dict(self.unread),
            "note": self.note,
        }


RAMP = 2
"""Number of waits (window + grace) over which early emission begins. Constant, as replays repeat its
decisions.

During that time a positive is learned later than it came, at first by one wait. The weight of held positives,
1 - 1/2, keeps any length balanced, so this is the smallest number that gives them a weight (ADR 0011).
"""

AGGREGATE_KINDS = ("sum", "count", "max", "min", "last")
"""Kinds of aggregates, in the order of the native core's numbers."""


@dataclass(frozen=True, slots=True)
class LabelPlan:
    """Join parameters of one label."""

    name: str
    window_ms: int
    given: int  # index of the label that must be true; -1: none
    condition: Expression  # on an action
    value: LabelValue | None  # None: a binary label
    bounds: Bounds | None = None  # samples with values outside are dropped


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """Join parameters of one model. Letters: L labels, A aggregates over all numeric labels, in label
    order."""

    labels: tuple[LabelPlan, ...]
    grace_ms: int
    require_shown: bool
    early: bool
    negatives: float
    max_ahead_ms: int
    ramp: int = 0  # waits over which early emission begins; 0: positives are emitted at once from the start
    times: Mapping[str, TimeField] = field(default_factory=dict)  # role -> field and unit of its events' time
    block_samples: int = MAX_SAMPLES  # samples of a block of `samples`; a replay does not depend on it

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
    """Compile the join of a spec. `hash_text` is the hash of text columns of actions."""
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
