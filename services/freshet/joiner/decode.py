"""Interface of event decoders, and the checks that follow decoding."""

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
    "Disputed",
    "EventColumns",
    "EventDecoder",
    "RefusalStreaks",
    "Refused",
    "refuse_too_large",
]


_log = structlog.get_logger("freshet.joiner")

BAD_IN_A_ROW = 100
"""Consecutive refused events of a stream from which on the joiner is not ready."""

LOG_AGAIN_S = 60.0
"""Time between two log lines about the same stream and reason."""


@dataclass(slots=True)
class RefusalStreaks:
    """Counts each stream's refused events since its last good one. Used by one thread."""

    monotonic: Callable[[], float]  # seconds
    _in_a_row: dict[str, int] = field(default_factory=dict)  # role -> events
    _last: dict[str, str] = field(default_factory=dict)  # role -> reason of the last refusal
    _logged_s: dict[tuple[str, str], float] = field(default_factory=dict)  # (role, word) -> when

    def count_batch(self, role: str, topic: str, records: int, refused: Refused) -> None:
        """Count a batch of `records` records of a stream, of which `refused` were refused."""
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
                _log.warning(
                    "events were refused", topic=topic, why=word, records=events, reason=refused.reasons[-1]
                )

    def trouble(self) -> str | None:
        """Return which stream has only refused events, and why; None if none has."""
        for role, events in self._in_a_row.items():
            if events >= BAD_IN_A_ROW:
                return f"the last {events} events of {role} were all refused: {self._last[role]}"
        return None


EventColumns = ImpressionColumns | ShownColumns | ActionColumns


REFUSALS = ("unreadable", "no_schema", "bad_time", "too_large")
"""Reasons of refusals: bytes that do not match their schema; an unknown schema, or one that lacks fields of
the spec; a time before 1970 or too far ahead; samples that exceed the log's limits."""


@dataclass(frozen=True, slots=True)
class Disputed:
    """A record dated ahead of the known time while another clock says that it is not.

    It is not joined before one of the clocks has proved wrong.
    """

    offset: int
    ahead_ms: int  # of the known time
    logged_ms: int  # the log's time of this record
    newest_ms: int  # the log's time of the last record that was read after it, or of this one


@dataclass(slots=True)
class Refused:
    """Records that cannot be decoded or joined, with the reasons; they go to dead letters."""

    rows: list[int] = field(default_factory=list)  # indices of the records read
    reasons: list[str] = field(default_factory=list)
    no_schema: int = 0  # refused for their schema
    bad_time: int = 0  # refused for their time
    too_large: int = 0  # refused for the size of their samples
    first_bad_time: str = ""  # offset and reason of the first record refused for its time
    disputed: Disputed | None = None  # the record on which clocks disagree; no record from it on is refused

    def by_reason(self) -> dict[str, int]:
        """Return {reason of REFUSALS: records}."""
        others = self.no_schema + self.bad_time + self.too_large
        return {
            "unreadable": len(self) - others,
            "no_schema": self.no_schema,
            "bad_time": self.bad_time,
            "too_large": self.too_large,
        }

    def add(self, rows: I64, reason: str) -> None:
        """Refuse rows for one reason. `rows`: (N,) int64."""
        self.rows.extend(rows.tolist())
        self.reasons.extend([reason] * len(rows))

    def before(self, row: int) -> Refused:
        """Return the refusals of earlier rows; the counts by reason are at most their number."""
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
    """Decodes records of one stream to columns. Refuses records that it cannot decode, without error."""

    def served(self, records: Records) -> tuple[ImpressionColumns, Refused]:
        """Decode served events to impressions with the spans of their bytes."""

    def fitting(self, served: ImpressionColumns, records: Records, refused: Refused) -> ImpressionColumns:
        """Drop and refuse events whose samples no trainer of the spec can decode.

        Called for new events only: a replay joins what earlier releases joined (PROTOCOL 18).
        """

    def shown(self, records: Records) -> tuple[ShownColumns, Refused]:
        """Decode shown events. Called only if the spec has that stream."""

    def actions(self, records: Records) -> tuple[ActionColumns, Refused]:
        """Decode actions, with the labels that they match and their values for each aggregate."""


def refuse_too_large(
    columns: ImpressionColumns, records: Records, limits: RecordLimits, labels: int, refused: Refused
) -> ImpressionColumns:
    """Drop and refuse events of which one sample exceeds a record's limit, or all samples exceed an append's.

    The gateway refuses such events before it acknowledges them; topics of other writers may hold them.
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
            "that the log accepts"
            if largest[event] > limits.sample_bytes
            else f"it has {int(counts[event]):,} elements, more than {MAX_ELEMENTS:,}"
            if counts[event] > MAX_ELEMENTS
            else f"its samples would have {int(together[event]):,} bytes together, as its context is copied "
            f"into each; at most {limits.expanded_bytes:,} are accepted"
        )
    return columns.where(~np.isin(columns.events, bad))
