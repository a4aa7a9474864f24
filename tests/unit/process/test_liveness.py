from freshet.process.lifecycle import Pulse
from freshet.testing.clock import SettableClock


def test_a_loop_is_stuck_two_minutes_after_its_last_beat() -> None:
    clock = SettableClock()
    pulse = Pulse(clock)
    pulse.beat()
    clock.advance(119.0)
    assert pulse.stuck() is None

    clock.advance(2.0)
    assert pulse.stuck() == "the main loop has stalled for 121 s"
    pulse.beat()
    assert pulse.stuck() is None


def test_resting_loop_is_not_stuck() -> None:
    clock = SettableClock()
    pulse = Pulse(clock)
    clock.advance(10_000.0)
    assert pulse.stuck() is None

    pulse.beat()
    pulse.rest()
    clock.advance(10_000.0)
    assert pulse.stuck() is None


def test_wall_clock_does_not_affect_pulse() -> None:
    clock = SettableClock()
    pulse = Pulse(clock)
    pulse.beat()
    clock.jump(clock.now_ms() + 86_400_000)

    assert pulse.stuck() is None
