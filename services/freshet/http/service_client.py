"""Health and status of a service over HTTP or HTTPS, without the proxies of the environment."""

from __future__ import annotations

import http.client
from typing import Any

import orjson

from freshet.http import tls

TIMEOUT_S = 1.0
"""Longest time for a response."""

MAX_BYTES = 8 << 20
"""Longest body of a response."""


def ask(port: int, path: str, *, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S) -> tuple[int, Any]:
    """Return status code and parsed JSON, or None, of a GET. Raises OSError if no HTTP server answers."""
    connection = tls.connection(host, port, timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = whole_body(answer, MAX_BYTES)
    except http.client.HTTPException as error:
        raise OSError(f"what answers on port {port} does not speak HTTP: {error!r}") from error
    finally:
        connection.close()
    try:
        return answer.status, orjson.loads(body)
    except orjson.JSONDecodeError:
        return answer.status, None


def whole_body(answer: http.client.HTTPResponse, most_bytes: int) -> bytes:
    """Return the body of a response. Raises HTTPException if it is truncated or above `most_bytes`."""
    body = answer.read(most_bytes + 1)
    if len(body) > most_bytes:
        raise http.client.HTTPException(f"the answer has more than {most_bytes} bytes")
    if answer.length:  # a bounded read reports no truncation
        raise http.client.IncompleteRead(body, answer.length)
    return body


def why_unready(port: int, *, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S) -> str:
    """Return the reason of /health/ready; "" if the service is ready. Raises OSError if no server answers."""
    code, said = ask(port, "/health/ready", host=host, timeout_s=timeout_s)
    if code == 200:
        return ""
    reason = said.get("reason") if isinstance(said, dict) else None
    return str(reason or f"/health/ready answers {code}")[:500]


def figures_of(port: int, *, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return the figures of /status; empty without figures. Raises OSError if no server answers."""
    code, said = ask(port, "/status", host=host, timeout_s=timeout_s)
    return said if code == 200 and isinstance(said, dict) else {}
