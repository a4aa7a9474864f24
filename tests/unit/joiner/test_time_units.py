"""Events with a time in another unit than the spec's are refused; the reason names the unit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.config.spec.inputs import UNIT_NS, likely_unit, unit_hint, written_in_larger_unit
from freshet.config.spec.model import TimeField
from freshet.joiner.core import ActionColumns
from freshet.joiner.decoder import Refused
from freshet.joiner.watermark import Now, TimeRules, judge_times
from freshet.types import BytesColumn, Records

NOW_MS = 1_764_000_000_000
AHEAD_MS = 60_000
UNITS = ("s", "ms", "us", "ns")


def judged(times_ms: list[int], unit: str, *, live: bool = True) -> tuple[list[int], Refused]:
    """Return the joined times, and the refusals, of actions that are logged now."""
    n = len(times_ms)
    records = Records(
        np.arange(n), np.full(n, NOW_MS), BytesColumn.of([b""] * n), BytesColumn.of([b""] * n), n
    )
    keys = np.zeros((n, 2), np.uint64)
    columns = ActionColumns(
        np.arange(n), np.array(times_ms, np.int64), keys, keys, np.zeros(n, np.uint32), np.zeros((n, 0))
    )
    refused, rules = Refused(), TimeRules("action", AHEAD_MS, TimeField(path="at", unit=unit))  # type: ignore[arg-type]
    timed = judge_times(columns, records, rules, Now(NOW_MS, NOW_MS) if live else None, refused)
    return timed.columns.times_ms.tolist(), refused


def read_as(unit: str, written: str) -> int:
    """Return the time in ms of a present event read by `unit` and written in the unit `written`."""
    number = NOW_MS * 10**6 // UNIT_NS[written]
    return number * UNIT_NS[unit] // 10**6


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    ("unit", "written"),
    [
        ("ms", "s"),
        ("us", "ms"),
        ("ns", "us"),
        ("s", "ms"),
        ("ms", "us"),
        ("us", "ns"),
        ("s", "us"),
        ("ms", "ns"),
    ],
)
def test_a_time_in_another_unit_is_refused_with_its_unit(unit: str, written: str, live: bool) -> None:
    joined, refused = judged([NOW_MS, read_as(unit, written), NOW_MS - 1], unit, live=live)

    assert joined == [NOW_MS, NOW_MS - 1]
    assert refused.rows == [1]
    assert f'time = "at:{written}" in events.action' in refused.reasons[0]


@given(st.sampled_from(UNITS), st.integers(0, NOW_MS + AHEAD_MS))
def test_no_time_since_1971_is_refused_for_its_unit(unit: str, time_ms: int) -> None:
    joined, refused = judged([time_ms], unit)

    assert bool(joined) != bool(refused.rows)
    if refused.rows:
        assert time_ms < 366 * 86_400_000
        assert written_in_larger_unit(time_ms, unit, NOW_MS + AHEAD_MS)
        assert "the number looks like" in refused.reasons[0]


@given(st.sampled_from([*UNITS, "days"]), st.integers(-(2**62), 2**62))
def test_a_likely_unit_is_another_one_and_of_this_time(unit: str, time_ms: int) -> None:
    likely = likely_unit(time_ms, unit, NOW_MS)
    time = TimeField(path="at", unit=unit)  # type: ignore[arg-type]
    assert (unit_hint(time, "served", time_ms, NOW_MS) == "") == (likely is None)
    if likely is not None:
        meant_ms = time_ms * UNIT_NS[likely] / UNIT_NS[unit]
        assert likely != unit
        assert 946_684_000_000 < meant_ms < NOW_MS + 2 * 86_400_000


def test_texts_have_no_unit() -> None:
    assert judged([NOW_MS // 1_000], "iso") == ([NOW_MS // 1_000], Refused())
