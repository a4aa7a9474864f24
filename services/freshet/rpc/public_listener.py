"""A gRPC listener on a service's own event loop, beside its HTTP: for clients from outside, in protobuf.

Handlers get a message's bytes and return bytes, on the loop that the HTTP handlers run on, so that what lies
beneath needs no locks. What they raise of ours ends the call with the status that says what to do about it.

Every method reads its messages itself, also those that clients know as unary (on the wire both are the same):
so a message that gRPC has thrown away for its size is seen and counted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import Any
from urllib.parse import unquote

import grpc
from grpc import aio

from freshet.errors import ConfigError, Overloaded, TooLarge
from freshet.http.authenticator import NOBODY, Guard, Guest
from freshet.http.endpoint import TOKEN_CODES
from freshet.http.responses import HttpError
from freshet.http.tokens import Scope
from freshet.observability.grpc_metrics import QUIET, ListenerCounts
from freshet.rpc.channel import MIB, ROOM, Transport, cut, door_options, listen_credentials
from freshet.rpc.memory_budget import Place, Room, Turn
from freshet.rpc.status_codes import NoMessageError, Told, told_of

__all__ = ["Answer", "Failed", "GrpcDoor"]

CALLS = 1024
"""At once. Their bytes are bounded together (`freshet.rpc.memory_budget`)."""

STREAM_MESSAGES = 64
"""Of one stream that are not yet answered; then no more are read, and flow control slows its client."""

STOPPING = "this listener is stopping; what was answered is done"

OVERLOADED_RETRY_S = 1.0

LOOK_S = 0.1
"""How often the listener looks whether it is to stop, as the HTTP server does."""

Answer = Callable[[bytes, Guest], Awaitable[bytes]]
"""Of a message, and who has sent it."""


Failed = Callable[[bytes, Told], bytes]
"""Makes the answer to a message for which `Answer` has raised."""


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
        together_bytes: int = 256 * MIB,
        together_setting: str = "",
    ) -> None:
        """Make a listener that is not yet one.

        Args:
            address: host:port; port 0 takes a free one.
            transport: certificates, and the largest message.
            counts: are added to.
            calls: at once; more are refused with RESOURCE_EXHAUSTED.
            guard: asks for tokens: when a call begins, and again for each message of a stream.
            message_timeout_s: how long a call of one message may take to send it, and how long a stream may
                be quiet while few others wait for room.
            together_bytes: of all messages that are read or worked on.
            together_setting: its name, for those who find no room.
        """
        self._address, self._transport, self.counts, self._calls = address, transport, counts, calls
        self._guard, self._message_timeout_s = guard, message_timeout_s
        self._methods: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
        self._lock = threading.Lock()
        self._room = Room(together_bytes, transport.max_message_bytes + ROOM, message_timeout_s)
        self._more = f"; {together_setting} allows more" if together_setting else ""
        counts.held_bytes = lambda: self._room.held
        self._open: set[asyncio.Future[str]] = (
            set()
        )  # of streams: why one is to end before its client ends it
        self._stopping = False
        self._server: aio.Server | None = None
        self.port = 0

    def open(self, service: str, method: str, answer: Callable[[], bytes]) -> None:
        """A method that is open to all, whose message says nothing: it is not read, however long it is.

        Args:
            service: with its package.
            method: takes an empty message.
            answer: makes the answer.
        """

        async def serve(_: AsyncIterator[bytes], context: aio.ServicerContext[bytes, bytes]) -> bytes:
            began = perf_counter()
            self.counts.frames[method] += 1
            made = answer()
            self._count_answer(method, made, began)
            return made

        self._add(service, method, grpc.stream_unary_rpc_method_handler(serve))

    def call(self, service: str, method: str, answer: Answer, *, scope: Scope) -> None:
        """A method of one message with one answer.

        Args:
            service: with its package.
            method: its name there.
            answer: makes the answer.
            scope: that a token must have.
        """

        async def serve(_: AsyncIterator[bytes], context: aio.ServicerContext[bytes, bytes]) -> bytes:
            place, began = None, perf_counter()
            try:
                guest = self._let_in(scope, context)  # before a message is read
                place = self._room.place()
                message = await self._only(context, place)
                return await self._answered(method, message, guest, answer, began)
            except Exception as error:
                await self._end(method, context, error, began)
                raise
            finally:
                if place is not None:
                    place.leave()

        self._add(service, method, grpc.stream_unary_rpc_method_handler(serve))

    def stream(self, service: str, method: str, answer: Answer, failed: Failed, *, scope: Scope) -> None:
        """A method of message after message, each with its answer as soon as there is one.

        Args:
            service: with its package.
            method: its name there.
            answer: makes the answer to one message.
            failed: makes the answer to a message for which `answer` has raised.
            scope: that a token must have, when the stream begins and at each message.
        """

        async def serve(_: AsyncIterator[bytes], context: aio.ServicerContext[bytes, bytes]) -> None:
            began = perf_counter()
            try:
                self._check(scope, context)
            except HttpError as error:
                await self._end(method, context, error, began)

            async def still_let_in(message: bytes, _: Guest) -> bytes:
                # A token may expire, or be dropped, while the stream is open.
                return await answer(message, self._let_in(scope, context))

            over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            if self._stopping:
                _tell(over, STOPPING)
            self._open.add(over)
            self.counts.streams[method] += 1
            try:
                await self._serve_stream(method, context, still_let_in, failed, over)
            finally:
                self._open.discard(over)
                self.counts.streams[method] -= 1

        self._add(service, method, grpc.stream_stream_rpc_method_handler(serve))

    def _add(self, service: str, method: str, handler: grpc.RpcMethodHandler) -> None:
        self.counts.show(method)
        self._methods.setdefault(service, {})[method] = handler

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
        self._stopping = True
        for over in self._open:
            _tell(over, STOPPING)
        if self._server is not None:
            await self._server.stop(drain_s)

    def _begun(self) -> None:
        with self._lock:  # gRPC's threads
            self.counts.handshakes += 1

    def _let_in(self, scope: Scope, context: aio.ServicerContext[bytes, bytes]) -> Guest:
        return NOBODY if self._guard is None else self._guard.admit(scope, *_shown(context))

    def _check(self, scope: Scope, context: aio.ServicerContext[bytes, bytes]) -> None:
        """As `_let_in`, before there is a message."""
        if self._guard is not None:
            self._guard.check(scope, *_shown(context))

    async def _end(
        self, method: str, context: aio.ServicerContext[bytes, bytes], error: Exception, began: float
    ) -> None:
        """End a call with what an exception says; raises, as gRPC's `abort` does."""
        told = self._told(method, error, began)
        if told.retry_after_ms:
            context.set_trailing_metadata((("retry-after-ms", str(told.retry_after_ms)),))
        await context.abort(told.status, cut(told.text))

    def _refuse(self, reason: str) -> None:
        self.counts.refused[reason] += 1

    def _told(self, method: str, error: Exception, began: float) -> Told:
        told = told_of(error)
        door = "refused" if told.code in TOKEN_CODES else "passed"
        self.counts.answered(method, told.status.name, door, perf_counter() - began)
        if told.code not in ("internal", "unavailable"):
            self._refuse(told.code)
        return told

    async def _answered(
        self, method: str, message: bytes, guest: Guest, answer: Answer, began: float
    ) -> bytes:
        size = len(message)
        self.counts.frames[method] += 1
        self.counts.received_bytes[method] += size
        if size > self._transport.max_message_bytes:
            raise TooLarge(
                f"the message has {size} bytes, expected at most {self._transport.max_message_bytes}"
            )
        try:
            made = await answer(message, guest)
        except asyncio.CancelledError:  # the client went away, or its deadline is over
            self.counts.answered(method, "CANCELLED", "passed", perf_counter() - began)
            raise
        self._count_answer(method, made, began)
        return made

    def _count_answer(self, method: str, made: bytes, began: float) -> None:
        self.counts.sent_bytes[method] += len(made)
        self.counts.answered(method, "OK", "passed", perf_counter() - began)

    async def _only(self, context: aio.ServicerContext[bytes, bytes], place: Place) -> bytes:
        """The message of a call of one."""
        limit_s = self._message_timeout_s
        room_s = 2 * limit_s  # quiet streams make room within the limit
        try:
            async with asyncio.timeout(room_s):
                await place.granted
        except TimeoutError:
            text = f"other messages have taken all room for {room_s:g} s{self._more}"
            raise Overloaded(text, OVERLOADED_RETRY_S) from None
        try:
            async with asyncio.timeout(limit_s):
                message: Any = await context.read()
        except TimeoutError:
            raise HttpError(
                408, "body_timeout", "the message did not arrive in time",
                expected=f"a whole message within {limit_s:g} s",
            ) from None  # fmt: skip
        if message is aio.EOF:
            limit = self._transport.max_message_bytes + ROOM
            raise NoMessageError(
                f"expected a message; found none that could be read (whole, of at most {limit} bytes)"
            )
        place.came(len(message))
        return bytes(message)

    async def _serve_stream(
        self,
        method: str,
        context: aio.ServicerContext[bytes, bytes],
        answer: Answer,
        failed: Failed,
        over: asyncio.Future[str],
    ) -> None:
        slots = asyncio.Semaphore(STREAM_MESSAGES)
        writing = asyncio.Lock()  # gRPC sends one message of a call at a time

        async def make(message: bytes) -> bytes:
            began = perf_counter()
            try:
                return await self._answered(method, message, NOBODY, answer, began)
            except Exception as error:
                return failed(message, self._told(method, error, began))

        async def handle(message: bytes, place: Place) -> None:
            made = await make(message)
            del message  # the client may take its time to read the answer
            place.leave()
            async with writing:
                await context.write(made)
            slots.release()

        async with asyncio.TaskGroup() as tasks:  # ends when all are answered; a client that is gone ends all
            turn = Turn.OPENED
            while True:
                await slots.acquire()
                found = await self._next(context, over, turn)
                if found is None:
                    break
                turn = Turn.SENDING
                task = tasks.create_task(handle(*found))
                task.add_done_callback(partial(_leave, found[1]))  # also of one that is ended before it began
        if over.done():
            await context.abort(grpc.StatusCode.UNAVAILABLE, over.result())

    async def _next(
        self, context: aio.ServicerContext[bytes, bytes], over: asyncio.Future[str], turn: Turn
    ) -> tuple[bytes, Place] | None:
        """The next message of a stream, and its place; None at its end, or when it is over."""
        place = self._room.place(partial(self._quiet, over), turn)
        found = None
        try:
            if await _unless(over, place.granted):
                reading = asyncio.ensure_future(context.read())
                if await _unless(over, reading) and (message := reading.result()) is not aio.EOF:
                    place.came(len(message))
                    found = message, place
        finally:
            if found is None:
                place.leave()
        return found

    def _quiet(self, over: asyncio.Future[str]) -> None:
        self._refuse(QUIET)
        _tell(over, (
            f"no whole message came for {self._room.quiet_limit_s():.1f} s, and others wait for room; "
            f"what was answered is done, open the stream again{self._more}"
        ))  # fmt: skip


def _tell(over: asyncio.Future[str], why: str) -> None:
    if not over.done():
        over.set_result(why)


def _leave(place: Place, _: asyncio.Task[None]) -> None:
    place.leave()


async def _unless(over: asyncio.Future[str], other: asyncio.Future[Any]) -> bool:
    """Wait for the other; False, and it is cancelled, if it is over before."""
    try:
        await asyncio.wait((other, over), return_when=asyncio.FIRST_COMPLETED)
        return other.done()
    finally:
        if not other.done():
            other.cancel()


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
