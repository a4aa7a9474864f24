import http.client
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler

import orjson
import pytest
from prometheus_client import CollectorRegistry, Counter
from structlog.testing import capture_logs

from freshet.errors import ConfigError, Unavailable
from freshet.http.admin import MAX_CONNECTIONS, Admin
from freshet.process.lifecycle import Cleanup


@pytest.fixture
def reasons() -> list[str | None]:
    """Why the service is not ready, in a list so that a test can change it."""
    return [None]


@pytest.fixture
def admin(reasons: list[str | None]) -> Iterator[Admin]:
    registry = CollectorRegistry()
    Counter("freshet_test_events", "Events.", registry=registry).inc(3)
    server = Admin("127.0.0.1", 0, registry=registry, ready=lambda: reasons[0], status=lambda: {"samples": 5})
    yield server
    server.close()


def get(server: Admin, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_health_metrics_and_status_are_served(admin: Admin) -> None:
    assert get(admin, "/health/live")[0] == 200
    assert get(admin, "/health/ready")[0] == 200
    assert b"freshet_test_events_total 3.0" in get(admin, "/metrics")[1]
    assert orjson.loads(get(admin, "/status")[1]) == {"samples": 5, "skipped": {}}


def test_a_service_that_is_not_ready_says_why(admin: Admin, reasons: list[str | None]) -> None:
    reasons[0] = "the claim is not held yet"

    code, body = get(admin, "/health/ready")

    assert code == 503
    assert orjson.loads(body)["reason"] == "the claim is not held yet"


def test_another_page_is_not_there_and_it_says_which_are(admin: Admin) -> None:
    code, body = get(admin, "/etc/passwd")

    error = orjson.loads(body)["error"]
    assert (code, error["code"], error["found"]) == (404, "not_found", "/etc/passwd")
    assert error["expected"] == ["/health/live", "/health/ready", "/metrics", "/status"]


def test_a_status_that_fails_is_an_error_like_any_other() -> None:
    def broken() -> dict[str, int]:
        raise Unavailable("the log cannot be read")

    server = Admin("127.0.0.1", 0, registry=CollectorRegistry(), ready=lambda: None, status=broken)
    try:
        code, body = get(server, "/status")
    finally:
        server.close()

    assert (code, orjson.loads(body)["error"]["message"]) == (503, "the log cannot be read")


def test_a_new_connection_closes_the_oldest(admin: Admin) -> None:
    silent = [socket.create_connection(("127.0.0.1", admin.port)) for _ in range(MAX_CONNECTIONS)]

    assert get(admin, "/health/live")[0] == 200

    silent[0].settimeout(5)  # less than a silent client is waited for
    assert silent[0].recv(1) == b""
    silent[1].settimeout(0.05)
    with pytest.raises(TimeoutError):
        silent[1].recv(1)
    for one in silent:
        one.close()


def test_a_port_in_use_names_its_owner(admin: Admin) -> None:
    with pytest.raises(ConfigError, match=rf"port {admin.port} is held by process \d+"):
        Admin("127.0.0.1", admin.port, registry=CollectorRegistry(), ready=lambda: None, status=dict)


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (BrokenPipeError(), False),
        (TimeoutError(), False),
        (ssl.SSLError("decryption failed or bad record mac"), False),
        (ValueError("ours"), True),
    ],
)
def test_disconnects_and_garbage_are_not_logged(
    admin: Admin,
    error: Exception,
    is_told: bool,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(BaseHTTPRequestHandler, "send_response", fail)
    with capture_logs() as told, pytest.raises(http.client.RemoteDisconnected):
        get(admin, "/health/live")

    assert bool(told) is is_told
    assert capfd.readouterr().err == ""  # what is said goes through the log, as lines of its form


def test_everything_is_closed_in_reverse_order_whatever_fails() -> None:
    closed: list[str] = []
    cleanup = Cleanup()
    cleanup.add("first", lambda: closed.append("first"))
    cleanup.add("bad", lambda: 1 / 0)
    cleanup.add("last", lambda: closed.append("last"))

    assert cleanup.run() == ["bad"]
    assert closed == ["last", "first"]


def test_a_service_whose_main_loop_stands_still_does_not_live() -> None:
    reasons: list[str | None] = [None]
    server = Admin(
        "127.0.0.1",
        0,
        registry=CollectorRegistry(),
        ready=lambda: None,
        status=dict,
        stuck=lambda: reasons[0],
    )
    try:
        assert get(server, "/health/live") == (200, b'{"status":"live"}')
        reasons[0] = "the main loop has stalled for 121 s"
        code, body = get(server, "/health/live")
    finally:
        server.close()

    assert (code, orjson.loads(body)) == (503, {"status": "stuck", "reason": reasons[0]})


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/metrics", "/status"])
def test_every_page_answers_head_and_options(admin: Admin, path: str) -> None:
    for method, length in (("HEAD", None), ("OPTIONS", 0)):
        status, headers, body = asked(admin, method, path)
        assert (status, body) == (200, b"")
        assert (int(headers["content-length"]) == length) == (method == "OPTIONS")
    assert asked(admin, "OPTIONS", path)[1]["allow"] == "GET, HEAD, OPTIONS"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_other_methods_are_refused_in_our_words(admin: Admin, method: str) -> None:
    status, headers, body = asked(admin, method, "/status")

    assert (status, headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    error = orjson.loads(body)["error"]
    assert (error["code"], error["found"]) == ("method_not_allowed", method)


def asked(server: Admin, method: str, path: str) -> tuple[int, Mapping[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path, b"{}" if method in ("POST", "PUT", "PATCH") else None)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()
