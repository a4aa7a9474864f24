"""gRPC for external clients: the listener, on a service's own event loop beside its HTTP listener, and the
protobuf messages of the .proto files in `schemas/`.

Handlers take and return the bytes of protobuf messages, on the loop of the HTTP handlers, so that they share
state without locks. A handler's exception ends the call with the status of its family.

Every method reads its messages itself, also those that clients know as unary (the same on the wire): so a
message that gRPC drops for its size is noticed and counted.

The messages' descriptors, compiled by `python -m ops.protos`, have their own pool, as `tritonclient` and
`kserve` register the same names in the default. Protobuf's runtime makes the classes, so that no generated
code requires one release of protobuf.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from grpc import aio

from freshet.errors import BadInput, Overloaded, TooLarge
from freshet.http.authenticator import ANONYMOUS, Authenticator, Principal
from freshet.http.endpoint import TOKEN_CODES
from freshet.http.messages import HttpError
from freshet.http.tokens import Scope
from freshet.observability.grpc_metrics import QUIET, ListenerCounts
from freshet.rpc.channel import MARGIN_BYTES, MIB, Transport, message_options
from freshet.rpc.errors import CallStatus, NoMessageError, call_status, shortened
from freshet.rpc.memory_budget import MemoryBudget, Priority, Reservation
from freshet.rpc.server import Context, GrpcServer

CALLS = 1024
"""Open calls. The memory budget bounds their bytes together (`freshet.rpc.memory_budget`)."""

STREAM_MESSAGES = 64
"""Unanswered messages of a stream; beyond it, no message is read, and flow control slows the client."""

STOPPING = "this listener is stopping; what was answered is done"

OVERLOADED_RETRY_S = 1.0

STOP_CHECK_S = 0.1
"""Seconds between two checks of the stop event, as of the HTTP server."""

KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 60_000
"""The answer to a ping waits behind the message that the client sends: over 1 Mbit/s that may be most of a
minute for one large message, during which the connection must not end."""

CLIENT_PING_MS = 10_000
"""Shortest interval of pings without data; gRPC closes connections that ping more often."""

WINDOW_BYTES = 64 << 10
"""Bytes of a call that its client may send before its message is read. By default gRPC grows it with the
link's delay and rate, to many MiB; a message that is being read gets the window that it needs in any case."""

DESCRIPTORS = Path(__file__).with_name("protobuf.binpb")
"""A FileDescriptorSet of all .proto files; a test fails when it is stale."""

OIP, GATEWAY = "inference", "freshet.wire.v1"
"""Packages of the .proto files."""

Handler = Callable[[bytes, Principal], Awaitable[bytes]]
"""Makes the answer to a message of a principal."""

Failed = Callable[[bytes, CallStatus], bytes]
"""Makes the answer to a message after an exception of its handler."""


def _options(transport: Transport) -> list[tuple[str, int]]:
    return [
        *message_options(transport),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", CLIENT_PING_MS),
    ]


