from __future__ import annotations

from prometheus_client import CollectorRegistry

from freshet.http.app import REQUEST_SECONDS
from freshet.observability.grpc_metrics import ANSWER_SECONDS as SECONDS
from freshet.observability.grpc_metrics import GRPC_METRICS, REFUSALS, ListenerCounts, public_counts
from freshet.observability.metrics import readings


def test_refusals_are_shown_from_0_on() -> None:
    counts = ListenerCounts()
    counts.refused["token"] += 2
    counts.refused["of another kind"] += 1

    assert readings(GRPC_METRICS, counts)["freshet_grpc_refused"] == {
        **{(reason,): 0.0 for reason in REFUSALS},
        ("token",): 2.0,
        ("of another kind",): 1.0,
    }


def test_a_public_listener_shows_its_own_refusals_and_answers() -> None:
    registry = CollectorRegistry()
    counts = public_counts(registry)
    counts.answers["Put", "UNAVAILABLE", "passed"] += 3

    labels = {"method": "Put", "status": "UNAVAILABLE", "door": "passed"}
    assert registry.get_sample_value("freshet_grpc_answers_total", labels) == 3.0
    assert readings(GRPC_METRICS, counts)["freshet_grpc_refused"] == {("quiet",): 0.0}


def test_answers_are_timed_by_method_without_refused_calls() -> None:
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
