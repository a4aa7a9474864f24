import pytest

from freshet.process.process_info import Activity
from freshet.process.restart_policy import HangPolicy, Policy, Silence, Watch

POLICY = Policy(first_wait_s=1.0, longest_wait_s=4.0, reset_after_s=30.0)


def test_a_service_that_was_never_started_is_due_at_once() -> None:
    assert Watch(POLICY).due(0.0)


def test_restarts_wait_twice_as_long_each_time_up_to_a_bound() -> None:
    watch = Watch(POLICY)
    waits = []
    for _ in range(4):
        watch.started(0.0)
        waits.append(watch.exited(1, 0.0))

    assert waits == [1.0, 2.0, 4.0, 4.0]
    assert watch.restarts == 4


def test_a_service_that_ran_long_enough_starts_afresh() -> None:
    watch = Watch(POLICY)
    watch.started(0.0)
    watch.exited(1, 0.0)
    watch.started(1.0)

    assert watch.exited(-9, 40.0) == 41.0
    assert watch.last_exit == "signal 9 (SIGKILL)"


def test_a_running_service_is_not_due() -> None:
    watch = Watch(POLICY)
    watch.started(0.0)

    assert not watch.due(100.0)


HANG = HangPolicy(idle_s=60.0, busy_s=600.0, stuck_s=10.0, longest_gap_s=8.0, working=0.02)


def looked(said: list[str | None], activity: Activity | None, *, every_s: float = 5.0) -> list[str]:
    """What is decided at each of these looks, after one answer."""
    silence, now = Silence(HANG), 0.0
    silence.add_check(now, "", activity)
    decided = []
    for each in said:
        now += every_s
        decided.append(silence.add_check(now, each, activity))
    return decided


def first_kill_s(decided: list[str], every_s: float = 5.0) -> float | None:
    return next(((i + 1) * every_s for i, why in enumerate(decided) if why), None)


STOPPED, ASLEEP = Activity("T", 3.0, False), Activity("S", 3.0, False)
WANTS_A_PROCESSOR, WAITS_FOR_A_DISK = Activity("R", 3.0, False), Activity("D", 3.0, False)


@pytest.mark.parametrize("activity", [STOPPED, ASLEEP])
def test_a_service_that_is_silent_and_idle_hangs(activity: Activity) -> None:
    decided = looked([None] * 30, activity)

    assert first_kill_s(decided) == 60.0
    assert "has not answered for 60 s" in decided[11]


@pytest.mark.parametrize("activity", [WANTS_A_PROCESSOR, WAITS_FOR_A_DISK, None])
def test_a_slow_machine_is_given_ten_times_as_long(activity: Activity | None) -> None:
    assert first_kill_s(looked([None] * 300, activity)) == 600.0


def test_a_service_that_works_is_given_ten_times_as_long() -> None:
    silence = Silence(HANG)
    silence.add_check(0.0, "", Activity("S", 0.0, False))
    decided = [silence.add_check(5.0 * i, None, Activity("S", 0.4 * i, False)) for i in range(1, 300)]

    assert first_kill_s(decided) == 600.0


def test_one_answer_is_enough() -> None:
    assert not any(looked([None] * 11 + [""] + [None] * 11, ASLEEP))


def test_a_machine_that_was_suspended_ends_nothing() -> None:
    assert not any(looked([None], STOPPED, every_s=8 * 3600.0))


def test_a_first_load_may_take_any_time() -> None:
    silence = Silence(HANG)
    assert not any(silence.add_check(5.0 * i, None, ASLEEP) for i in range(10_000))


def test_a_service_that_a_debugger_holds_is_left_alone() -> None:
    assert not any(looked([None] * 500, Activity("T", 3.0, True)))


def test_a_main_loop_that_stands_still_is_told_twice_and_killed() -> None:
    decided = looked(["the main loop has stalled for 121 s"] * 4, WANTS_A_PROCESSOR)

    assert first_kill_s(decided) == 10.0
    assert "stalled for 121 s" in decided[1]
    assert not any(looked(["still", "", "still", ""] * 9, ASLEEP)), "it turns in between"
