"""The context that the services of a model share."""

from __future__ import annotations

from dataclasses import dataclass

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.spec.layout import Layout, layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import Topics
from freshet.log import EventLog
from freshet.log.topics import ensure_topics


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
