"""A small HTTP face for services: routes, bounded bodies, errors as JSON, and a uvicorn server that drains.

Raw ASGI: a framework's conveniences cost more than our handlers do. A handler takes a `Request` and returns a
`Response` (or a `Stream`, whose body comes piece by piece) or raises; whatever it raises becomes JSON
`{"error": {code, message, expected, found, hint}}`, never a stack trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest

from freshet.errors import Unavailable
from freshet.runtime.answers import GONE, ClientGoneError, HttpError, Response, error_response, json_response
from freshet.runtime.bodies import BODIES, Bodies
from freshet.runtime.endpoint import METRICS_PAGE, Endpoint
from freshet.runtime.metrics import Metric
from freshet.runtime.rates import Payer
from freshet.runtime.streaming import Headers, Stream, send_pieces
from freshet.runtime.tokens import Scope as TokenScope
from freshet.tracing import Context, Tracer, active, parsed_traceparent, within

if TYPE_CHECKING:
    from freshet.runtime.guard import Guard

__all__ = [
    "HTTP_METRICS",
    "App",
    "Handler",
    "HttpError",
    "Reply",
    "Request",
    "Response",
    "Stream",
    "Taker",
    "TakerRoute",
    "error_response",
    "header_map",
    "json_response",
]

log = structlog.get_logger(__name__)

FORWARDED = b"x-forwarded-for"

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]

REQUESTS = Metric(
    "freshet_http_requests",
    "counter",
    "requests",
    "Requests answered, or given up by clients that went away (status `gone`); by `door`: `passed`, or "
    "`refused` before anybody was let in, as without a token, too often for this client, from a page of "
    "another site, or with a path or method that there is not.",
    ("route", "status", "door"),
)
REQUEST_SECONDS = Metric(
    "freshet_http_request_seconds",
    "histogram",
    "seconds",
    "Time from a request's head to its answer, of those that passed the door; of one that waited to be "
    "scored and was given up, until that was seen.",
    ("route",),
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0),
)
STREAMS = Metric(
    "freshet_http_streams", "gauge", "streams", "Answers that are being streamed now.", ("route",)
)
CONNECTIONS = Metric("freshet_http_connections", "gauge", "connections", "Connections that are open.")
CUT_OFF = Metric(
    "freshet_http_connections_cut_off",
    "counter",
    "connections",
    "Connections closed on their clients: too_many of them; no request came (no_request), or none of HTTP "
    "(malformed), or too_many_pipelined behind one another; its head was too slow (head_late) or too large "
    "(head_too_large); a rest was too slow that nobody waits for (body_late); the answer was not read "
    "(not_read).",
    ("why",),
)
HTTP_METRICS = (REQUESTS, REQUEST_SECONDS, STREAMS, CONNECTIONS, CUT_OFF, BODIES)
"""What every service counts that speaks HTTP through `App`."""


def _stays() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Request:
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
    gone: Callable[[], bool] = _stays  # whether its client went away, where that is known

    @property
    def content_type(self) -> str:
        """Media type without parameters, in lower case; empty if none was sent."""
        return self.headers.get(b"content-type", b"").split(b";")[0].strip().lower().decode("latin-1")


Handler = Callable[[Request], Awaitable[Response | Stream]]
Reply = Callable[[Response], None]
"""Gives a request its answer: on the loop, once."""
Taker = Callable[[Request, Reply], None]
"""Takes a whole request on the loop and replies to it, at once or later; raises as a handler does. What takes
many small requests together needs no task for each of them."""
Admit = Callable[[Mapping[bytes, bytes]], None]


@dataclass(frozen=True, slots=True)
class _Route:
    parts: tuple[str, ...]
    name: str  # for metrics: bounded, whatever paths clients invent
    methods: dict[str, tuple[Handler, Endpoint]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class TakerRoute:
    """A route whose whole requests may be handed to `App.take`, past ASGI."""

    name: str
    taker: Taker
    scope: TokenScope | None = None  # that a token must have


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
        admit: Admit = lambda headers: None,
        guard: Guard | None = None,
        max_streams: int = 64,
        streams_setting: str = "",
        role: str = "",
    ) -> None:
        """Routes are added later.

        Args:
            max_body_bytes: of one request.
            body_timeout_s: within which a body must have come whole.
            max_bodies_bytes: of all requests whose bodies are coming or are worked on.
            headers: go with every answer.
            admit: looks at every request's headers first, and may raise.
            guard: then asks for a token, where the route has a scope.
            max_streams: one more is refused, with the name of the setting that allows more.
            role: who says in traces that it answered.
        """
        self._headers, self._admit, self._guard, self.role = headers, admit, guard, role
        if guard is not None:
            guard.register(registry)
        self._max_streams, self._streams_setting = max_streams, streams_setting
        self.streams = 0  # that are open now
        self._ending = asyncio.Event()  # set when streams are to end
        self._routes: dict[str, _Route] = {}
        self._patterns: list[_Route] = []
        self._takers: dict[bytes, TakerRoute] = {}
        self._bodies = Bodies(
            registry, most_bytes=max_body_bytes, timeout_s=body_timeout_s, together=max_bodies_bytes
        )
        self._registry = registry
        ProcessCollector(registry=registry)  # memory, when it began, files
        self._requests = REQUESTS.counter(registry)
        self._seconds = REQUEST_SECONDS.histogram(registry)
        self._streams = STREAMS.gauge(registry)
        self.connections = 0  # that are open now
        CONNECTIONS.gauge(registry, lambda: self.connections)
        self._cut_off = CUT_OFF.counter(registry)
        self._counters: dict[tuple[str, int], tuple[Counter, Histogram]] = {}  # of `passed` by route, status
        self.endpoints: list[Endpoint] = []
        self.route(METRICS_PAGE, self._metrics)

    def route(self, endpoint: Endpoint, handler: Handler) -> None:
        """Answer the endpoint's method and path with this handler, and its description in the documents."""
        self.endpoints.append(endpoint)
        path = endpoint.pattern
        parts = tuple(path.split("/"))
        known = self._routes.get(path) or next((r for r in self._patterns if r.parts == parts), None)
        if known is None:
            known = _Route(parts, path)
            if "*" in parts:
                self._patterns.append(known)
            else:
                self._routes[path] = known
        known.methods[endpoint.method] = (handler, endpoint)

    def route_taker(self, endpoint: Endpoint, taker: Taker) -> None:
        """Answer a POST without `{name}` in its path with this taker; as `route` in all else."""

        async def handler(request: Request) -> Response:
            answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

            def reply(response: Response) -> None:
                if not answered.done():  # the server's drain may have cut it off
                    answered.set_result(response)

            if (tracer := active()) is not None:
                span, traced = self._traced(tracer, endpoint.path, request.headers, reply)
                try:
                    taker(replace(request, span=span), traced)
                except Exception as error:
                    with within(span):
                        traced(error_response(error))
            else:
                taker(request, reply)
            return await answered

        self.route(endpoint, handler)
        self._takers[endpoint.path.encode()] = TakerRoute(endpoint.path, taker, endpoint.scope)

    def taker_of(self, method: bytes, url: bytes) -> TakerRoute | None:
        """The route whose whole requests `take` takes, if this is one."""
        return self._takers.get(url) if method == b"POST" else None

    def takes(self, size: int) -> bool:
        """Whether a body of so many bytes is within the limit."""
        return size <= self._bodies.most_bytes

    def take(
        self,
        route: TakerRoute,
        headers: Mapping[bytes, bytes],
        body: bytes,
        peer: str,
        reply: Reply,
        gone: Callable[[], bool] = _stays,
    ) -> None:
        """Answer a whole request of the route, as by ASGI but without a task.

        `reply` is called once; with `GONE`, if the taker has seen by `gone` that the client went away.
        """
        started = perf_counter()  # the loop's own clock has milliseconds
        try:
            self._admit(headers)
            who, peer, payer = self._let_in(route.scope, headers, peer)
        except Exception as error:
            response = error_response(error)
            self._count(route.name, response.status, perf_counter() - started, passed=False)
            reply(response)
            return
        span = None
        if (tracer := active()) is not None:  # not before: strangers must not fill the queue of spans
            span, reply = self._traced(tracer, route.name, headers, reply)

        def answer(response: Response) -> None:
            self._count(route.name, response.status, perf_counter() - started)
            reply(response)

        try:
            asked = Request("POST", route.name, "", headers, body, (), peer, who, payer, span, gone)
            route.taker(asked, answer)
        except Exception as error:
            with within(span):  # what is logged of it names the trace
                answer(error_response(error))

    def _let_in(
        self,
        scope: TokenScope | None,
        headers: Mapping[bytes, bytes],
        peer: str,
        or_scope: TokenScope | None = None,
    ) -> tuple[str, str, Payer | None]:
        """A `Guest`. Raises HttpError."""
        if self._guard is None:
            return "", peer, None
        forwarded = headers.get(FORWARDED)
        if scope is None:
            return "", self._guard.address(peer, forwarded), None
        return self._guard.admit(scope, headers.get(b"authorization"), peer, forwarded, or_scope)

    def _traced(
        self, tracer: Tracer, route: str, headers: Mapping[bytes, bytes], reply: Reply
    ) -> tuple[Context | None, Reply]:
        """A POST's span in its client's trace, if it has one, which is told of with the answer."""
        client = parsed_traceparent(headers.get(b"traceparent"))
        if client is None:
            return None, reply
        span, started_ns = tracer.new(client), tracer.now_ns()

        def answer(response: Response) -> None:
            tracer.span(
                f"POST {route}",
                self.role,
                started_ns,
                kind="server",
                context=span,
                parent=client,
                attributes={
                    "http.request.method": "POST",
                    "http.route": route,
                    "http.response.status_code": response.status,
                },
                error="" if response.status < 500 else f"answered with {response.status}",
                asked_for=True,
            )
            reply(response)

        return span, answer

    def _count(self, route: str, status: int, seconds: float, *, passed: bool = True) -> None:
        """Count an answer. Those to who was not let in apart: strangers, whom it costs nothing to ask, must
        change neither times nor shares of errors. A door that fails is a fault of ours."""
        if not passed and status < 500:
            self._requests.labels(route, str(status), "refused").inc()
            return
        counters = self._counters.get((route, status))
        if counters is None:
            said = "gone" if status == GONE.status else str(status)
            counters = (self._requests.labels(route, said, "passed"), self._seconds.labels(route))
            self._counters[route, status] = counters
        counters[0].inc()
        counters[1].observe(seconds)

    def headers_of(self, response: Response) -> Sequence[tuple[bytes, bytes]]:
        """All headers of an answer, its length included."""
        return [
            (b"content-type", response.content_type),
            (b"content-length", str(len(response.body)).encode()),
            *response.headers,
            *self._headers,
        ]

    def cut_off(self, why: str) -> None:
        """Count a connection that is closed on its client; see CUT_OFF for the reasons."""
        self._cut_off.labels(why).inc()

    def end_streams(self) -> None:
        """End every stream at once, and those that begin from now on; on the server's loop."""
        self._ending.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served here, not {scope['type']}")
        started = perf_counter()
        route, passed = "unknown", False
        try:
            headers = header_map(scope["headers"])
            self._admit(headers)
            found, arguments = self._find(scope)
            route = found.name
            method = found.methods.get(scope["method"])
            if method is None:
                allowed = ", ".join(sorted(found.methods))
                raise HttpError(
                    405,
                    "method_not_allowed",
                    f"{route} does not answer {scope['method']}",
                    expected=allowed,
                    found=scope["method"],
                    headers=((b"allow", allowed.encode()),),
                )
            handler, endpoint = method
            peer = (scope.get("client") or ("",))[0]
            who, peer, payer = self._let_in(endpoint.scope, headers, peer, endpoint.or_scope)
            passed = True
            async with self._bodies.whole(headers, receive) as body:
                request = Request(
                    scope["method"],
                    scope["path"],
                    scope["query_string"].decode("latin-1"),
                    headers,
                    body,
                    arguments,
                    peer,
                    who,
                    payer,
                )
                response = await handler(request)
            if isinstance(response, Stream) and self.streams >= self._max_streams:
                raise self._too_many_streams()  # nothing was asked of its pieces, so nothing is left behind
        except asyncio.CancelledError:  # the server's drain is over; what was begun is not known to be done
            response = error_response(Unavailable("the server is stopping; send it again"))
        except ClientGoneError:
            self._requests.labels(route, "gone", "passed").inc()
            return
        except Exception as error:
            response = error_response(error)
        if isinstance(response, Stream):
            await self._stream(route, response, receive, send)
            return
        self._count(route, response.status, perf_counter() - started, passed=passed)
        await send(_start(response.status, self.headers_of(response)))
        await send({"type": "http.response.body", "body": response.body})

    async def _stream(self, route: str, stream: Stream, receive: Receive, send: Send) -> None:
        self._requests.labels(route, "200", "passed").inc()
        self.streams += 1  # before anything is awaited: requests that come together are counted one by one
        try:
            with self._streams.labels(route).track_inprogress():
                kind = (b"content-type", stream.content_type)  # no length: the body comes in chunks
                await send(_start(200, [kind, *stream.headers, *self._headers]))
                how = await send_pieces(stream, receive, send, self._ending)
        except Exception as error:
            log.error("a stream broke off", route=route, exc_info=error)
        else:
            log.debug("a stream has ended", route=route, how=how)
        finally:
            self.streams -= 1

    def _find(self, scope: Scope) -> tuple[_Route, tuple[str, ...]]:
        raw = scope.get("raw_path") or scope["path"].encode()
        path = raw.split(b"?")[0].decode("latin-1")
        exact = self._routes.get(path)
        if exact is not None:
            return exact, ()
        parts = path.split("/")  # as it is: a proxy that lets some paths pass must see the same as we do
        for route in self._patterns:
            if len(route.parts) == len(parts) and all(
                a in ("*", b) for a, b in zip(route.parts, parts, strict=True)
            ):
                return route, tuple(unquote(b) for a, b in zip(route.parts, parts, strict=True) if a == "*")
        raise HttpError(
            404, "not_found", "no such path", expected=sorted(self._routes), found=scope["path"][:200]
        )

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

    async def _metrics(self, _request: Request) -> Response:
        return Response(200, generate_latest(self._registry), b"text/plain; version=0.0.4; charset=utf-8")


def header_map(lines: Sequence[tuple[bytes, bytes]]) -> Mapping[bytes, bytes]:
    """Headers by name, in lower case; of repeated ones the last, but every address that proxies have told of:
    some add a line of their own (RFC 9110 §5.3)."""
    found = dict(lines)
    if len(found) < len(lines) and FORWARDED in found:
        found[FORWARDED] = b",".join(value for name, value in lines if name == FORWARDED)
    return found


def _start(status: int, headers: Sequence[tuple[bytes, bytes]]) -> Mapping[str, Any]:
    """The head of an answer."""
    return {"type": "http.response.start", "status": status, "headers": headers}
