"""What the joiner needs of a decoder of events, and the checks that follow decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import structlog

from freshet.config.spec.topics import MAX_ELEMENTS, RecordLimits
from freshet.joiner.core import ActionColumns, ImpressionColumns, ShownColumns
from freshet.types import I64, Records

__all__ = [
    "BAD_IN_A_ROW",
    "REFUSALS",
    "BadInARow",
    "Disputed",
    "EventColumns",
    "EventDecoder",
    "Refused",
    "refuse_too_large",
]

# --- Streams of which nothing can be used: told in the log and in the readiness of the joiner.


log = structlog.get_logger("freshet.joiner")

BAD_IN_A_ROW = 100
"""Refused events of a stream without a good one in between, from which on the joiner is not ready."""

LOG_AGAIN_S = 60.0
"""Between two log lines about one stream and reason."""


@dataclass(slots=True)
class BadInARow:
    """Counts refused events of each stream since its last good one. Used by one thread."""

    monotonic: Callable[[], float]  # seconds
    _in_a_row: dict[str, int] = field(default_factory=dict)  # role -> events
    _last: dict[str, str] = field(default_factory=dict)  # role -> reason of the last
    _logged_s: dict[tuple[str, str], float] = field(default_factory=dict)  # (role, word) -> when

    def note(self, role: str, topic: str, records: int, refused: Refused) -> None:
        """Take note of a batch of `records` records of a stream, and of what was refused of it."""
        if not len(refused):
            if records and self._in_a_row.get(role):
                self._in_a_row[role] = 0
            return
        good = records > len(set(refused.rows))
        self._in_a_row[role] = 0 if good else self._in_a_row.get(role, 0) + len(refused)
        self._last[role] = refused.reasons[-1]
        now = self.monotonic()
        for word, events in refused.by_reason().items():
            if events and now - self._logged_s.get((role, word), float("-inf")) >= LOG_AGAIN_S:
                self._logged_s[role, word] = now
                log.warning(
                    "events were refused", topic=topic, why=word, records=events, reason=refused.reasons[-1]
                )

    def trouble(self) -> str | None:
        """None, or which stream is bad and why."""
        for role, events in self._in_a_row.items():
            if events >= BAD_IN_A_ROW:
                return f"the last {events} events of {role} were all refused: {self._last[role]}"
        return None


EventColumns = ImpressionColumns | ShownColumns | ActionColumns


REFUSALS = ("unreadable", "no_schema", "bad_time", "too_large")
"""Why records are refused, in a word: their bytes are not what their schema says; their schema is not known,
or lacks what the spec names; their time is before 1970 or too far ahead; their samples would exceed what the
log takes."""


@dataclass(frozen=True, slots=True)
class Disputed:
    """Clocks disagree on a record: it is dated ahead of the time that is known to be right, and another clock
    says that it is not. It is not joined before one of the clocks has turned out to be wrong."""

    offset: int
    ahead_ms: int  # of the known time
    logged_ms: int  # the log's time of this record
    newest_ms: int  # the log's time of the last record that was read after it, or of this one


@dataclass(slots=True)
class Refused:
    """Records that are not understood or not acceptable, with the reason; they go to dead letters."""

    rows: list[int] = field(default_factory=list)  # index in the records read
    reasons: list[str] = field(default_factory=list)
    no_schema: int = 0  # of these, for their schema
    bad_time: int = 0  # of these, for their time
    too_large: int = 0  # of these, for the size of their samples
    first_bad_time: str = ""  # offset and reason of the first of these
    disputed: Disputed | None = None  # the record on which clocks disagree; none from it on is refused

    def by_reason(self) -> dict[str, int]:
        """REFUSALS -> how many."""
        others = self.no_schema + self.bad_time + self.too_large
        return {
            "unreadable": len(self) - others,
            "no_schema": self.no_schema,
            "bad_time": self.bad_time,
            "too_large": self.too_large,
        }

    def add(self, rows: I64, reason: str) -> None:
        """Refuse these rows for one reason."""
        self.rows.extend(rows.tolist())
        self.reasons.extend([reason] * len(rows))

    def before(self, row: int) -> Refused:
        """Those of earlier records; the counts by reason are at most their number."""
        kept = [i for i, at in enumerate(self.rows) if at < row]
        n = len(kept)
        bad_time = min(self.bad_time, n)
        return Refused(
            [self.rows[i] for i in kept],
            [self.reasons[i] for i in kept],
            min(self.no_schema, n - bad_time),
            bad_time,
            min(self.too_large, n - bad_time),
            self.first_bad_time,
        )

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


def refuse_too_large(
    columns: ImpressionColumns, records: Records, limits: RecordLimits, labels: int, refused: Refused
) -> ImpressionColumns:
    """Drop events of which a sample would exceed what the log takes as one record, or all samples together
    what is appended at once.

    The gateway refuses such events before it acknowledges them; other writers' topics may hold them.
    """
    if not len(columns):
        return columns
    longest = int((columns.ends - columns.begins).max())
    safe = min(limits.sample_bytes, limits.safe_event_bytes(labels), MAX_ELEMENTS)
    if longest <= safe and len(columns) <= len(columns.data):  # the usual case; elements have bytes
        return columns
    counts = np.bincount(columns.events, minlength=len(columns.offsets))
    context = columns.prefix_ends - columns.begins + columns.ends - columns.suffix_begins  # (E,)
    sizes = context[columns.events] + columns.element_ends - columns.element_begins  # (N,)
    events = len(context)
    largest = np.zeros(events, np.int64)
    np.maximum.at(largest, columns.events, sizes)
    together = np.bincount(columns.events, sizes.astype(np.float64), events) * labels
    bad = np.flatnonzero(
        (largest > limits.sample_bytes) | (together > limits.expanded_bytes) | (counts > MAX_ELEMENTS)
    )
    if not len(bad):
        return columns
    for event in bad.tolist():
        refused.too_large += 1
        refused.rows.append(int(np.searchsorted(records.offsets, columns.offsets[event])))
        refused.reasons.append(
            f"a sample of it would have {int(largest[event]):,} bytes, more than the {limits.sample_bytes:,} "
            "that the log takes"
            if largest[event] > limits.sample_bytes
            else f"it has {int(counts[event]):,} elements, more than {MAX_ELEMENTS:,}"
            if counts[event] > MAX_ELEMENTS
            else f"its samples would have {int(together[event]):,} bytes together, as its context is copied "
            f"into each; at most {limits.expanded_bytes:,} are taken"
        )
    return columns.where(~np.isin(columns.events, bad))
