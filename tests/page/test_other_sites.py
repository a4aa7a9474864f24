"""A real browser with a page of another site open: its requests to a port are refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import orjson
import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.fixtures.gateway import Running, action, start
from tests.page.browser import CALM, browser_path

__all__ = ["start"]  # the fixture

pytestmark = pytest.mark.browser

SEND = """async ([url, body, type, mode]) => {
  const sent = type ? {body, headers: {"content-type": type}} : {body: new Blob([body])};
  try {
    const answer = await fetch(url, {method: "POST", mode, ...sent});
    return answer.status;
  } catch (error) { return 0; }
}"""
"""Returns the status; 0 if the page may not see it."""


class _Blank(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser that finds every name below `.example` on this machine."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path(), args=[*CALM, "--host-resolver-rules=MAP *.example 127.0.0.1"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site() -> Iterator[int]:
    """Port of a web server with a blank page."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Blank)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_a_page_of_another_site_sends_no_event(
    browser: Browser, site: int, start: Callable[..., Running]
) -> None:
    gateway, event = start(), orjson.dumps(action()).decode()
    url = f"{gateway.url}/v1/actions"
    page = browser.new_page()
    page.goto(f"http://evil.example:{site}/")
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        assert page.evaluate(SEND, [url, event, kind, "no-cors"]) == 0
    assert page.evaluate(SEND, [url, event, "application/json", "cors"]) == 0
    assert gateway.records("app.actions") == []

    page.goto(f"{gateway.url}/health/live")  # the port's own page: the event itself is good
    assert page.evaluate(SEND, [url, event, "application/json", "cors"]) == 202
    page.close()


def test_a_rebound_name_reads_and_sends_nothing(browser: Browser, start: Callable[..., Running]) -> None:
    gateway, event = start(), orjson.dumps(action()).decode()
    port = gateway.url.rpartition(":")[2]
    page = browser.new_page()
    answer = page.goto(f"http://evil.example:{port}/status")
    assert answer is not None
    assert (answer.status, answer.json()["error"]["code"]) == (403, "host")
    assert page.evaluate(SEND, ["/v1/actions", event, "application/json", "cors"]) == 403
    assert gateway.records("app.actions") == []
    page.close()
