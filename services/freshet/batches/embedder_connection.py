"""One lane's connection to one embedder: prefetched requests, received batches, returned gradients.

Gradients that an overloaded embedder refuses are sent again in order. An error of the connection ends the
feed; its embedder then issues the unreturned batches again.

Letters: U rows of a group, G gradients of a group, S floats of a row.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from freshet.batches.frames import Names, RequestHeader, batch_of, flush_frame, gradients_frame, take_frame
from freshet.batches.stream import TrainBatch
from freshet.errors import FreshetError, Overloaded
from freshet.rows.grpc.client import Link
from freshet.rpc.frames import Frame, decode_frame, encode_frame
from freshet.rpc.value_formats import RowCodec
from freshet.types import F32, U32

__all__ = ["Feed", "FeedOwner", "Out", "StreamCounts"]


@dataclass(slots=True)
class StreamCounts:
    """Counts of a stream since it was opened."""

    batches: int = 0
    samples: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    fenced: int = 0  # batches of replaced embedders
    broken: int = 0  # feeds that ended with an error


@dataclass(slots=True, eq=False)
class Out:
    """A batch between `next_batch` and `push_gradients`."""

    feed: Feed
    id: int
    batch: TrainBatch


class FeedOwner(Protocol):
    """The stream of a feed, as the feed uses it. Thread-safe."""

    counts: StreamCounts

    @property
    def names(self) -> Names:
        """The names of the columns."""

    @property
    def codec(self) -> RowCodec:
        """The codec of gradients."""

    @property
    def now(self) -> float:
        """The monotonic time of deadlines in seconds."""

    def vector(self) -> dict[int, int]:
        """Return the dense vector as {partition: next offset}."""

    def request_header(self, feed: int, lane: int) -> RequestHeader:
        """Return the header of a feed's requests."""

    def feed_link(self, address: str) -> Link:
        """Open the connection of one lane."""

    def put_out(self, out: Out, size: int) -> None:
        """Record a batch of `size` bytes that a feed hands over."""

    def notify(self) -> None:
        """Wake the lanes: a batch has arrived or a feed has ended."""

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until `notify`."""


_feed_ids = itertools.count(secrets.randbits(48) << 8)
"""Ids of this process's feeds; other processes start at other random numbers."""


