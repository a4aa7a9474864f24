"""gRPC listeners, on grpc.aio: TLS and counts of all of them; the listener for frames between services.

`GrpcServer` is a listener with its methods. `FrameServer` answers streams of frames from other services;
`freshet.rpc.public_server` answers calls of external clients.
"""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeAlias

import grpc
import structlog
import uvloop
from grpc import aio

from freshet.config.spec.identity import explain_defaults
from freshet.errors import BadInput, ConfigError, FreshetError, Overloaded, Unavailable
from freshet.observability.grpc_metrics import ListenerCounts
from freshet.rpc.channel import MIB, RETRY_AFTER_S, Transport, method_name, peer_options
from freshet.rpc.errors import failure_frame, shortened
from freshet.rpc.frames import BadFrame, Frame, LargeFrame, OtherFrame, decode_frame
from freshet.rpc.pieces import MessageAssembler, check_message_size, split_message

log = structlog.get_logger("freshet.grpc")

Context: TypeAlias = aio.ServicerContext[bytes, bytes]

STREAMS = 128
"""Open streams: each may wait in a thread for its answer. More are refused as overloaded."""

SPARE_CALLS = 32
"""Calls besides streams: those with one answer, and streams that are refused."""

WORK_BYTES = 256 * MIB
"""Bytes of requests in work at once, and of answers that are made at once."""

PIECE_TIMEOUT_S = 10.0
"""Longest wait for the next piece of a message: pieces follow each other at once."""

STOP_GRACE_S = 0.1
"""Seconds for which open calls stay after the drain."""

Answer = Callable[[Frame], bytes]
"""Makes the answer to one message, in a thread. Errors of `freshet.errors` are answered as failures,
ValueError as BadInput."""


