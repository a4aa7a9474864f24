"""What the joiner needs of a decoder of events, and the checks that follow decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from freshet.joiner.core import ActionColumns, ImpressionColumns, ShownColumns
from freshet.types import I64, Records

__all__ = ["EventColumns", "EventDecoder", "Refused", "refuse_bad_times"]

EventColumns = ImpressionColumns | ShownColumns | ActionColumns


@dataclass(slots=True)
class Refused:
    """Records that are not understood or not acceptable, with the reason; they go to dead letters."""

    rows: list[int] = field(default_factory=list)  # index in the records read
    reasons: list[str] = field(default_factory=list)

    def add(self, rows: I64, reason: str) -> None:
        """Refuse these rows for one reason."""
        self.rows.extend(rows.tolist())
        self.reasons.extend([reason] * len(rows))

    def __len__(self) -> int:
        return len(self.rows)


class EventDecoder(Protocol):
    """Turns records of one stream into columns. A record that cannot be understood is refused, never
    raised.
    """

    def served(self, records: Records) -> tuple[ImpressionColumns, Refused]:
        """Served events: impressions with the spans of their bytes."""

    def shown(self, records: Records) -> tuple[ShownColumns, Refused]:
        """Shown events. Called only if the spec has that stream."""

    def actions(self, records: Records) -> tuple[ActionColumns, Refused]:
        """Actions with the labels they match and what they bring to each aggregate."""


C = TypeVar("C", ImpressionColumns, ShownColumns, ActionColumns)


def refuse_bad_times(columns: C, records: Records, max_ahead_ms: int, refused: Refused) -> C:
    """Drop events dated before 1970, or further ahead of their record's time than allowed (PROTOCOL 19).

    One event dated 2099 would otherwise close every window.
    """
    if not len(columns):
        return columns
    offsets, _ = columns.places
    rows = np.searchsorted(records.offsets, offsets)
    ahead = columns.times_ms - records.times_ms[rows]
    bad = (ahead > max_ahead_ms) | (columns.times_ms < 0)
    if not bad.any():
        return columns
    for row in np.unique(rows[bad]):
        worst = int(ahead[rows == row].max())
        refused.rows.append(int(row))
        refused.reasons.append(
            f"its time is {worst} ms ahead of the log's, more than join.max_ahead_ms = {max_ahead_ms}"
            if worst > max_ahead_ms
            else "its time is before 1970"
        )
    return columns.where(~np.isin(rows, rows[bad]))
