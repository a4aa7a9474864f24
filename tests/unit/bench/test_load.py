"""The load beside freshness: it has its rate of events, whatever the answers."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bench.load import ROUNDS_PER_S, TEMPLATES, Background, templates


class Handler(BaseHTTPRequestHandler):
    """Keeps requests; answers with the status of its server."""

    protocol_version = "HTTP/1.1"
    server: Gateway

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        with self.server.came:
            self.server.taken.append((self.path, json.loads(body)))
            self.server.came.notify()
        answer = b"{}"
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Gateway(ThreadingHTTPServer):
    """A stand-in for the gateway."""

    daemon_threads = True

    def __init__(self) -> None:
        self.taken: list[tuple[str, list[dict[str, Any]]]] = []
        self.came, self.status = threading.Condition(), 202
        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def gateway():
    server = Gateway()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def taken_by(gateway, enough):
    """Send until `enough` returns true for the requests that have come."""
    with Background(gateway.server_address[1], 500) as background:
        with gateway.came:
            assert gateway.came.wait_for(lambda: enough(gateway.taken), 60)
        return background.figures()


def has_clicks(taken):
    return any(path == "/v1/actions" for path, _ in taken)


def test_what_is_acknowledged_is_counted(gateway):
    figures = taken_by(gateway, has_clicks)

    assert figures["events_per_s"] > 0
    assert figures["events_failed"] == 0
    assert 0 < figures["ack_p50_ms"] <= figures["ack_p99_ms"]


def test_what_is_not_acknowledged_is_counted_as_failed(gateway):
    gateway.status = 429

    figures = taken_by(gateway, has_clicks)

    assert figures["events_per_s"] == 0
    assert figures["events_failed"] > 0


def test_clicks_are_on_sent_pages_and_pages_are_sent_once(gateway):
    taken_by(gateway, lambda taken: sum(path == "/v1/actions" for path, _ in taken) > 3)

    pages = [event for path, events in gateway.taken if path == "/v1/impressions" for event in events]
    clicks = [event for path, events in gateway.taken if path == "/v1/actions" for event in events]
    shown = {(p["request_id"], item["article"]) for p in pages for item in p["items"]}
    assert len({p["request_id"] for p in pages}) == len(pages)
    assert {(c["request_id"], c["article"]) for c in clicks} <= shown
    assert all(abs(event["ts"] - time.time() * 1e3) < 60_000 for event in (*pages, *clicks))


@pytest.mark.parametrize("rate", [10, 500, 777, 5_000])
def test_rounds_together_have_the_rate(rate):
    events = sum(t.n_pages + t.n_clicks for t in templates(rate))

    assert events == pytest.approx(rate * TEMPLATES / ROUNDS_PER_S, abs=1)
