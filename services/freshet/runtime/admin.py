"""Health and metrics of services that speak no HTTP otherwise: a small server on a thread of its own.

`/health/live` while the process runs, `/health/ready` with the reason while it is not, `/metrics` for
Prometheus, `/status` as JSON for `freshet status`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from freshet.errors import ConfigError
from freshet.runtime.ports import owner_of_port

__all__ = ["Admin"]


class Admin:
    """Serves until closed. `ready` returns None, or why the service is not ready."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        registry: CollectorRegistry,
        ready: Callable[[], str | None],
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Raises ConfigError if the port cannot be had, naming who has it."""
        routes: dict[str, Callable[[], tuple[int, str, bytes]]] = {
            "/health/live": lambda: (200, "application/json", b'{"status":"live"}'),
            "/health/ready": lambda: _readiness(ready()),
            "/metrics": lambda: (200, CONTENT_TYPE_LATEST, generate_latest(registry)),
            "/status": lambda: (200, "application/json", _json(status())),
        }

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds; a client that says nothing holds no thread for ever

            def do_GET(self) -> None:
                route = routes.get(self.path.partition("?")[0])
                found = route() if route else (404, "application/json", b'{"error":"no such page"}')
                code, kind, body = found
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: a scrape every few seconds is no news."""

        try:
            self._server = ThreadingHTTPServer((address, port), Handler)
        except OSError as error:
            raise ConfigError(
                "admin port",
                "port",
                f"{address}:{port}",
                f"a free port ({error.strerror})",
                owner_of_port(port) or "take another with FRESHET_<SERVICE>_ADMIN_PORT",
            ) from None
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="admin", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port listened on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _readiness(reason: str | None) -> tuple[int, str, bytes]:
    if reason is None:
        return 200, "application/json", b'{"status":"ready"}'
    return 503, "application/json", _json({"status": "unready", "reason": reason})


def _json(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
