"""The admin port of services without other HTTP endpoints: health, metrics and status, in a thread."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn

import orjson
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from freshet.http import tls
from freshet.http.browser_checks import AllowedSites
from freshet.http.endpoint import (
    LIVE,
    METRICS_PAGE,
    Answer,
    Endpoint,
    json,
    mapping,
    ready_page,
    record,
    refusals,
    status_page,
)
from freshet.http.messages import HttpError, error_response
from freshet.observability.skipped_state import skipped_status
from freshet.process.ports import cannot_listen

log = structlog.get_logger(__name__)

READY = ready_page("Service")
STATUS = status_page({"type": "object", "description": "depends on the service; readers take what they know"})
_OFFSETS = mapping({"type": "integer"})
PROGRESS = Endpoint(
    "GET",
    "/progress",
    "How far trainer or shard have learned and published, and nothing else: cheap enough for many requests a "
    "second.",
    (
        Answer(
            200,
            "next offsets, by partition of samples and of `rows`",
            (
                json(
                    record(
                        "Progress",
                        {},
                        {
                            "applied": {**_OFFSETS, "description": "by the dense weights"},
                            "published": record("", {"applied": _OFFSETS, "rows_next": _OFFSETS}),
                            "slices": {"type": "integer", "description": "of a shard: how many it owns"},
                        },
                    )
                ),
            ),
        ),
        *refusals("not_found"),
    ),
    "Every sample below `published.applied` is in records of `rows` below `published.rows_next`. A trainer "
    "whose rows are in shards has `applied` alone, a shard the others. Only trainer and paramserver have it.",
)
ENDPOINTS: tuple[Endpoint, ...] = (LIVE, READY, METRICS_PAGE, STATUS)
"""Endpoints of every admin port."""


STOP_CHECK_S = 0.1
"""Seconds between two checks of the stop: the end of a process waits for the next."""

HANDSHAKE_S = 10.0
"""Longest TLS handshake; the connection is closed after it."""


MAX_CONNECTIONS = 64
"""Open connections, a thread each. A further one closes the oldest: a response takes a moment only."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # the oldest first
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; close the oldest one beyond the limit."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Make the handshake in the connection's thread, so that a slow one delays no other connection."""
        secure = tls.listener_tls()
        if secure is not None:
            request.settimeout(HANDSHAKE_S)
            try:
                wrapped = secure.server_context().wrap_socket(
                    request, server_side=True, do_handshake_on_connect=False
                )
            except OSError:
                self.shutdown_request(request)
                return
            with self._lock:  # `wrap_socket` detached the former
                self._open = {wrapped if one is request else one: None for one in self._open}
            request = wrapped
            try:
                request.do_handshake()
            except OSError:  # counted
                self.shutdown_request(request)
                return
        super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors, except those of connections, which clients cause."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("request failed", exc_info=error)


class Admin:
    """The server of an admin port, which serves until it is closed."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        registry: CollectorRegistry,
        ready: Callable[[], str | None],
        status: Callable[[], Mapping[str, Any]],
        progress: Callable[[], Mapping[str, Any]] | None = None,
        hosts: str = "",
        stuck: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Start to serve.

        Args:
            registry: metrics; those of the process are added.
            ready: returns None, or the reason for which the service is not ready.
            status: returns the figures of `/status`.
            progress: returns the figures of `/progress`; None: no such endpoint.
            hosts: further host names of the port (FRESHET_COMMON_HOSTS).
            stuck: returns None, or the reason to restart the process (`freshet.process.lifecycle`).

        Raises:
            ConfigError: the address cannot be bound; names the process that has the port.
        """
        ProcessCollector(registry=registry)
        sites = AllowedSites(address, hosts)
        routes: dict[str, Callable[[], tuple[int, str, bytes]]] = {
            LIVE.path: lambda: _liveness(stuck()),
            READY.path: lambda: _readiness(ready()),
            METRICS_PAGE.path: lambda: (200, CONTENT_TYPE_LATEST, generate_latest(registry)),
            STATUS.path: lambda: (200, "application/json", _json({**status(), "skipped": skipped_status()})),
        }
        if progress is not None:
            routes[PROGRESS.path] = lambda: (200, "application/json", _json(progress()))

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds, so that a silent client does not keep its thread

            def _answer(self) -> None:
                path = self.path.partition("?")[0]
                headers: Sequence[tuple[bytes, bytes]] = ()
                try:
                    sites.check(
                        {name.lower().encode(): value.encode() for name, value in self.headers.items()}
                    )
                    if path not in routes:
                        _unknown(path, sorted(routes))
                    if self.command == "OPTIONS":
                        code, kind, body, headers = 200, "application/json", b"", _ALLOW
                    elif self.command not in ("GET", "HEAD"):
                        raise _not_allowed(path, self.command)
                    else:
                        code, kind, body = routes[path]()
                except Exception as error:
                    response = error_response(error)
                    code, body, headers = response.status, response.body, response.headers
                    kind = "application/json"
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                for name, value in headers:
                    self.send_header(name.decode(), value.decode())
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = do_OPTIONS = do_POST = do_PUT = do_DELETE = do_PATCH = _answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                """Log no request: Prometheus sends one every few seconds."""

        try:
            self._server = _Server((address, port), Handler)
        except OSError as error:
            raise cannot_listen("admin", address, port, "FRESHET_<SERVICE>_ADMIN_PORT", error) from None
        serving = partial(self._server.serve_forever, poll_interval=STOP_CHECK_S)
        self._thread = threading.Thread(target=serving, name="admin", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_METHODS = "GET, HEAD, OPTIONS"
_ALLOW = ((b"allow", _METHODS.encode()),)


def _not_allowed(path: str, method: str) -> HttpError:
    return HttpError(
        405,
        "method_not_allowed",
        f"{path[:200]} does not answer {method}",
        expected=_METHODS,
        found=method,
        headers=_ALLOW,
    )


def _unknown(path: str, known: Sequence[str]) -> NoReturn:
    raise HttpError(404, "not_found", "no such path", expected=known, found=path[:200])


def _liveness(reason: str | None) -> tuple[int, str, bytes]:
    if reason is None:
        return 200, "application/json", b'{"status":"live"}'
    return 503, "application/json", _json({"status": "stuck", "reason": reason})


def _readiness(reason: str | None) -> tuple[int, str, bytes]:
    if reason is None:
        return 200, "application/json", b'{"status":"ready"}'
    return 503, "application/json", _json({"status": "unready", "reason": reason})


def _json(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
