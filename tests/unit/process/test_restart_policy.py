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


def test_long_run_resets_backoff() -> None:
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


def decisions(answers: list[str | None], activity: Activity | None, *, every_s: float = 5.0) -> list[str]:
    """Return the reasons to kill after each check, following one live answer."""
    silence, now = Silence(HANG), 0.0
    silence.add_check(now, "", activity)
    decided = []
    for answer in answers:
        now += every_s
        decided.append(silence.add_check(now, answer, activity))
    return decided


def first_kill_s(decided: list[str], every_s: float = 5.0) -> float | None:
    return next(((i + 1) * every_s for i, why in enumerate(decided) if why), None)


STOPPED, ASLEEP = Activity("T", 3.0, False), Activity("S", 3.0, False)
WANTS_A_PROCESSOR, WAITS_FOR_A_DISK = Activity("R", 3.0, False), Activity("D", 3.0, False)


@pytest.mark.parametrize("activity", [STOPPED, ASLEEP])
def test_a_service_that_is_silent_and_idle_hangs(activity: Activity) -> None:
    decided = decisions([None] * 30, activity)

    assert first_kill_s(decided) == 60.0
    assert "has not answered for 60 s" in decided[11]


@pytest.mark.parametrize("activity", [WANTS_A_PROCESSOR, WAITS_FOR_A_DISK, None])
def test_busy_process_has_ten_times_the_limit(activity: Activity | None) -> None:
    assert first_kill_s(decisions([None] * 300, activity)) == 600.0


def test_working_process_has_ten_times_the_limit() -> None:
    silence = Silence(HANG)
    silence.add_check(0.0, "", Activity("S", 0.0, False))
    decided = [silence.add_check(5.0 * i, None, Activity("S", 0.4 * i, False)) for i in range(1, 300)]

    assert first_kill_s(decided) == 600.0


def test_one_answer_resets_silence() -> None:
    assert not any(decisions([None] * 11 + [""] + [None] * 11, ASLEEP))


def test_suspended_machine_kills_no_service() -> None:
    assert not any(decisions([None], STOPPED, every_s=8 * 3600.0))


def test_a_first_load_may_take_any_time() -> None:
    silence = Silence(HANG)
    assert not any(silence.add_check(5.0 * i, None, ASLEEP) for i in range(10_000))


def test_traced_process_is_never_hung() -> None:
    assert not any(decisions([None] * 500, Activity("T", 3.0, True)))


def test_process_with_stalled_loop_is_killed() -> None:
    decided = decisions(["the main loop has stalled for 121 s"] * 4, WANTS_A_PROCESSOR)

    assert first_kill_s(decided) == 10.0
    assert "stalled for 121 s" in decided[1]
    assert not any(decisions(["still", "", "still", ""] * 9, ASLEEP)), "a live answer resets it"
