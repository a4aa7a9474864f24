"""The client against a scripted server: retries, receipts, errors."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from freshet.client import Ack, AsyncClient, Client, EventsRefused, Receipt, RetryPolicy, Rows
from freshet.errors import BadInput, ConfigError, Overloaded, Unavailable
from freshet.http.app import App
from freshet.http.endpoint import Endpoint
from freshet.http.messages import BodyLimits, Request, Response, json_response
from tests.fixtures.serving import answering

QUICK = RetryPolicy(attempts=3, first_pause_s=0.001, longest_pause_s=0.01)
ACKED = json_response(202, {"accepted": 1, "acks": [{"topic": "actions", "partition": 1, "offset": 7}]})
BUSY = json_response(
    429, {"error": {"code": "overloaded", "message": "queue full"}}, ((b"retry-after", b"0"),)
)
AWAY = json_response(503, {"error": {"code": "unavailable", "message": "log away"}})
RANKED = json_response(
    200,
    {"request_id": 9, "items": [], "version": 4, "freshness_ms": 8, "unknown_rows": {}, "explored": False},
)


def full(code: str) -> Response:
    return json_response(503, {"error": {"code": code, "message": "too many"}})


@dataclass
class Scripted:
    """Gives `answers` in turn, then repeats the last; keeps the requests."""

    url: str = ""
    answers: list[Response] = field(default_factory=list)
    asked: list[tuple[str, Any]] = field(default_factory=list)

    async def __call__(self, request: Request) -> Response:
        body = orjson.loads(request.body) if request.body else request.query
        self.asked.append((request.path, body))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture(scope="module")
def running() -> Iterator[Scripted]:
    script = Scripted()
    app = App(CollectorRegistry(), BodyLimits(10_000, 20))
    for path in ("/v1/impressions", "/v1/shown", "/v1/actions", "/v1/rank"):
        app.route(Endpoint("POST", path, "Scripted.", ()), script)
    app.route(Endpoint("GET", "/v1/progress", "Scripted.", ()), script)
    with answering(app) as at:
        script.url = at.url
        yield script


@pytest.fixture
def script(running: Scripted) -> Scripted:
    running.asked.clear()
    return running


@pytest.fixture
def client(script: Scripted) -> Iterator[Client]:
    with Client(script.url, script.url, retries=QUICK) as client:
        yield client


def test_events_go_to_their_path_and_come_back_as_a_receipt(script: Scripted, client: Client) -> None:
    script.answers = [ACKED]

    assert client.actions({"id": 1}) == Receipt((Ack("actions", 1, 7),))
    client.impressions([{"id": 2}, {"id": 3}])
    client.shown({"id": 4})

    assert script.asked == [
        ("/v1/actions", {"id": 1}),
        ("/v1/impressions", [{"id": 2}, {"id": 3}]),
        ("/v1/shown", {"id": 4}),
    ]


def test_temporary_failures_are_retried(script: Scripted, client: Client) -> None:
    script.answers = [BUSY, AWAY, ACKED]

    assert len(client.actions({"id": 1}).acks) == 1
    assert len(script.asked) == 3


def test_after_the_last_attempt_the_error_is_raised(script: Scripted, client: Client) -> None:
    script.answers = [BUSY]
    with pytest.raises(Overloaded, match="queue full"):
        client.actions({"id": 1})
    assert len(script.asked) == 3

    script.answers = [AWAY]
    with pytest.raises(Unavailable, match="log away"):
        client.actions({"id": 1})


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with (
        Client("http://127.0.0.1:1", retries=QUICK) as client,
        pytest.raises(Unavailable, match="3 attempts"),
    ):
        client.actions({"id": 1})


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:1", "socks5://127.0.0.1:1"])
def test_no_proxy_is_used_for_a_server_of_this_machine(
    script: Scripted, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("all_proxy", proxy)
    monkeypatch.delenv("no_proxy", raising=False)
    script.answers = [ACKED]

    with Client(script.url, script.url, retries=QUICK) as client:
        assert len(client.actions({"id": 1}).acks) == 1


@pytest.mark.parametrize("here", ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"])
def test_a_proxy_is_used_for_the_server_elsewhere_only(
    script: Scripted, monkeypatch: pytest.MonkeyPatch, here: str
) -> None:
    for name in ("all_proxy", "http_proxy"):
        monkeypatch.setenv(name, script.url)
    monkeypatch.delenv("no_proxy", raising=False)
    script.answers = [AWAY]

    with Client(here, "http://elsewhere:1", retries=QUICK) as client:
        with pytest.raises(Unavailable, match="log away"):  # of the proxy
            client.rank({}, [{}], request_id=1)
        proxied = len(script.asked)
        with pytest.raises(Unavailable, match="ConnectError"):
            client.actions({"id": 1})
    assert (proxied, len(script.asked)) == (3, 3)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:7000", "http://", "ftp://h", "http://[::1", "http://h:99999", "http://ä ü"]
)
def test_a_malformed_url_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(ConfigError, match="expected a URL such as"):
        Client(gateway=url)
    with pytest.raises(ConfigError, match="expected a URL such as"):
        AsyncClient(inference=url)


def test_refused_events_are_raised_with_a_receipt(script: Scripted, client: Client) -> None:
    refused = {"index": 1, "path": "user.id", "expected": "long", "found": '"x"'}
    body = {"accepted": 1, "acks": [{"topic": "a", "partition": 0, "offset": 3}], "refused": [refused]}
    script.answers = [json_response(422, body)]

    with pytest.raises(EventsRefused, match=r"event 1: user\.id: expected long") as caught:
        client.actions([{"id": 1}, {"id": 2}])

    assert caught.value.receipt.acks == (Ack("a", 0, 3),)
    assert len(script.asked) == 1


@pytest.mark.parametrize(
    "answer", [json_response(400, {"error": {"message": "no"}}), Response(400, b"no json")]
)
def test_a_bad_request_is_bad_input_and_not_repeated(
    script: Scripted, client: Client, answer: Response
) -> None:
    script.answers = [answer]

    with pytest.raises(BadInput, match="400"):
        client.actions({"id": 1})
    assert len(script.asked) == 1


def test_a_ranking_is_read(script: Scripted, client: Client) -> None:
    item = {"index": 1, "score": 0.5, "predictions": {"buy": 0.5}, "propensity": 1.0}
    script.answers = [
        json_response(
            200,
            {
                "request_id": 9,
                "items": [item],
                "version": 4,
                "freshness_ms": 80,
                "unknown_rows": {"user": 1},
                "explored": False,
            },
        )
    ]

    ranking = client.rank({"user": 1}, [{"id": 1}, {"id": 2}], k=1, request_id="r")

    assert (ranking.request_id, ranking.version, ranking.items[0].index) == ("9", 4, 1)
    assert script.asked == [
        (
            "/v1/rank",
            {"context": {"user": 1}, "candidates": [{"id": 1}, {"id": 2}], "k": 1, "request_id": "r"},
        )
    ]


def test_a_dry_run_returns_its_rows(script: Scripted, client: Client) -> None:
    item = {"index": 0, "score": 0.5, "predictions": {"buy": 0.5}, "propensity": 1.0}
    rows = {"user": {"known": 1, "of": 1, "age_s": 12}, "tags": {"known": 0, "of": 2, "age_s": None}}
    body = {"request_id": 9, "version": 4, "freshness_ms": 80, "unknown_rows": {}, "explored": False}
    script.answers = [
        json_response(200, {**body, "items": [{**item, "rows": rows}]}),
        json_response(200, {**body, "items": [item]}),
    ]

    explained = client.rank({}, [{"id": 1}], dry_run=True, explain=True)
    plain = client.rank({}, [{"id": 1}])

    assert explained.items[0].rows == {"user": Rows(1, 1, 12), "tags": Rows(0, 2, None)}
    assert plain.items[0].rows is None
    assert script.asked[0][1] == {"context": {}, "candidates": [{"id": 1}], "dry_run": True, "explain": True}
    assert script.asked[1][1] == {"context": {}, "candidates": [{"id": 1}]}


def test_a_ranking_without_an_id_may_be_logged_so_is_sent_once(script: Scripted, client: Client) -> None:
    for lost in (Response(502, b"[]"), AWAY, Response(503, b"no json"), Response(504, b"")):
        script.answers = [lost, RANKED]
        script.asked.clear()
        with pytest.raises(Unavailable, match=f"{lost.status}.*pass a `request_id`"):
            client.rank({}, [{"id": 1}])
        assert len(script.asked) == 1

        for repeatable in ({"request_id": "r"}, {"dry_run": True}):
            script.answers = [lost, RANKED]
            assert client.rank({}, [{"id": 1}], **repeatable).request_id == "9"


def test_a_ranking_that_was_refused_unread_is_sent_again(script: Scripted, client: Client) -> None:
    for refused in (BUSY, full("bodies"), full("connections")):
        script.answers = [refused, RANKED]
        assert client.rank({}, [{"id": 1}]).request_id == "9"
    with (
        Client(inference="http://127.0.0.1:1", retries=QUICK) as away,
        pytest.raises(Unavailable, match="3 attempts"),
    ):
        away.rank({}, [{"id": 1}])


class Losing(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Carries each request out, and loses its answer."""

    def __init__(self) -> None:
        self.sent = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.sent += 1
        raise httpx.ReadTimeout("lost", request=request)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)


