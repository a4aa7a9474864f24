"""Asking a service how it is, over HTTP or HTTPS: directly, whatever proxy the environment names."""

from __future__ import annotations

import http.client
from typing import Any

import orjson

from freshet.http import tls

__all__ = ["ask", "figures_of", "whole_body", "why_unready"]

PATIENCE_S = 1.0
"""How long a service may take to answer how it is."""

MOST_BYTES = 8 << 20
"""Of an answer; more is no status."""


def ask(port: int, path: str, *, host: str = "127.0.0.1", timeout_s: float = PATIENCE_S) -> tuple[int, Any]:
    """(status code, parsed JSON or None) of a GET. Raises OSError if nothing answers, or no HTTP."""
    connection = tls.connection(host, port, timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = whole_body(answer, MOST_BYTES)
    except http.client.HTTPException as error:
        raise OSError(f"what answers on port {port} does not speak HTTP: {error!r}") from error
    finally:
        connection.close()
    try:
        return answer.status, orjson.loads(body)
    except orjson.JSONDecodeError:
        return answer.status, None


def whole_body(answer: http.client.HTTPResponse, most_bytes: int) -> bytes:
    """The body of an answer. Raises HTTPException if it is cut off, or larger than that."""
    body = answer.read(most_bytes + 1)
    if len(body) > most_bytes:
        raise http.client.HTTPException(f"the answer has more than {most_bytes} bytes")
    if answer.length:  # a read with a bound takes a connection's end for that of the body
        raise http.client.IncompleteRead(body, answer.length)
    return body


def why_unready(port: int, *, host: str = "127.0.0.1", timeout_s: float = PATIENCE_S) -> str:
    """What /health/ready says; "" if the service is ready. Raises OSError if nothing answers."""
    code, said = ask(port, "/health/ready", host=host, timeout_s=timeout_s)
    if code == 200:
        return ""
    reason = said.get("reason") if isinstance(said, dict) else None
    return str(reason or f"/health/ready answers {code}")[:500]


def figures_of(port: int, *, host: str = "127.0.0.1", timeout_s: float = PATIENCE_S) -> dict[str, Any]:
    """What /status says; empty if that is nothing. Raises OSError if nothing answers."""
    code, said = ask(port, "/status", host=host, timeout_s=timeout_s)
    return said if code == 200 and isinstance(said, dict) else {}
