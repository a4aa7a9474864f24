"""`App` over real sockets: errors as JSON, bounded bodies, drains."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from freshet.errors import BadInput, ConfigError, Overloaded, TooLarge, Unavailable
from freshet.http.app import App
from freshet.http.authenticator import Authenticator, RateLimits
from freshet.http.endpoint import Answer, Endpoint
from freshet.http.messages import BodyLimits, HttpError, Request, Response, json_response
from freshet.http.server import bind, run_server, serve
from tests.fixtures.asgi import answered
from tests.fixtures.effort import examples
from tests.fixtures.serving import answering

LIMIT = 1_000


@dataclass
class Running:
    url: str
    stop: threading.Event
    port: int

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path)


async def echo(request: Request) -> Response:
    return json_response(200, {"bytes": len(request.body), "type": request.content_type})


async def named(request: Request) -> Response:
    return json_response(200, list(request.arguments))


def raising(error: Exception) -> Callable[[Request], object]:
    async def handler(request: Request) -> Response:
        raise error

    return handler


ERRORS = {
    "bad": (BadInput("x: expected a, found b"), 400),
    "large": (TooLarge("too many"), 413),
    "full": (Overloaded("queue full", 2.0), 429),
    "away": (Unavailable("log away"), 503),
    "bug": (KeyError("secret"), 500),
    "told": (HttpError(418, "teapot", "short", expected="tea", found="coffee", hint="boil"), 418),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    app = App(CollectorRegistry(), BodyLimits(LIMIT, 20))
    app.route(Endpoint("POST", "/echo", "Echo.", ()), echo)
    app.route(Endpoint("GET", "/things/{name}", "One.", ()), named)
    app.route(Endpoint("GET", "/things/{name}/parts/{part}", "A part.", ()), named)
    for name, (error, _) in ERRORS.items():
        app.route(Endpoint("GET", f"/errors/{name}", "Fails.", ()), raising(error))  # type: ignore[arg-type]
    with answering(app) as at:
        yield Running(at.url, at.stop, at.port)


def test_a_body_reaches_its_handler(server: Running) -> None:
    answer = httpx.post(
        server.url + "/echo", content=b"x" * LIMIT, headers={"content-type": "Text/Plain; q=1"}
    )

    assert answer.json() == {"bytes": LIMIT, "type": "text/plain"}


@pytest.mark.parametrize("name", list(ERRORS))
def test_every_error_is_json_with_a_code_and_a_message(server: Running, name: str) -> None:
    answer = server.get(f"/errors/{name}")

    assert answer.status_code == ERRORS[name][1]
    assert answer.json()["error"].keys() == {"code", "message", "expected", "found", "hint"}


def test_every_route_gets_the_address_behind_a_trusted_proxy() -> None:
    app = App(
        CollectorRegistry(),
        BodyLimits(LIMIT, 1),
        authenticator=Authenticator(limits=RateLimits(trusted_proxies=1)),
    )
    peers = []

    async def handler(request: Request) -> Response:
        peers.append(request.peer)
        return Response(200, b"")

    app.route(Endpoint("GET", "/open", "Open.", ()), handler)
    app.route(Endpoint("GET", "/closed", "Closed.", (), scope="rank"), handler)
    for path in ("/open", "/closed"):
        headers = {b"x-forwarded-for": b"6.6.6.6, 203.0.113.9"}
        asyncio.run(answered(app, path, headers, method="GET", client="10.0.0.1"))

    assert peers == ["203.0.113.9", "203.0.113.9"]


def test_an_unexpected_error_is_sent_without_details(server: Running) -> None:
    assert "secret" not in server.get("/errors/bug").text


def test_when_to_come_back_is_said(server: Running) -> None:
    assert server.get("/errors/full").headers["retry-after"] == "2"
    assert server.get("/errors/away").headers["retry-after"] == "1"


def test_an_unknown_path_says_which_there_are(server: Running) -> None:
    answer = server.get("/nowhere")

    assert answer.status_code == 404
    assert "/echo" in answer.json()["error"]["expected"]


def test_a_wrong_method_says_which_is_right(server: Running) -> None:
    answer = server.get("/echo")

    assert answer.status_code == 405
    assert answer.headers["allow"] == "OPTIONS, POST"


def test_head_answers_as_get_without_a_body(server: Running) -> None:
    head, get = httpx.head(server.url + "/health/live"), server.get("/health/live")

    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(get.content))
    assert httpx.head(server.url + "/echo").status_code == 405, "a path without GET"


def test_options_lists_methods_and_permits_no_other_site(server: Running) -> None:
    asked = {"origin": "http://other.example", "access-control-request-method": "POST"}
    answer = httpx.options(server.url + "/health/live", headers=asked)

    assert (answer.status_code, answer.content, answer.headers["allow"]) == (200, b"", "GET, HEAD, OPTIONS")
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert httpx.options(server.url + "/nowhere").status_code == 404


def test_path_arguments_are_decoded_and_not_split(server: Running) -> None:
    assert server.get("/things/a%20b").json() == ["a b"]
    assert server.get("/things/..%2f..%2fetc").json() == ["../../etc"]
    assert server.get("/things/x/parts/y").json() == ["x", "y"]
    assert server.get("/things/x/y").status_code == 404


def test_a_too_large_declared_length_is_refused(server: Running) -> None:
    answer = httpx.post(server.url + "/echo", content=b"x" * (LIMIT + 1))

    assert answer.status_code == 413
    assert answer.json()["error"]["expected"] == f"at most {LIMIT} bytes"


def test_a_chunked_body_is_read_up_to_the_limit(server: Running) -> None:
    whole = httpx.post(server.url + "/echo", content=iter([b"x" * 600, b"x" * (LIMIT - 600)]))
    refused = httpx.post(server.url + "/echo", content=iter([b"x" * 600, b"x" * 600]))

    assert whole.json()["bytes"] == LIMIT
    assert refused.status_code == 413


def test_a_client_that_stops_sending_gets_408() -> None:
    app = App(CollectorRegistry(), BodyLimits(LIMIT, 0.3))
    app.route(Endpoint("POST", "/echo", "Echo.", ()), echo)
    with answering(app) as at, socket.create_connection(("127.0.0.1", at.port), timeout=20) as client:
        client.sendall(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc")
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_disconnect_does_not_affect_other_clients(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc")

    assert server.get("/things/x").status_code == 200


def test_requests_are_counted_by_route_not_by_path(server: Running) -> None:
    server.get("/things/some-name")
    text = server.get("/metrics").text

    assert 'freshet_http_requests_total{door="passed",route="/things/*",status="200"}' in text
    assert "some-name" not in text


def test_a_route_is_counted_from_0_before_its_first_answer() -> None:
    registry = CollectorRegistry()
    app = App(registry, BodyLimits(LIMIT, 1))
    app.route(
        Endpoint("POST", "/v1/things/{name}", "Things.", (Answer(202, "kept"), Answer(422, "not"))), named
    )

    labels = {"route": "/v1/things/*", "status": "202", "door": "passed"}
    assert registry.get_sample_value("freshet_http_requests_total", labels) == 0


@given(st.binary(max_size=200))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60), deadline=None
)
def test_random_bytes_on_the_wire_never_stop_the_server(server: Running, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(data + b"\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        first = client.recv(100)
    assert not first.startswith(b"HTTP/1.1 5")


def test_a_port_in_use_is_a_config_error(server: Running) -> None:
    with pytest.raises(ConfigError, match="a free port"):
        bind("127.0.0.1", server.port)


def test_a_bound_address_refuses_clients_until_served() -> None:
    app = App(CollectorRegistry(), BodyLimits(LIMIT, 1))
    sock = bind("127.0.0.1", 0)
    address = sock.getsockname()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=60)

    with answering(app, sock):
        socket.create_connection(address, timeout=60).close()


def test_an_address_taken_by_another_is_a_config_error() -> None:
    app = App(CollectorRegistry(), BodyLimits(LIMIT, 1))
    with bind("127.0.0.1", 0) as sock, bind("127.0.0.1", sock.getsockname()[1]) as quicker:
        quicker.listen()

        with pytest.raises(ConfigError, match="a free port"):
            asyncio.run(serve(app, sock, threading.Event()))


@pytest.mark.parametrize("drain_s", [0.0, 0.25, 2.5])
def test_the_drain_is_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch, drain_s: float) -> None:
    told: list[float] = []
    config = uvicorn.Config

    def watched(*given: Any, **named: Any) -> uvicorn.Config:
        told.append(named["timeout_graceful_shutdown"])
        return config(*given, **named)

    monkeypatch.setattr(uvicorn, "Config", watched)
    stop, left = threading.Event(), list[float]()
    stop.set()
    app = App(CollectorRegistry(), BodyLimits(LIMIT, 1))

    async def main() -> None:
        left.append(await serve(app, bind("127.0.0.1", 0), stop, drain_s=drain_s))

    run_server(main)
    assert told == [drain_s]
    assert 0 <= left[0] < drain_s or left[0] == 0


def test_a_request_begun_before_the_stop_is_answered() -> None:
    begun, gate = threading.Event(), threading.Event()

    async def slow(request: Request) -> Response:
        begun.set()
        await asyncio.get_running_loop().run_in_executor(None, gate.wait, 60)
        return json_response(200, "late")

    app = App(CollectorRegistry(), BodyLimits(LIMIT, 1))
    app.route(Endpoint("GET", "/slow", "Slow.", ()), slow)
    answers: list[httpx.Response] = []
    with answering(app) as at:
        client = threading.Thread(target=lambda: answers.append(httpx.get(f"{at.url}/slow", timeout=60)))
        client.start()
        assert begun.wait(60)
        at.stop.set()
        gate.set()
        client.join(60)
        at.thread.join(60)

        assert [a.json() for a in answers] == ["late"]
        assert not at.thread.is_alive()