class PublicServer(GrpcServer):
    """Answers calls of external clients, within a memory budget, on the event loop on which it is started."""

    def __init__(
        self,
        address: str,
        transport: Transport,
        counts: ListenerCounts,
        *,
        authenticator: Authenticator | None = None,
        message_timeout_s: float = 10.0,
        budget_bytes: int = 256 * MIB,
        budget_setting: str = "",
    ) -> None:
        """Open no port yet.

        Args:
            address: host:port; port 0 takes a free one.
            transport: certificates, and the size of the largest message.
            counts: counts of the listener, for metrics.
            authenticator: finds the principal of a call, and of each message of a stream.
            message_timeout_s: longest time for the message of a call to arrive, and for which a stream may be
                idle while others wait for memory.
            budget_bytes: bytes of all messages that are read or processed.
            budget_setting: name of the setting of `budget_bytes`, for errors.
        """
        super().__init__(address, transport, counts, options=_options(transport), calls=CALLS)
        self._authenticator, self._message_timeout_s = authenticator, message_timeout_s
        self._budget = MemoryBudget(
            budget_bytes, transport.max_message_bytes + MARGIN_BYTES, message_timeout_s
        )
        self._raise_hint = f"; {budget_setting} allows more" if budget_setting else ""
        counts.held_bytes = lambda: self._budget.reserved
        self._ends: set[asyncio.Future[str]] = set()  # of open streams: set to the reason to end early
        self._stopping = False

    def add_open_call(self, service: str, method: str, answer: Callable[[], bytes]) -> None:
        """Add a method without scope. Its message is empty, so it is not read, however long it is."""

        async def serve(_: AsyncIterator[bytes], context: Context) -> bytes:
            began = perf_counter()
            self.counts.frames[method] += 1
            encoded = answer()
            self._count_answer(method, encoded, began)
            return encoded

        self._add(service, method, grpc.stream_unary_rpc_method_handler(serve))

    def add_call(self, service: str, method: str, handler: Handler, *, scope: Scope) -> None:
        """Add a method of one message with one answer; `service` includes its package."""

        async def serve(_: AsyncIterator[bytes], context: Context) -> bytes:
            reservation, began = None, perf_counter()
            try:
                principal = self._authenticate(scope, context)  # before a message is read
                reservation = self._budget.reserve()
                message = await self._read_only(context, reservation)
                return await self._answer(method, message, principal, handler, began)
            except Exception as error:
                await self._abort(method, context, error, began)
                raise
            finally:
                if reservation is not None:
                    reservation.release()

        self._add(service, method, grpc.stream_unary_rpc_method_handler(serve))

    def add_stream(
        self, service: str, method: str, handler: Handler, failed: Failed, *, scope: Scope
    ) -> None:
        """Add a method of many messages, each answered once its answer is ready.

        Args:
            service: name with its package.
            method: name in the service.
            handler: makes the answer to one message.
            failed: makes the answer to a message after an exception of the handler.
            scope: scope that a token must have, at the start of the stream and at each message.
        """

        async def serve(_: AsyncIterator[bytes], context: Context) -> None:
            began = perf_counter()
            try:
                if self._authenticator is not None:
                    self._authenticator.check_token(scope, *credentials_of(context))
            except HttpError as error:
                await self._abort(method, context, error, began)

            async def authenticated(message: bytes, _: Principal) -> bytes:
                # A token may expire or be removed while the stream is open.
                return await handler(message, self._authenticate(scope, context))

            end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            if self._stopping:
                _set_once(end, STOPPING)
            self._ends.add(end)
            self.counts.streams[method] += 1
            try:
                await self._serve_stream(method, context, authenticated, failed, end)
            finally:
                self._ends.discard(end)
                self.counts.streams[method] -= 1

        self._add(service, method, grpc.stream_stream_rpc_method_handler(serve))

    def _add(self, service: str, method: str, handler: grpc.RpcMethodHandler) -> None:
        self.counts.show(method)
        self.add_method(service, method, handler)

    async def start(self) -> None:
        """Listen, on the running loop. Raises ConfigError if the address cannot be bound."""
        await self.listen()

    async def serve(self, stop: threading.Event, drain_s: float) -> None:
        """Answer calls until `stop` is set, then open calls for at most `drain_s`."""
        while not stop.is_set():
            await asyncio.sleep(STOP_CHECK_S)
        self._stopping = True
        for end in self._ends:
            _set_once(end, STOPPING)
        await self.close(drain_s)

    def _authenticate(self, scope: Scope, context: Context) -> Principal:
        if self._authenticator is None:
            return ANONYMOUS
        return self._authenticator.authenticate(scope, *credentials_of(context))

    async def _abort(self, method: str, context: Context, error: Exception, began: float) -> None:
        """End a call with the status of an exception; raises, as gRPC's `abort` does."""
        status = self._count_failure(method, error, began)
        if status.retry_after_ms:
            context.set_trailing_metadata((("retry-after-ms", str(status.retry_after_ms)),))
        await context.abort(status.status, shortened(status.text))

    def _count_failure(self, method: str, error: Exception, began: float) -> CallStatus:
        status = call_status(error)
        door = "refused" if status.code in TOKEN_CODES else "passed"
        self.counts.answered(method, status.status.name, door, perf_counter() - began)
        if status.code not in ("internal", "unavailable"):
            self.refuse(status.code)
        return status

    async def _answer(
        self, method: str, message: bytes, principal: Principal, handler: Handler, began: float
    ) -> bytes:
        size = len(message)
        self.counts.frames[method] += 1
        self.counts.received_bytes[method] += size
        if size > self._transport.max_message_bytes:
            raise TooLarge(
                f"the message has {size} bytes, expected at most {self._transport.max_message_bytes}"
            )
        try:
            encoded = await handler(message, principal)
        except asyncio.CancelledError:  # the client disconnected, or its deadline is over
            self.counts.answered(method, "CANCELLED", "passed", perf_counter() - began)
            raise
        self._count_answer(method, encoded, began)
        return encoded

    def _count_answer(self, method: str, encoded: bytes, began: float) -> None:
        self.counts.sent_bytes[method] += len(encoded)
        self.counts.answered(method, "OK", "passed", perf_counter() - began)

    async def _read_only(self, context: Context, reservation: Reservation) -> bytes:
        """Read the message of a call with one message."""
        limit_s = self._message_timeout_s
        grant_s = 2 * limit_s  # idle streams release memory within the limit
        try:
            async with asyncio.timeout(grant_s):
                await reservation.granted
        except TimeoutError:
            text = f"other messages have taken all room for {grant_s:g} s{self._raise_hint}"
            raise Overloaded(text, OVERLOADED_RETRY_S) from None
        try:
            async with asyncio.timeout(limit_s):
                message: Any = await context.read()
        except TimeoutError:
            raise HttpError(
                408,
                "body_timeout",
                "the message did not arrive in time",
                expected=f"a whole message within {limit_s:g} s",
            ) from None
        if message is aio.EOF:
            limit = self._transport.max_message_bytes + MARGIN_BYTES
            raise NoMessageError(
                f"expected a message; found none that could be read (whole, of at most {limit} bytes)"
            )
        reservation.shrink(len(message))
        return bytes(message)

    async def _serve_stream(
        self, method: str, context: Context, handler: Handler, failed: Failed, end: asyncio.Future[str]
    ) -> None:
        slots = asyncio.Semaphore(STREAM_MESSAGES)
        writing = asyncio.Lock()  # gRPC sends one message of a call at a time

        async def answer(message: bytes) -> bytes:
            began = perf_counter()
            try:
                return await self._answer(method, message, ANONYMOUS, handler, began)
            except Exception as error:
                return failed(message, self._count_failure(method, error, began))

        async def handle(message: bytes, reservation: Reservation) -> None:
            encoded = await answer(message)
            del message  # the client may read the answer slowly
            reservation.release()
            async with writing:
                await context.write(encoded)
            slots.release()

        async with asyncio.TaskGroup() as tasks:  # a client that disconnects cancels them all
            priority = Priority.OPENED
            while True:
                await slots.acquire()
                found = await self._next_message(context, end, priority)
                if found is None:
                    break
                priority = Priority.SENDING
                task = tasks.create_task(handle(*found))
                task.add_done_callback(partial(_release, found[1]))  # also if cancelled before it ran
        if end.done():
            await context.abort(grpc.StatusCode.UNAVAILABLE, end.result())

    async def _next_message(
        self, context: Context, end: asyncio.Future[str], priority: Priority
    ) -> tuple[bytes, Reservation] | None:
        """Return the next message of a stream and its reservation; None at its end, or if `end` is set."""
        reservation = self._budget.reserve(partial(self._end_idle, end), priority)
        found = None
        try:
            if await _done_before(end, reservation.granted):
                reading = asyncio.ensure_future(context.read())
                if await _done_before(end, reading) and (message := reading.result()) is not aio.EOF:
                    reservation.shrink(len(message))
                    found = message, reservation
        finally:
            if found is None:
                reservation.release()
        return found

    def _end_idle(self, end: asyncio.Future[str]) -> None:
        self.refuse(QUIET)
        reason = (
            f"no whole message came for {self._budget.idle_limit_s():.1f} s, and others wait for room; "
            f"what was answered is done, open the stream again{self._raise_hint}"
        )
        _set_once(end, reason)