class Feed:
    """One lane's connection to one embedder."""

    def __init__(self, stream: FeedOwner, lane: int, address: str) -> None:
        self.address = address
        self.error: FreshetError | None = None
        self._stream = stream
        self._header = stream.request_header(next(_feed_ids), lane)
        self._link = stream.feed_link(address)
        self._lock = threading.Lock()
        self._requests = 0  # without an answer
        self._received: deque[Frame] = deque()
        self._memory: list[list[F32]] = []  # row arrays of returned batches, for reuse
        self._last_push: Future[Frame] | None = None
        self._refused: list[bytes] = []  # gradients that the overloaded embedder refused, in order
        self._retry: Future[Frame] | None = None  # the last of them that was sent again
        self._backs_off = False  # the embedder was overloaded since the last request
        self.again_at = 0.0  # no request is sent before

    @property
    def has_news(self) -> bool:
        """Whether a batch has arrived, the feed has ended, or it backs off."""
        return bool(self._received) or self._backs_off or self.error is not None

    def ask(self, ahead: int) -> None:
        """Send requests until `ahead` are pending or answered, unless the embedder is overloaded."""
        self._backs_off = False
        if self._stream.now < self.again_at:
            return
        self._resend()
        if self._retry is not None and not self._retry.done():
            return  # requests would use the memory budget that it needs
        while self.error is None and not self._backs_off:
            with self._lock:
                if self._requests + len(self._received) >= ahead:
                    return
                self._requests += 1
            vector = self._stream.vector()
            answer = self._link.ask("Take", partial(take_frame, header=self._header, applied=vector))
            answer.add_done_callback(self._answered)

    def pop(self) -> Out | None:
        """Decode the oldest received batch; None if there is none, or it is empty or invalid."""
        with self._lock:
            if not self._received:
                return None
            frame = self._received.popleft()
            memory = self._memory.pop() if self._memory else None
        try:
            decoded = batch_of(frame, self._stream.names, memory)
        except FreshetError as error:
            self.fail(error)
            return None
        if decoded is None:
            return None
        out = Out(self, *decoded)
        size = sum(array.nbytes for array in frame.sections.values())
        self._stream.put_out(out, size)
        return out

    def give(
        self, batch_id: int, gradients: Sequence[F32] | None, counts: Sequence[U32] | None = None
    ) -> None:
        """Send a batch's gradients, (G, S) float32 and counts (U,) uint32 a group; None: unused.

        If they are lost, the feed ends and its embedder issues the batch again.
        """
        vector, codec = self._stream.vector(), self._stream.codec

        def make(number: int) -> bytes:
            return gradients_frame(number, self._header, vector, batch_id, gradients, codec, counts)

        with self._lock:
            if self._refused:  # pushes keep their order
                self._refused.append(make(0))
                return
        self._send(make)

    def _send(self, make: Callable[[int], bytes]) -> Future[Frame]:
        sent: list[bytes] = []

        def kept(number: int) -> bytes:
            sent.append(make(number))
            return sent[0]

        self._last_push = push = self._link.ask("Give", kept)
        push.add_done_callback(partial(self._push_answered, sent[0]))
        self._stream.counts.sent_bytes += len(sent[0])
        return push

    def _resend(self) -> None:
        with self._lock:
            refused, self._refused = self._refused, []
        for data in refused:
            self._retry = self._send(partial(_numbered, data))

    def recycle(self, rows: list[F32]) -> None:
        """Reuse the memory of a returned batch's rows, (U, S) float32 a group, for a later batch."""
        with self._lock:
            if len(self._memory) < 4:
                self._memory.append([_whole(one) for one in rows])

    def flush(self, deadline: float) -> bool:
        """Wait until all pushes are acknowledged; False if some are not by the deadline."""
        if self._last_push is None:
            return True
        while self.error is None and (left := deadline - self._stream.now) > 0:
            if (pause := self.again_at - self._stream.now) > 0:
                self._stream.pause(min(left, pause))
                continue
            self._resend()
            vector = self._stream.vector()
            answer = self._link.ask("Give", partial(flush_frame, header=self._header, applied=vector))
            try:
                if answer.result(left).flags and not self._refused:
                    return True
            except TimeoutError:
                return False
            except Overloaded as error:
                self._back_off(error)
            except FreshetError as error:
                self.fail(error)
        return False

    def fail(self, error: FreshetError) -> None:
        """End the feed with an error; the first one is kept."""
        self.error = self.error or error
        self._stream.notify()

    def close(self) -> None:
        """Close the connection. The embedder then issues the unreturned batches again."""
        self._link.close()

    def _answered(self, answer: Future[Frame]) -> None:
        error = answer.exception()
        with self._lock:
            self._requests -= 1
            if error is None:
                self._received.append(answer.result())
        self._failed(error)
        self._stream.notify()

    def _push_answered(self, data: bytes, answer: Future[Frame]) -> None:
        error = answer.exception()
        if isinstance(error, Overloaded):
            with self._lock:
                self._refused.append(data)
        elif answer is self._retry:  # the embedder accepts requests again
            self._backs_off = True
            self._stream.notify()
        self._failed(error)

    def _failed(self, error: BaseException | None) -> None:
        if isinstance(error, Overloaded):
            self._back_off(error)
        elif error is not None:
            self.fail(error if isinstance(error, FreshetError) else FreshetError(repr(error)))

    def _back_off(self, error: Overloaded) -> None:
        """Pause requests; unreturned batches stay valid, and refused gradients are sent again."""
        self.again_at, self._backs_off = self._stream.now + error.retry_after_s, True
        self._stream.notify()


def _numbered(data: bytes, number: int) -> bytes:
    """Encode a frame again with another id."""
    return encode_frame(replace(decode_frame(data, max_bytes=len(data)), id=number))


def _whole(rows: F32) -> F32:
    """Return the array of which the rows are a view."""
    base = rows.base
    return base if isinstance(base, np.ndarray) and base.ndim == 2 and base.dtype == rows.dtype else rows
