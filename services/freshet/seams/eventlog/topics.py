"""Create a model's topics on any event log."""

from __future__ import annotations

from freshet.errors import Mismatch
from freshet.seams.eventlog import EventLog, TopicInfo
from freshet.spec.model import Spec
from freshet.spec.records import RecordLimits
from freshet.spec.schemas import streams_of
from freshet.spec.topics import TopicPlan, Topics, topics_of

__all__ = ["ensure_topics", "limits_of"]


def ensure_topics(log: EventLog, spec: Spec) -> Topics:
    """Create the topics that are missing; idempotent, and safe for several processes at once.

    Those that others alone write are left as they are.

    Raises Mismatch if one exists with another number of partitions, or if one of others does not exist.
    """
    topics = topics_of(spec)
    theirs = {stream.topic for stream in streams_of(spec) if stream.theirs}
    known = log.topics() if theirs else {}
    for plan in topics.plans:
        if plan.name in theirs:
            _check(plan, known.get(plan.name))
            continue
        log.create_topic(
            plan.name, partitions=plan.partitions, retention_ms=plan.retention_ms, group=plan.group
        )
    return topics


def limits_of(log: EventLog, spec: Spec) -> RecordLimits:
    """Bounds of events by what the model's topics take as one record; the topics must exist.

    Raises ConfigError for a topic that takes too little, as `RecordLimits.of` does.
    """
    known = log.topics()
    return RecordLimits.of(spec, {p.name: known[p.name].max_record_bytes for p in topics_of(spec).plans})


def _check(plan: TopicPlan, found: TopicInfo | None) -> None:
    """A topic of others fits, or Mismatch says why not."""
    if found is None or found.partitions != plan.partitions:
        partitions = "no such topic" if found is None else f"{found.partitions}"
        raise Mismatch(
            f"topic {plan.name}: expected {plan.partitions} partitions, found {partitions}\n"
            "  others write it, so they make it; the spec's `partitions` are those of all that is joined"
        )
