"""Which paths there are, and the handler of each method of one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from freshet.http.endpoint import Endpoint
from freshet.http.request import Request
from freshet.http.responses import HttpError, Response

__all__ = ["Handler", "HotHandler", "Reply", "Resource"]

Handler = Callable[[Request], Awaitable[Response | StreamingResponse]]
Reply = Callable[[Response], None]
"""Answers a request. Called on the loop, once."""
HotHandler = Callable[[Request, Reply], None]
"""Starts to work on a request, and calls the reply at once or later; raises as a handler does. Services that
work on many small requests together answer them by callbacks."""
Answer = Callable[["Resource", Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """A path: an ASGI application, which Starlette's router calls, or `App` itself where time counts."""

    name: str  # for metrics: bounded, whatever paths clients invent
    answer: Answer
    methods: dict[str, tuple[Handler, Endpoint]] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self.answer(self, scope, receive, send)

    def handler(self, method: str) -> tuple[Handler, Endpoint | None]:
        """The handler of a method and its description, which OPTIONS lacks.

        HEAD is answered by the handler of GET; the server leaves the body out. OPTIONS lists the methods and
        nothing else, so that a browser lets no page of another site read or send anything.

        Raises:
            HttpError: 405, the path has no such method.
        """
        found = self.methods.get("GET" if method == "HEAD" else method)
        if found is not None:
            return found
        allowed = ", ".join(sorted({*self.methods, *(["HEAD"] if "GET" in self.methods else []), "OPTIONS"}))
        headers = ((b"allow", allowed.encode()),)
        if method == "OPTIONS":

            async def options(_request: Request) -> Response:
                return Response(200, b"", headers=headers)

            return options, None
        raise HttpError(
            405,
            "method_not_allowed",
            f"{self.name} does not answer {method}",
            expected=allowed,
            found=method,
            headers=headers,
        )
