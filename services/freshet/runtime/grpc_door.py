"""A gRPC listener on a service's own event loop, beside its HTTP: for clients from outside, in protobuf.

Handlers get a message's bytes and return bytes, on the loop that the HTTP handlers run on, so that what lies
beneath needs no locks. What they raise of ours ends the call with the status that says what to do about it.

Every method reads its messages itself, also those that clients know as unary (on the wire both are the same):
so a message that gRPC has thrown away for its size is seen and counted.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import unquote

import grpc
import structlog
from grpc import aio

from freshet.errors import BadInput, ConfigError, Overloaded, TooLarge, Unavailable
from freshet.runtime.endpoint import TOKEN_CODES
from freshet.runtime.grpc_metrics import ListenerCounts
from freshet.runtime.guard import NOBODY, Guard, Guest
from freshet.runtime.http import HttpError
from freshet.runtime.tokens import Scope
from freshet.seams.transport import ROOM, Transport, cut, door_options, listen_credentials

__all__ = ["GrpcDoor", "Told", "told_of"]

log = structlog.get_logger("freshet.grpc")

CALLS = 1024
"""At once. What lies beneath bounds the bytes that it takes (the gateway's queue; scoring ends at once)."""

STREAM_MESSAGES = 64
"""Of one stream that are not yet answered; then no more are read, and flow control slows its client."""

LOOK_S = 0.1
"""How often the listener looks whether it is to stop, as the HTTP server does."""

Answer = Callable[[bytes, Guest], Awaitable[bytes]]
"""Of a message, and who has sent it."""


@dataclass(frozen=True, slots=True)
class Told:
    """An exception as a client is told it."""

    status: grpc.StatusCode
    code: str  # as over HTTP: `freshet.runtime.http_errors`
    text: str
    retry_after_ms: int = 0  # 0: do not try again unchanged


Failed = Callable[[bytes, Told], bytes]
"""Makes the answer to a message for which `Answer` has raised."""

_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    503: grpc.StatusCode.UNAVAILABLE,
}


