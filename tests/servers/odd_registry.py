"""A schema registry that answers oddly: for each path what a test says, down to the bytes."""

from __future__ import annotations

import json
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from typing import Any

Odd = Callable[[socket.socket, threading.Event], None]
"""Writes an answer to a connection; ends soon once the event is set."""


def answer(body: bytes, status: str = "200 OK", *, more: str = "", cut: int = 0) -> Odd:
    """A whole answer, or one that ends `cut` bytes early."""

    def write(connection: socket.socket, _: threading.Event) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body) + cut}\r\n{more}\r\n"
        connection.sendall(head.encode() + body)

    return write


def json_answer(value: Any, status: str = "200 OK") -> Odd:
    """A whole answer in JSON."""
    return answer(json.dumps(value).encode(), status)


def endless(head: bytes, piece: bytes, pause_s: float = 0.0) -> Odd:
    """An answer that never ends: a head, then the same piece again and again."""

    def write(connection: socket.socket, stop: threading.Event) -> None:
        connection.sendall(head)
        while not stop.wait(pause_s):
            connection.sendall(piece)

    return write


def silence(_: socket.socket, stop: threading.Event) -> None:
    """No answer."""
    stop.wait(60.0)


_OK = b"HTTP/1.1 200 OK\r\n"

UNAVAILABLE: Mapping[str, tuple[Odd, str]] = {
    "a page of a proxy": (answer(b"<html>Sign in</html>"), "is this a schema registry"),
    "no object": (json_answer([1]), "is this a schema registry"),
    "an object without a schema": (json_answer({"status": "UP"}), "is this a schema registry"),
    "a schema that is a number": (json_answer({"schema": 5}), "is this a schema registry"),
    "references that are a word": (json_answer({"schema": '"int"', "references": "x"}), "is this a schema"),
    "JSON nested without end": (answer(b"[" * 100_000), "is this a schema registry"),
    "401": (json_answer({"error_code": 40101}, "401 Unauthorized"), "FRESHET_REGISTRY_USER"),
    "403": (answer(b"", "403 Forbidden"), "FRESHET_REGISTRY_USER"),
    "404 of another server": (answer(b"<html>", "404 Not Found"), "is this a schema registry"),
    "500": (json_answer({"error_code": 50001, "message": "no leader"}, "500 Error"), "no leader"),
    "503 in words": (answer(b"overloaded", "503 Service Unavailable"), "503"),
    "a redirect": (answer(b"", "301 Moved", more="Location: https://other/x?t=1\r\n"), "to https://other/x:"),
    "a redirect to nowhere": (answer(b"{}", "302 Found"), "redirects are not followed"),
    "an answer that is cut": (answer(b'{"schema": ', cut=9), "cut off|IncompleteRead"),
    "bytes that are no HTTP": (endless(b"\x16\x03\x01", b"\xff" * 64), "status line"),
    "nothing": (lambda connection, stop: None, "without response"),
    "silence": (silence, "within"),
    "a body without end": (endless(_OK + b"\r\n", b" " * 65_536), "above|within"),
    "chunks without end": (
        endless(_OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1000\r\n" + b" " * 4096 + b"\r\n"),
        "above|within",
    ),
    "a body that drips": (endless(_OK + b"Content-Length: 999\r\n\r\n", b" ", 0.05), "within"),
    "a head that drips": (endless(_OK, b"x", 0.05), "within"),
    "a head without end": (endless(_OK, b"X-A: " + b"a" * 100 + b"\r\n"), "100 headers"),
    "no final status": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.01), "within"),
    "a chunk's size of words": (answer(b"", more="Transfer-Encoding: chunked\r\n"), "IncompleteRead"),
}
"""Answers that say nothing of a schema, with words of the reason: the caller waits."""

UNUSABLE: Mapping[str, tuple[Odd, str]] = {
    "an id that is not there": (
        json_answer({"error_code": 40403}, "404 Not Found"),
        "not in the schema registry",
    ),
    "a schema that is no JSON": (json_answer({"schema": "record View"}), "not JSON"),
    "a schema of no type": (json_answer({"schema": '{"type": "thing"}'}), "thing"),
    "a schema nested without end": (json_answer({"schema": "[" * 50_000}), "not JSON"),
    "Protobuf": (json_answer({"schema": "message A {}", "schemaType": "PROTOBUF"}), "PROTOBUF"),
    "a reference without a version": (json_answer({"schema": '"x"', "references": [{}]}), "version"),
    "a schema that is no record": (json_answer({"schema": '"long"'}), ""),
    "a record of other fields": (
        json_answer({"schema": '{"type": "record", "name": "B", "fields": [{"name": "x", "type": "int"}]}'}),
        "",
    ),
}
"""Answers that say that records of the id cannot be read, with words of the reason."""

SPEC = """
name = "shop"
[events]
served = { topic = "v", format = "confluent", schema = "v.avsc", key = ["r"], time = "ts:ms" }
action = { topic = "d", format = "bare", schema = "v.avsc", key = ["r"], time = "ts:ms" }
[join]
emit = "window"
grace = "1s"
[labels]
click = { on = "action.r == 'x'", window = "2s" }
[tables]
item = { dim = 4 }
[features]
item = { field = "r", table = "item" }
[serve]
score = "click"
log_served = false
"""
SCHEMA = {
    "type": "record",
    "name": "View",
    "fields": [{"name": "r", "type": "string"}, {"name": "ts", "type": "long"}],
}


class OddRegistry:
    """Serves at 127.0.0.1 from a thread: `answers` by schema id, `otherwise` for all others."""

    def __init__(self, answers: Mapping[int, Odd] | None = None, otherwise: Odd | None = None) -> None:
        self.answers = dict(answers or {})
        self.otherwise = otherwise or json_answer({"error_code": 40403}, "404 Not Found")
        self.requests = 0
        self._stop = threading.Event()
        odd = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.settimeout(30)
                odd._handle(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: object) -> None:  # a client that went away
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        """Where clients connect to."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> OddRegistry:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handle(self, connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = connection.recv(4096)
            if not piece:
                return
            head += piece
        self.requests += 1
        found = re.match(rb"GET /schemas/ids/(\d+) ", head)
        write = self.answers.get(int(found[1]), self.otherwise) if found else self.otherwise
        write(connection, self._stop)
