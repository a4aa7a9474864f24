"""What the joiner needs of a decoder of events, and the checks that follow decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from freshet.joiner.core import ActionColumns, ImpressionColumns, ShownColumns
from freshet.types import I64, Records

__all__ = ["REFUSALS", "EventColumns", "EventDecoder", "Refused", "refuse_bad_times"]

EventColumns = ImpressionColumns | ShownColumns | ActionColumns


REFUSALS = ("unreadable", "no_schema", "bad_time")
"""Why records are refused, in a word: their bytes are not what their schema says; their schema is not known,
or lacks what the spec names; their time is before 1970 or too far ahead."""


@dataclass(slots=True)
class Refused:
    """Records that are not understood or not acceptable, with the reason; they go to dead letters."""

    rows: list[int] = field(default_factory=list)  # index in the records read
    reasons: list[str] = field(default_factory=list)
    no_schema: int = 0  # of these, for their schema
    bad_time: int = 0  # of these, for their time

    def by_reason(self) -> dict[str, int]:
        """REFUSALS -> how many."""
        others = self.no_schema + self.bad_time
        return {"unreadable": len(self) - others, "no_schema": self.no_schema, "bad_time": self.bad_time}

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

    def fitting(self, served: ImpressionColumns, records: Records, refused: Refused) -> ImpressionColumns:
        """Leave out events whose samples no trainer of the spec can decode, and refuse them.

        Called for events that are new. A replay takes what earlier releases took (PROTOCOL 18).
        """

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
        refused.bad_time += 1
        refused.rows.append(int(row))
        refused.reasons.append(
            f"its time is {worst} ms ahead of the log's, more than join.max_ahead_ms = {max_ahead_ms}"
            if worst > max_ahead_ms
            else "its time is before 1970"
        )
    return columns.where(~np.isin(rows, rows[bad]))
