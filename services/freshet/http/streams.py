"""Answers whose body comes piece by piece: bounded for clients that do not read, over when either side is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Headers", "Stream", "send_pieces"]

Headers = tuple[tuple[bytes, bytes], ...]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]

LAST_WORD_S = 0.5
"""How long the end of a stream may take to be said to a client that does not read."""


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """An answer whose body comes piece by piece, until the pieces end, the client goes or the server stops.

    The next piece is asked for when the client's connection has taken the one before, so whoever makes the
    pieces keeps nothing for a client that does not read. However the stream ends, `pieces` is closed.
    """

    pieces: AsyncGenerator[bytes]
    content_type: bytes
    headers: Headers = ()


async def send_pieces(stream: Stream, receive: Receive, send: Send, ending: asyncio.Event) -> str:
    """Send pieces until they end, the client goes or `ending` is set; returns which. Closes `pieces`.

    The head of the answer was sent already. A client that stops reading is gone once the server cuts it off.
    Raises what the pieces raise.
    """
    jobs = {
        "over": asyncio.ensure_future(_pump(stream, send)),
        "gone": asyncio.ensure_future(_until_gone(receive)),
        "stopped": asyncio.ensure_future(ending.wait()),
    }
    try:
        with contextlib.suppress(asyncio.CancelledError):  # the server's drain is over
            await asyncio.wait(jobs.values(), return_when=asyncio.FIRST_COMPLETED)
        how = next((how for how, job in jobs.items() if job.done()), "stopped")
    finally:
        for job in jobs.values():
            job.cancel()
        results = await asyncio.gather(*jobs.values(), return_exceptions=True)
        await stream.pieces.aclose()
    problem = results[0]
    if isinstance(problem, Exception):
        raise problem  # without a last word: the client sees that this was not all
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORD_S):
            await send({"type": "http.response.body", "body": b""})
    return how


async def _pump(stream: Stream, send: Send) -> None:
    async for piece in stream.pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)  # pieces that are always there must not keep the client's end unnoticed


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
