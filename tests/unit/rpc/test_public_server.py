"""The public gRPC server: credentials, slow and idle clients, the memory budget, protobuf messages."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.errors import BadInput
from freshet.http.addresses import forwarded_address
from freshet.http.authenticator import Principal
from freshet.rpc.public_server import DESCRIPTORS, GATEWAY, OIP, PublicServer, credentials_of, messages, parse
from ops.protos import compiled
from tests.unit.rpc.listening import DEADLINE_S, Served, serving


class Call:
    """The context of a call with metadata and an address."""

    def __init__(self, *metadata: tuple[str, str | bytes]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:10.0.0.1:50000"


def shown(*metadata: tuple[str, str | bytes]) -> tuple[bytes | None, str, bytes | None]:
    call: Any = Call(*metadata)
    return credentials_of(call)


def test_all_lines_of_proxies_are_one_list() -> None:
    lines = [("x-forwarded-for", line) for line in ("6.6.6.6", "203.0.113.9", "10.0.0.2")]

    _, peer, forwarded = shown(*lines, ("x-forwarded-for-not", "x"))

    assert forwarded == b"6.6.6.6,203.0.113.9,10.0.0.2"
    assert forwarded_address(peer, forwarded, 2) == "203.0.113.9"


def test_of_several_tokens_the_last_is_shown() -> None:
    assert shown(("authorization", "Bearer a"), ("authorization", b"Bearer b"))[0] == b"Bearer b"


def test_without_metadata_there_is_an_address_alone() -> None:
    assert shown() == (None, "10.0.0.1", None)


# Clients


async def echo(message: bytes, _: Principal) -> bytes:
    return message


def echoing(server: PublicServer) -> None:
    server.add_call("Test", "Echo", echo, scope="send")


def asked(server: Served, message: bytes, **call: Any) -> bytes:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        return bytes(channel.unary_unary("/Test/Echo")(message, timeout=DEADLINE_S, **call))


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and no settings
QUIET_S = 5.0
"""Longer than a service of ours would let another one be silent."""


@pytest.mark.slow
def test_a_client_with_a_busy_uplink_stays_connected() -> None:
    """An answer to a ping waits behind what the client sends; here it never comes."""
    with serving(echoing) as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(PREFACE)
        until = time.monotonic() + QUIET_S
        while (left := until - time.monotonic()) > 0:
            if select.select([client], [], [], left)[0]:
                assert client.recv(65_536), f"the connection was closed {left:.1f} s early"


def test_nothing_compressed_is_taken_so_that_nothing_is_expanded() -> None:
    with serving(echoing) as server:
        with pytest.raises(grpc.RpcError, match=r"(?i)compress") as refused:
            asked(server, bytes(1000), compression=grpc.Compression.Gzip)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert asked(server, b"plain") == b"plain"


@pytest.mark.parametrize("letter", ["x", "長"])
def test_a_long_error_text_is_shortened(letter: str) -> None:
    async def refuse(message: bytes, _: Principal) -> bytes:
        raise BadInput("expected another one: " + letter * 20_000)

    with (
        serving(lambda server: server.add_call("Test", "Echo", refuse, scope="send")) as server,
        pytest.raises(grpc.RpcError, match="expected another one") as refused,
    ):
        asked(server, b"")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# What may be held together


@pytest.fixture
def quiet() -> Iterator[Callable[..., Iterator[bytes]]]:
    """Makes what a client sends that sends these messages, then nothing, and does not end while the test
    runs."""
    over = threading.Event()

    def made(*messages: bytes) -> Iterator[bytes]:
        yield from messages
        over.wait(DEADLINE_S)

    yield made
    over.set()


def test_an_open_call_is_answered_without_its_message(
    quiet: Callable[..., Iterator[bytes]],
) -> None:
    with (
        serving(
            lambda server: server.add_open_call("Test", "Live", lambda: b"yes"), message_timeout_s=0.2
        ) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        assert ("Live", "OK", "passed") in server.counts.answers, "a series before the first answer"
        assert channel.stream_unary("/Test/Live")(quiet(), timeout=DEADLINE_S) == b"yes"
        assert channel.unary_unary("/Test/Live")(bytes(1 << 20), timeout=DEADLINE_S) == b"yes"
    assert (server.counts.received_bytes["Live"], server.counts.answers["Live", "OK", "passed"]) == (0, 2)


def streaming(server: PublicServer) -> None:
    echoing(server)
    server.add_stream("Test", "Echoes", echo, lambda _, told: told.text.encode(), scope="send")


def test_an_idle_stream_ends_when_others_wait(
    quiet: Callable[..., Iterator[bytes]],
) -> None:
    with (
        serving(streaming, message_timeout_s=3.0, budget_bytes=1) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stream = channel.stream_stream("/Test/Echoes")(quiet(b"first"), timeout=DEADLINE_S)
        assert next(stream) == b"first"
        assert asked(server, b"other") == b"other"
        with pytest.raises(grpc.RpcError, match="what was answered is done, open the stream again") as ended:
            next(stream)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.counts.refused == {"quiet": 1}
        assert next(channel.stream_stream("/Test/Echoes")(quiet(b"first"), timeout=DEADLINE_S)) == b"first"


@pytest.mark.slow
def test_messages_beyond_the_budget_are_refused_with_a_delay() -> None:
    begun, go_on = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def slow(message: bytes, _: Principal) -> bytes:
        loops.append(asyncio.get_running_loop())
        begun.set()
        await go_on.wait()
        return message

    def add(server: PublicServer) -> None:
        echoing(server)
        server.add_call("Test", "Slow", slow, scope="send")

    with (
        serving(add, message_timeout_s=4.0, budget_bytes=1, budget_setting="FRESHET_X") as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        first = channel.unary_unary("/Test/Slow").future(b"first", timeout=DEADLINE_S)
        assert begun.wait(DEADLINE_S)
        with pytest.raises(grpc.RpcError, match=r"have taken all room .*; FRESHET_X allows more") as refused:
            asked(server, b"other")
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("retry-after-ms", "1000") in [tuple(pair) for pair in refused.value.trailing_metadata()]
        assert (server.counts.refused, server.counts.held_bytes()) == ({"overloaded": 1}, len(b"first"))
        loops[0].call_soon_threadsafe(go_on.set)
        assert (first.result(), asked(server, b"other")) == (b"first", b"other")
        assert server.counts.held_bytes() == 0


def test_the_descriptors_are_those_of_the_proto_files():
    assert Path(DESCRIPTORS).read_bytes() == compiled(), "run python -m ops.protos"


def test_a_message_is_parsed_as_serialized():
    asked = messages(GATEWAY).PutRequest(id=2**63, body=b"\0\xff", stream=2, encoding=4)
    assert parse(messages(GATEWAY).PutRequest, asked.SerializeToString()) == asked


def test_a_message_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no message Nobody"):
        _ = messages(OIP).Nobody


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_bad_input(data):
    for message_class in (messages(OIP).ModelInferRequest, messages(GATEWAY).PutRequest):
        try:
            parse(message_class, data)
        except BadInput as error:
            assert message_class.DESCRIPTOR.full_name in str(error)  # noqa: PT017  (either is right)
