"""Counts of the events that this process has joined, for metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from freshet.joiner.decode import REFUSALS
from freshet.joiner.ledger import EVENT_COUNTERS

__all__ = ["EventCounts"]


@dataclass(slots=True)
class EventCounts:
    """Counts of durable commits since the process started.

    The ledger counts since the model began and moves with its partition. Here the process that wrote a commit
    counts it once, so sums over joiners stay right when partitions move. If the writer dies, or gets no
    acknowledgement, before it counts a commit, that commit is in the ledger only.
    """

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVENT_COUNTERS, 0))
    refused: dict[str, dict[str, int]] = field(default_factory=dict)  # role -> REFUSALS -> events
    out_of_bounds: dict[str, int] = field(default_factory=dict)  # label with bounds -> samples dropped

    @classmethod
    def of(cls, roles: Iterable[str]) -> EventCounts:
        """Make zero counts for streams: a counter that begins with its first event shows no increase."""
        return cls(refused={role: dict.fromkeys(REFUSALS, 0) for role in roles})

    def add(
        self,
        outcomes: Mapping[str, int],
        refused: Mapping[str, Mapping[str, int]],
        out_of_bounds: Mapping[str, int] | None = None,
    ) -> None:
        """Add the counts of one written commit."""
        for label, samples in (out_of_bounds or {}).items():
            self.out_of_bounds[label] = self.out_of_bounds.get(label, 0) + samples
        for name, events in outcomes.items():
            self.outcomes[name] += events
        for role, counts in refused.items():
            for reason, events in counts.items():
                self.refused[role][reason] += events
