"""The ASGI application of a service: routes, body limits, errors as JSON, metrics and traces of requests.

Starlette's router finds the resource of a path, and Starlette sends streamed responses. A few hot routes of
each service take nearly all requests; `App` finds those by a dict lookup before the router. A handler takes a
`Request` and returns a `Response` or a `StreamingResponse`, or raises; any exception becomes JSON
`{"error": {code, message, expected, found, hint}}`, never a stack trace.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast
from urllib.parse import unquote

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest
from starlette.responses import StreamingResponse
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from freshet.errors import Unavailable
from freshet.http.authenticator import Authenticator, Principal
from freshet.http.endpoint import LIVE, METRICS_PAGE, Endpoint
from freshet.http.messages import (
    BODY_BYTES,
    CLOSE,
    FORWARDED,
    GONE,
    BodyLimits,
    BodyReader,
    ClientGoneError,
    Headers,
    HttpError,
    Incoming,
    Request,
    Response,
    error_response,
    header_map,
    json_response,
    refuse_upgrade,
)
from freshet.observability.metrics import ANSWER_BUCKETS, Metric
from freshet.observability.spans import end_http_request, start_http_request
from freshet.observability.tracing import context_of, within

log = structlog.get_logger(__name__)

LAST_PIECE_S = 0.5
"""Seconds for which the end of a stream may wait for a client that does not read."""

Handler = Callable[[Request], Awaitable[Response | StreamingResponse]]

Reply = Callable[[Response], None]
"""Answers a request. Called on the loop, once."""

HotHandler = Callable[[Request, Reply], None]
"""Starts the work for a request and calls the reply, at once or later; raises as a handler does. So services
that process many small requests together answer them by callbacks."""

REQUESTS = Metric(
    "freshet_http_requests",
    "counter",
    "requests",
    "Requests answered, or given up by clients that went away (status `gone`); by `door`: `passed`, or "
    "`refused` without a token, beyond a rate limit, from a page of another site, or for a path or method "
    "that does not exist.",
    ("route", "status", "door"),
)
REQUEST_SECONDS = Metric(
    "freshet_http_request_seconds",
    "histogram",
    "seconds",
    "Time from a request's head to its answer, without refused requests; if the client disconnected while "
    "the request waited to be scored, the time until that was noticed.",
    ("route",),
    buckets=ANSWER_BUCKETS,
)
STREAMS = Metric(
    "freshet_http_streams", "gauge", "streams", "Answers that are being streamed now.", ("route",)
)
CONNECTIONS = Metric("freshet_http_connections", "gauge", "connections", "Connections that are open.")
CUT_OFF = Metric(
    "freshet_http_connections_cut_off",
    "counter",
    "connections",
    "Connections closed on their clients, by reason: there were too_many of them.",
    ("why",),
)
HTTP_METRICS = (REQUESTS, REQUEST_SECONDS, STREAMS, CONNECTIONS, CUT_OFF, BODY_BYTES)
"""Metrics of every `App`."""


class _Counts:
    """Metrics of one service's requests and connections."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = REQUESTS.counter(registry)
        self._seconds = REQUEST_SECONDS.histogram(registry)
        self.streams = STREAMS.gauge(registry)
        self.connections: Callable[[], int] = lambda: 0  # number of open ones; set by the server
        CONNECTIONS.gauge(registry, lambda: self.connections())  # noqa: PLW0108  # replaced by the server
        self.cut_off = CUT_OFF.counter(registry)
        self._accepted: dict[tuple[str, int], tuple[Counter, Histogram]] = {}  # by route and status

    def show(self, route: str, status: int) -> None:
        """Expose a route before its first answer: an alert must see that requests stopped with a restart."""
        self._requests.labels(route, str(status), "passed")

    def answered(self, route: str, status: int, seconds: float, *, accepted: bool = True) -> None:
        """Count a response.

        Refused requests count apart, so that strangers cannot change times or shares of errors. An exception
        of the authenticator is our own fault, and counts as accepted.
        """
        if not accepted and status < 500:
            self._requests.labels(route, str(status), "refused").inc()
            return
        counters = self._accepted.get((route, status))
        if counters is None:
            label = "gone" if status == GONE.status else str(status)
            counters = (self._requests.labels(route, label, "passed"), self._seconds.labels(route))
            self._accepted[route, status] = counters
        counters[0].inc()
        counters[1].observe(seconds)

    def untimed(self, route: str, status: str) -> None:
        """Count a streamed response, or a client that disconnected within the body."""
        self._requests.labels(route, status, "passed").inc()


