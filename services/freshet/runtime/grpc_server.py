"""A gRPC listener of ours: TLS, token, limits, counters of what was refused, a stop that drains.

Methods are generic ones with raw bytes; most are streams of frames that are answered one by one
(`answered`). gRPC's flow control bounds what one stream sends ahead; what all streams have in work at once is
bounded here, in bytes, and more is refused as `Overloaded` for the client to try again.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import structlog

from freshet.errors import BadInput, ConfigError, FreshetError, Overloaded, Unavailable
from freshet.runtime.grpc_metrics import GRPC_METRICS, ListenerCounts, grpc_readings
from freshet.seams.transport import (
    MIB,
    RETRY_AFTER_S,
    Transport,
    cut,
    listen_credentials,
    method_name,
    shared_options,
)
from freshet.wire.failures import failure_frame
from freshet.wire.frames import BadFrame, Frame, LargeFrame, OtherFrame, decode_frame
from freshet.wire.pieces import Whole, check_whole, pieces_of

__all__ = ["GRPC_METRICS", "WORK_BYTES", "Answer", "GrpcServer", "ListenerCounts", "grpc_readings"]

log = structlog.get_logger("freshet.grpc")

STREAMS = 128
"""At once: each holds a thread while its client is connected; more are refused as overloaded."""

WORK_BYTES = 256 * MIB
"""Of requests in work at once."""

Answer = Callable[[Frame], bytes]
"""Makes the answer to one message. What it raises of ours is answered as a failure; ValueError as
BadInput."""


class GrpcServer:
    """One listener. Methods are added, then it is started; `stop` drains."""

    def __init__(
        self,
        address: str,
        transport: Transport,
        *,
        identity: Mapping[str, str] | None = None,
        streams: int = STREAMS,
        work_bytes: int = WORK_BYTES,
    ) -> None:
        """Make a listener that is not yet one.

        Args:
            address: host:port; port 0 takes a free one.
            identity: metadata that a client must show as it is here, if it shows any of that name: the model
                and its spec's hash, so that a client of another spec is refused before it sends a row.
            streams: at once.
            work_bytes: of requests in work at once.
        """
        self._transport, self.work_bytes = transport, work_bytes
        self.counts = ListenerCounts()
        self._lock = threading.Condition()  # guards counts, work and draining
        self._work = 0
        self._draining = False
        self._methods: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
        self._server = grpc.server(
            ThreadPoolExecutor(streams, thread_name_prefix="grpc"),
            interceptors=[_Gate(transport.tokens_now, dict(identity or {}), self.refuse)],
            options=[*shared_options(transport), ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=streams,
        )
        self._asked = address
        self.port = 0

    def add(self, service: str, method: str, handler: grpc.RpcMethodHandler) -> None:
        """A method of any kind; bytes in, bytes out."""
        self._methods.setdefault(service, {})[method] = handler

    def answered(self, service: str, method: str, answer: Answer) -> None:
        """A stream of frames, each answered in turn."""

        def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._open(method):
                yield from self.answers(method, requests, answer)

        self.add(service, method, grpc.stream_stream_rpc_method_handler(serve))

    def answered_once(self, service: str, method: str, answer: Answer) -> None:
        """A call of one frame with one answer."""

        def serve(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            return self.answers(method, iter([request]), answer)

        self.add(service, method, grpc.unary_stream_rpc_method_handler(serve))

    def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be bound."""
        for service, handlers in self._methods.items():
            name = method_name(service, "").strip("/")
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        credentials = listen_credentials(self._transport, self._begun)
        try:
            self.port = (
                self._server.add_insecure_port(self._asked)
                if credentials is None
                else self._server.add_secure_port(self._asked, credentials)
            )
        except RuntimeError as error:
            raise ConfigError(
                "grpc",
                "address",
                self._asked,
                "an address of this machine and a port that is free",
                str(error),
            ) from error
        self._server.start()

    def stop(self, drain_s: float) -> None:
        """Answer what is in work, refuse the rest as unavailable, then close. Idempotent."""
        deadline = time.monotonic() + drain_s
        with self._lock:
            self._draining = True
            done = self._lock.wait_for(lambda: self._work == 0, drain_s)
        if not done:
            log.warning("requests were cut off by the end of the drain", bytes=self._work)
        self._server.stop(max(0.0, min(deadline - time.monotonic(), 0.1))).wait()

    def _begun(self) -> None:
        with self._lock:
            self.counts.handshakes += 1

    def refuse(self, reason: str) -> None:
        """Count a refusal."""
        with self._lock:
            self.counts.refused[reason] += 1

    def answers(self, method: str, requests: Iterator[bytes], answer: Answer) -> Iterator[bytes]:
        """Answer the messages of one stream in turn, whole ones and pieces; what is no frame ends it."""
        whole, limit = Whole(self._transport.whole_bytes), self._transport.max_message_bytes
        taken, refused = 0, None
        try:
            for request in requests:
                self._count(self.counts.frames, method, 1)
                self._count(self.counts.received_bytes, method, len(request))
                first = not whole.begun
                try:
                    frame = whole.take(decode_frame(request, max_bytes=limit))
                except (BadFrame, LargeFrame, OtherFrame) as error:
                    yield self._ending(error)
                    return
                if first:  # a message counts as work from its first piece on
                    taken, refused = self._taken(whole.size if frame is None else len(request))
                if frame is None:
                    if refused is not None:
                        whole.drop()
                    continue
                made = failure_frame(refused, frame.id) if refused else self._made(method, frame, answer)
                self._done(taken)
                taken = 0
                self._count(self.counts.sent_bytes, method, len(made))
                yield from pieces_of(made, limit)
            if whole.begun:
                yield self._ending(BadFrame("the stream ended within a message", "truncated"))
        finally:
            self._done(taken)

    def _ending(self, error: BadFrame | LargeFrame | OtherFrame) -> bytes:
        self.refuse(error.reason)
        return failure_frame(error, 0)

    def _count(self, counter: Counter[str], method: str, n: int) -> None:
        with self._lock:
            counter[method] += n

    def _made(self, method: str, frame: Frame, answer: Answer) -> bytes:
        made = self._answer_of(method, frame, answer)
        try:
            check_whole(made, self._transport.max_message_bytes)
        except LargeFrame as error:
            self.refuse(error.reason)
            return failure_frame(error, frame.id)
        return made

    def _answer_of(self, method: str, frame: Frame, answer: Answer) -> bytes:
        try:
            return answer(frame)
        except BadFrame as error:
            self.refuse(error.reason)
            return failure_frame(error, frame.id)
        except FreshetError as error:
            return failure_frame(error, frame.id)
        except ValueError as error:  # as the native core refuses what a batch holds
            self.refuse("shape")
            return failure_frame(BadInput(str(error)), frame.id)
        except Exception as error:  # a defect of ours: the caller must not wait for an answer
            log.error("a request failed", method=method, exc_info=error)
            return failure_frame(error, frame.id)

    def _taken(self, size: int) -> tuple[int, Unavailable | None]:
        """(Bytes taken as work, why none were)."""
        try:
            self._take_work(size)
        except Unavailable as error:
            return 0, error
        return size, None

    def _done(self, size: int) -> None:
        with self._lock:
            self._work -= size
            self._lock.notify_all()

    def _take_work(self, size: int) -> None:
        with self._lock:
            if self._draining:
                raise Unavailable("this listener is stopping; ask who takes over")
            if self._work and self._work + size > self.work_bytes:
                self.counts.refused["overloaded"] += 1
                raise Overloaded(
                    f"{self._work} bytes of requests are in work, at most {self.work_bytes}", RETRY_AFTER_S
                )
            self._work += size

    def _open(self, method: str) -> _Opened:
        return _Opened(self, method)


