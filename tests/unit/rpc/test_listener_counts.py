"""Who is not let in changes no figure of those who are, and leaves no span."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import pytest
from prometheus_client import CollectorRegistry

from freshet.clock import SYSTEM_CLOCK
from freshet.errors import Overloaded
from freshet.http.app import App
from freshet.http.authenticator import Guard, Limits
from freshet.http.browser_checks import Sites
from freshet.http.endpoint import Endpoint
from freshet.http.request import Request
from freshet.http.responses import Response
from freshet.http.routes import Reply
from freshet.http.tokens import TokenEntry, digest_of
from freshet.observability.tracing import install
from tests.fixtures.asgi import answered
from tests.fixtures.spans import Recorded, recording

PATH = "/v1/things"
GOOD, OTHER = b"Bearer good", b"Bearer other"
ENTRIES = (
    TokenEntry("shop", frozenset({"send"}), digest_of(b"good")),
    TokenEntry("page", frozenset({"rank"}), digest_of(b"other")),
)
TRACEPARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def full(request: Request, reply: Reply) -> None:
    if request.body == b"full":
        raise Overloaded("the queue is full", 1.0)
    reply(Response(202, b""))


class Door:
    """An app with one route."""

    def __init__(self, guard: Guard) -> None:
        self.registry = CollectorRegistry()
        self.app = App(self.registry, max_body_bytes=100, body_timeout_s=1, guard=guard, admit=Sites().admit)
        self.app.route_hot(Endpoint("POST", PATH, "Things.", (), scope="send"), full)

    def ask(self, headers: Mapping[bytes, bytes], body: bytes = b"") -> int:
        """The status of the answer."""
        sent = asyncio.run(answered(self.app, PATH, headers, body))
        return int(sent[0]["status"])

    def counted(self, door: str, status: int) -> float:
        """Of all routes: one is not looked for where a page of another site asks."""
        return sum(
            sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == "freshet_http_requests_total"
            and (sample.labels["door"], sample.labels["status"]) == (door, str(status))
        )

    def timed(self) -> float | None:
        return self.registry.get_sample_value("freshet_http_request_seconds_count", {"route": PATH})


@pytest.fixture
def spans() -> Iterator[list[Recorded]]:
    tracer, told = recording()
    install(tracer)
    yield told
    install(None)


REFUSED = {
    "no token": ({}, 401),
    "unknown": ({b"authorization": b"Bearer x"}, 401),
    "for other things": ({b"authorization": OTHER}, 403),
    "another site": ({b"authorization": GOOD, b"sec-fetch-site": b"cross-site", b"host": b"localhost"}, 403),
}


@pytest.mark.parametrize("why", REFUSED)
def test_who_is_refused_is_counted_apart_and_neither_timed_nor_traced(
    why: str, spans: list[Recorded]
) -> None:
    door = Door(Guard(more=ENTRIES))
    headers, status = REFUSED[why]

    assert door.ask({**headers, b"traceparent": TRACEPARENT}) == status

    assert (door.counted("refused", status), door.counted("passed", status)) == (1, 0)
    assert not door.timed()
    assert spans == []


def test_who_comes_too_often_is_told_from_a_full_queue(spans: list[Recorded]) -> None:
    door = Door(Guard(more=ENTRIES, clock=SYSTEM_CLOCK, limits=Limits(requests_per_s=0.001)))
    headers = {b"authorization": GOOD, b"traceparent": TRACEPARENT}

    assert [door.ask(headers, b"full") for _ in range(2)] == [429, 429]

    assert (door.counted("passed", 429), door.counted("refused", 429)) == (1, 1)
    assert door.timed() == 1
    assert len(spans) == 1


def test_a_door_that_fails_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(more=ENTRIES)
    monkeypatch.setattr(guard, "admit", lambda *_: 1 / 0)
    door = Door(guard)

    assert door.ask({}) == 500

    assert (door.counted("passed", 500), door.counted("refused", 500)) == (1, 0)
