"""Requests over real sockets, to servers that keep, close, stall and talk nonsense."""

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
    """Head and body of the next request. Raises IncompleteReadError at the end."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
    return head, await reader.readexactly(length)


def answering(*answers: bytes, closes: bool = False) -> tuple[Serve, list[tuple[bytes, bytes]]]:
    """Serves these answers in turn, the last again and again; and what was asked."""
    asked: list[tuple[bytes, bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                asked.append(await request_of(reader))
                writer.write(answers[min(len(asked), len(answers)) - 1])
                if closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    return serve, asked


@asynccontextmanager
async def served(
    serve: Serve, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Server, list[asyncio.Task[None]]]]:
    """A server, and a task for each connection that is made to it; all have ended afterwards."""
    made: list[asyncio.Task[None]] = []

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.append(asyncio.create_task(serve(reader, writer)))  # type: ignore[arg-type]

    server = await asyncio.start_server(begin, "127.0.0.1", 0, ssl=tls)
    try:
        yield Server(Address("127.0.0.1", server.sockets[0].getsockname()[1]), tls is not None), made
    finally:
        server.close()
        async with asyncio.timeout(10):
            await asyncio.gather(*made)


async def asked_of(
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
    """The answers, and how many connections were made."""
    async with served(serve, tls) as (where, made):
        believed = ssl.create_default_context(cafile=ca_file or None)
        connections = Connections([where], most, timeout_s, token=token, tls=believed)
        try:
            if at_once:
                return list(await asyncio.gather(*(connections.post("/x", body) for body in bodies))), len(
                    made
                )
            return [await connections.post("/x", body) for body in bodies], len(made)
        finally:
            connections.close()


def statuses(answers: list[Answer]) -> list[int]:
    return [answer.status for answer in answers]


def test_a_connection_is_kept() -> None:
    serve, asked = answering(OK)

    answers, made = asyncio.run(asked_of(serve, [b"1", b"2", b"3"], token="secret-token"))

    assert [answer.body for answer in answers] == [b"ok"] * 3
    assert all(answer.sent_at is not None for answer in answers)
    assert made == 1
    assert [body for _, body in asked] == [b"1", b"2", b"3"]
    assert asked[0][0].startswith(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization: Bearer secret-token\r\n" in asked[0][0]


def test_no_more_connections_are_made_than_allowed() -> None:
    serve, _ = answering(OK)

    answers, made = asyncio.run(asked_of(serve, [b"x"] * 20, at_once=True, most=3))

    assert statuses(answers) == [200] * 20
    assert made <= 3


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

    answers, _ = asyncio.run(asked_of(serve, [b"1", b"2"]))

    assert [(a.status, a.body) for a in answers] == [(202, b"ok")] * 2


def test_a_server_that_closes_after_each_answer_gets_a_new_connection() -> None:
    serve, _ = answering(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), closes=True)

    answers, made = asyncio.run(asked_of(serve, [b"1", b"2", b"3"]))

    assert statuses(answers) == [200] * 3
    assert made == 3


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP came back"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", "the connection was closed"),
        (b"", "the connection was closed"),
    ],
    ids=["nonsense", "cut off", "nothing"],
)
def test_what_is_no_answer_is_told(answer: bytes, problem: str) -> None:
    serve, _ = answering(answer, closes=True)

    [found], _ = asyncio.run(asked_of(serve, [b"1"]))

    assert found.status == 0
    assert found.problem.startswith(problem)


def test_a_server_that_never_answers_is_given_up() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    [found], _ = asyncio.run(asked_of(never, [b"1"], timeout_s=0.05))

    assert found.problem == "no answer within 0.05 s"


def test_the_wait_for_a_free_connection_is_within_the_timeout() -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    answers, made = asyncio.run(asked_of(never, [b"1"] * 20, at_once=True, most=1, timeout_s=1.0))

    assert {answer.problem for answer in answers} == {"no answer within 1 s"}
    assert made <= 5, "one after the other would have taken twenty times as long, and twenty connections"
    assert 1 <= sum(answer.sent_at is not None for answer in answers) <= 5


def test_nobody_who_listens_is_told() -> None:
    async def ask() -> Answer:
        server = await asyncio.start_server(answering(OK)[0], "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await Connections([Server(Address("127.0.0.1", port))], 1, 5).post("/x", b"")

    found = asyncio.run(ask())

    assert found.problem.startswith("no connection:")
    assert found.sent_at is None


def test_servers_are_asked_in_turn() -> None:
    async def ask() -> list[int]:
        (one, ones), (other, others) = answering(OK), answering(OK)
        async with served(one) as (first, _), served(other) as (second, _):
            connections = Connections([first, second], 4, 5)
            for _ in range(6):
                await connections.post("/x", b"")
            connections.close()
        return [len(ones), len(others)]

    assert asyncio.run(ask()) == [3, 3]


def test_https_is_verified(tmp_path: Path) -> None:
    mine, another = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    mine.issue_cert("127.0.0.1").configure_cert(context)
    files = {}
    for name, ca in (("mine", mine), ("another", another)):
        files[name] = tmp_path / f"{name}.pem"
        ca.cert_pem.write_to_path(files[name])
    serve, _ = answering(OK)

    [good], _ = asyncio.run(asked_of(serve, [b"1"], tls=context, ca_file=str(files["mine"])))
    [bad], _ = asyncio.run(asked_of(serve, [b"1"], tls=context, ca_file=str(files["another"])))

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
    serve, asked = answering(OK)
    monkeypatch.setattr("freshet.load.connections.IDLE_S", 0.0)

    answers, made = asyncio.run(asked_of(serve, [b"1", b"2"]))

    assert statuses(answers) == [200, 200]
    assert made == 2
    assert [body for _, body in asked] == [b"1", b"2"]
