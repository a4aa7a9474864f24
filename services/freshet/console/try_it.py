"""Try it: a request that inference ranks for the page only. Nothing of it is logged, or explored."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from freshet.errors import BadInput, Unavailable
from freshet.http import tls
from freshet.http.addresses import Address
from freshet.http.messages import Response
from freshet.http.service_client import whole_body
from freshet.http.token_files import token_headers
from freshet.json_text import kind_of, written

__all__ = ["asked", "body_of"]

KEYS = {"context", "candidates", "k"}
PATIENCE_S = 10.0
"""A request may wait for a server that starts; of several, all together."""

MOST_ASKED = 3
CONNECT_S = 1.0

MOST_BYTES = 16 << 20


def body_of(body: bytes) -> bytes:
    """The rank request of what the page sends, {context, candidates, k}; inference judges what it means.

    Raises BadInput for what is no such object.
    """
    try:
        wanted: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"the body is not JSON: {error}") from None
    if not isinstance(wanted, dict):
        raise BadInput(f"expected an object with context and candidates, found {kind_of(wanted)}")
    unknown = sorted(wanted.keys() - KEYS)
    if unknown:
        raise BadInput(f"expected context, candidates and k, found {unknown[0]!r:.60}")
    return written({**wanted, "dry_run": True, "explain": True}, "the body")


def asked(addresses: Sequence[Address], body: bytes, token_file: str = "") -> Response:  # nosec B107  # no file
    """What inference answers, passed through: the first replica that does. Blocks.

    Raises:
        Unavailable: none does.
        ConfigError: the file of the token to be sent cannot be read.
    """
    headers = {"content-type": "application/json", **token_headers(token_file)}
    problem = Unavailable("inference: where it answers is not known; is it started?")
    deadline = time.monotonic() + PATIENCE_S
    for address in addresses[:MOST_ASKED]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        try:
            return _asked(address, body, headers, left_s)
        except Unavailable as error:
            problem = error
    raise problem


def _asked(address: Address, body: bytes, headers: Mapping[str, str], left_s: float) -> Response:
    connection = tls.connection(address.host, address.port, min(CONNECT_S, left_s))
    try:
        connection.connect()
        connection.sock.settimeout(left_s)
        connection.request("POST", "/v1/rank", body, dict(headers))
        answer = connection.getresponse()
        content = whole_body(answer, MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"inference does not answer at {address}: {error}") from None
    finally:
        connection.close()
    return Response(answer.status, content)
