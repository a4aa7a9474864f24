"""Clients that send wrong bytes or leave responses unread do not harm the server or other clients."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from freshet.http.app import App
from freshet.http.endpoint import Endpoint
from freshet.http.messages import BodyLimits, Request, Response, header_map
from freshet.testing.conditions import wait_for
from tests.fixtures.effort import examples
from tests.fixtures.serving import answering
from tests.unit.http.hot_server import Running, asking, bodies, running_server

TOGETHER = 100_000


def answered(client: socket.socket) -> bytes:
    """All that the server says until it closes the connection."""
    said = b""
    while piece := client.recv(65_536):
        said += piece
    return said


def is_well(hot_server: Running) -> None:
    assert httpx.post(f"{hot_server.url}/now", content=b"x").content == b"now x"


def metrics(hot_server: Running) -> str:
    return httpx.get(f"{hot_server.url}/metrics").text


def test_bytes_that_are_no_http_get_400(hot_server: Running) -> None:
    with hot_server.connect() as client:
        client.sendall(b"\x00bad\r\n\r\n")
        said = answered(client)
    assert said.startswith(b"HTTP/1.1 400")
    is_well(hot_server)


def test_a_malformed_body_is_answered_with_400(hot_server: Running) -> None:
    with hot_server.connect() as client:
        client.sendall(b"/routed HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
        client.sendall(b"no length\r\n")
        said = answered(client)
    assert said.startswith(b"HTTP/1.1 400")
    assert said.count(b"\r\n\r\n") == 1


@pytest.mark.parametrize("between", [b"", b"GET /h HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_an_answer_that_has_nowhere_to_go_is_dropped(hot_server: Running, between: bytes) -> None:
    """A late reply is dropped, without an exception in its handler."""
    with hot_server.connect() as client:
        client.sendall(asking("/later", b"x") + between + b"\x00bad\r\n\r\n")
        assert answered(client).startswith(b"HTTP/1.1 400")
        wait_for(lambda: bool(hot_server.held))
    raised: list[BaseException] = []
    done = threading.Event()
    _, reply = hot_server.held.pop()

    def give() -> None:
        try:
            reply(Response(202, b"{}"))
        except BaseException as error:
            raised.append(error)
        done.set()

    assert hot_server.loop is not None
    hot_server.loop.call_soon_threadsafe(give)
    assert done.wait(60)
    assert not raised
    is_well(hot_server)


def test_nothing_behind_the_end_of_a_connection_is_carried_out(hot_server: Running) -> None:
    with hot_server.connect() as client:
        client.sendall(asking("/now", b"x", "connection: close") + asking("/later", b"never"))
        assert answered(client).endswith(b"now x")
    with hot_server.connect() as client:
        too_large = b"POST /now HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n" + b"x" * 2_000
        client.sendall(too_large + asking("/later", b"never"))
        assert answered(client).startswith(b"HTTP/1.1 413")
    is_well(hot_server)
    assert not hot_server.held


UPGRADE = b"connection: upgrade, http2-settings\r\nhttp2-settings: AAEAAEAA\r\nupgrade: h2c\r\n"
HIDDEN = asking("/now", b"hidden")
LENGTH, CHUNKED = b"content-length: %d\r\n" % len(HIDDEN), b"transfer-encoding: chunked\r\n"


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(
    ("path", "more", "body", "host"),
    [
        (b"/now", UPGRADE + LENGTH, HIDDEN, b"x"),
        (b"/routed", UPGRADE + LENGTH, HIDDEN, b"x"),
        (b"/nowhere", UPGRADE + LENGTH, HIDDEN, b"x"),
        (b"/now", UPGRADE + LENGTH, HIDDEN, b"another.site"),
        (b"/now", UPGRADE + CHUNKED, b"%x\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN), b"x"),
    ],
    ids=["hot", "routed", "unknown path", "refused host", "chunked"],
)
def test_a_body_after_upgrade_is_refused_and_no_request(
    hot_server: Running, path: bytes, more: bytes, body: bytes, host: bytes, pieces: int
) -> None:
    """A proxy that passes Upgrade on would not see the requests in such a body."""
    head = b"POST " + path + b" HTTP/1.1\r\nhost: " + host + b"\r\n" + more + b"\r\n"
    with hot_server.connect() as client:
        client.sendall(head + body if pieces == 1 else head)
        said = answered(client)
        if pieces == 2:
            with contextlib.suppress(OSError):  # as the connection is closed
                client.sendall(body)
                said += answered(client)
    assert said.startswith(b"HTTP/1.1 400")
    assert said.count(b"content-length: ") == 1
    assert b'"code":"upgrade"' in said
    assert b"without Upgrade" in said
    is_well(hot_server)


@pytest.mark.parametrize("length", [b"", b"content-length: 0\r\n"])
def test_upgrade_without_a_body_is_ignored(hot_server: Running, length: bytes) -> None:
    with hot_server.connect() as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n" + UPGRADE + length + b"\r\n")
        assert client.recv(65_536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/now", "/routed", "/nowhere"])
@pytest.mark.parametrize("how", ["connection: close", "connection: keep-alive", "transfer-encoding: chunked"])
def test_a_client_that_sends_all_first_gets_the_error(hot_server: Running, path: str, how: str) -> None:
    """Clients of Python do; a connection closed on a body that is on its way would be reset."""
    body = b"x" * 30_000_000  # more than the kernel holds between the two
    if how.startswith("transfer"):
        body, length = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), how
    else:
        length = f"{how}\r\ncontent-length: {len(body)}"
    with hot_server.connect() as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\n{length}\r\n\r\n".encode() + body)
        said = answered(client) if "close" in how else client.recv(10_000)
    assert said.startswith(b"HTTP/1.1 404" if path == "/nowhere" else b"HTTP/1.1 413")
    is_well(hot_server)


def test_a_length_of_thousands_of_digits_is_refused(hot_server: Running) -> None:
    with hot_server.connect() as client:
        head = b"POST /routed HTTP/1.1\r\nhost: x\r\ncontent-length: "
        client.sendall(head + b"0" * 5_000 + b"2\r\n\r\nab")
        assert bodies(client, 1) == [b"routed ab"]


PIECES = [
    asking("/now", b"x"),
    asking("/later", b"x"),
    asking("/routed", b"x"),
    asking("/now", b"x", "connection: close"),
    asking("/routed", b"x", "expect: 100-continue"),
    asking("/now", b"whole")[:-3],
    b"GET /h HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /now HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    b"POST /routed HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\nz",
    b"\x00bad\r\n\r\n",
    b"\r\n",
]


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=6), min_size=1, max_size=4),
    st.integers(0, 1 << 30),
)
def test_the_server_survives_any_pipelined_bytes(flood: Running, sent: list[list[bytes]], seed: int) -> None:
    rng = random.Random(seed)
    clients = [flood.connect() for _ in sent]
    for client, pieces in zip(clients, sent, strict=True):
        whole = b"".join(pieces)
        cut = rng.randrange(len(whole) + 1)
        try:
            client.sendall(whole[:cut])
            client.sendall(whole[cut:])
        except OSError:
            continue  # it is closed already
    if rng.random() < 0.5:
        for client in clients:
            client.close()
    is_well(flood)
    assert flood.loop is not None
    for request, reply in list(flood.held):
        flood.loop.call_soon_threadsafe(reply, Response(202, request.body))
    flood.held.clear()
    is_well(flood)
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def flood() -> Iterator[Running]:
    with running_server() as made:
        yield made


# --- bodies that together are too many


@pytest.fixture
def holding() -> Iterator[Running]:
    """Holds bodies of 100,000 bytes together."""
    made = Running()
    app = App(CollectorRegistry(), BodyLimits(60_000, 5, TOGETHER))
    release = asyncio.Event()

    async def waits(request: Request) -> Response:
        made.held.append((request, lambda response: None))
        await release.wait()
        return Response(200, b"")

    app.route(Endpoint("POST", "/waits", "Until told.", ()), waits)
    with answering(app, drain_s=1) as at:
        made.port, made.stop, made.loop = at.port, at.stop, at.loop
        yield made
        at.loop.call_soon_threadsafe(release.set)


def test_bodies_are_bounded_together(holding: Running) -> None:
    body = b"b" * 55_000
    first = holding.connect()
    first.sendall(asking("/waits", body))
    wait_for(lambda: len(holding.held) == 1)
    assert "freshet_http_body_bytes 55000.0" in metrics(holding)
    refused = httpx.post(f"{holding.url}/waits", content=body)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "bodies"
    assert refused.headers["retry-after"] == "1"
    first.close()


def test_proxy_addresses_are_joined_over_header_lines() -> None:
    lines = [(b"host", b"x"), (b"x-forwarded-for", b"1.1.1.1"), (b"x-forwarded-for", b"2.2.2.2, 3.3.3.3")]
    assert header_map(lines)[b"x-forwarded-for"] == b"1.1.1.1,2.2.2.2, 3.3.3.3"
    assert header_map(lines[:2]) == {b"host": b"x", b"x-forwarded-for": b"1.1.1.1"}
