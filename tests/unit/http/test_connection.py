"""What the kernel still keeps for a client that does not read."""

from __future__ import annotations

import socket

from freshet.http.connection import kept_by_kernel


def test_bytes_that_a_client_has_not_taken_are_told() -> None:
    ours, client = socket.socketpair()
    with ours, client:
        assert kept_by_kernel(ours) == 0
        ours.sendall(b"x" * 1_000)
        assert kept_by_kernel(ours) >= 1_000


def test_of_a_connection_that_is_going_there_are_none() -> None:
    ours, client = socket.socketpair()
    ours.close()
    client.close()

    assert kept_by_kernel(ours) == 0
    assert kept_by_kernel(None) == 0  # a connection over TLS that has no transport any more
