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
from contextlib import contextmanager
from typing import Any

import grpc
import structlog

from freshet.config.spec.identity import explain_defaults
from freshet.errors import BadInput, ConfigError, FreshetError, Overloaded, Unavailable
from freshet.observability.grpc_metrics import GRPC_METRICS, ListenerCounts
from freshet.rpc.channel import (
    MIB,
    RETRY_AFTER_S,
    Transport,
    cut,
    listen_credentials,
    method_name,
    shared_options,
)
from freshet.rpc.failures import failure_frame
from freshet.rpc.frames import BadFrame, Frame, LargeFrame, OtherFrame, decode_frame
from freshet.rpc.late_pieces import LatePieces
from freshet.rpc.pieces import Whole, check_whole, pieces_of

__all__ = ["GRPC_METRICS", "STREAMS", "WORK_BYTES", "Answer", "GrpcServer", "ListenerCounts"]

log = structlog.get_logger("freshet.grpc")

STREAMS = 128
"""At once: each holds a thread while its client is connected; more are refused as overloaded."""

SPARE = 32
"""Threads besides, for calls of one answer, and for telling streams that there are too many: what is beyond
them too gRPC refuses, and tells nobody here."""

WORK_BYTES = 256 * MIB
"""Of requests in work at once."""

PIECE_S = 10.0
"""Until the next piece of a message that has begun must have come: pieces follow each other at once."""

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
        piece_s: float = PIECE_S,
    ) -> None:
        """Make a listener that is not yet one.

        Args:
            address: host:port; port 0 takes a free one.
            identity: metadata that a client must show as it is here, if it shows any of that name: the model
                and its spec's hash, so that a client of another spec is refused before it sends a row.
            streams: at once.
            work_bytes: of requests in work at once, and of answers that are being made; no message with all
                its pieces is taken that is longer, nor an answer made, but one of the transport's limit is.
            piece_s: how long the next piece of a message may be in coming.
        """
        self._transport, self.streams, self._streams_open = transport, streams, 0
        self.work_bytes = work_bytes
        self._longest = min(transport.whole_bytes, max(work_bytes, transport.max_message_bytes))
        self._late = LatePieces(piece_s, self._ended_late)
        self.counts = ListenerCounts()
        self._lock = threading.Condition()  # guards counts, work and draining
        self._work = self._answers = self._unsent = 0
        self._draining = False
        self._methods: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
        self._server = grpc.server(
            ThreadPoolExecutor(streams + SPARE, thread_name_prefix="grpc"),
            interceptors=[_Gate(transport.tokens_now, dict(identity or {}), self.refuse)],
            options=[*shared_options(transport), ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=streams + SPARE,
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
                yield from self.answers(method, requests, answer, context)

        self.add(service, method, grpc.stream_stream_rpc_method_handler(serve))

    def answered_once(self, service: str, method: str, answer: Answer) -> None:
        """A call of one frame with one answer."""

        def serve(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._answers_to(method, iter([request]), answer, context)

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
        self._late.start()

    def stop(self, drain_s: float) -> None:
        """Answer what is in work, refuse the rest as unavailable, then close. Idempotent."""
        deadline = time.monotonic() + drain_s
        with self._lock:
            self._draining = True
            done = self._lock.wait_for(lambda: self._work == self._unsent == 0, drain_s)
        if not done:
            log.warning("requests were cut off by the end of the drain", bytes=self._work)
        self._server.stop(max(0.0, min(deadline - time.monotonic(), 0.1))).wait()
        self._late.stop()

    def _ended_late(self) -> None:
        self.refuse("late")
        log.warning("a stream was ended in the middle of a message")

    def _begun(self) -> None:
        with self._lock:
            self.counts.handshakes += 1

    def refuse(self, reason: str) -> None:
        """Count a refusal."""
        with self._lock:
            self.counts.refused[reason] += 1

    def answers(
        self, method: str, requests: Iterator[bytes], answer: Answer, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Answer the messages of one stream in turn, whole ones and pieces; what is no frame ends it."""
        with self._lock:
            self._streams_open += 1
            fits = self._streams_open <= self.streams
        try:
            if not fits:
                self.refuse("streams")
                log.warning("a stream was refused: as many as may be are open", streams=self.streams)
                text = f"{self.streams} streams are open here, and no more may be"
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            yield from self._answers_to(method, requests, answer, context)
        finally:
            with self._lock:
                self._streams_open -= 1

    def _answers_to(
        self, method: str, requests: Iterator[bytes], answer: Answer, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        limit = self._transport.max_message_bytes
        whole = Whole(self._longest)
        taken, refused = 0, None
        try:
            for request in requests:
                self._count(self.counts.frames, method, 1)
                self._count(self.counts.received_bytes, method, len(request))
                try:
                    frame = whole.take(decode_frame(request, max_bytes=limit))
                except (BadFrame, LargeFrame, OtherFrame) as error:
                    yield self._ending(error)
                    return
                if refused is None:  # what has come of a message counts as work
                    refused = self._refused(len(request), own=taken)
                    taken += 0 if refused else len(request)
                if frame is None:
                    self._late.expect(context)
                    if refused is not None:
                        whole.drop()
                        self._done(taken)
                        taken = 0
                    continue
                self._late.forget(context)
                made = failure_frame(refused, frame.id) if refused else self._made(method, frame, answer)
                with self._sending():  # before it is no work any more: a stop waits for the answer, too
                    self._done(taken)
                    taken, refused = 0, None
                    self._count(self.counts.sent_bytes, method, len(made))
                    yield from pieces_of(made, limit)
            if whole.begun and self._late.forget(context):  # else it was ended here, which is counted
                yield self._ending(BadFrame("the stream ended within a message", "truncated"))
        finally:
            self._late.forget(context)
            self._done(taken)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        with self._lock:
            self._unsent += 1
        try:
            yield
        finally:
            with self._lock:
                self._unsent -= 1
                self._lock.notify_all()

    @contextmanager
    def making(self, size: int) -> Iterator[None]:
        """Make an answer of so many bytes.

        Raises:
            LargeFrame: it could not be sent, or is longer than all that may be in work.
            Overloaded: others are being made, and there is no room for it beside them.
        """
        check_whole(size, self._transport.max_message_bytes)
        if size > self._longest:
            raise LargeFrame(f"answer: expected at most {self._longest} bytes, found {size}")
        with self._lock:
            if self._answers and self._answers + size > self.work_bytes:
                raise self._overloaded(f"{self._answers} bytes of answers are being made")
            self._answers += size
        try:
            yield
        finally:
            with self._lock:
                self._answers -= size

    def _ending(self, error: BadFrame | LargeFrame | OtherFrame) -> bytes:
        self.refuse(error.reason)
        return failure_frame(error, 0)

    def _count(self, counter: Counter[str], method: str, n: int) -> None:
        with self._lock:
            counter[method] += n

    def _made(self, method: str, frame: Frame, answer: Answer) -> bytes:
        made = self._answer_of(method, frame, answer)
        try:
            check_whole(len(made), self._transport.max_message_bytes)
        except LargeFrame as error:
            self.refuse(error.reason)
            return failure_frame(error, frame.id)
        return made

    def _answer_of(self, method: str, frame: Frame, answer: Answer) -> bytes:
        try:
            return answer(frame)
        except (BadFrame, LargeFrame) as error:
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

    def _done(self, size: int) -> None:
        with self._lock:
            self._work -= size
            self._lock.notify_all()

    def _refused(self, size: int, own: int) -> Unavailable | None:
        """Count bytes of a request as work, of which `own` count already; or why they are not."""
        with self._lock:
            if self._draining and not own:
                return Unavailable("this listener is stopping; ask who takes over")
            if self._work > own and self._work + size > self.work_bytes:
                return self._overloaded(f"{self._work} bytes of requests are in work")
            self._work += size
            return None

    def _overloaded(self, what: str) -> Overloaded:
        """Counted; under the lock."""
        self.counts.refused["overloaded"] += 1
        return Overloaded(f"{what}, at most {self.work_bytes} may be", RETRY_AFTER_S)

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
                hint = explain_defaults(expected, str(found))
                return _ending(grpc.StatusCode.FAILED_PRECONDITION, f"{text}\n{hint}" if hint else text)
        return continuation(details)


def _ending(code: grpc.StatusCode, text: str) -> grpc.RpcMethodHandler:
    def end(_: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(code, cut(text))
        yield b""  # not reached: abort raises

    return grpc.stream_stream_rpc_method_handler(end)
