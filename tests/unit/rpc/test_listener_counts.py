"""Refused requests change no figure of accepted ones, and leave no span."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import pytest
from prometheus_client import CollectorRegistry

from freshet.clock import SYSTEM_CLOCK
from freshet.errors import Overloaded
from freshet.http.app import App, Reply
from freshet.http.authenticator import Authenticator, RateLimits
from freshet.http.browser_checks import AllowedSites
from freshet.http.endpoint import Endpoint
from freshet.http.messages import BodyLimits, Request, Response
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


class Served:
    """An app with one route."""

    def __init__(self, authenticator: Authenticator) -> None:
        self.registry = CollectorRegistry()
        self.app = App(
            self.registry, BodyLimits(100, 1), authenticator=authenticator, check=AllowedSites().check
        )
        self.app.route_hot(Endpoint("POST", PATH, "Things.", (), scope="send"), full)

    def ask(self, headers: Mapping[bytes, bytes], body: bytes = b"") -> int:
        """The status of the answer."""
        sent = asyncio.run(answered(self.app, PATH, headers, body))
        return int(sent[0]["status"])

    def counted(self, door: str, status: int) -> float:
        """Count over all routes, as a page of another site is refused before the route is known."""
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
def test_refused_requests_count_apart_untimed_and_untraced(why: str, spans: list[Recorded]) -> None:
    served = Served(Authenticator(more=ENTRIES))
    headers, status = REFUSED[why]

    assert served.ask({**headers, b"traceparent": TRACEPARENT}) == status

    assert (served.counted("refused", status), served.counted("passed", status)) == (1, 0)
    assert not served.timed()
    assert spans == []


def test_a_rate_limit_counts_apart_from_a_full_queue(spans: list[Recorded]) -> None:
    served = Served(Authenticator(more=ENTRIES, clock=SYSTEM_CLOCK, limits=RateLimits(requests_per_s=0.001)))
    headers = {b"authorization": GOOD, b"traceparent": TRACEPARENT}

    assert [served.ask(headers, b"full") for _ in range(2)] == [429, 429]

    assert (served.counted("passed", 429), served.counted("refused", 429)) == (1, 1)
    assert served.timed() == 1
    assert len(spans) == 1


def test_a_failing_authenticator_counts_as_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    authenticator = Authenticator(more=ENTRIES)
    monkeypatch.setattr(authenticator, "authenticate", lambda *_: 1 / 0)
    served = Served(authenticator)

    assert served.ask({}) == 500

    assert (served.counted("passed", 500), served.counted("refused", 500)) == (1, 0)
