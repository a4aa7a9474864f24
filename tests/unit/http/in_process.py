"""Requests to an ASGI application without a server between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Message = Mapping[str, Any]


async def answered(
    app: Callable[[Any, Any, Any], Awaitable[None]],
    path: str,
    headers: Mapping[bytes, bytes],
    body: bytes = b"",
    *,
    method: str = "POST",
    client: str = "192.0.2.7",
    gone: bool = False,
) -> list[Message]:
    """What the application sends. With `gone`, the client leaves behind its body."""
    sent: list[Message] = []
    comes: list[Message] = [
        {"type": "http.request", "body": body},
        *([{"type": "http.disconnect"}] if gone else []),
    ]

    async def receive() -> Message:
        if not comes:
            await asyncio.Event().wait()
        return comes.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": list(headers.items()), "client": (client, 1),
    }  # fmt: skip
    await app(scope, receive, send)
    return sent
