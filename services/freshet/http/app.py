"""The ASGI application of a service: routes, bounded bodies, errors as JSON, counts and traces of requests.

Starlette's router finds the resource of a path and Starlette sends what is streamed. A few routes of each
service answer nearly all requests; `App` finds those by one look into a dict, before the router. A handler
takes a `Request` and returns a `Response` or a `StreamingResponse`, or raises; any exception becomes JSON
`{"error": {code, message, expected, found, hint}}`, never a stack trace.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from time import perf_counter
from typing import cast
from urllib.parse import unquote

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from starlette.responses import StreamingResponse
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from freshet.errors import Unavailable
from freshet.http.authenticator import Guard, Guest
from freshet.http.bodies import Bodies, Incoming
from freshet.http.endpoint import LIVE, METRICS_PAGE, Endpoint
from freshet.http.metrics import HttpCounts
from freshet.http.request import FORWARDED, Request, header_map
from freshet.http.responses import (
    CLOSE,
    GONE,
    ClientGoneError,
    Headers,
    HttpError,
    Response,
    error_response,
    json_response,
)
from freshet.http.routes import Handler, HotHandler, Resource
from freshet.observability.spans import end_http_request, start_http_request
from freshet.observability.tracing import context_of, within

__all__ = ["App"]

log = structlog.get_logger(__name__)

LAST_PIECE_S = 0.5
"""How long the end of a stream may take to reach a client that does not read."""


class App:
    """An ASGI application: routes, body limits, error bodies, request metrics."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        max_bodies_bytes: int = 128 << 20,
        headers: Headers = (),
        admit: Callable[[Mapping[bytes, bytes]], None] = lambda headers: None,
        guard: Guard | None = None,
        max_streams: int = 64,
        streams_setting: str = "",
        role: str = "",
    ) -> None:
        """Routes are added later; `/metrics` and `/health/live` are there at once.

        Args:
            max_body_bytes: of one request.
            body_timeout_s: within which a whole body must arrive.
            max_bodies_bytes: of all requests whose bodies are arriving or are worked on.
            headers: go with every answer.
            admit: checks every request's headers first, and may raise.
            guard: then asks for a token, where the route has a scope.
            max_streams: one more is refused, with the name of the setting that allows more.
            role: the service's name in traces.
        """
        self._headers, self._admit, self._guard, self._role = headers, admit, guard, role
        if guard is not None:
            guard.register(registry)
        self._max_streams, self._streams_setting = max_streams, streams_setting
        self._streaming: set[asyncio.Task[object]] = set()
        self._ending = False  # streams are to end
        self._resources: dict[str, Resource] = {}  # by path
        self._hot: dict[bytes, Resource] = {}  # by path, without `{name}`
        self._router = Router(redirect_slashes=False, default=Resource("unknown", self._answer))
        self._error_forms: list[tuple[str, Callable[[Response], Response]]] = []
        self._bodies = Bodies(
            registry, most_bytes=max_body_bytes, timeout_s=body_timeout_s, together=max_bodies_bytes
        )
        self._registry = registry
        ProcessCollector(registry=registry)  # memory, when it began, files
        self._counts = HttpCounts(registry)
        self._max_connections = 0
        self.route(METRICS_PAGE, self._metrics)
        self.route(LIVE, self._live)

    # --- what a service adds

    def route(self, endpoint: Endpoint, handler: Handler) -> None:
        """Answer the endpoint's method and path with this handler."""
        resource = self._resources.get(endpoint.path)
        if resource is None:
            resource = self._resources[endpoint.path] = Resource(endpoint.pattern, self._answer)
            self._router.routes.append(Route(endpoint.path, resource))
        resource.methods[endpoint.method] = (handler, endpoint)

    def route_hot(self, endpoint: Endpoint, handler: HotHandler) -> None:
        """As `route`, for a path without `{name}` that the router need not find, and a handler that is given
        a reply to call."""

        async def answer(request: Request) -> Response:
            answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

            def reply(response: Response) -> None:
                if not answered.done():  # the server's drain may have cut it off
                    answered.set_result(response)

            span = start_http_request(self._role, endpoint.path, request.headers)
            if span is None:
                handler(request, reply)
                return await answered
            context = context_of(span)

            def reply_traced(response: Response) -> None:
                if span.is_recording():  # a handler may fail after its reply
                    end_http_request(span, response.status)
                reply(response)

            try:
                handler(request._replace(span=context), reply_traced)
            except Exception as error:
                with within(context):  # its log lines name the trace
                    reply_traced(error_response(error))
            return await answered

        self.route(endpoint, answer)
        self._hot[endpoint.path.encode()] = self._resources[endpoint.path]

    def form_errors(self, path: str, form: Callable[[Response], Response]) -> None:
        """Rewrite the errors of all URLs at or below a path, those without a route included: a protocol that
        is served there may have a form of its own for them."""
        self._error_forms.append((path, form))

    # --- called by the server

    def bound_connections(self, connections: Callable[[], int], most: int) -> None:
        """Refuse requests, and end their connections, while there are more than `most` connections."""
        self._counts.connections, self._max_connections = connections, most

    def end_streams(self) -> None:
        """End every stream at once, and those that begin from now on; on the server's loop."""
        self._ending = True
        for task in self._streaming:
            task.cancel()

    @property
    def streams(self) -> int:
        """How many are open."""
        return len(self._streaming)

    # --- one request

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served here, not {scope['type']}")
        raw_path = scope["raw_path"]
        hot = self._hot.get(raw_path)
        if hot is not None:
            return self._answer(hot, scope, receive, send)
        # The path as it came: a proxy that lets some paths pass must see the same path as the router.
        routed = {**scope, "path": raw_path.decode("latin-1")}
        return self._router(routed, receive, send)

    async def _answer(self, resource: Resource, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter()  # the loop's own clock has milliseconds
        passed, body, method, incoming = False, b"", scope["method"], Incoming(receive)
        try:
            headers = header_map(scope["headers"])
            if self._counts.connections() > self._max_connections:
                self._counts.cut_off("too_many")
                raise _too_many_connections()
            self._admit(headers)
            if not resource.methods:
                raise self._not_found(scope["path"])
            handler, endpoint = resource.handler(method)
            guest = self._let_in(endpoint, headers, scope)
            passed = True
            body = await self._bodies.read(headers, incoming)
            arguments = scope.get("path_params")
            response = await handler(
                Request(
                    method,
                    scope["path"],
                    scope["query_string"].decode("latin-1"),
                    headers,
                    body,
                    tuple(map(unquote, arguments.values())) if arguments else (),
                    guest.address,
                    guest.who,
                    guest.payer,
                    receive=receive,
                )
            )
            if isinstance(response, StreamingResponse) and self.streams >= self._max_streams:
                raise self._too_many_streams()  # no piece was asked for, so nothing is left behind
        except asyncio.CancelledError:  # the server's drain is over; a part of the work may be done
            response = self._error_response(
                scope["path"], Unavailable("the server is stopping; send it again")
            )
        except ClientGoneError:
            self._counts.gone(resource.name)
            return
        except Exception as error:
            response = self._error_response(scope["path"], error)
        finally:
            self._bodies.release(body)
        if isinstance(response, StreamingResponse):
            if method != "HEAD":
                await self._stream(resource.name, response, scope, receive, send)
                return
            await cast(AsyncGenerator[bytes], response.body_iterator).aclose()
            kind = response.headers["content-type"].encode("latin-1")
            response = Response(200, b"", kind)
        self._counts.answered(resource.name, response.status, perf_counter() - started, passed=passed)
        if response is not GONE:
            await self._send(response, incoming, send)

    async def _send(self, response: Response, incoming: Incoming, send: Send) -> None:
        headers = [
            (b"content-type", response.content_type),
            (b"content-length", b"%d" % len(response.body)),
            *response.headers,
            *self._headers,
        ]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        if incoming.more and response.status != 408:  # whose body has had its time
            await send({"type": "http.response.body", "body": response.body, "more_body": True})
            await incoming.drop_rest()
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "http.response.body", "body": response.body})

    async def _stream(
        self, route: str, response: StreamingResponse, scope: Scope, receive: Receive, send: Send
    ) -> None:
        task = cast("asyncio.Task[object]", asyncio.current_task())
        for name, value in self._headers:
            response.headers.append(name.decode("latin-1"), value.decode("latin-1"))
        pieces = response.body_iterator = _in_turns(cast(AsyncGenerator[bytes], response.body_iterator))
        self._streaming.add(task)
        if self._ending:
            task.cancel()
        try:
            with self._counts.streaming(route):
                await response(scope, receive, send)
            log.debug("a stream has ended", route=route)
        except asyncio.CancelledError:  # the server stops
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_PIECE_S):
                    await send({"type": "http.response.body", "body": b""})
        except Exception as error:  # without a last piece: the client sees that this was not all
            log.error("a stream broke off", route=route, exc_info=error)
        finally:
            self._streaming.discard(task)
            await pieces.aclose()

    def _let_in(self, endpoint: Endpoint | None, headers: Mapping[bytes, bytes], scope: Scope) -> Guest:
        """Check the client's token where the endpoint has a scope. Raises HttpError."""
        peer = (scope.get("client") or ("",))[0]
        if self._guard is None:
            return Guest("", peer, None)
        forwarded = headers.get(FORWARDED)
        if endpoint is None or endpoint.scope is None:
            return Guest("", self._guard.address(peer, forwarded), None)
        authorization = headers.get(b"authorization")
        return self._guard.admit(endpoint.scope, authorization, peer, forwarded, endpoint.or_scope)

    def _error_response(self, path: str, error: Exception) -> Response:
        response = error_response(error)
        for prefix, form in self._error_forms:
            if path == prefix or path.startswith(f"{prefix}/"):
                return form(response)
        return response

    def _not_found(self, path: str) -> HttpError:
        paths = sorted(path for path in self._resources if "{" not in path)
        return HttpError(404, "not_found", "no such path", expected=paths, found=path[:200])

    def _too_many_streams(self) -> HttpError:
        return HttpError(
            503,
            "streams",
            "too many streams are open",
            expected=f"at most {self._max_streams}",
            found=self.streams,
            hint="close some" + (f", or raise {self._streams_setting}" if self._streams_setting else ""),
            headers=((b"retry-after", b"5"),),
        )

    async def _live(self, _request: Request) -> Response:
        return json_response(200, {"status": "live"})

    async def _metrics(self, _request: Request) -> Response:
        return Response(200, generate_latest(self._registry), b"text/plain; version=0.0.4; charset=utf-8")


async def _in_turns(pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The pieces, closed with this generator. Pieces that are always there must not keep the loop from
    noticing that the client went away."""
    try:
        async for piece in pieces:
            yield piece
            await asyncio.sleep(0)
    finally:
        await pieces.aclose()


def _too_many_connections() -> HttpError:
    return HttpError(
        503,
        "connections",
        "too many connections are open",
        expected="fewer at once",
        hint="use connections again; FRESHET_COMMON_MAX_CONNECTIONS allows more",
        headers=((b"retry-after", b"5"), CLOSE),
    )
