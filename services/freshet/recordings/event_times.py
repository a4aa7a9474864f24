"""Event times of recorded data: what is odd about them, by count and the first row.

A wrong unit or a wrong order is told beside the figures of a replay, since a model learns from such rows all
the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.spec.time_units import WORDS, likely_unit
from freshet.errors import BadInput
from freshet.types import I64

__all__ = ["EventTimes", "Oddity", "Reason", "SetAside"]

# --- Events of a run's topics that the spec cannot read: counted by stream and reason, each reason with
# its first example.


Reason = Literal["unreadable", "no_schema"]
"""As the joiner counts them: the bytes are not what their schema says, or have a value that the spec's schema
does not take; the schema is not known, or does not resolve to the spec's."""


@dataclass(slots=True)
class _Kind:
    records: int = 0
    first: str = ""  # place and reason of the first


@dataclass(slots=True)
class SetAside:
    """Gathers what one replay sets aside."""

    read: Counter[str] = field(default_factory=Counter)  # records by stream, the good ones, too
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
        """Stream -> reason -> how many records, and the first; empty where nothing was set aside."""
        found: dict[str, Any] = {}
        for (stream, reason), kind in self._kinds.items():
            found.setdefault(stream, {})[reason] = {"records": kind.records, "first": kind.first}
        return found

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"set aside: {kind.records:,} of {self.read[stream]:,} records of the {stream} stream, {reason}\n"
            f"  first: {kind.first}"
            for (stream, reason), kind in self._kinds.items()
        ]


YEAR_MS = 366 * 86_400_000
DAY_MS = 86_400_000


@dataclass(slots=True)
class Oddity:
    """One kind of odd time."""

    count: int = 0
    first: str = ""  # place of the first
    first_ms: int = 0
    worst_ms: int = 0  # of falling times: the longest step back


@dataclass
class EventTimes:
    """Gathers the times of one stream.

    Args of the constructor: `name`, the time field as the spec writes it (`ts:ms`); `unit` of it.
    """

    name: str
    unit: str
    clock: Clock = SYSTEM_CLOCK
    rows: int = 0
    early: Oddity = field(default_factory=Oddity)
    future: Oddity = field(default_factory=Oddity)
    falling: Oddity = field(default_factory=Oddity)
    _newest_ms: int | None = None

    def add(self, times_ms: I64, where: Callable[[int], str]) -> None:
        """N times that follow each other; `where` says the place of one of them."""
        if not len(times_ms):
            return
        self.rows += len(times_ms)
        now_ms = self.clock.now_ms()
        self._note(self.early, times_ms < YEAR_MS, times_ms, where)
        self._note(self.future, times_ms > now_ms + DAY_MS, times_ms, where)
        before = times_ms[0] if self._newest_ms is None else self._newest_ms
        newest = np.maximum.accumulate(np.concatenate([[before], times_ms]))
        back = newest[:-1] - times_ms
        if self._note(self.falling, back > 0, times_ms, where):
            self.falling.worst_ms = max(self.falling.worst_ms, int(back.max()))
        self._newest_ms = int(newest[-1])

    def _note(self, oddity: Oddity, odd: Any, times_ms: I64, where: Callable[[int], str]) -> bool:
        count = int(np.count_nonzero(odd))
        if count and not oddity.count:
            at = int(odd.argmax())
            oddity.first, oddity.first_ms = where(at), int(times_ms[at])
        oddity.count += count
        return bool(count)

    def as_json(self) -> dict[str, Any]:
        """What is odd, by kind; empty if nothing is."""
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
        """The same as sentences."""
        said = []
        for oddity, what in (
            (self.early, "lie in 1970 or before"),
            (self.future, "lie more than a day in the future"),
        ):
            if oddity.count:
                said.append(
                    f"times: {oddity.count:,} of {self.rows:,} rows {what} by {self.name};"
                    f" the first is {_iso(oddity.first_ms)} at {oddity.first}"
                )
        if said and (unit := self.likely_unit()):
            path = self.name.rpartition(":")[0]
            said.append(f'  the numbers look like {WORDS[unit]}: say time = "{path}:{unit}"')
        if self.falling.count:
            said.append(
                f"times: {self.falling.count:,} of {self.rows:,} rows are older than a row before them,"
                f" by up to {self.falling.worst_ms / 1000:,.3f} s; the first is {self.falling.first}\n"
                "  rows are learned in the order of the files: sort them by time"
            )
        return said

    def likely_unit(self) -> str | None:
        """The unit by which odd times would lie between 2000 and tomorrow, if it is not the stated one."""
        odd = self.early if self.early.count else self.future
        if not odd.count or self.unit == "iso" or odd.count < self.rows / 2:
            return None
        return likely_unit(odd.first_ms, self.unit, self.clock.now_ms())


def _iso(ms: int) -> str:
    try:
        return str(np.datetime64(ms, "ms")) + "Z"
    except (OverflowError, ValueError):
        return f"{ms} ms"
