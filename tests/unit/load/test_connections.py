"""Requests over real sockets, to servers that keep or close connections, stall, or answer nonsense."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from freshet.errors import ConfigError
from freshet.http.addresses import Address
from freshet.load.connections import Answer, Connections, Server, server_at

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def request_of(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read head and body of the next request. Raises IncompleteReadError at the end."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
    return head, await reader.readexactly(length)


def answering(*answers: bytes, closes: bool = False) -> tuple[Serve, list[tuple[bytes, bytes]]]:
    """Return a handler that gives these answers in turn, then repeats the last, and its requests."""
    requests: list[tuple[bytes, bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                requests.append(await request_of(reader))
                writer.write(answers[min(len(requests), len(answers)) - 1])
                if closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    return serve, requests


@asynccontextmanager
async def served(
    serve: Serve, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Server, list[asyncio.Task[None]]]]:
    """Run a server; yield it and the tasks of its connections, which have all ended afterwards."""
    opened: list[asyncio.Task[None]] = []

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(asyncio.create_task(serve(reader, writer)))  # type: ignore[arg-type]

    server = await asyncio.start_server(begin, "127.0.0.1", 0, ssl=tls)
    try:
        yield Server(Address("127.0.0.1", server.sockets[0].getsockname()[1]), tls is not None), opened
    finally:
        server.close()
        async with asyncio.timeout(10):
            await asyncio.gather(*opened)


async def post_all(
    serve: Serve,
    bodies: list[bytes],
    *,
    at_once: bool = False,
    timeout_s: float = 10.0,
    most: int = 4,
    tls: ssl.SSLContext | None = None,
    ca_file: str = "",
    token: str = "",
) -> tuple[list[Answer], int]:
    """Post the bodies; return the answers and the number of connections."""
    async with served(serve, tls) as (where, opened):
        trusted = ssl.create_default_context(cafile=ca_file or None)
        connections = Connections([where], most, timeout_s, token=token, tls=trusted)
        try:
            if at_once:
                return list(await asyncio.gather(*(connections.post("/x", body) for body in bodies))), len(
                    opened
                )
            return [await connections.post("/x", body) for body in bodies], len(opened)
        finally:
            connections.close()


def statuses(answers: list[Answer]) -> list[int]:
    return [answer.status for answer in answers]


def test_connection_is_reused() -> None:
    serve, requests = answering(OK)

    answers, opened = asyncio.run(post_all(serve, [b"1", b"2", b"3"], token="secret-token"))

    assert [answer.body for answer in answers] == [b"ok"] * 3
    assert all(answer.sent_at is not None for answer in answers)
    assert opened == 1
    assert [body for _, body in requests] == [b"1", b"2", b"3"]
    assert requests[0][0].startswith(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization: Bearer secret-token\r\n" in requests[0][0]


def test_no_more_connections_are_made_than_allowed() -> None:
    serve, _ = answering(OK)

    answers, opened = asyncio.run(post_all(serve, [b"x"] * 20, at_once=True, most=3))

    assert statuses(answers) == [200] * 20
    assert opened <= 3


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 202 Accepted\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
    ],
    ids=["chunked", "continued", "closing"],
)
def test_answers_come_in_several_forms(answer: bytes) -> None:
    serve, _ = answering(answer)

    answers, _ = asyncio.run(post_all(serve, [b"1", b"2"]))

    assert [(a.status, a.body) for a in answers] == [(202, b"ok")] * 2


def test_closed_connections_are_replaced() -> None:
    serve, _ = answering(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), closes=True)

    answers, opened = asyncio.run(post_all(serve, [b"1", b"2", b"3"]))

    assert statuses(answers) == [200] * 3
    assert opened == 3


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP came back"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", "the connection was closed"),
        (b"", "the connection was closed"),
    ],
    ids=["nonsense", "cut off", "nothing"],
)
def test_malformed_answer_is_reported(answer: bytes, problem: str) -> None:
    serve, _ = answering(answer, closes=True)

    [found], _ = asyncio.run(post_all(serve, [b"1"]))

    assert found.status == 0
    assert found.problem.startswith(problem)


def test_missing_answer_times_out() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    [found], _ = asyncio.run(post_all(never, [b"1"], timeout_s=0.05))

    assert found.problem == "no answer within 0.05 s"


def test_timeout_includes_wait_for_connection() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    answers, opened = asyncio.run(post_all(never, [b"1"] * 20, at_once=True, most=1, timeout_s=3.0))

    assert {answer.problem for answer in answers} == {"no answer within 3 s"}
    assert opened <= 5, "one after the other would have taken twenty times as long, and twenty connections"
    assert 1 <= sum(answer.sent_at is not None for answer in answers) <= 5


def test_refused_connection_is_reported() -> None:
    async def post() -> Answer:
        server = await asyncio.start_server(answering(OK)[0], "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await Connections([Server(Address("127.0.0.1", port))], 1, 60).post("/x", b"")

    found = asyncio.run(post())

    assert found.problem.startswith("no connection:")
    assert found.sent_at is None


def test_servers_get_requests_in_turn() -> None:
    async def post() -> list[int]:
        (one, ones), (other, others) = answering(OK), answering(OK)
        async with served(one) as (first, _), served(other) as (second, _):
            connections = Connections([first, second], 4, 60)
            for _ in range(6):
                await connections.post("/x", b"")
            connections.close()
        return [len(ones), len(others)]

    assert asyncio.run(post()) == [3, 3]


def test_https_is_verified(tmp_path: Path) -> None:
    mine, another = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    mine.issue_cert("127.0.0.1").configure_cert(context)
    files = {}
    for name, ca in (("mine", mine), ("another", another)):
        files[name] = tmp_path / f"{name}.pem"
        ca.cert_pem.write_to_path(files[name])
    serve, _ = answering(OK)

    [good], _ = asyncio.run(post_all(serve, [b"1"], tls=context, ca_file=str(files["mine"])))
    [bad], _ = asyncio.run(post_all(serve, [b"1"], tls=context, ca_file=str(files["another"])))

    assert good.status == 200
    assert bad.problem.startswith("no connection:")
    assert "certificate" in bad.problem


@pytest.mark.parametrize("url", ["gateway:7000", "ftp://a:1", "http://a:1/v1", "http://a:x", "http://"])
def test_a_url_that_names_no_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--gateway"):
        server_at("--gateway", url)


def test_urls_have_the_usual_ports() -> None:
    assert server_at("--gateway", "https://a") == Server(Address("a", 443), tls=True)
    assert server_at("--gateway", "http://[::1]") == Server(Address("::1", 80))


def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    serve, requests = answering(OK)
    monkeypatch.setattr("freshet.load.connections.IDLE_S", 0.0)

    answers, opened = asyncio.run(post_all(serve, [b"1", b"2"]))

    assert statuses(answers) == [200, 200]
    assert opened == 2
    assert [body for _, body in requests] == [b"1", b"2"]
