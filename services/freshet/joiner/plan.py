"""Join plan, compiled from the spec: windows, conditions, aggregates; the topics and context of the join."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.expression import Expression, LabelValue, compile_condition, compile_value
from freshet.config.spec.model import Spec, TimeField
from freshet.config.spec.rules import Bounds
from freshet.config.spec.schemas import streams_of
from freshet.config.spec.topics import RecordLimits
from freshet.features.blocks import MAX_SAMPLES, block_samples
from freshet.log import EventLog, Writer
from freshet.types import TopicPartition

if TYPE_CHECKING:
    from freshet.joiner.decoder import EventDecoder

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
    def remembered_ms(self) -> int:
        """Event time for which a restart needs an event (PROTOCOL 20)."""
        return 2 * (max(label.window_ms for label in self.labels) + self.grace_ms)

    @property
    def aggregates(self) -> tuple[tuple[int, str], ...]:
        """(label index, kind) of each aggregate: the columns of `ActionColumns.values`."""
        return tuple(
            (i, part.name)
            for i, label in enumerate(self.labels)
            if label.value
            for part in label.value.aggregates
        )


@dataclass(frozen=True, slots=True)
class Topics:
    """Topics of the join, by purpose."""

    inputs: Mapping[str, str]  # role -> topic; `shown` only if the spec has it
    samples: str
    late: str
    joiner: str
    dead_letters: str
    log_ids: Mapping[str, str]  # input topic -> log id
    limits: RecordLimits  # of records derived from events
    samples_partitions: int  # the spec's; samples of input partition p go to p modulo this number

    def samples_partition(self, partition: int) -> int:
        """Return the partition of `samples` for a partition of the inputs. Several may share one: inputs may
        grow, `samples` does not during a model's life (PROTOCOL 1)."""
        return partition % self.samples_partitions


@dataclass(frozen=True, slots=True)
class JoinContext:
    """One model's join on a log, as the joiner and the batches beside it use it.

    One writer may span all partitions, which is cheapest where one process always has them all. Where
    partitions move between processes, each has a writer of its own, named after it. The later opener of a
    writer fences the earlier one.
    """

    log: EventLog
    model: str
    plan: JoinPlan
    topics: Topics
    decoder: Callable[[], EventDecoder]  # makes a decoder; each partition has its own
    partitions: Sequence[int]  # of the inputs, at the start
    all_partitions: bool = True  # whether one writer spans all partitions
    clock: Clock = SYSTEM_CLOCK
    open_writer: Callable[[str], Writer] | None = None  # opens a writer by name; None: the log's

    def groups(self, partitions: Sequence[int]) -> list[tuple[int, ...]]:
        """Group partitions that share a writer."""
        return [tuple(partitions)] if self.all_partitions else [(p,) for p in partitions]

    def writer_of(self, group: tuple[int, ...]) -> Writer:
        """Open the writer of a group of partitions, which fences its former owner."""
        return self.writer_named(f"joiner-{self.model}" + ("" if self.all_partitions else f"-{group[0]}"))

    def writer_named(self, name: str) -> Writer:
        """Open a writer by its name."""
        return (self.open_writer or self.log.writer)(name)

    def inputs_of(self, partitions: Iterable[int]) -> list[TopicPartition]:
        """Return the input topics' partitions of these numbers."""
        return [TopicPartition(topic, p) for p in partitions for topic in self.topics.inputs.values()]


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
