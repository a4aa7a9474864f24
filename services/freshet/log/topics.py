"""Create a model's topics on any event log."""

from __future__ import annotations

from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import streams_of
from freshet.config.spec.topics import RecordLimits, TopicPlan, Topics, topics_of
from freshet.errors import Mismatch
from freshet.log import EventLog, TopicInfo

__all__ = ["ensure_topic", "ensure_topics", "limits_of"]


def ensure_topics(log: EventLog, spec: Spec) -> Topics:
    """Create the topics that are missing; idempotent, and safe for several processes at once.

    Those that others alone write are left as they are.

    Raises Mismatch if one exists with another number of partitions (event topics may have more than the spec
    says: the joiner reads them all), or if one of others does not exist.
    """
    topics = topics_of(spec)
    theirs = {stream.topic for stream in streams_of(spec) if stream.theirs}
    known = log.topics() if theirs else {}
    for plan in topics.plans:
        if plan.name in theirs:
            _check(plan, known.get(plan.name))
        else:
            ensure_topic(log, plan)
    return topics


def ensure_topic(log: EventLog, plan: TopicPlan) -> TopicInfo:
    """Create one topic, or see that the one that exists will do. Raises Mismatch if it does not."""
    try:
        return log.create_topic(
            plan.name, partitions=plan.partitions, retention_ms=plan.retention_ms, group=plan.group
        )
    except Mismatch:
        found = log.partition_counts([plan.name]).get(plan.name, 0) if plan.may_have_more else 0
        if found <= plan.partitions:
            raise
        return log.create_topic(plan.name, partitions=found, retention_ms=plan.retention_ms, group=plan.group)


def limits_of(log: EventLog, spec: Spec) -> RecordLimits:
    """Bounds of events by what the model's topics take as one record; the topics must exist.

    Raises ConfigError for a topic that takes too little, as `RecordLimits.of` does.
    """
    known = log.topics()
    return RecordLimits.of(spec, {p.name: known[p.name].max_record_bytes for p in topics_of(spec).plans})


def _check(plan: TopicPlan, found: TopicInfo | None) -> None:
    """A topic of others fits, or Mismatch says why not."""
    if found is None or found.partitions < plan.partitions:
        partitions = "no such topic" if found is None else f"{found.partitions}"
        raise Mismatch(
            f"topic {plan.name}: expected {plan.partitions} partitions or more, found {partitions}\n"
            "  others write it, so they make it; the spec's `partitions` are those of all that is joined"
        )
