"""Detection of event times in another unit than the spec states, and hints for errors."""

from __future__ import annotations

from freshet.config.spec.events import UNIT_NS, TimeField

__all__ = ["WORDS", "YEAR_2000_S", "likely_unit", "unit_hint", "written_in_larger_unit"]

YEAR_2000_S = 946_684_800
DAY_S = 86_400
WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_FINER = frozenset({"ms", "us", "ns"})


def likely_unit(time_ms: int, unit: str, now_ms: int) -> str | None:
    """Return the first unit other than `unit` by which the time lies between the year 2000 and tomorrow."""
    if unit == "iso":
        return None
    number = time_ms * 10**6 // UNIT_NS[unit]
    for other in WORDS:
        if other != unit and YEAR_2000_S <= number * UNIT_NS[other] / 1e9 < now_ms / 1000 + DAY_S:
            return other
    return None


def written_in_larger_unit(time_ms: int, unit: str, latest_ms: int) -> bool:
    """Return whether a live event's time falls in January 1970 because its unit is 1000 times the spec's.

    Seconds read as milliseconds do. The native `is_doubtful_time` has the same bounds.
    """
    return unit in _FINER and YEAR_2000_S <= time_ms <= latest_ms // 1000


def unit_hint(time: TimeField, role: str, time_ms: int, now_ms: int) -> str:
    """Return a hint for an error about a time that is probably in another unit; else ""."""
    unit = likely_unit(time_ms, time.unit, now_ms)
    if unit is None:
        return ""
    stated = WORDS.get(time.unit, time.unit)
    return (
        f"; the number looks like {WORDS[unit]}: send {stated}, or say time = "
        f'"{time.path}:{unit}" in events.{role} of the spec'
    )
