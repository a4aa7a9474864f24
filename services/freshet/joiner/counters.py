"""What came of the events that this process has joined, for metrics. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from freshet.joiner.decode import REFUSALS
from freshet.joiner.ledger import EVENT_COUNTERS

__all__ = ["EventCounts"]


@dataclass(slots=True)
class EventCounts:
    """Counts since the process started, of what its commits have made durable.

    The ledger counts since the model began and moves with its partition; here each commit is counted once, by
    the process that wrote it, so that sums over joiners hold when partitions move. One whose writer died, or
    was not told that it is written, before it counted is in the ledger alone.
    """

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVENT_COUNTERS, 0))
    refused: dict[str, dict[str, int]] = field(default_factory=dict)  # role -> REFUSALS -> events
    out_of_bounds: dict[str, int] = field(
        default_factory=dict
    )  # label with bounds -> samples dropped for them

    @classmethod
    def of(cls, roles: Iterable[str]) -> EventCounts:
        """Nothing yet, of these streams: a counter that begins with its first event shows no increase."""
        return cls(refused={role: dict.fromkeys(REFUSALS, 0) for role in roles})

    def add(
        self,
        outcomes: Mapping[str, int],
        refused: Mapping[str, Mapping[str, int]],
        out_of_bounds: Mapping[str, int] | None = None,
    ) -> None:
        """Of one commit that is written."""
        for label, samples in (out_of_bounds or {}).items():
            self.out_of_bounds[label] = self.out_of_bounds.get(label, 0) + samples
        for name, events in outcomes.items():
            self.outcomes[name] += events
        for role, counts in refused.items():
            for reason, events in counts.items():
                self.refused[role][reason] += events