def told_of(error: Exception) -> Told:
    """What an exception says to a client. Unforeseen ones are logged whole and told without details."""
    if isinstance(error, HttpError):
        said = error.content
        more = [f"{name} {said[name]}" for name in ("expected", "found", "hint") if said[name] is not None]
        status = _STATUS.get(error.status, grpc.StatusCode.UNKNOWN)
        after_ms = math.ceil(error.retry_after_s * 1e3)
        return Told(status, str(said["code"]), "; ".join([str(error), *more]), after_ms)
    if isinstance(error, BadInput):
        large = isinstance(error, TooLarge)
        text = f"{error}; send it in smaller pieces" if large else str(error)
        return Told(grpc.StatusCode.INVALID_ARGUMENT, "too_large" if large else "bad_input", text)
    if isinstance(error, Overloaded):
        after_ms = max(1, round(error.retry_after_s * 1e3))
        return Told(grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded", str(error), after_ms)
    if isinstance(error, Unavailable):
        return Told(grpc.StatusCode.UNAVAILABLE, "unavailable", str(error), 1000)
    log.error("a call failed", exc_info=error)
    text = "an unforeseen error; the service's log says more"
    return Told(grpc.StatusCode.INTERNAL, "internal", text)


class GrpcDoor:
    """One listener. Methods are added, then it serves on the running loop until it is told to stop."""

    def __init__(
        self,
        address: str,
        transport: Transport,
        counts: ListenerCounts,
        *,
        calls: int = CALLS,
        guard: Guard | None = None,
        message_timeout_s: float = 10.0,
    ) -> None:
        """Make a listener that is not yet one.

        Args:
            address: host:port; port 0 takes a free one.
            transport: certificates, and the largest message.
            counts: are added to.
            calls: at once; more are refused with RESOURCE_EXHAUSTED.
            guard: asks for tokens: when a call begins, and again for each message of a stream.
            message_timeout_s: how long a call of one message may take to send it.
        """
        self._address, self._transport, self.counts, self._calls = address, transport, counts, calls
        self._guard, self._message_timeout_s = guard, message_timeout_s
        self._methods: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
        self._lock = threading.Lock()
        self._stopping = asyncio.Event()
        self._server: aio.Server | None = None
        self.port = 0

    def call(self, service: str, method: str, answer: Answer, *, scope: Scope | None) -> None:
        """A method of one message with one answer.

        Args:
            service: with its package.
            answer: makes the answer.
            scope: that a token must have; None: open to all.
        """

        async def serve(_: AsyncIterator[bytes], context: aio.ServicerContext[bytes, bytes]) -> bytes:
            try:
                guest = self._let_in(scope, context)  # before a message is read
            except HttpError as error:
                await self._end(method, context, error)
            try:
                async with asyncio.timeout(self._message_timeout_s):
                    message = await context.read()
            except TimeoutError:
                await self._end(method, context, HttpError(
                    408, "body_timeout", "the message did not arrive in time",
                    expected=f"a whole message within {self._message_timeout_s:g} s",
                ))  # fmt: skip
            if message is aio.EOF:
                await self._without_message(method, context)
            try:
                return await self._answered(method, message, guest, answer)
            except Exception as error:
                await self._end(method, context, error)
                raise

        self.counts.answers[method, "OK", "passed"] += 0  # shown from the start on
        self._methods.setdefault(service, {})[method] = grpc.stream_unary_rpc_method_handler(serve)

    def stream(
        self, service: str, method: str, answer: Answer, failed: Failed, *, scope: Scope | None
    ) -> None:
        """A method of message after message, each with its answer as soon as there is one.

        Args:
            service: with its package.
            answer: makes the answer to one message.
            failed: makes the answer to a message for which `answer` has raised.
            scope: that a token must have, when the stream begins and at each message; None: open to all.
        """

        async def serve(_: AsyncIterator[bytes], context: aio.ServicerContext[bytes, bytes]) -> None:
            try:
                self._check(scope, context)
            except HttpError as error:
                await self._end(method, context, error)

            async def still_let_in(message: bytes, _: Guest) -> bytes:
                # A token may expire, or be dropped, while the stream is open.
                return await answer(message, self._let_in(scope, context))

            self.counts.streams[method] += 1
            try:
                await self._serve_stream(method, context, still_let_in, failed)
            finally:
                self.counts.streams[method] -= 1

        self.counts.answers[method, "OK", "passed"] += 0
        self._methods.setdefault(service, {})[method] = grpc.stream_stream_rpc_method_handler(serve)

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be bound."""
        # Longer messages than ours reach us up to some room, so that they are refused by name.
        self._server = server = aio.server(
            options=[*door_options(self._transport), ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=self._calls,
        )
        for service, handlers in self._methods.items():
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        credentials = listen_credentials(self._transport, self._begun)
        try:
            self.port = (
                server.add_insecure_port(self._address)
                if credentials is None
                else server.add_secure_port(self._address, credentials)
            )
        except RuntimeError as error:
            raise ConfigError(
                "listen", "grpc_port", self._address, "a free port of this machine", str(error)
            ) from error
        await server.start()

    async def serve(self, stop: threading.Event, drain_s: float) -> None:
        """Answer until `stop` is set; then what is in work, for at most `drain_s`."""
        while not stop.is_set():
            await asyncio.sleep(LOOK_S)
        self._stopping.set()
        if self._server is not None:
            await self._server.stop(drain_s)

    def _begun(self) -> None:
        with self._lock:  # gRPC's threads
            self.counts.handshakes += 1

    def _let_in(self, scope: Scope | None, context: aio.ServicerContext[bytes, bytes]) -> Guest:
        if scope is None or self._guard is None:
            return NOBODY
        return self._guard.admit(scope, *_shown(context))

    def _check(self, scope: Scope | None, context: aio.ServicerContext[bytes, bytes]) -> None:
        """As `_let_in`, before there is a message."""
        if scope is not None and self._guard is not None:
            self._guard.check(scope, *_shown(context))

    async def _end(self, method: str, context: aio.ServicerContext[bytes, bytes], error: Exception) -> None:
        """End a call with what an exception says; raises, as gRPC's `abort` does."""
        told = self._told(method, error)
        if told.retry_after_ms:
            context.set_trailing_metadata((("retry-after-ms", str(told.retry_after_ms)),))
        await context.abort(told.status, cut(told.text))

    def _refuse(self, reason: str) -> None:
        self.counts.refused[reason] += 1

    def _told(self, method: str, error: Exception) -> Told:
        told = told_of(error)
        door = "refused" if told.code in TOKEN_CODES else "passed"
        self.counts.answers[method, told.status.name, door] += 1
        if told.code not in ("internal", "unavailable"):
            self._refuse(told.code)
        return told

    async def _answered(self, method: str, message: bytes, guest: Guest, answer: Answer) -> bytes:
        size = len(message)
        self.counts.frames[method] += 1
        self.counts.received_bytes[method] += size
        if size > self._transport.max_message_bytes:
            raise TooLarge(
                f"the message has {size} bytes, expected at most {self._transport.max_message_bytes}"
            )
        made = await answer(message, guest)
        self.counts.sent_bytes[method] += len(made)
        self.counts.answers[method, "OK", "passed"] += 1
        return made

    async def _without_message(self, method: str, context: aio.ServicerContext[bytes, bytes]) -> None:
        self._refuse("no_message")
        self.counts.answers[method, grpc.StatusCode.INVALID_ARGUMENT.name, "passed"] += 1
        limit = self._transport.max_message_bytes + ROOM
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"expected a message; found none that could be read (whole, of at most {limit} bytes unpacked)",
        )

    async def _serve_stream(
        self,
        method: str,
        context: aio.ServicerContext[bytes, bytes],
        answer: Answer,
        failed: Failed,
    ) -> None:
        slots = asyncio.Semaphore(STREAM_MESSAGES)
        writing = asyncio.Lock()  # gRPC sends one message of a call at a time

        async def make(message: bytes) -> bytes:
            try:
                return await self._answered(method, message, NOBODY, answer)
            except Exception as error:
                return failed(message, self._told(method, error))

        async def handle(message: bytes) -> None:
            made = await make(message)
            del message  # the client may take its time to read the answer
            async with writing:
                await context.write(made)
            slots.release()

        async with asyncio.TaskGroup() as tasks:  # ends when all are answered; a client that is gone ends all
            while True:
                await slots.acquire()
                message = await self._next(context)
                if message is None:
                    break
                tasks.create_task(handle(message))
        if self._stopping.is_set():
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "this listener is stopping; what was answered is done"
            )

    async def _next(self, context: aio.ServicerContext[bytes, bytes]) -> bytes | None:
        """The next message of a stream; None at its end, or when the listener stops."""
        reading = asyncio.ensure_future(context.read())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                return None
            message = reading.result()
            return None if message is aio.EOF else message
        finally:
            stopping.cancel()
            if not reading.done():
                reading.cancel()


def _peer(context: aio.ServicerContext[bytes, bytes]) -> str:
    """The address of `ipv4:127.0.0.1:50000`, `ipv6:[::1]:50000` or, of what is none, the whole."""
    kind, _, rest = context.peer().partition(":")
    return unquote(rest).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else context.peer()


def _shown(context: aio.ServicerContext[bytes, bytes]) -> tuple[bytes | None, str, bytes | None]:
    """Authorization, address and X-Forwarded-For of a call, for `Guard`."""
    # A proxy may add a line of its own for whom it has seen: all of them are one list, in their order. gRPC
    # 1.85 itself keeps the last line alone; then there are fewer entries than proxies, and none is believed.
    forwarded = b",".join(_metadata(context, "x-forwarded-for"))
    return next(reversed(_metadata(context, "authorization")), None), _peer(context), forwarded or None


def _metadata(context: aio.ServicerContext[bytes, bytes], name: str) -> list[bytes]:
    """What the call's metadata has of that name, in order."""
    found = context.invocation_metadata() or ()
    return [v.encode() if isinstance(v, str) else bytes(v) for key, v in found if key == name]
