"""One event's way through real processes, as an OpenTelemetry collector sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from freshet.apps.local import Local, local
from freshet.clock import SYSTEM_CLOCK
from freshet.config.spec import Spec, load_spec
from freshet.config.spec.model import Explore
from freshet.testing.conditions import wait_until
from tests.fixtures.commands import url_of
from tests.servers.otlp import Received, Receiver, receiver

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "freshet.toml"
SERVER = 2  # in OTLP
CLIENT_TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}


def quick() -> Spec:
    """The quickstart's, with a version a second and each order the model's. A click may take seconds to come:
    samples decided without it are reported first."""
    spec = load_spec(QUICKSTART)
    return replace(
        spec,
        join=replace(spec.join, grace_ms=2_000),
        labels=tuple(replace(label, window_ms=5_000) for label in spec.labels),
        train=replace(spec.train, version_interval_ms=1_000),
        serve=replace(spec.serve, explore=Explore()),
    )


@pytest.fixture
def collector() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


def test_an_event_is_traced_from_request_to_learned_version(
    collector: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRESHET_TRACES_RATIO", "1")
    monkeypatch.setenv("FRESHET_TRACES_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with local(quick(), ready_s=120) as system:
        ask(system, "r-1")
        act(system, "r-1")
        wait_until("the event was learned from", lambda: learned(collector, "r-1"), within_s=60)
        wait_until("a version was served after it", lambda: served_after(collector, "r-1"), within_s=60)
        wait_until("its rows were served", lambda: rows_after(collector, "r-1"), within_s=60)
        ask(system, "r-2")
        wait_until("a later request is told of", lambda: bool(rank_of(collector, "r-2")), within_s=60)
        metrics = httpx.get(f"{url_of(system, 'trainer')}/metrics").text

    event = trace_of(collector, "r-1")
    one = {name: collector.of(name=name, trace_id=event) for name in ("POST", "send", "join", "learn")}

    # The event's own trace, through four processes.
    rank, sends, joins = one["POST"][0], one["send"], one["join"]
    assert {span.service for span in collector.of(trace_id=event)} == {
        "freshet-inference", "freshet-gateway", "freshet-joiner", "freshet-trainer"
    }  # fmt: skip
    served, action, samples = sends[0], sends[1], sends[2]
    assert (rank.scope, served.scope, action.scope) == (
        "freshet.inference",
        "freshet.inference",
        "freshet.gateway",
    )
    assert (served.parent, action.parent, joins[0].parent) == (rank.span_id, served.span_id, served.span_id)
    assert (samples.scope, samples.parent) == ("freshet.joiner", joins[0].span_id)
    assert one["learn"][0].parent == samples.span_id
    assert served.attributes["freshet.request_id"] == action.attributes["freshet.request_id"] == "r-1"
    for span, route in ((rank, "POST /v1/rank"), (action, "POST /v1/actions")):
        request = client_of(collector, span)
        assert (request.name, request.parent, request.kind) == (route, CLIENT_SPAN, SERVER)
        assert request.start_ns <= span.start_ns

    # The batch that learned from it: embedder, shard and trainer, which share a process here.
    (train,) = [span for span in collector.of(name="train") if span.named in one["learn"][0].links]
    batch = collector.of(trace_id=train.trace_id)
    by_name = {(span.scope, span.name): span for span in batch}
    process = by_name["freshet.embedder", "process news.samples"]
    lookup, push = by_name["freshet.embedder", "Rows/Lookup"], by_name["freshet.embedder", "Rows/Push"]
    shard = [by_name["freshet.paramserver", f"Rows/{method}"] for method in ("Lookup", "Push")]
    assert samples.named in process.links
    assert (train.parent, lookup.parent, push.parent) == (process.span_id, process.span_id, train.span_id)
    assert [span.parent for span in shard] == [lookup.span_id, push.span_id]

    # What came of it: rows and a version, which inference took.
    (sent_rows,) = [s for s in collector.of(name="send news.rows") if shard[1].named in s.links][:1]
    assert [s for s in collector.of(scope="inference", name="process") if s.parent == sent_rows.span_id]
    (version,) = [span for span in collector.of(name="publish version") if train.named in span.links]
    (load,) = [span for span in collector.of(name="load version") if span.parent == version.span_id]
    assert load.trace_id == version.trace_id
    assert any(link[0] != event for link in rank_of(collector, "r-2")[0].links)

    # Times in order, in one clock: this machine's.
    steps = [rank, served, samples, process, lookup, shard[0], train, push, shard[1]]
    assert [s.start_ns for s in steps] == sorted(s.start_ns for s in steps)
    assert all(s.start_ns <= s.end_ns for s in collector.spans)
    assert samples.end_ns <= version.end_ns
    assert version.start_ns <= load.start_ns  # `stable` moves before the span of the version ends

    assert all(s.resource["deployment.environment"] == "test" for s in collector.spans)
    assert 'freshet_traces_spans_total{outcome="sent"}' in metrics
    assert 'freshet_traces_spans_total{outcome="dropped"} 0.0' in metrics


def ask(system: Local, request_id: str) -> None:
    candidates = [{"article": f"a-{n}", "topic": "music", "age_s": 60.0} for n in range(3)]
    body = {"request_id": request_id, "context": {"reader": "ann"}, "candidates": candidates, "k": 2}
    answer = httpx.post(f"{url_of(system, 'inference')}/v1/rank", json=body, headers=TRACEPARENT, timeout=30)
    assert answer.status_code == 200, answer.text


def act(system: Local, request_id: str) -> None:
    now_ms = SYSTEM_CLOCK.now_ms()
    event = {"event_id": "e-1", "request_id": request_id, "article": "a-0", "type": "click", "ts": now_ms}
    answer = httpx.post(
        f"{url_of(system, 'gateway')}/v1/actions", json=event, headers=TRACEPARENT, timeout=30
    )
    assert answer.status_code == 202, answer.text


def rank_of(collector: Receiver, request_id: str) -> list[Received]:
    event = trace_of(collector, request_id)
    return collector.of(name="POST /v1/rank", trace_id=event) if event else []


def trace_of(collector: Receiver, request_id: str) -> str:
    """The trace of the event with this request id; empty while nothing is known of it."""
    found = [s for s in collector.of(name="send") if s.attributes.get("freshet.request_id") == request_id]
    assert len({span.trace_id for span in found}) <= 1
    return found[0].trace_id if found else ""


def client_of(collector: Receiver, span: Received) -> Received:
    """The request's span in the client's trace that this one points at."""
    (found,) = [s for s in collector.of(trace_id=CLIENT_TRACE) if s.named in span.links]
    return found


def learned(collector: Receiver, request_id: str) -> bool:
    event = trace_of(collector, request_id)
    return bool(event and collector.of(name="learn", trace_id=event))


def _train(collector: Receiver, request_id: str) -> Received | None:
    links = {
        link for s in collector.of(name="learn", trace_id=trace_of(collector, request_id)) for link in s.links
    }
    return next((span for span in collector.of(name="train") if span.named in links), None)


def served_after(collector: Receiver, request_id: str) -> bool:
    train = _train(collector, request_id)
    published = [v for v in collector.of(name="publish") if train is not None and train.named in v.links]
    return bool(published and [s for s in collector.of(name="load") if s.parent == published[0].span_id])


def rows_after(collector: Receiver, request_id: str) -> bool:
    train = _train(collector, request_id)
    if train is None:
        return False
    pushes = {s.named for s in collector.of(scope="paramserver", name="Rows/Push", trace_id=train.trace_id)}
    sent = {s.span_id for s in collector.of(scope="paramserver", name="send") if pushes & set(s.links)}
    return any(s.parent in sent for s in collector.of(scope="inference", name="process"))