def _set_once(end: asyncio.Future[str], reason: str) -> None:
    if not end.done():
        end.set_result(reason)


def _release(reservation: Reservation, _: asyncio.Task[None]) -> None:
    reservation.release()


async def _done_before(end: asyncio.Future[str], other: asyncio.Future[Any]) -> bool:
    """Wait for `other`; if `end` is done first, cancel it and return False."""
    try:
        await asyncio.wait((other, end), return_when=asyncio.FIRST_COMPLETED)
        return other.done()
    finally:
        if not other.done():
            other.cancel()


def _peer(context: Context) -> str:
    """Return the address in `ipv4:127.0.0.1:50000` or `ipv6:[::1]:50000`, or another text as it is."""
    kind, _, rest = context.peer().partition(":")
    return unquote(rest).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else context.peer()


def credentials_of(context: Context) -> tuple[bytes | None, str, bytes | None]:
    """Return Authorization, address and X-Forwarded-For of a call, for `Authenticator`."""
    # Proxies may each add a line; all lines are one list. gRPC 1.85 keeps the last line only: then there are
    # fewer entries than proxies, and none is trusted.
    forwarded = b",".join(_metadata(context, "x-forwarded-for"))
    return next(reversed(_metadata(context, "authorization")), None), _peer(context), forwarded or None


def _metadata(context: Context, name: str) -> list[bytes]:
    """Return the values of a name in the call's metadata, in order."""
    found = context.invocation_metadata() or ()
    return [v.encode() if isinstance(v, str) else bytes(v) for key, v in found if key == name]


class Messages:
    """The message classes of one package as attributes, with the fields of the .proto file."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        try:
            made = message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{self._package}.{name}"))
        except KeyError:
            raise AttributeError(f"{self._package} has no message {name}") from None
        setattr(self, name, made)
        return made


@cache
def messages(package: str) -> Messages:
    """Return the messages of OIP or GATEWAY."""
    return Messages(package)


def parse(message_class: Any, data: bytes) -> Any:
    """Parse a message; unknown fields are ignored. Raises BadInput."""
    try:
        return message_class.FromString(data)
    except DecodeError:
        name = message_class.DESCRIPTOR.full_name
        raise BadInput(f"expected a protobuf message {name}, found {len(data)} bytes that are none") from None


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
        pool.Add(file)
    return pool
