"""Reports of a replay beside its figures: suspicious event times and unreadable records.

A model learns from rows with a wrong time unit or order all the same, so the report names them.

Letters: N rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.spec.inputs import WORDS, likely_unit
from freshet.errors import BadInput
from freshet.types import I64

Reason = Literal["unreadable", "no_schema"]
"""As in the joiner's counters: `unreadable` if the bytes do not fit their schema or a value does not fit the
spec's; `no_schema` if the schema is unknown or does not resolve to the spec's."""


@dataclass(slots=True)
class _Kind:
    records: int = 0
    first: str = ""  # place and reason of the first record


@dataclass(slots=True)
class SetAside:
    """Counts of the records that one replay cannot read, by stream and reason."""

    read: Counter[str] = field(default_factory=Counter)  # all records by stream
    _kinds: dict[tuple[str, Reason], _Kind] = field(default_factory=dict)

    def add(self, stream: str, reason: Reason, example: str, records: int = 1) -> None:
        """Count records of one reason; `example` is place and reason of the first of them."""
        kind = self._kinds.setdefault((stream, reason), _Kind())
        kind.records += records
        kind.first = kind.first or example

    def refuse_bad_streams(self) -> None:
        """Raise BadInput, naming the stream, if none of a stream's records could be read."""
        for stream, read in self.read.items():
            mine = [kind for (role, _), kind in self._kinds.items() if role == stream]
            if read and sum(kind.records for kind in mine) == read:
                first = "\n  ".join(kind.first for kind in mine)
                raise BadInput(
                    f"replay topics: expected events of the {stream} stream that the spec can read, "
                    f"found none among {read:,} records; the first:\n  {first}\n"
                    "  is it the spec, or a later one, of the model that wrote them?"
                )

    def as_json(self) -> dict[str, Any]:
        """Return {stream: {reason: number of records, and the first}}."""
        found: dict[str, Any] = {}
        for (stream, reason), kind in self._kinds.items():
            found.setdefault(stream, {})[reason] = {"records": kind.records, "first": kind.first}
        return found

    def lines(self) -> list[str]:
        """Return the counts as sentences."""
        return [
            f"set aside: {kind.records:,} of {self.read[stream]:,} records of the {stream} stream, {reason}\n"
            f"  first: {kind.first}"
            for (stream, reason), kind in self._kinds.items()
        ]


YEAR_MS = 366 * 86_400_000
DAY_MS = 86_400_000


@dataclass(slots=True)
class Oddity:
    """Rows with one kind of suspicious time."""

    count: int = 0
    first: str = ""  # place of the first row
    first_ms: int = 0
    worst_ms: int = 0  # for falling times: the longest step back


@dataclass
class EventTimes:
    """Checks the event times of one stream."""

    name: str  # the time field as in the spec, `ts:ms`
    unit: str
    clock: Clock = SYSTEM_CLOCK
    rows: int = 0
    early: Oddity = field(default_factory=Oddity)
    future: Oddity = field(default_factory=Oddity)
    falling: Oddity = field(default_factory=Oddity)
    _newest_ms: int | None = None

    def add(self, times_ms: I64, where: Callable[[int], str]) -> None:
        """Check the next times, (N,) int64 ms; `where` returns the place of a row by its index."""
        if not len(times_ms):
            return
        self.rows += len(times_ms)
        now_ms = self.clock.now_ms()
        self._count(self.early, times_ms < YEAR_MS, times_ms, where)
        self._count(self.future, times_ms > now_ms + DAY_MS, times_ms, where)
        before = times_ms[0] if self._newest_ms is None else self._newest_ms
        newest = np.maximum.accumulate(np.concatenate([[before], times_ms]))
        back = newest[:-1] - times_ms
        if self._count(self.falling, back > 0, times_ms, where):
            self.falling.worst_ms = max(self.falling.worst_ms, int(back.max()))
        self._newest_ms = int(newest[-1])

    def _count(self, oddity: Oddity, odd: Any, times_ms: I64, where: Callable[[int], str]) -> bool:
        count = int(np.count_nonzero(odd))
        if count and not oddity.count:
            at = int(odd.argmax())
            oddity.first, oddity.first_ms = where(at), int(times_ms[at])
        oddity.count += count
        return bool(count)

    def as_json(self) -> dict[str, Any]:
        """Return the suspicious rows by kind, and the likely unit."""
        found: dict[str, Any] = {}
        kinds = (("in_1970_or_before", self.early), ("in_the_future", self.future), ("falling", self.falling))
        for kind, oddity in kinds:
            if oddity.count:
                found[kind] = {
                    "rows": oddity.count,
                    "first": oddity.first,
                    "first_time": _iso(oddity.first_ms),
                }
        if "falling" in found:
            found["falling"]["furthest_ms"] = self.falling.worst_ms
        if unit := self.likely_unit():
            found["likely_unit"] = unit
        return found

    def lines(self) -> Sequence[str]:
        """Return the suspicious rows as sentences."""
        lines = []
        for oddity, fault in (
            (self.early, "lie in 1970 or before"),
            (self.future, "lie more than a day in the future"),
        ):
            if oddity.count:
                lines.append(
                    f"times: {oddity.count:,} of {self.rows:,} rows {fault} by {self.name};"
                    f" the first is {_iso(oddity.first_ms)} at {oddity.first}"
                )
        if lines and (unit := self.likely_unit()):
            path = self.name.rpartition(":")[0]
            lines.append(f'  the numbers look like {WORDS[unit]}: say time = "{path}:{unit}"')
        if self.falling.count:
            lines.append(
                f"times: {self.falling.count:,} of {self.rows:,} rows are older than a row before them,"
                f" by up to {self.falling.worst_ms / 1000:,.3f} s; the first is {self.falling.first}\n"
                "  rows are learned in the order of the files: sort them by time"
            )
        return lines

    def likely_unit(self) -> str | None:
        """Return the unit by which suspicious times would lie between 2000 and tomorrow, if there is one."""
        odd = self.early if self.early.count else self.future
        if not odd.count or self.unit == "iso" or odd.count < self.rows / 2:
            return None
        return likely_unit(odd.first_ms, self.unit, self.clock.now_ms())


def _iso(ms: int) -> str:
    try:
        return str(np.datetime64(ms, "ms")) + "Z"
    except (OverflowError, ValueError):
        return f"{ms} ms"
