"""`SteadyClock` while the wall clock is set."""

from __future__ import annotations

import pytest

from freshet.clock import CONFIRMED_S, SteadyClock, latest_ms

START_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
JUMPS_MS = (HOUR_MS, -HOUR_MS, 24 * HOUR_MS, -24 * HOUR_MS)


class SetClock:
    """A wall clock that the test sets; `pass_s` advances both clocks."""

    def __init__(self) -> None:
        self.wall, self.seconds = START_MS, 1_000.0

    def now_ms(self) -> int:
        return self.wall

    def monotonic(self) -> float:
        return self.seconds

    def pass_s(self, seconds: float) -> None:
        self.seconds += seconds
        self.wall += round(seconds * 1_000)


def known(clock: SetClock) -> SteadyClock:
    """Return a steady clock with a confirmed offset."""
    steady = SteadyClock(clock, boot="b")
    clock.pass_s(CONFIRMED_S + 1)
    steady.now_ms()
    return steady


@pytest.mark.parametrize("jump_ms", JUMPS_MS)
def test_a_wall_clock_set_wrong_for_a_while_changes_nothing(jump_ms: int) -> None:
    clock = SetClock()
    steady = known(clock)
    for _ in range(6):
        clock.wall += jump_ms
        assert steady.now_ms() == clock.wall - jump_ms
        assert steady.step_ms == jump_ms
        clock.pass_s(10)
        assert steady.now_ms() == clock.wall - jump_ms
        clock.wall -= jump_ms
        clock.pass_s(10)
        assert steady.now_ms() == clock.wall
        assert steady.step_ms == 0


@pytest.mark.parametrize("jump_ms", JUMPS_MS)
def test_a_lasting_setting_is_followed_and_its_return_at_once(jump_ms: int) -> None:
    clock = SetClock()
    steady = known(clock)
    clock.wall += jump_ms
    steady.now_ms()
    clock.pass_s(CONFIRMED_S)
    assert steady.now_ms() == clock.wall
    clock.wall -= jump_ms
    assert steady.now_ms() == clock.wall


@pytest.mark.parametrize("jump_ms", [HOUR_MS, 24 * HOUR_MS])
def test_a_process_started_ahead_follows_the_clock_back(jump_ms: int) -> None:
    clock = SetClock()
    clock.wall += jump_ms
    steady = SteadyClock(clock, boot="b")
    clock.pass_s(3)
    clock.wall -= jump_ms
    assert steady.now_ms() == clock.wall


def jumped_while_young(jump_ms: int) -> tuple[SetClock, SteadyClock]:
    """Return a clock that was wrong for 6 s at the start of its process."""
    clock = SetClock()
    steady = SteadyClock(clock, boot="b")
    clock.pass_s(1)
    clock.wall += jump_ms
    steady.now_ms()
    clock.pass_s(6)
    clock.wall -= jump_ms
    return clock, steady


@pytest.mark.parametrize("jump_ms", JUMPS_MS)
def test_a_new_process_survives_a_jump_in_its_first_seconds(jump_ms: int) -> None:
    clock, steady = jumped_while_young(jump_ms)
    assert steady.now_ms() == clock.wall


@pytest.mark.parametrize("jump_ms", JUMPS_MS)
def test_a_reverted_setting_is_not_followed_again(jump_ms: int) -> None:
    clock, steady = jumped_while_young(jump_ms)
    assert steady.now_ms() == clock.wall
    clock.pass_s(1_000)
    assert steady.now_ms() == clock.wall
    clock.wall += jump_ms
    assert steady.now_ms() == clock.wall - jump_ms


@pytest.mark.parametrize("jump_ms", JUMPS_MS)
def test_a_process_resumes_from_an_earlier_state(jump_ms: int) -> None:
    clock = SetClock()
    before = known(clock)
    clock.wall += jump_ms
    after = SteadyClock(clock, boot="b")
    after.resume(before.state)
    clock.pass_s(1)
    assert after.now_ms() == clock.wall - jump_ms
    clock.wall -= jump_ms
    assert after.now_ms() == clock.wall


def test_a_state_before_a_reboot_is_ignored() -> None:
    clock = SetClock()
    before = known(clock)
    clock.wall += HOUR_MS
    after = SteadyClock(clock, boot="another")
    after.resume(before.state)
    assert after.now_ms() == clock.wall


def test_slewing_is_followed() -> None:
    clock = SetClock()
    steady = known(clock)
    for _ in range(1_000):
        clock.pass_s(60)
        clock.wall += 30  # 500 ppm
        assert steady.now_ms() == clock.wall


def test_a_clock_behind_is_led_until_it_is_set_right() -> None:
    clock = SetClock()
    steady = known(clock)
    steady.lead(clock.wall + HOUR_MS)
    clock.pass_s(1_000)
    assert steady.now_ms() == clock.wall + HOUR_MS
    clock.wall += HOUR_MS
    assert steady.now_ms() == clock.wall
    assert steady.step_ms == 0


def test_the_latest_time_is_the_later_of_both_clocks() -> None:
    clock = SetClock()
    steady = known(clock)
    clock.wall += HOUR_MS
    assert latest_ms(steady) == clock.wall
    clock.wall -= 2 * HOUR_MS
    assert latest_ms(steady) == clock.wall + HOUR_MS
    assert latest_ms(clock) == clock.wall


@pytest.mark.parametrize("jump_ms", [HOUR_MS, 24 * HOUR_MS])
def test_a_new_process_set_back_bounds_the_time_above(jump_ms: int) -> None:
    clock = SetClock()
    steady = SteadyClock(clock, boot="b")
    clock.pass_s(1)
    clock.wall -= jump_ms
    assert steady.now_ms() == clock.wall, "it may have begun while the clock was ahead"
    clock.pass_s(CONFIRMED_S - 1)
    assert latest_ms(steady) == clock.wall + jump_ms
    clock.pass_s(1)
    assert latest_ms(steady) == clock.wall


@pytest.mark.parametrize("jump_ms", JUMPS_MS)
def test_a_new_process_set_right_again_has_one_time(jump_ms: int) -> None:
    clock = SetClock()
    steady = SteadyClock(clock, boot="b")
    clock.pass_s(1)
    clock.wall += jump_ms
    assert latest_ms(steady) == clock.wall - min(jump_ms, 0)
    clock.pass_s(6)
    clock.wall -= jump_ms
    assert latest_ms(steady) == steady.now_ms() == clock.wall
