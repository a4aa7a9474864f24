"""One request, as handlers are given it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from starlette.types import Receive

from freshet.http.rate_limits import Payer
from freshet.observability.tracing import Context

__all__ = ["FORWARDED", "Request", "header_map"]

FORWARDED = b"x-forwarded-for"


class Request(NamedTuple):
    """One request with its whole body."""

    method: str
    path: str
    query: str
    headers: Mapping[bytes, bytes]  # as `header_map` has them
    body: bytes
    arguments: tuple[str, ...] = ()  # what a route's `*` parts matched, decoded
    peer: str = ""  # the client's address; behind proxies that are trusted, the one that these tell
    who: str = ""  # name of the token that was shown, where one was asked for
    payer: Payer | None = None  # for `Guard.pay`
    span: Context | None = None  # of this request in its client's trace, if that is recorded
    receive: Receive | None = None  # of ASGI, behind the body

    @property
    def content_type(self) -> str:
        """Media type without parameters, in lower case; empty if none was sent."""
        return self.headers.get(b"content-type", b"").split(b";")[0].strip().lower().decode("latin-1")

    def watch_client(self) -> Callable[[], bool]:
        """Start to watch the client; the function returned reports whether it has disconnected.

        Costs a task, so a handler calls this where work can wait so long that clients give up.
        """
        if self.receive is None:
            return lambda: False
        return asyncio.get_running_loop().create_task(_until_gone(self.receive)).done


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def header_map(lines: Sequence[tuple[bytes, bytes]]) -> Mapping[bytes, bytes]:
    """Headers by name, in lower case; of repeated ones the last, but every address that proxies have told of:
    some add a line of their own (RFC 9110 §5.3)."""
    found = dict(lines)
    if len(found) < len(lines) and FORWARDED in found:
        found[FORWARDED] = b",".join(value for name, value in lines if name == FORWARDED)
    return found
