"""Which paths and methods there are, and who answers each: handlers, and takers of whole requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import unquote

from freshet.http.endpoint import Endpoint
from freshet.http.request import Request
from freshet.http.responses import HttpError, Response
from freshet.http.streams import Stream
from freshet.http.tokens import Scope

__all__ = ["Handler", "Reply", "Route", "Routes", "Taker", "TakerRoute"]

Handler = Callable[[Request], Awaitable[Response | Stream]]
Reply = Callable[[Response], None]
"""Gives a request its answer: on the loop, once."""
Taker = Callable[[Request, Reply], None]
"""Takes a whole request on the loop and replies to it, at once or later; raises as a handler does. What takes
many small requests together needs no task for each of them."""


@dataclass(frozen=True, slots=True)
class Route:
    """A path, and who answers its methods."""

    parts: tuple[str, ...]  # between slashes; `*` stands for anything
    name: str  # for metrics: bounded, whatever paths clients invent
    methods: dict[str, tuple[Handler, Endpoint]] = field(default_factory=dict)

    def answering(self, method: str) -> tuple[Handler, Endpoint | None]:
        """The handler of a method and its description, which OPTIONS lacks.

        HEAD is answered by the handler of GET; the server leaves the body out. OPTIONS lists the methods and
        nothing else, so that a browser lets no page of another site read or send anything.

        Raises:
            HttpError: 405, the path has no such method.
        """
        found = self.methods.get("GET" if method == "HEAD" else method)
        if found is None:
            allowed = ", ".join(self.allowed)
            if method == "OPTIONS":
                return _options(allowed), None
            raise HttpError(
                405,
                "method_not_allowed",
                f"{self.name} does not answer {method}",
                expected=allowed,
                found=method,
                headers=((b"allow", allowed.encode()),),
            )
        return found

    @property
    def allowed(self) -> list[str]:
        """The methods that are answered, sorted."""
        return sorted({*self.methods, *(["HEAD"] if "GET" in self.methods else []), "OPTIONS"})


def _options(allowed: str) -> Handler:
    async def answer(_request: Request) -> Response:
        return Response(200, b"", headers=((b"allow", allowed.encode()),))

    return answer


@dataclass(frozen=True, slots=True, eq=False)
class TakerRoute:
    """A route whose whole requests may be handed to `App.take`, past ASGI."""

    name: str
    taker: Taker
    scope: Scope | None = None  # that a token must have


class Routes:
    """The routes of one service; all are added before the first request."""

    def __init__(self) -> None:
        self._exact: dict[str, Route] = {}
        self._patterns: list[Route] = []
        self._takers: dict[bytes, TakerRoute] = {}

    def add(self, endpoint: Endpoint, handler: Handler) -> None:
        """Have this handler answer the endpoint's method and path."""
        path = endpoint.pattern
        parts = tuple(path.split("/"))
        known = self._exact.get(path) or next((r for r in self._patterns if r.parts == parts), None)
        if known is None:
            known = Route(parts, path)
            if "*" in parts:
                self._patterns.append(known)
            else:
                self._exact[path] = known
        known.methods[endpoint.method] = (handler, endpoint)

    def add_taker(self, endpoint: Endpoint, taker: Taker) -> None:
        """Have this taker take requests of the endpoint that arrive whole; any others need a handler, too."""
        self._takers[endpoint.path.encode()] = TakerRoute(endpoint.path, taker, endpoint.scope)

    def taker_of(self, method: bytes, url: bytes) -> TakerRoute | None:
        """The route whose whole requests are taken, if this is one."""
        return self._takers.get(url) if method == b"POST" else None

    def find(self, url: bytes, path: str) -> tuple[Route, tuple[str, ...]]:
        """The route of a URL as it came, and what its `*` parts matched, decoded.

        `path` is what an error shows of it. Raises HttpError: 404 if there is none.
        """
        asked = url.split(b"?")[0].decode("latin-1")
        exact = self._exact.get(asked)
        if exact is not None:
            return exact, ()
        parts = asked.split("/")  # as it is: a proxy that lets some paths pass must see the same as we do
        for route in self._patterns:
            if len(route.parts) == len(parts) and all(
                a in ("*", b) for a, b in zip(route.parts, parts, strict=True)
            ):
                return route, tuple(unquote(b) for a, b in zip(route.parts, parts, strict=True) if a == "*")
        raise HttpError(404, "not_found", "no such path", expected=sorted(self._exact), found=path[:200])
