"""A connection to one gRPC listener of another service: streams of requests, matched with answers by id.

A stream is reopened after errors. Unanswered requests are bounded in bytes; further ones fail with Overloaded
at once instead of waiting.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import grpc

from freshet.errors import FreshetError, Overloaded, TooLarge, Unavailable
from freshet.rpc.channel import RETRY_AFTER_S, Transport, method_name, open_channel
from freshet.rpc.errors import error_of, failure_of
from freshet.rpc.frames import BadFrame, Frame, Kind, decode_frame, encode_frame
from freshet.rpc.pieces import MessageAssembler, check_message_size, split_message
from freshet.wires.link_codecs import EXACT, LinkCodecs

Metadata = Sequence[tuple[str, str]]


@dataclass(slots=True)
class LinkCounts:
    """Traffic of a link since its creation. Bytes are those of the frames that gRPC gets and gives."""

    sent_frames: int = 0  # requests
    sent_bytes: int = 0
    received_bytes: int = 0
    broken: int = 0  # streams that ended with an error

    def add(self, other: LinkCounts) -> None:
        """Add the traffic of another link."""
        self.sent_frames += other.sent_frames
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.broken += other.broken


class Link:
    """Lookups, pushes and unary calls to one shard. Thread-safe."""

    def __init__(
        self,
        address: str,
        transport: Transport,
        service: str,
        metadata: Metadata,
        codecs: LinkCodecs | None = None,
        *,
        in_flight_bytes: int,
    ) -> None:
        self.address, self.transport, self._service = address, transport, service
        self._metadata, self._limit = metadata, in_flight_bytes
        self.codecs = codecs or LinkCodecs(EXACT, same_host=True)
        self._pems, self._channel = transport.pems(), open_channel(address, transport)
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._closed = False
        self._counts_lock = threading.Lock()
        self._counts = LinkCounts()

    @property
    def counts(self) -> LinkCounts:
        """A copy of its counts."""
        with self._counts_lock:
            return replace(self._counts)

    def count(self, more: LinkCounts) -> None:
        """Add to its counts."""
        with self._counts_lock:
            self._counts.add(more)

    def ask(self, method: str, make: Callable[[int], bytes]) -> Future[Frame]:
        """Send a request on the method's stream; `make` encodes it under the id it is given.

        The future holds the answer or an error: the shard's own, Unavailable if the stream broke (the outcome
        is unknown), Overloaded beyond the limit, or TooLarge if the request exceeds the largest message.
        """
        frame_id = next(self._ids)
        data = make(frame_id)
        try:
            check_message_size(len(data), self.transport.max_message_bytes)
        except TooLarge as error:
            return _failed(error)
        with self._lock:
            stream = self._streams.get(method)
            if self._closed:
                return _failed(Unavailable(f"{self.address}: the connection was closed"))
            if stream is None or stream.broken:
                self._renew_channel()
                name = method_name(self._service, method)
                stream = _Stream(self._channel, name, self, self._metadata)
                self._streams[method] = stream
            return stream.ask(frame_id, data, self._limit)

    def call(self, method: str, timeout_s: float) -> Frame:
        """Make a unary call without arguments.

        Raises Unavailable, Mismatch, ConfigError, Corrupt or BadFrame.
        """
        call = self._channel.unary_stream(method_name(self._service, method))
        whole = MessageAssembler(self.transport.whole_bytes)
        frame: Frame | None = None
        request = encode_frame(Frame(Kind.REQUEST))
        self.count(LinkCounts(sent_frames=1, sent_bytes=len(request)))
        try:
            answers = call(request, timeout=timeout_s, metadata=self._metadata)
        except ValueError as error:  # gRPC's for a closed channel: another thread has closed it
            raise Unavailable(f"{self.address}: the connection was closed") from error
        try:
            for data in answers:
                self.count(LinkCounts(received_bytes=len(data)))
                frame = whole.add_frame(decode_frame(data, max_bytes=self.transport.max_message_bytes))
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error
        if frame is None:
            raise BadFrame(f"{self.address}: expected an answer to {method}, found none", "truncated")
        if frame.kind == Kind.FAILURE:
            raise failure_of(frame)
        return frame

    def _renew_channel(self) -> None:
        """Open a new channel if certificates were renewed; a channel keeps its first ones until they expire.

        Only while no stream uses the channel. Needs the lock.
        """
        pems = self.transport.pems()
        if pems != self._pems and all(stream.broken for stream in self._streams.values()):
            former = self._channel
            self._pems, self._channel = pems, open_channel(self.address, self.transport)
            former.close()

    def carried(self) -> tuple[int, int]:
        """Return the bytes received and sent since its creation."""
        counts = self.counts
        return counts.received_bytes, counts.sent_bytes

    def give_up(self, method: str, why: str) -> None:
        """End a stream that does not answer; its requests fail, and the next one opens a new stream."""
        with self._lock:
            stream = self._streams.pop(method, None)
        if stream is not None:
            stream.end(Unavailable(f"{self.address}: {why}"))

    def close(self) -> None:
        """End the streams; open requests fail. Idempotent."""
        with self._lock:
            self._closed = True
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.end(Unavailable(f"{self.address}: the connection was closed"))
        self._channel.close()


class _Stream:
    """One bidirectional stream and its unanswered requests."""

    def __init__(self, channel: grpc.Channel, name: str, link: Link, metadata: Metadata) -> None:
        self._link = link
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._waiting: dict[int, tuple[Future[Frame], int]] = {}
        self._bytes = 0  # of unanswered requests
        self._lock = threading.Lock()
        self.broken: FreshetError | None = None  # the error that ended the stream
        self._call = channel.stream_stream(name)(self._requests(), metadata=metadata)
        threading.Thread(target=self._receive, name=f"link {link.address}", daemon=True).start()

    def ask(self, frame_id: int, data: bytes, limit: int) -> Future[Frame]:
        future: Future[Frame] = Future()
        with self._lock:
            if self.broken is not None:
                return _failed(self.broken)
            if self._waiting and self._bytes + len(data) > limit:
                return _failed(
                    Overloaded(
                        f"{self._link.address}: {self._bytes} bytes are under way, at most {limit}",
                        RETRY_AFTER_S,
                    )
                )
            self._waiting[frame_id] = (future, len(data))
            self._bytes += len(data)
            self._link.count(LinkCounts(sent_frames=1))
            self._outgoing.put(data)
        return future

    def end(self, error: FreshetError) -> None:
        """Fail all unanswered requests and stop both directions. Idempotent."""
        with self._lock:
            self.broken = self.broken or error
            waiting, self._waiting = list(self._waiting.values()), {}
        self._outgoing.put(None)
        self._call.cancel()
        for future, _ in waiting:
            future.set_exception(error)

    def _requests(self) -> Iterator[bytes]:
        while (data := self._outgoing.get()) is not None:
            for piece in split_message(data, self._link.transport.max_message_bytes):
                self._link.count(LinkCounts(sent_bytes=len(piece)))
                yield piece

    def _receive(self) -> None:
        where, limits = self._link.address, self._link.transport
        whole = MessageAssembler(limits.whole_bytes)
        error: FreshetError = Unavailable(f"{where}: the shard has ended the stream")
        try:
            for data in self._call:
                self._link.count(LinkCounts(received_bytes=len(data)))
                frame = whole.add_frame(decode_frame(data, max_bytes=limits.max_message_bytes))
                if frame is None:
                    continue
                if frame.id == 0:  # an error of the stream itself, which ends it
                    error = failure_of(frame)
                    break
                self._answer(frame)
        except grpc.RpcError as failed:
            error = error_of(failed, where)
        except FreshetError as failed:
            error = failed
        except Exception as failed:  # unanswered requests must fail, too
            error = FreshetError(f"{where}: {failed!r}")
        self._link.count(LinkCounts(broken=1))
        self.end(error)

    def _answer(self, frame: Frame) -> None:
        with self._lock:
            future, size = self._waiting.pop(frame.id, (None, 0))
            self._bytes -= size
        if future is None:
            return  # given up before the answer came
        error: FreshetError | None = None
        if frame.kind == Kind.FAILURE:
            try:
                error = failure_of(frame)
            except FreshetError as unreadable:  # such as a family of a later release
                error = unreadable
        with contextlib.suppress(Exception):  # raised by a callback of the caller
            if error is None:
                future.set_result(frame)
            else:
                future.set_exception(error)


def _failed(error: FreshetError) -> Future[Frame]:
    future: Future[Frame] = Future()
    future.set_exception(error)
    return future
