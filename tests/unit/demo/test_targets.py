"""Targets of the simulator: URLs as addresses, and failover between servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from freshet.config.settings import load_settings
from freshet.demo.connections import HttpConnection, Targets, server_of, targets_by
from freshet.errors import ConfigError, Unavailable
from freshet.http.addresses import Address

NOWHERE = Address("127.0.0.1", 1)


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://gateway-0:7000", "gateway-0", 7000),
        ("http://balancer", "balancer", 80),
        ("http://balancer/", "balancer", 80),
        ("http://[::1]:7001", "::1", 7001),
        ("http://[::1]", "::1", 80),
    ],
)
def test_a_url_names_a_server(url: str, host: str, port: int) -> None:
    assert server_of("--gateway", url) == Address(host, port)


@pytest.mark.parametrize(
    "url",
    ["gateway-0:7000", "https://gateway-0:7000", "http://", "http://g:7000/v1", "http://g:7000?x", "http://g:x",
     "http://me:word@g:7000", "http://[::1:7000"],
)  # fmt: skip
def test_malformed_url_is_refused_with_example(url: str) -> None:
    with pytest.raises(ConfigError, match="--inference") as caught:
        server_of("--inference", url)

    assert "http://gateway-0:7000" in str(caught.value)


@pytest.mark.parametrize(
    ("bound", "host"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.5", "10.0.0.5")]
)
def test_without_urls_readers_visit_this_machine(bound: str, host: str) -> None:
    settings = load_settings({"FRESHET_COMMON_BIND_ADDRESS": bound, "FRESHET_GATEWAY_PORT": "7100"})

    assert targets_by(settings) == Targets((Address(host, 7100),), (Address(host, 7001),))
    assert targets_by(settings, ["http://a:1", "http://b:2"]) == Targets(
        (Address("a", 1), Address("b", 2)), (Address(host, 7001),)
    )


@pytest.fixture
def serve() -> Iterator[Callable[[int], Address]]:
    """Return a function that starts a server with one status for every POST."""
    started: list[ThreadingHTTPServer] = []

    def start(status: int) -> Address:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Keep the test output clean."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        started.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return Address("127.0.0.1", server.server_address[1])

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def test_unreachable_server_fails_over(serve: Callable[[int], Address]) -> None:
    connection = HttpConnection([NOWHERE, serve(202)])

    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1/v1/actions"):
        connection.post("/v1/actions", b"[]")
    assert [connection.post("/v1/actions", b"[]")[0] for _ in range(2)] == [202, 202]
    connection.close()


def test_failing_server_fails_over_and_refusing_one_does_not(
    serve: Callable[[int], Address],
) -> None:
    connection = HttpConnection([serve(503), serve(400), serve(202)])

    assert [connection.post("/", b"{}")[0] for _ in range(3)] == [503, 400, 400]
    connection.close()


def test_connections_begin_at_servers_in_turn(serve: Callable[[int], Address]) -> None:
    servers = [serve(200), serve(201)]

    assert [HttpConnection(servers, i).post("/", b"{}")[0] for i in range(4)] == [200, 201, 200, 201]


def test_only_server_is_retried(serve: Callable[[int], Address]) -> None:
    connection = HttpConnection([serve(503)])

    assert [connection.post("/", b"{}")[0] for _ in range(2)] == [503, 503]
    connection.close()