class _Opened:
    """A stream while it is open, for the gauge."""

    def __init__(self, server: GrpcServer, method: str) -> None:
        self._server, self._method = server, method

    def __enter__(self) -> None:
        self._add(1)

    def __exit__(self, *_: object) -> None:
        self._add(-1)

    def _add(self, n: int) -> None:
        with self._server._lock:
            self._server.counts.streams[self._method] += n


class _Gate(grpc.ServerInterceptor):
    """Lets calls in that show the token, and the model that this listener is for."""

    def __init__(
        self,
        tokens: Callable[[], tuple[str, ...]],
        identity: Mapping[str, str],
        refused: Callable[[str], None],
    ) -> None:
        self._tokens = tokens
        self._identity, self._refused = identity, refused

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        metadata = {str(key): value for key, value in details.invocation_metadata}
        if taken := [f"Bearer {token}".encode() for token in self._tokens()]:
            shown = metadata.get("authorization", "")
            given = shown.encode() if isinstance(shown, str) else bytes(shown)
            if not sum(hmac.compare_digest(given, one) for one in taken):  # with all, in constant time
                self._refused("token")
                return _ending(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
        for key, expected in self._identity.items():
            found = metadata.get(key, expected)
            if found != expected:
                self._refused("identity")
                text = f"this listener is for {key} {expected}, the client is for {found}"
                return _ending(grpc.StatusCode.FAILED_PRECONDITION, text)
        return continuation(details)


def _ending(code: grpc.StatusCode, text: str) -> grpc.RpcMethodHandler:
    def end(_: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(code, cut(text))
        yield b""  # not reached: abort raises

    return grpc.stream_stream_rpc_method_handler(end)
