from freshet.runtime.supervision import Policy, Watch

POLICY = Policy(first_wait_s=1.0, longest_wait_s=4.0, settled_after_s=30.0)


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
