"""A model on any event log: the creation of its topics, and the context that its services share."""

from __future__ import annotations

import re
from dataclasses import dataclass

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.spec.layout import Layout, layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import RecordLimits, TopicPlan, Topics, topics_of
from freshet.errors import ConfigError, Mismatch
from freshet.log import EventLog, TopicInfo

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,200}")


@dataclass(frozen=True, slots=True, eq=False)
class ModelContext:
    """A model as its processes see it: its spec, its topics in the event log, and the clock."""

    spec: Spec
    spec_hash: str  # identity of the spec; processes and stores of a model have the same
    layout: Layout  # of the spec
    log: EventLog
    topics: Topics
    clock: Clock = SYSTEM_CLOCK

    @classmethod
    def open(cls, spec: Spec, spec_hash: str, log: EventLog, clock: Clock = SYSTEM_CLOCK) -> ModelContext:
        """Create the missing topics of a model. Raises Mismatch as `ensure_topics` does."""
        return cls(spec, spec_hash, layout_of(spec), log, ensure_topics(log, spec), clock)


def ensure_topics(log: EventLog, spec: Spec) -> Topics:
    """Create missing topics; idempotent, and safe in several processes at once.

    External topics, which only other systems write, are not changed.

    Raises Mismatch if a topic exists with another number of partitions (event topics may have more than the
    spec: the joiner reads them all), or if an external topic does not exist.
    """
    topics = topics_of(spec)
    for plan in topics.plans:
        ensure_topic(log, plan)
    return topics


def ensure_topic(log: EventLog, plan: TopicPlan) -> None:
    """Create a topic, or check that an existing one fits the plan; an external one is only checked.

    Raises Mismatch if it does not fit, or if an external one does not exist.
    """
    if plan.external:
        _check(plan, log.partition_counts([plan.name]).get(plan.name))
        return
    try:
        log.create_topic(
            plan.name, partitions=plan.partitions, retention_ms=plan.retention_ms, group=plan.group
        )
    except Mismatch:
        found = log.partition_counts([plan.name]).get(plan.name, 0) if plan.may_have_more else 0
        if found <= plan.partitions:
            raise
        log.create_topic(plan.name, partitions=found, retention_ms=plan.retention_ms, group=plan.group)


def check_new_topic(name: str, partitions: int, group: str | None = None) -> None:
    """Check the arguments of `EventLog.create_topic`. Raises ConfigError."""
    for key, value in (("topic", name), ("group", group)):
        if value is not None and not _NAME.fullmatch(value):
            raise ConfigError("event log", key, value, f"a name that matches {_NAME.pattern}")
    if not 1 <= partitions <= 1024:
        raise ConfigError("event log", f"partitions of {name}", partitions, "an integer from 1 to 1024")


def check_partitions(found: TopicInfo, partitions: int, where: str) -> None:
    """Raise Mismatch if an existing topic has another number of partitions; `where` names its log."""
    if found.partitions != partitions:
        raise Mismatch(
            f"topic {found.name}: expected {partitions} partitions, found {found.partitions} {where}\n"
            "  the number is fixed for a model's life: keep it, or use another topic name"
        )


def limits_of(log: EventLog, spec: Spec) -> RecordLimits:
    """Return the limits of events by the record limits of the model's topics, which must exist.

    Raises ConfigError for a topic with too low a limit, as `RecordLimits.of` does.
    """
    known = log.topics()
    return RecordLimits.of(spec, {p.name: known[p.name].max_record_bytes for p in topics_of(spec).plans})


def _check(plan: TopicPlan, found: int | None) -> None:
    """Raise Mismatch if an external topic, which has `found` partitions, does not fit."""
    if found is None or found < plan.partitions:
        raise Mismatch(
            f"topic {plan.name}: expected {plan.partitions} partitions or more, "
            f"found {'no such topic' if found is None else found}\n"
            "  its writers create it; every joined topic has the spec's `partitions`"
        )