def test_a_ranking_is_not_repeated_after_a_lost_answer() -> None:
    losing = Losing()

    async def main() -> None:
        async with AsyncClient(retries=QUICK) as client:
            client._http = httpx.AsyncClient(transport=losing)
            with pytest.raises(Unavailable, match=r"ReadTimeout.*pass a `request_id`"):
                await client.rank({}, [{}])

    asyncio.run(main())
    assert losing.sent == 1
    with Client(retries=QUICK) as client:
        client._http = httpx.Client(transport=losing)
        with pytest.raises(Unavailable, match=r"ReadTimeout.*pass a `request_id`"):
            client.rank({}, [{}])
        assert losing.sent == 2
        with pytest.raises(Unavailable, match="3 attempts"):
            client.rank({}, [{}], request_id=0)
    assert losing.sent == 5


def test_waiting_asks_until_the_event_is_served(script: Scripted, client: Client) -> None:
    script.answers = [json_response(200, {"served": s}) for s in (False, False, True)]

    assert client.wait_until_served(Ack("actions", 1, 7), timeout_s=60)
    assert script.asked[0] == ("/v1/progress", "topic=actions&partition=1&offset=7")


def test_waiting_goes_on_when_too_many_ask(script: Scripted, client: Client) -> None:
    script.answers = [json_response(429, {}), json_response(200, {"served": True})]

    assert client.wait_until_served(Ack("actions", 1, 7), timeout_s=60)


