"""Create a model's topics on any event log."""

from __future__ import annotations

from freshet.seams.eventlog import EventLog
from freshet.spec.model import Spec
from freshet.spec.topics import Topics, topics_of

__all__ = ["ensure_topics"]


def ensure_topics(log: EventLog, spec: Spec) -> Topics:
    """Create the topics that are missing; idempotent, and safe for several processes at once.

    Raises Mismatch if one exists with another number of partitions.
    """
    topics = topics_of(spec)
    for plan in topics.plans:
        log.create_topic(
            plan.name, partitions=plan.partitions, retention_ms=plan.retention_ms, group=plan.group
        )
    return topics
