"""A rank request of the page goes to a replica that answers; the error names the last address."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from freshet.console.service import rank_for_page
from freshet.errors import Unavailable
from freshet.http.addresses import Address

NOWHERE = Address("127.0.0.1", 1)


@pytest.fixture
def replica() -> Iterator[Address]:
    """A server that ranks nothing, and refuses the body `b"bad"`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(400 if body == b"bad" else 200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            """A test's output is its assertions."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield Address("127.0.0.1", server.server_address[1])
    server.shutdown()
    server.server_close()


def test_a_replica_that_has_just_gone_is_passed_over(replica: Address) -> None:
    assert rank_for_page([NOWHERE, replica], b"{}").status == 200


def test_a_refusal_of_a_replica_is_the_answer(replica: Address) -> None:
    assert rank_for_page([replica, NOWHERE], b"bad").status == 400


def test_if_none_answers_the_last_address_is_named() -> None:
    with pytest.raises(Unavailable, match=r"inference does not answer at 127\.0\.0\.1:1"):
        rank_for_page([NOWHERE, NOWHERE], b"{}")


def test_if_none_is_known_that_is_said() -> None:
    with pytest.raises(Unavailable, match="not known"):
        rank_for_page([], b"{}")
