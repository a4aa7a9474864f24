"""Asking how a service is: what nothing, no HTTP, no JSON and a proxy in the environment come to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freshet.http.service_client import ask, figures_of, why_unready
from freshet.process.process_info import birth_of, is_alive, memory_mb
from freshet.testing.conditions import wait_until

pytestmark = pytest.mark.usefixtures("patient")

Serve = Callable[[bytes], int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Answers every connection to a port with these bytes, and closes it."""
    sockets: list[socket.socket] = []

    def start(answer: bytes) -> int:
        listening = socket.create_server(("127.0.0.1", 0))
        sockets.append(listening)

        def work() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4_096)
                    connection.sendall(answer)

        threading.Thread(target=work, daemon=True).start()
        port: int = listening.getsockname()[1]
        return port

    yield start
    for each in sockets:
        each.shutdown(socket.SHUT_RDWR)
        each.close()


def http_answer(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def test_a_service_that_is_ready_has_no_reason_not_to_be(serve: Serve) -> None:
    assert why_unready(serve(http_answer("200 OK", b'{"status":"ready"}'))) == ""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"status":"unready","reason":"rows lack"}', "rows lack"),
        (b"[]", "/health/ready answers 503"),
        (b"no json", "/health/ready answers 503"),
    ],
)
def test_the_reason_of_an_unready_service_is_returned(serve: Serve, body: bytes, reason: str) -> None:
    assert why_unready(serve(http_answer("503 Unavailable", body))) == reason


@pytest.mark.parametrize("answer", [http_answer("200 OK", b"[1]"), http_answer("404 Not Found", b'{"a":1}')])
def test_a_wrong_status_has_no_figures(serve: Serve, answer: bytes) -> None:
    assert figures_of(serve(answer)) == {}


CUT_OFF = http_answer("200 OK", b'{"samples":3} ')[:-1]


@pytest.mark.parametrize("answer", [b"220 mail.example ESMTP\r\n", b"", CUT_OFF])
def test_a_server_without_http_is_an_error(serve: Serve, answer: bytes) -> None:
    with pytest.raises(OSError, match="does not speak HTTP"):
        ask(serve(answer), "/status")


def test_a_proxy_of_the_environment_is_not_used(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)

    assert figures_of(serve(http_answer("200 OK", b'{"samples":3}'))) == {"samples": 3}


def test_a_process_differs_from_another_with_its_id(tmp_path: Path) -> None:
    script = tmp_path / "freshet" / "freshet.py"  # the path of a program says nothing of whose it is
    script.parent.mkdir()
    script.write_text("input()")
    ours = subprocess.Popen([sys.executable, str(script), "freshet"], stdin=subprocess.PIPE)
    try:
        wait_until("its interpreter is loaded", lambda: (memory_mb(ours.pid) or 0) > 1, within_s=60)
        birth = birth_of(ours.pid)
        assert is_alive(ours.pid, birth)
        assert not is_alive(ours.pid, f"another boot:{birth.rpartition(':')[2]}"), "of another run"
        assert not is_alive(ours.pid, ""), "the process of the record had ended before its birth was read"
        assert not is_alive(os.getpid(), birth), "another process"
    finally:
        ours.communicate(b"\n")

    assert not is_alive(ours.pid, birth)
    assert memory_mb(ours.pid) is None
    assert not is_alive(1 << 40, birth)
