"""A gRPC door: what a call shows there, and what its clients may do to it."""

from __future__ import annotations

import select
import socket
import time
from typing import Any

import grpc
import pytest

from freshet.errors import BadInput
from freshet.runtime.grpc_door import GrpcDoor, _shown
from freshet.runtime.guard import Guest
from freshet.runtime.rates import forwarded_address
from tests.unit.runtime.door import DEADLINE_S, Open, door_with


class Call:
    """What a call's context tells of who asks."""

    def __init__(self, *metadata: tuple[str, str | bytes]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:10.0.0.1:50000"


def shown(*metadata: tuple[str, str | bytes]) -> tuple[bytes | None, str, bytes | None]:
    call: Any = Call(*metadata)
    return _shown(call)


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


async def echo(message: bytes, _: Guest) -> bytes:
    return message


def echoing(door: GrpcDoor) -> None:
    door.call("Test", "Echo", echo, scope=None)


def asked(door: Open, message: bytes, **call: Any) -> bytes:
    with grpc.insecure_channel(f"127.0.0.1:{door.port}") as channel:
        return bytes(channel.unary_unary("/Test/Echo")(message, timeout=DEADLINE_S, **call))


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and no settings
QUIET_S = 5.0
"""Longer than a service of ours would let another one be silent."""


def test_a_client_whose_uplink_is_busy_for_seconds_is_not_cut_off() -> None:
    """An answer to a ping waits behind what the client sends; here it never comes."""
    with door_with(echoing) as door, socket.create_connection(("127.0.0.1", door.port)) as client:
        client.sendall(PREFACE)
        until = time.monotonic() + QUIET_S
        while (left := until - time.monotonic()) > 0:
            if select.select([client], [], [], left)[0]:
                assert client.recv(65_536), f"the connection was closed {left:.1f} s early"


def test_nothing_compressed_is_taken_so_that_nothing_is_expanded() -> None:
    with door_with(echoing) as door:
        with pytest.raises(grpc.RpcError, match=r"(?i)compress") as refused:
            asked(door, bytes(1000), compression=grpc.Compression.Gzip)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert asked(door, b"plain") == b"plain"


@pytest.mark.parametrize("letter", ["x", "長"])
def test_an_error_with_a_long_text_is_told_by_its_beginning(letter: str) -> None:
    async def refuse(message: bytes, _: Guest) -> bytes:
        raise BadInput("expected another one: " + letter * 20_000)

    with (
        door_with(lambda door: door.call("Test", "Echo", refuse, scope=None)) as door,
        pytest.raises(grpc.RpcError, match="expected another one") as refused,
    ):
        asked(door, b"")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
