"""A small HTTP face for services: routes, bounded bodies, errors as JSON, what is counted and traced of them.

Raw ASGI: a framework's conveniences cost more than our handlers do. A handler takes a `Request` and returns a
`Response` (or a `Stream`, whose body comes piece by piece) or raises; whatever it raises becomes JSON
`{"error": {code, message, expected, found, hint}}`, never a stack trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest

from freshet.errors import Unavailable
from freshet.http.authenticator import Guard
from freshet.http.bodies import Bodies
from freshet.http.endpoint import LIVE, METRICS_PAGE, Endpoint
from freshet.http.metrics import HttpCounts
from freshet.http.rate_limits import Payer
from freshet.http.request import FORWARDED, Request, header_map, stays
from freshet.http.responses import ClientGoneError, HttpError, Response, error_response, json_response
from freshet.http.routes import Handler, Reply, Routes, Taker, TakerRoute
from freshet.http.streams import Headers, Stream, send_pieces
from freshet.http.tokens import Scope as TokenScope
from freshet.observability.spans import end_http_request, start_http_request
from freshet.observability.tracing import context_of, within

__all__ = ["App"]

log = structlog.get_logger(__name__)

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Admit = Callable[[Mapping[bytes, bytes]], None]


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
        """Routes are added later; metrics and whether it lives are answered at once.

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
        self.routes = Routes()
        self._error_forms: list[tuple[str, Callable[[Response], Response]]] = []
        self._bodies = Bodies(
            registry, most_bytes=max_body_bytes, timeout_s=body_timeout_s, together=max_bodies_bytes
        )
        self._registry = registry
        ProcessCollector(registry=registry)  # memory, when it began, files
        self.counts = HttpCounts(registry)
        self.route(METRICS_PAGE, self._metrics)
        self.route(LIVE, self._live)

    def route(self, endpoint: Endpoint, handler: Handler) -> None:
        """Answer the endpoint's method and path with this handler, and its description in the documents."""
        self.routes.add(endpoint, handler)

    def form_errors(self, path: str, form: Callable[[Response], Response]) -> None:
        """Rewrite the errors of all URLs at or below a path, those without a route included: a protocol that
        is served there may have a form of its own for them."""
        self._error_forms.append((path, form))

    def _error_response(self, path: str, error: Exception) -> Response:
        response = error_response(error)
        for prefix, form in self._error_forms:
            if path == prefix or path.startswith(f"{prefix}/"):
                return form(response)
        return response

    def route_taker(self, endpoint: Endpoint, taker: Taker) -> None:
        """Answer a POST without `{name}` in its path with this taker; as `route` in all else."""

        async def handler(request: Request) -> Response:
            answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

            def reply(response: Response) -> None:
                if not answered.done():  # the server's drain may have cut it off
                    answered.set_result(response)

            span = start_http_request(self.role, endpoint.path, request.headers)
            if span is None:
                taker(request, reply)
                return await answered
            context = context_of(span)

            def reply_traced(response: Response) -> None:
                end_http_request(span, response.status)
                reply(response)

            try:
                taker(replace(request, span=context), reply_traced)
            except Exception as error:
                with within(context):
                    reply_traced(error_response(error))
            return await answered

        self.route(endpoint, handler)
        self.routes.add_taker(endpoint, taker)

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
        gone: Callable[[], bool] = stays,
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
            self.counts.answered(route.name, response.status, perf_counter() - started, passed=False)
            reply(response)
            return
        span = start_http_request(self.role, route.name, headers)  # refused clients get no span
        context = None if span is None else context_of(span)

        def answer(response: Response) -> None:
            self.counts.answered(route.name, response.status, perf_counter() - started)
            if span is not None:
                end_http_request(span, response.status)
            reply(response)

        try:
            asked = Request("POST", route.name, "", headers, body, (), peer, who, payer, context, gone)
            route.taker(asked, answer)
        except Exception as error:
            with within(context):  # its log lines name the trace
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

    def headers_of(self, response: Response) -> Sequence[tuple[bytes, bytes]]:
        """All headers of an answer, its length included."""
        return [
            (b"content-type", response.content_type),
            (b"content-length", str(len(response.body)).encode()),
            *response.headers,
            *self._headers,
        ]

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
            found, arguments = self.routes.find(
                scope.get("raw_path") or scope["path"].encode(), scope["path"]
            )
            route = found.name
            handler, endpoint = found.answering(scope["method"])
            peer = (scope.get("client") or ("",))[0]
            if endpoint is not None:
                who, peer, payer = self._let_in(endpoint.scope, headers, peer, endpoint.or_scope)
            else:
                who, peer, payer = self._let_in(None, headers, peer)
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
            stopping = Unavailable("the server is stopping; send it again")
            response = self._error_response(scope["path"], stopping)
        except ClientGoneError:
            self.counts.gone(route)
            return
        except Exception as error:
            response = self._error_response(scope["path"], error)
        if isinstance(response, Stream) and scope["method"] == "HEAD":
            await response.pieces.aclose()
            response = Response(200, b"", response.content_type, response.headers)
        if isinstance(response, Stream):
            await self._stream(route, response, receive, send)
            return
        self.counts.answered(route, response.status, perf_counter() - started, passed=passed)
        await send(_start(response.status, self.headers_of(response)))
        await send({"type": "http.response.body", "body": response.body})

    async def _stream(self, route: str, stream: Stream, receive: Receive, send: Send) -> None:
        self.streams += 1  # before anything is awaited: requests that come together are counted one by one
        try:
            with self.counts.streaming(route):
                kind = (b"content-type", stream.content_type)  # no length: the body comes in chunks
                await send(_start(200, [kind, *stream.headers, *self._headers]))
                how = await send_pieces(stream, receive, send, self._ending)
        except Exception as error:
            log.error("a stream broke off", route=route, exc_info=error)
        else:
            log.debug("a stream has ended", route=route, how=how)
        finally:
            self.streams -= 1

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


def _start(status: int, headers: Sequence[tuple[bytes, bytes]]) -> Mapping[str, Any]:
    """The head of an answer."""
    return {"type": "http.response.start", "status": status, "headers": headers}
