from __future__ import annotations

from freshet.runtime.grpc_metrics import (
    GRPC_DOOR_METRICS,
    GRPC_METRICS,
    REFUSALS,
    ListenerCounts,
    grpc_door_readings,
    grpc_readings,
)


def test_a_reason_is_shown_before_its_first_refusal_so_that_the_first_is_an_increase() -> None:
    counts = ListenerCounts()
    counts.refused["token"] += 2
    counts.refused["of another kind"] += 1

    assert grpc_readings(counts, REFUSALS)["freshet_grpc_refused"] == {
        **{(reason,): 0.0 for reason in REFUSALS},
        ("token",): 2.0,
        ("of another kind",): 1.0,
    }
    assert grpc_readings(ListenerCounts())["freshet_grpc_refused"] == {}


def test_answers_are_of_listeners_for_clients_from_outside_alone() -> None:
    counts = ListenerCounts()
    counts.answers["Put", "UNAVAILABLE", "passed"] += 3

    assert grpc_door_readings(counts)["freshet_grpc_answers"] == {("Put", "UNAVAILABLE", "passed"): 3.0}
    assert set(grpc_door_readings(counts)) == {metric.name for metric in GRPC_DOOR_METRICS}
    assert set(grpc_readings(counts)) == {metric.name for metric in GRPC_METRICS}


def test_the_first_quiet_stream_of_a_door_is_an_increase() -> None:
    assert grpc_door_readings(ListenerCounts())["freshet_grpc_refused"] == {("quiet",): 0.0}
