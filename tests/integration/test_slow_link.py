"""The link of chosen delay that measurements put between a trainer and its rows."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.servers.slow_link import PIECE, SlowLink

DELAY_S = 0.02


@contextmanager
def echo() -> Iterator[int]:
    """A server that sends back what each client sends, one after the other, until that ends; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(ConnectionError):
                while data := connection.recv(PIECE):
                    connection.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(60)


def received(connection: socket.socket, count: int) -> bytes:
    """So many bytes."""
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        assert part, f"the connection ended after {found!r}"
        found += part
    return found


@contextmanager
def carried() -> Iterator[tuple[SlowLink, socket.socket]]:
    """A link in front of such a server, and a connection through it."""
    with echo() as port:
        link = SlowLink(("127.0.0.1", 0), ("127.0.0.1", port), DELAY_S)
        with socket.create_connection(("127.0.0.1", link.port), timeout=20) as connection:
            yield link, connection
        link.close()


@contextmanager
def linked() -> Iterator[socket.socket]:
    """A connection to such a server through a link."""
    with carried() as (_, connection):
        yield connection


def test_bytes_return_whole_and_in_order_after_both_delays() -> None:
    sent = random.Random(1).randbytes(10 * PIECE + 3)
    with linked() as connection:
        began = time.monotonic()
        threading.Thread(target=connection.sendall, args=(sent,)).start()
        first = connection.recv(PIECE)
        waited = time.monotonic() - began
        parts = [first]
        while sum(map(len, parts)) < len(sent):
            parts.append(connection.recv(PIECE))

    assert b"".join(parts) == sent
    assert waited >= 2 * DELAY_S, "each way takes the delay"


def test_an_end_goes_through_as_well() -> None:
    with linked() as connection:
        connection.sendall(b"all")
        connection.shutdown(socket.SHUT_WR)

        assert received(connection, 3) == b"all"
        assert connection.recv(1) == b""


def test_a_reset_link_resets_connections_until_it_is_restored() -> None:
    with carried() as (link, connection):
        connection.sendall(b"one")
        assert received(connection, 3) == b"one"
        link.reset()

        with pytest.raises(ConnectionResetError):
            connection.recv(1)
        with (
            pytest.raises(ConnectionResetError),  # when it is made, or once it is read
            socket.create_connection(("127.0.0.1", link.port), timeout=20) as another,
        ):
            another.recv(1)


@pytest.mark.parametrize("way", [{"answers": False}, {"asks": False}, {}], ids=["asks", "answers", "both"])
def test_lost_bytes_arrive_in_order_once_a_link_is_restored(
    way: dict[str, bool],
) -> None:
    with carried() as (link, connection):
        connection.sendall(b"one")
        assert received(connection, 3) == b"one"
        link.lose(**way)
        connection.sendall(b"two")
        connection.settimeout(5 * DELAY_S)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        link.mend()
        connection.settimeout(20)
        connection.sendall(b"six")

        assert received(connection, 6) == b"twosix"


def test_a_new_connection_through_a_link_that_loses_is_mute() -> None:
    with carried() as (link, connection):
        connection.sendall(b"one")
        assert received(connection, 3) == b"one"
        connection.shutdown(socket.SHUT_WR)
        link.lose()
        with socket.create_connection(("127.0.0.1", link.port), timeout=20) as another:
            another.sendall(b"two")
            another.settimeout(5 * DELAY_S)
            with pytest.raises(TimeoutError):
                another.recv(1)
            link.mend()
            another.settimeout(20)

            assert received(another, 3) == b"two"
