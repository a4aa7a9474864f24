"""A console with scripted answers: the page's contract over HTTP, without a system behind it."""

from __future__ import annotations

import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

PAGE = Path(__file__).parents[2] / "services/freshet/console/page"
TOKEN = "a-token"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Scripted:
    """Serves the page and a scripted state; can be stopped and started again on its port.

    `state`, `history` and `requests` are sent as they are (text is sent raw, so that a test can break it); a
    state's `now_ms` is kept current if it has one, and a history has one, too. `publish` sends a record
    to every page that is connected.
    """

    def __init__(self, world: dict[str, Any], *, every_s: float = 0.2) -> None:
        self.world, self.every_s = world, every_s
        self.refuse_api = False  # a console that is there and answers 503 to every question
        self.answers = threading.Event()  # cleared: requests that change something get no answer yet
        self.answers.set()
        self.asked: list[tuple[str, str, Any]] = []  # method, path, body of changes and tries
        self.states = 0  # sent so far, to all pages together
        self.queues: set[queue.SimpleQueue[tuple[int, str, Any]]] = set()
        self._next = 1_000_000
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self.stopped = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, on the port of last time if there was one."""
        self.stopped = threading.Event()
        self._server = _Server(("127.0.0.1", self._port), _handler(self))
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """End at once, streams included."""
        assert self._server is not None
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()

    def publish(self, record: Any, event: str = "record") -> None:
        """Send an event, as a rule a record of the measures topic, to all pages that are connected."""
        self._next += 1
        for waiting in list(self.queues):
            waiting.put((self._next, event, record))

    def waiting(self) -> int:
        """How many records have been published and not sent yet."""
        return sum(q.qsize() for q in self.queues)

    def state(self) -> str:
        """The state as it is sent now."""
        self.states += 1
        state = self.world["state"]
        if isinstance(state, dict) and isinstance(state.get("now_ms"), int):
            state = {**state, "now_ms": int(time.time() * 1000)}
        return _text(state)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that goes away in the middle of a stream is no event."""


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


def _handler(console: Scripted) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path in {"/", "/index.html"} or path.startswith("/static/"):
                self._file(PAGE / (path.removeprefix("/static/") if path != "/" else "index.html"))
            elif console.refuse_api:
                self._json(503, {"error": {"message": "the console is starting", "hint": "wait a moment"}})
            elif path == "/api/events":
                self._events()
            elif path == "/api/history":
                query = parse_qs(urlsplit(self.path).query)
                history = console.world["history"]
                answer = history(int(query["span_s"][0])) if callable(history) else history
                self._json(200, {**answer, "now_ms": int(time.time() * 1000)})
            elif path == "/api/requests":
                self._json(200, console.world["requests"])
            else:
                self._json(404, {"error": {"message": f"no {path} here"}})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            console.asked.append(("POST", self.path, json.loads(body)))
            if self.path == "/api/try":
                self._json(200, console.world["ranking"])
            elif self.headers.get("authorization") != f"Bearer {TOKEN}":
                hint = "it stands in state/console.token"
                self._json(403, {"error": {"message": "this is not the console's token", "hint": hint}})
            else:
                console.answers.wait(60)
                self._json(200, {"number": 1})

        def _events(self) -> None:
            mine: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
            console.queues.add(mine)
            stopped = console.stopped
            self._head(200, "text/event-stream", None)
            try:
                while not stopped.is_set():
                    self._send(f"event: state\ndata: {console.state()}\n\n")
                    until = time.monotonic() + console.every_s
                    while (left := until - time.monotonic()) > 0 and not stopped.is_set():
                        try:
                            offset, event, record = mine.get(timeout=min(left, 0.05))
                        except queue.Empty:
                            continue
                        self._send(f"event: {event}\nid: {offset}\ndata: {_text(record)}\n\n")
            finally:
                console.queues.discard(mine)
                self.close_connection = True

        def _send(self, text: str) -> None:
            self.wfile.write(text.encode())
            self.wfile.flush()

        def _file(self, path: Path) -> None:
            if path.resolve().parent != PAGE or not path.is_file():
                self._json(404, {"error": {"message": f"no {path.name} here"}})
                return
            content = path.read_bytes()
            self._head(200, CONTENT_TYPES.get(path.suffix, "text/plain"), len(content))
            self.wfile.write(content)

        def _json(self, status: int, content: Any) -> None:
            body = _text(content).encode()
            self._head(status, "application/json", len(body))
            self.wfile.write(body)

        def _head(self, status: int, content_type: str, length: int | None) -> None:
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-security-policy", CSP)
            self.send_header("x-content-type-options", "nosniff")
            if length is None:
                self.send_header("connection", "close")
            else:
                self.send_header("content-length", str(length))
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """A test's output is its assertions."""

    return Handler
