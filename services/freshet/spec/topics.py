"""Names and shapes of a model's topics; the one place that spells them."""

from __future__ import annotations

from dataclasses import dataclass

from freshet.spec.model import Spec

__all__ = ["ROWS_PARTITIONS", "SCHEMAS_TOPIC", "TopicPlan", "Topics", "topics_of"]

ROWS_PARTITIONS = 8
"""Partitions of `<model>.rows`, fixed for life: as many readers can share the work of following rows."""

SCHEMAS_TOPIC = "schemas"
"""One for all models of a log: a schema's id is its first record's offset, plus 1."""

DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """How a topic is to be created. `group`: topics that one atomic append may span."""

    name: str
    partitions: int
    retention_ms: int | None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Topics:
    """Every topic of one model."""

    served: str
    shown: str | None
    action: str
    samples: str
    late: str
    joiner: str
    dead_letters: str  # what the joiner refuses; atomic with its commits
    refused: str  # what the gateway refuses
    rows: str
    control: str
    versions: str
    measures: str
    plans: tuple[TopicPlan, ...]


def topics_of(spec: Spec) -> Topics:
    """Names and creation plans of all topics of a model, in an order in which they may be created.

    Event and sample topics are kept a week, far longer than any join horizon; claims and schemas for ever.
    """
    model = spec.name
    events = spec.events
    joined = f"{model}.joined"  # samples and the joiner's commit change in one append (PROTOCOL 18)
    week = 7 * DAY_MS
    shown = events.shown.topic if events.shown else None
    plans = [
        TopicPlan(SCHEMAS_TOPIC, 1, None),
        TopicPlan(events.served.topic, spec.partitions, week),
        *([TopicPlan(shown, spec.partitions, week)] if shown else []),
        TopicPlan(events.action.topic, spec.partitions, week),
        TopicPlan(f"{model}.samples", spec.partitions, week, joined),
        TopicPlan(f"{model}.samples.late", spec.partitions, week, joined),
        TopicPlan(f"{model}.joiner", spec.partitions, week, joined),
        TopicPlan(f"{model}.dead-letters", 1, week, joined),
        TopicPlan(f"{model}.refused", 1, week),
        TopicPlan(f"{model}.rows", ROWS_PARTITIONS, DAY_MS),
        TopicPlan(f"{model}.control", 1, None),
        TopicPlan(f"{model}.versions", 1, None),
        TopicPlan(f"{model}.measures", 1, week),
    ]
    return Topics(
        served=events.served.topic,
        shown=shown,
        action=events.action.topic,
        samples=f"{model}.samples",
        late=f"{model}.samples.late",
        joiner=f"{model}.joiner",
        dead_letters=f"{model}.dead-letters",
        refused=f"{model}.refused",
        rows=f"{model}.rows",
        control=f"{model}.control",
        versions=f"{model}.versions",
        measures=f"{model}.measures",
        plans=tuple(plans),
    )
