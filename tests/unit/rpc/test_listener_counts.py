"""Who is not let in changes no figure of those who are, and leaves no span."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

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
from tests.spans import Recorded, recording

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
    """An app that is asked by both of its ways in."""

    def __init__(self, guard: Guard) -> None:
        self.registry = CollectorRegistry()
        self.app = App(self.registry, max_body_bytes=100, body_timeout_s=1, guard=guard, admit=Sites().admit)
        self.app.route_taker(Endpoint("POST", PATH, "Things.", (), scope="send"), full)

    def ask(self, way: str, headers: Mapping[bytes, bytes], body: bytes = b"") -> int:
        """The status of the answer."""
        return asyncio.run(self._whole(headers, body) if way == "whole" else self._asgi(headers, body))

    async def _whole(self, headers: Mapping[bytes, bytes], body: bytes) -> int:
        answers: list[Response] = []
        route = self.app.routes.taker_of(b"POST", PATH.encode())
        assert route is not None
        self.app.take(route, headers, body, "192.0.2.7", answers.append)
        return answers[0].status

    async def _asgi(self, headers: Mapping[bytes, bytes], body: bytes) -> int:
        sent: list[Mapping[str, Any]] = []

        async def receive() -> Mapping[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: Mapping[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": headers.items(),
            "client": ("192.0.2.7", 1),
        }  # fmt: skip
        await self.app(scope, receive, send)
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


WAYS = pytest.mark.parametrize("way", ["whole", "asgi"])
REFUSED = {
    "no token": ({}, 401),
    "unknown": ({b"authorization": b"Bearer x"}, 401),
    "for other things": ({b"authorization": OTHER}, 403),
    "another site": ({b"authorization": GOOD, b"sec-fetch-site": b"cross-site", b"host": b"localhost"}, 403),
}


@WAYS
@pytest.mark.parametrize("why", REFUSED)
def test_who_is_refused_is_counted_apart_and_neither_timed_nor_traced(
    way: str, why: str, spans: list[Recorded]
) -> None:
    door = Door(Guard(more=ENTRIES))
    headers, status = REFUSED[why]

    assert door.ask(way, {**headers, b"traceparent": TRACEPARENT}) == status

    assert (door.counted("refused", status), door.counted("passed", status)) == (1, 0)
    assert not door.timed()
    assert spans == []


@WAYS
def test_who_comes_too_often_is_told_from_a_full_queue(way: str, spans: list[Recorded]) -> None:
    door = Door(Guard(more=ENTRIES, clock=SYSTEM_CLOCK, limits=Limits(requests_per_s=0.001)))
    headers = {b"authorization": GOOD, b"traceparent": TRACEPARENT}

    assert [door.ask(way, headers, b"full") for _ in range(2)] == [429, 429]

    assert (door.counted("passed", 429), door.counted("refused", 429)) == (1, 1)
    assert door.timed() == 1
    assert len(spans) == 1


@WAYS
def test_a_door_that_fails_is_a_fault_of_ours(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(more=ENTRIES)
    monkeypatch.setattr(guard, "admit", lambda *_: 1 / 0)
    door = Door(guard)

    assert door.ask(way, {}) == 500

    assert (door.counted("passed", 500), door.counted("refused", 500)) == (1, 0)