@dataclass(frozen=True, slots=True, eq=False)
class _Resource:
    """A path with its methods: an ASGI application, called by Starlette's router or by `App` itself."""

    name: str  # label of metrics; bounded, as clients may send any path
    answer: Callable[[_Resource, Scope, Receive, Send], Awaitable[None]]
    methods: dict[str, tuple[Handler, Endpoint]] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(self, scope, receive, send)

    def handler(self, method: str) -> tuple[Handler, Endpoint | None]:
        """Return the handler of a method and its endpoint, which OPTIONS lacks.

        The handler of GET also answers HEAD; the server omits the body. OPTIONS lists the methods and grants
        nothing, so that a browser lets no page of another site read or send.

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


class App:
    """An ASGI application with the routes of one service. Lives on one event loop."""

    def __init__(
        self,
        registry: CollectorRegistry,
        bodies: BodyLimits,
        *,
        headers: Headers = (),
        check: Callable[[Mapping[bytes, bytes]], None] = lambda headers: None,
        authenticator: Authenticator | None = None,
        max_streams: int = 64,
        streams_setting: str = "",
        role: str = "",
    ) -> None:
        """Add the routes `/metrics` and `/health/live`.

        Args:
            headers: headers of every response.
            check: called with the headers of each request first; may raise HttpError.
            authenticator: finds the principal of a request if its route has a scope.
            max_streams: limit of streamed responses; further ones are refused.
            streams_setting: name of the setting of `max_streams`, for errors.
            role: name of the service in traces.
        """
        self._headers, self._check, self._authenticator, self._role = headers, check, authenticator, role
        if authenticator is not None:
            authenticator.register(registry)
        self._max_streams, self._streams_setting = max_streams, streams_setting
        self._streaming: set[asyncio.Task[object]] = set()
        self._ending = False  # whether streams must end
        self._resources: dict[str, _Resource] = {}  # by path
        self._hot: dict[bytes, _Resource] = {}  # by path, without `{name}`
        self._router = Router(redirect_slashes=False, default=_Resource("unknown", self._answer))
        self._error_forms: list[tuple[str, Callable[[Response], Response]]] = []
        self._bodies = BodyReader(registry, bodies)
        self._registry = registry
        ProcessCollector(registry=registry)
        self._counts = _Counts(registry)
        self._max_connections = 0
        self.route(METRICS_PAGE, self._metrics)
        self.route(LIVE, self._live)

    # --- called by services

    def route(self, endpoint: Endpoint, handler: Handler) -> None:
        """Answer the endpoint's method and path by a handler."""
        resource = self._resources.get(endpoint.path)
        if resource is None:
            resource = self._resources[endpoint.path] = _Resource(endpoint.pattern, self._answer)
            self._router.routes.append(Route(endpoint.path, resource))
        resource.methods[endpoint.method] = (handler, endpoint)
        good = next((answer.status for answer in endpoint.answers if answer.status < 400), 200)
        self._counts.show(endpoint.pattern, good)

    def route_hot(self, endpoint: Endpoint, handler: HotHandler) -> None:
        """As `route`, for a hot path without `{name}` and a handler that replies by a callback."""

        async def answer(request: Request) -> Response:
            answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

            def reply(response: Response) -> None:
                if not answered.done():  # the server's drain may have cancelled the request
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
        """Rewrite the errors of all URLs at or below a path, also of those without a route, for a protocol
        with an error form of its own."""
        self._error_forms.append((path, form))

    # --- called by the server

    def bound_connections(self, connections: Callable[[], int], most: int) -> None:
        """Refuse requests and close their connections while there are more than `most` connections."""
        self._counts.connections, self._max_connections = connections, most

    def end_streams(self) -> None:
        """End every stream at once, also those that start later. Called on the server's loop."""
        self._ending = True
        for task in self._streaming:
            task.cancel()

    @property
    def streams(self) -> int:
        """Number of open streams."""
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
        # The path is not decoded: a proxy that allows some paths must see the same path as the router.
        routed = {**scope, "path": raw_path.decode("latin-1")}
        return self._router(routed, receive, send)

    async def _answer(self, resource: _Resource, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter()  # the loop's clock has a resolution of milliseconds
        accepted, body, method, incoming = False, b"", scope["method"], Incoming(receive)
        try:
            headers = header_map(scope["headers"])
            refuse_upgrade(headers)  # first: other errors leave the connection open
            if self._counts.connections() > self._max_connections:
                self._counts.cut_off.labels("too_many").inc()
                raise _too_many_connections()
            self._check(headers)
            if not resource.methods:
                raise self._not_found(scope["path"])
            handler, endpoint = resource.handler(method)
            principal = self._authenticate(endpoint, headers, scope)
            accepted = True
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
                    principal.address,
                    principal.name,
                    principal.allowance,
                    receive=receive,
                )
            )
            if isinstance(response, StreamingResponse) and self.streams >= self._max_streams:
                raise self._too_many_streams()  # its generator has not started, so needs no close
        except asyncio.CancelledError:  # the server's drain is over; a part of the work may be done
            response = self._error_response(
                scope["path"], Unavailable("the server is stopping; send it again")
            )
        except ClientGoneError:
            if incoming.more:
                self._counts.untimed(resource.name, "gone")
                return
            response = GONE
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
        self._counts.answered(resource.name, response.status, perf_counter() - started, accepted=accepted)
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
        if incoming.more and response.status != 408:  # a late body is not awaited again
            await send({"type": "http.response.body", "body": response.body, "more_body": True})
            await incoming.discard()
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "http.response.body", "body": response.body})

    async def _stream(
        self, route: str, response: StreamingResponse, scope: Scope, receive: Receive, send: Send
    ) -> None:
        task = cast("asyncio.Task[object]", asyncio.current_task())
        for name, value in self._headers:
            response.headers.append(name.decode("latin-1"), value.decode("latin-1"))
        pieces = response.body_iterator = _yielding_to_loop(
            cast(AsyncGenerator[bytes], response.body_iterator)
        )
        self._streaming.add(task)
        if self._ending:
            task.cancel()
        try:
            self._counts.untimed(route, "200")
            with self._counts.streams.labels(route).track_inprogress():
                await response(scope, receive, send)
            log.debug("a stream has ended", route=route)
        except asyncio.CancelledError:  # the server stops
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_PIECE_S):
                    await send({"type": "http.response.body", "body": b""})
        except Exception as error:  # without a last piece, so that the client notices the missing part
            log.error("a stream broke off", route=route, exc_info=error)
        finally:
            self._streaming.discard(task)
            await pieces.aclose()

    def _authenticate(
        self, endpoint: Endpoint | None, headers: Mapping[bytes, bytes], scope: Scope
    ) -> Principal:
        """Return the principal; a token is required if the endpoint has a scope. Raises HttpError."""
        peer = (scope.get("client") or ("",))[0]
        if self._authenticator is None:
            return Principal("", peer, None)
        forwarded = headers.get(FORWARDED)
        if endpoint is None or endpoint.scope is None:
            return Principal("", self._authenticator.address(peer, forwarded), None)
        authorization = headers.get(b"authorization")
        return self._authenticator.authenticate(
            endpoint.scope, authorization, peer, forwarded, endpoint.or_scope
        )

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


async def _yielding_to_loop(pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Pass pieces on, and let the loop run between them: otherwise a stream with pieces
    that are always ready would not notice that its client disconnected."""
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
