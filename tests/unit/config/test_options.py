"""Forms of options."""

from __future__ import annotations

import pytest

from freshet.config.options import UNITS_MS, Duration, Wrong

LONGEST = Duration(0, 10**12)


@pytest.mark.parametrize("unit", [unit for unit in UNITS_MS if unit != "ms"])
def test_a_fraction_of_whole_milliseconds_is_a_duration(unit: str) -> None:
    found = [LONGEST.read(f"{n // 1000}.{n % 1000:03d}{unit}") for n in range(10_000)]

    assert found == [n * UNITS_MS[unit] // 1000 for n in range(10_000)]


@pytest.mark.parametrize("text", ["1.5ms", "0.0001s", "1.0005s", "0.000001h", "123456789.000001ms"])
def test_a_fraction_of_a_millisecond_is_refused(text: str) -> None:
    with pytest.raises(Wrong) as refused:
        LONGEST.read(text)
    assert refused.value.hint == "a millisecond is the smallest unit of time here"