def waited(url: str, timeout_s: float, *, in_async: bool) -> bool | Unavailable:
    """What one of the clients returns or raises after it has waited for an event."""
    event = Receipt((Ack("actions", 1, 7),))
    request_s = 3600.0  # no request ends by itself

    async def main() -> bool:
        async with AsyncClient(url, url, timeout_s=request_s) as client:
            return await client.wait_until_served(event, timeout_s=timeout_s)

    try:
        if in_async:
            return asyncio.run(main())
        with Client(url, url, timeout_s=request_s) as client:
            return client.wait_until_served(event, timeout_s=timeout_s)
    except Unavailable as error:
        return error


def wait_until_found(
    expected: str, url: str, script: Scripted, answers: Sequence[Response] = (), *, in_async: bool
) -> None:
    """Wait for an event until the result has these words, twice as long each time.

    On a busy machine a short wait ends before an answer has come.
    """
    timeout_s, found = 0.1, ""
    while expected not in found:
        assert timeout_s < 60, found
        script.answers = [*answers]
        found = str(waited(url, timeout_s, in_async=in_async))
        assert expected in found or found == "False" or "no answer" in found
        timeout_s *= 2


@pytest.mark.parametrize("in_async", [False, True])
def test_waiting_gives_up_in_time(script: Scripted, in_async: bool) -> None:
    unserved = json_response(200, {"served": False})

    wait_until_found("False", script.url, script, [unserved], in_async=in_async)


@pytest.mark.parametrize("in_async", [False, True])
def test_waiting_goes_on_after_temporary_failures(script: Scripted, in_async: bool) -> None:
    script.answers = [AWAY, json_response(502, {}), json_response(200, {"served": True})]

    assert waited(script.url, 60, in_async=in_async) is True


@pytest.mark.parametrize("in_async", [False, True])
def test_waiting_for_a_server_that_stays_away_is_unavailable(script: Scripted, in_async: bool) -> None:
    then_away = [json_response(200, {"served": False}), AWAY]

    wait_until_found("503: log away", script.url, script, then_away, in_async=in_async)
    wait_until_found("ConnectError", "http://127.0.0.1:1", script, in_async=in_async)


@pytest.mark.parametrize("in_async", [False, True])
def test_waiting_for_a_silent_server_ends_in_time(in_async: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = waited(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.2, in_async=in_async)

    assert "no answer" in str(found)  # a wait for the request's own end would outlast pytest's time-out


def test_a_query_that_the_end_cuts_short_changes_nothing() -> None:
    falls_silent = threading.Event()

    class Silent(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if falls_silent.is_set():
                threading.Event().wait(request.extensions["timeout"]["read"])
                raise httpx.ReadTimeout("no answer")
            falls_silent.set()
            return httpx.Response(200, json={"served": False})

    with Client() as client:
        client._http = httpx.Client(transport=Silent())
        assert not client.wait_until_served(Ack("actions", 1, 7), timeout_s=0.2)


def test_the_async_client_does_the_same(script: Scripted) -> None:
    async def main() -> None:
        async with AsyncClient(script.url, script.url, retries=QUICK) as client:
            script.answers = [BUSY, ACKED]
            receipt = await client.actions({"id": 1})
            assert receipt.acks == (Ack("actions", 1, 7),)
            await client.impressions({"id": 1})
            await client.shown({"id": 1})
            script.answers = [json_response(200, {"served": s}) for s in (False, True)]
            assert await client.wait_until_served(receipt.acks[0], timeout_s=60)
            script.answers = [AWAY]
            with pytest.raises(Unavailable):
                await client.rank({}, [{}])
        async with AsyncClient("http://127.0.0.1:1", retries=QUICK) as nobody:
            with pytest.raises(Unavailable, match="3 attempts"):
                await nobody.actions({"id": 1})

    asyncio.run(main())


@given(st.integers(0, 20), st.none() | st.text(max_size=5) | st.integers(0, 999).map(str), st.floats(0, 1))
def test_pauses_grow_are_bounded_and_honour_the_server(
    attempt: int, after: str | None, chance: float
) -> None:
    policy = RetryPolicy(attempts=10)
    pause = policy.pause_s(attempt, after, chance)

    if attempt + 1 >= 10:
        assert pause is None
    else:
        assert pause is not None
        assert pause <= 60
        if after is not None and after.isascii() and after.isdigit():
            assert pause >= min(float(after), 60)
