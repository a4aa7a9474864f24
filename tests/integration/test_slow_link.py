"""The link of chosen delay that measurements put between a trainer and its rows."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers.slow_link import PIECE, SlowLink

DELAY_S = 0.02


@contextmanager
def echo() -> Iterator[int]:
    """A server that sends back what one client sends, until that ends; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(PIECE):
                connection.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.close()
    thread.join(20)


@contextmanager
def linked() -> Iterator[socket.socket]:
    """A connection to such a server through a link."""
    with echo() as port:
        link = SlowLink(("127.0.0.1", 0), ("127.0.0.1", port), DELAY_S)
        with socket.create_connection(("127.0.0.1", link.port), timeout=20) as connection:
            yield connection
        link.close()


def test_what_is_sent_comes_back_whole_and_in_order_after_both_delays() -> None:
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

        assert connection.recv(3, socket.MSG_WAITALL) == b"all"
        assert connection.recv(1) == b""