class GrpcServer:
    """A listener on one event loop: methods are added, then it listens until it is closed."""

    def __init__(
        self,
        address: str,
        transport: Transport,
        counts: ListenerCounts,
        *,
        options: Sequence[tuple[str, int]],
        calls: int,
        interceptors: Sequence[aio.ServerInterceptor] = (),
    ) -> None:
        """Open no port yet.

        Args:
            address: host:port; port 0 takes a free one.
            transport: certificates and size limit.
            counts: counts of the listener, for metrics.
            options: channel arguments.
            calls: open calls; gRPC refuses more with RESOURCE_EXHAUSTED.
        """
        self._address, self._transport, self.counts = address, transport, counts
        self._options, self._calls, self._interceptors = options, calls, interceptors
        self._methods: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
        self._lock = threading.Lock()  # guards refusals and handshakes, which are counted in several threads
        self._server: aio.Server | None = None
        self.port = 0

    def add_method(self, service: str, method: str, handler: grpc.RpcMethodHandler) -> None:
        """Add a method with bytes as messages; `service` includes its package."""
        self._methods.setdefault(service, {})[method] = handler

    async def listen(self) -> None:
        """Open the port. Raises ConfigError if the address cannot be bound."""
        self._server = server = aio.server(
            options=[*self._options, ("grpc.so_reuseport", 0)],
            interceptors=self._interceptors,
            maximum_concurrent_rpcs=self._calls,
        )
        for service, handlers in self._methods.items():
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        credentials = self._credentials()
        try:
            self.port = (
                server.add_insecure_port(self._address)
                if credentials is None
                else server.add_secure_port(self._address, credentials)
            )
        except RuntimeError as error:
            expected = "an address of this machine and a port that is free"
            raise ConfigError("grpc", "address", self._address, expected, str(error)) from error
        await server.start()

    async def close(self, grace_s: float) -> None:
        """Accept no call any more; cancel those that are open after `grace_s`."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def refuse(self, reason: str) -> None:
        """Count a refusal. Thread-safe."""
        with self._lock:
            self.counts.refused[reason] += 1

    def _credentials(self) -> grpc.ServerCredentials | None:
        """Return the TLS credentials, which follow renewed certificates; None without TLS."""
        if not self._transport.secure:
            return None
        current = self._transport.pems()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            # gRPC calls this from its threads as a handshake begins, and reports no failed handshake: a
            # client with a wrong certificate shows as a handshake without calls.
            nonlocal current
            with self._lock:
                self.counts.handshakes += 1
            pems = self._transport.pems()
            if pems is current or pems == current:
                return None
            current = pems
            return _certificates(pems)

        return grpc.dynamic_ssl_server_credentials(
            _certificates(current), renewed, require_client_authentication=bool(self._transport.ca)
        )


def _certificates(pems: Any) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(pems.key, pems.cert)], root_certificates=pems.ca or None
    )


class FrameServer(GrpcServer):
    """Answers frames of other services. It has a thread with an event loop, and threads that make answers.

    Requests of a stream are answered in turn. gRPC's flow control bounds the bytes that a stream sends ahead;
    the bytes of all requests in work are bounded here, and further requests are refused as Overloaded.
    """

    def __init__(
        self,
        address: str,
        transport: Transport,
        *,
        identity: Mapping[str, str] | None = None,
        streams: int = STREAMS,
        work_bytes: int = WORK_BYTES,
        piece_timeout_s: float = PIECE_TIMEOUT_S,
    ) -> None:
        """Open no port yet.

        Args:
            address: host:port; port 0 takes a free one.
            identity: metadata of the model and its spec's hash. A client that sends other values is refused
                before it sends a row.
            streams: limit of open streams.
            work_bytes: limit of requests in work together, and of answers that are made together. It also
                bounds a message in pieces, but a message of the transport's limit is always accepted.
            piece_timeout_s: longest wait for the next piece of a message.
        """
        super().__init__(
            address,
            transport,
            ListenerCounts(),
            options=peer_options(transport),
            calls=streams + SPARE_CALLS,
            interceptors=[_PeerCheck(transport.tokens_now, dict(identity or {}), self.refuse)],
        )
        self.streams, self.work_bytes, self._piece_timeout_s = streams, work_bytes, piece_timeout_s
        self._longest = min(transport.whole_bytes, max(work_bytes, transport.max_message_bytes))
        self._threads = ThreadPoolExecutor(streams + SPARE_CALLS, thread_name_prefix="grpc-answer")
        self._answer_bytes = 0  # reserved for answers; guarded by the lock
        # All below belongs to the loop.
        self._streams_open = self._work = self._unsent = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._stop_after: asyncio.Future[float] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def add_stream(self, service: str, method: str, answer: Answer) -> None:
        """Add a method for streams of frames, answered by `answer`."""
        self.add_sessions(service, method, lambda: nullcontext(answer))

    def add_sessions(
        self, service: str, method: str, open_session: Callable[[], AbstractContextManager[Answer]]
    ) -> None:
        """Add a method that opens a session for each stream; it ends, in a thread, with its stream."""

        async def serve(_: AsyncIterator[bytes], context: Context) -> None:
            if self._streams_open >= self.streams:
                self.refuse("streams")
                log.warning(
                    "a stream was refused: the limit of open streams is reached", streams=self.streams
                )
                text = f"{self.streams} streams are open here, and no more may be"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            self._streams_open += 1
            self.counts.streams[method] += 1
            session = ExitStack()
            try:
                await self._answer_frames(method, session.enter_context(open_session()), context)
            finally:
                self._streams_open -= 1
                self.counts.streams[method] -= 1
                await self._in_thread(session.close)

        self._add(service, method, serve)

    def add_call(self, service: str, method: str, answer: Answer) -> None:
        """Add a method of one request; its answer may come in pieces."""

        async def serve(_: AsyncIterator[bytes], context: Context) -> None:
            await self._answer_frames(method, answer, context)

        self._add(service, method, serve)

    def _add(
        self, service: str, method: str, serve: Callable[[AsyncIterator[bytes], Context], Awaitable[None]]
    ) -> None:
        package_service = method_name(service, "").strip("/")
        self.add_method(package_service, method, grpc.stream_stream_rpc_method_handler(serve))

    def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be bound."""
        listening: Future[None] = Future()
        self._thread = threading.Thread(target=self._run_loop, args=(listening,), name="grpc", daemon=True)
        self._thread.start()
        try:
            listening.result()
        except ConfigError:
            self._thread = None  # it has ended
            raise

    def stop(self, drain_s: float) -> None:
        """Finish requests in work for at most `drain_s`, refuse others as unavailable, close. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None or self._stop_after is None:
            return
        self._loop.call_soon_threadsafe(self._stop_after.set_result, drain_s)
        thread.join()
        self._threads.shutdown(wait=False)

    @contextmanager
    def reserve_answer(self, size: int) -> Iterator[None]:
        """Reserve bytes of an answer while it is made. Thread-safe.

        Raises:
            LargeFrame: it could not be sent, or exceeds `work_bytes`.
            Overloaded: other answers have reserved too much; they are retried later.
        """
        check_message_size(size, self._transport.max_message_bytes)
        if size > self._longest:
            raise LargeFrame(f"answer: expected at most {self._longest} bytes, found {size}")
        with self._lock:
            reserved = self._answer_bytes
            fits = not reserved or reserved + size <= self.work_bytes
            if fits:
                self._answer_bytes += size
        if not fits:
            raise self._overloaded(f"{reserved} bytes of answers are being made")
        try:
            yield
        finally:
            with self._lock:
                self._answer_bytes -= size

    # --- the loop

    def _run_loop(self, listening: Future[None]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(listening))

    async def _serve(self, listening: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_after = self._loop.create_future()
        try:
            await self.listen()
        except BaseException as error:  # the thread that starts the server raises it
            listening.set_exception(error)
            return
        listening.set_result(None)
        drain_s = await self._stop_after
        self._draining = True
        self._update_idle()
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("requests were cancelled at the end of the drain", bytes=self._work)
        await self.close(STOP_GRACE_S)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in a thread. If the client cancels the call, wait for the function all the same:
        until it returns, its request is work, and its session must not end."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not self._draining:
                await asyncio.wait([running])
            raise

    async def _answer_frames(self, method: str, answer: Answer, context: Context) -> None:
        """Answer the messages of one stream in turn. A message that is not a frame ends the stream."""
        limit = self._transport.max_message_bytes
        assembler = MessageAssembler(self._longest)
        reserved, refusal = 0, None  # of the message that arrives
        try:
            while (data := await self._read(context, assembler)) is not aio.EOF:
                self.counts.frames[method] += 1
                self.counts.received_bytes[method] += len(data)
                try:
                    frame = assembler.add_frame(decode_frame(data, max_bytes=limit))
                except (BadFrame, LargeFrame, OtherFrame) as error:
                    await context.write(self._last_answer(error))
                    return
                if refusal is None:  # pieces count as work as they arrive
                    refusal = self._reserve(len(data), reserved)
                    reserved += 0 if refusal else len(data)
                if frame is None:
                    if refusal is not None:
                        assembler.discard()
                        self._release(reserved)
                        reserved = 0
                    continue
                if refusal is None:
                    encoded = await self._in_thread(self._make_answer, method, frame, answer)
                else:
                    encoded = failure_frame(refusal, frame.id)
                self._unsent += 1  # before the release, as a drain also waits for the answer
                self._release(reserved)
                reserved, refusal = 0, None
                try:
                    self.counts.sent_bytes[method] += len(encoded)
                    for piece in split_message(encoded, limit):
                        await context.write(piece)
                finally:
                    self._unsent -= 1
                    self._update_idle()
                del data, frame, encoded  # an idle stream holds no message
            if assembler.incomplete:
                incomplete = BadFrame("the stream ended within a message", "truncated")
                await context.write(self._last_answer(incomplete))
        finally:
            self._release(reserved)

    async def _read(self, context: Context, assembler: MessageAssembler) -> Any:
        """Return the next frame, or EOF. Cancels the call if the next piece of a message is late."""
        if not assembler.incomplete:
            return await context.read()
        try:
            async with asyncio.timeout(self._piece_timeout_s):
                return await context.read()
        except TimeoutError:
            self.refuse("late")
            log.warning("a stream was ended in the middle of a message")
            text = f"the next piece of a message did not come within {self._piece_timeout_s:g} s"
            await context.abort(grpc.StatusCode.CANCELLED, text)

    def _reserve(self, size: int, own: int) -> FreshetError | None:
        """Count bytes of a request as work, or return the reason for its refusal; `own` bytes are counted."""
        if self._draining and not own:
            return Unavailable("this listener is stopping; another one takes over")
        if self._work > own and self._work + size > self.work_bytes:
            return self._overloaded(f"{self._work} bytes of requests are in work")
        self._work += size
        return None

    def _release(self, size: int) -> None:
        self._work -= size
        self._update_idle()

    def _update_idle(self) -> None:
        if self._draining and self._work == self._unsent == 0:
            self._idle.set()

    def _overloaded(self, reason: str) -> Overloaded:
        self.refuse("overloaded")
        return Overloaded(f"{reason}, at most {self.work_bytes} may be", RETRY_AFTER_S)

    def _last_answer(self, error: BadFrame | LargeFrame | OtherFrame) -> bytes:
        self.refuse(error.reason)
        return failure_frame(error, 0)

    # --- in a thread

    def _make_answer(self, method: str, frame: Frame, answer: Answer) -> bytes:
        try:
            encoded = answer(frame)
            check_message_size(len(encoded), self._transport.max_message_bytes)
            return encoded
        except (BadFrame, LargeFrame) as error:
            self.refuse(error.reason)
            return failure_frame(error, frame.id)
        except FreshetError as error:
            return failure_frame(error, frame.id)
        except ValueError as error:  # raised by the native core for the content of a batch
            self.refuse("shape")
            return failure_frame(BadInput(str(error)), frame.id)
        except Exception as error:  # a defect of ours; without an answer the client would wait
            log.error("a request failed", method=method, exc_info=error)
            return failure_frame(error, frame.id)


class _PeerCheck(aio.ServerInterceptor):
    """Refuses calls without a valid token, and calls for another model or spec."""

    def __init__(
        self,
        tokens: Callable[[], tuple[str, ...]],
        identity: Mapping[str, str],
        refuse: Callable[[str], None],
    ) -> None:
        self._tokens, self._identity, self._refuse = tokens, identity, refuse

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        metadata = {str(key): value for key, value in details.invocation_metadata}
        if valid := [f"Bearer {token}".encode() for token in self._tokens()]:
            sent = metadata.get("authorization", "")
            given = sent.encode() if isinstance(sent, str) else bytes(sent)
            if not sum(hmac.compare_digest(given, one) for one in valid):  # with all, in constant time
                self._refuse("token")
                return _refusing(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
        for key, expected in self._identity.items():
            found = metadata.get(key, expected)
            if found != expected:
                self._refuse("identity")
                text = f"this listener is for {key} {expected}, the client is for {found}"
                hint = explain_defaults(expected, str(found))
                return _refusing(grpc.StatusCode.FAILED_PRECONDITION, f"{text}\n{hint}" if hint else text)
        return await continuation(details)


def _refusing(code: grpc.StatusCode, text: str) -> grpc.RpcMethodHandler:
    async def abort(_: AsyncIterator[bytes], context: Context) -> None:
        await context.abort(code, shortened(text))

    return grpc.stream_stream_rpc_method_handler(abort)
