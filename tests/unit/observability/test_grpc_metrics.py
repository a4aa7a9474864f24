from __future__ import annotations

from prometheus_client import CollectorRegistry

from freshet.http.app import REQUEST_SECONDS
from freshet.observability.grpc_metrics import (
    ANSWER_SECONDS as SECONDS,
)
from freshet.observability.grpc_metrics import (
    GRPC_METRICS,
    PUBLIC_GRPC_METRICS,
    REFUSALS,
    ListenerCounts,
    grpc_readings,
    public_counts,
    public_readings,
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

    assert public_readings(counts)["freshet_grpc_answers"] == {("Put", "UNAVAILABLE", "passed"): 3.0}
    assert set(public_readings(counts)) == {
        metric.name for metric in PUBLIC_GRPC_METRICS if metric != SECONDS
    }
    assert set(grpc_readings(counts)) == {metric.name for metric in GRPC_METRICS}


def test_the_first_quiet_stream_of_a_door_is_an_increase() -> None:
    assert public_readings(ListenerCounts())["freshet_grpc_refused"] == {("quiet",): 0.0}


def test_answers_are_timed_by_method_and_what_the_door_refused_is_not() -> None:
    registry = CollectorRegistry()
    counts = public_counts(registry)

    def timed(method: str, end: str = "count", **labels: str) -> float | None:
        return registry.get_sample_value(f"{SECONDS.name}_{end}", {"method": method, **labels})

    counts.show("Put")
    assert timed("Put") == 0.0
    assert timed("Get") is None
    for seconds, status, door in (
        (0.3, "OK", "passed"),
        (0.001, "RESOURCE_EXHAUSTED", "passed"),
        (9.0, "UNAUTHENTICATED", "refused"),
    ):
        counts.answered("Put", status, door, seconds)

    assert timed("Put") == 2.0
    assert timed("Put", "bucket", le="0.2") == 1.0
    assert timed("Put", "bucket", le="0.5") == 2.0
    asked = {"method": "Put", "status": "UNAUTHENTICATED", "door": "refused"}
    assert registry.get_sample_value("freshet_grpc_answers_total", asked) == 1.0
    assert SECONDS.buckets == REQUEST_SECONDS.buckets, "so that both can be added"
