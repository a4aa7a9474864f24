"""Shares of events from which the model learns nothing: definitions, and figures of the last five minutes.

A share is `lost` divided by `of`; both are sums of counts that joiner and inference keep. Status, console,
replay and metrics use these definitions, so that a name has one numerator and one denominator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RECENT_S = 300.0
"""Length of `recent`."""

_STEP_S = 10.0
"""Interval between kept counts; `recent` covers up to this much more."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Definition of a share."""

    name: str
    words: str  # in a sentence: "3 of 50 <words>"
    lost: tuple[str, ...]  # counts that are summed
    of: tuple[str, ...]


_ACTIONS = ("actions_matched", "actions_again", "actions_late", "actions_outside", "actions_orphan")
_SHOWN = ("shown_matched", "shown_late", "shown_orphan", "shown_outside")
_REPEATS = ("impressions_repeated", "actions_repeated", "shown_repeated", "actions_no_label")
_IMPRESSIONS = ("impressions", "impressions_late")
JOINER_FIGURES = (
    Figure(
        "unmatched",
        "actions that meet a label's condition changed no label",
        ("actions_late", "actions_outside", "actions_orphan"),
        _ACTIONS,
    ),
    Figure(
        "orphans",
        "of these had no impression within the grace, or are dated after its windows",
        ("actions_orphan",),
        _ACTIONS,
    ),
    Figure(
        "outside",
        "of these are dated before their impression by more than the grace",
        ("actions_outside",),
        _ACTIONS,
    ),
    Figure("late", "came after their label was decided", ("actions_late",), _ACTIONS),
    Figure("late_impressions", "impressions came too late to be joined", ("impressions_late",), _IMPRESSIONS),
    Figure(
        "unmatched_shown",
        "shown events found no impression, came too late, or are dated before it or after its windows",
        ("shown_orphan", "shown_late", "shown_outside"),
        _SHOWN,
    ),
    Figure(
        "undecodable",
        "events could not be decoded or used, and are dead letters",
        ("refused",),
        ("refused", *_IMPRESSIONS, *_ACTIONS, *_SHOWN, *_REPEATS),
    ),
)
"""Figures over counts of the joiner's ledger (`freshet.joiner.commit.EVENT_COUNTERS`), and `refused`."""

INFERENCE_FIGURES = (
    Figure("unlogged", "served events were not logged", ("unlogged",), ("unlogged", "logged")),
)
"""Figures over counts of the served log."""

_ALL = {figure.name: figure for figure in (*JOINER_FIGURES, *INFERENCE_FIGURES)}


def counted(figures: tuple[Figure, ...], counts: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return {figure: {lost, of, share}}; a share is None if `of` is 0."""
    shares = {}
    for figure in figures:
        lost, of = (sum(counts.get(name, 0) for name in names) for names in (figure.lost, figure.of))
        shares[figure.name] = {"lost": lost, "of": of, "share": lost / of if of else None}
    return shares


@dataclass(slots=True)
class Recent:
    """Counts of the last five minutes, from totals that only grow. Not thread-safe."""

    span_s: float = RECENT_S
    _kept: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)

    def take(self, totals: Mapping[str, int], now_s: float) -> dict[str, int]:
        """Return the growth of each total over the span, or since the first call; `now_s` is monotonic."""
        if not self._kept or now_s - self._kept[-1][0] >= _STEP_S:
            self._kept.append((now_s, dict(totals)))
        while len(self._kept) > 1 and now_s - self._kept[1][0] >= self.span_s:
            self._kept.popleft()
        first = self._kept[0][1]
        return {name: total - first.get(name, 0) for name, total in totals.items()}


def losses_text(recent: Mapping[str, Any] | None, begun: Mapping[str, Any] | None) -> list[str]:
    """Return a line for each figure with losses.

    Args:
        recent: `counted` of the last five minutes; None if there is no such span.
        begun: `counted` since the model, or the process, began.
    """
    lines = []
    for name, figure in _ALL.items():
        parts = []
        for shares, when in ((recent, "in the last 5 min"), (begun, "since the beginning")):
            one = (shares or {}).get(name)
            if one and one["lost"] and one["of"]:
                parts.append(f"{one['lost']:,} of {one['of']:,} ({one['lost'] / one['of']:.1%}) {when}")
        if parts:
            lines.append(f"{name}: {'; '.join(parts)}: {figure.words}")
    return lines
