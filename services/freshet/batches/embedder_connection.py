"""One lane's connection to one embedder: requests ahead of time, batches as they come, gradients home.

What an embedder has no room for comes again, in order; what breaks the connection ends the feed, and its
embedder issues again what is out.
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

from freshet.batches.frames import Asked, Names, batch_of, gradients_frame, settle_frame, take_frame
from freshet.batches.stream import TrainBatch
from freshet.errors import FreshetError, Overloaded
from freshet.rows.grpc.shard_connection import Link
from freshet.rpc.frames import Frame, decode_frame, encode_frame
from freshet.rpc.value_formats import RowCodec
from freshet.types import F32, U32

__all__ = ["Feed", "Home", "Out", "StreamCounts"]


@dataclass(slots=True)
class StreamCounts:
    """What came and went since the stream was made."""

    batches: int = 0
    samples: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    fenced: int = 0  # batches of an embedder that was replaced
    broken: int = 0  # feeds that ended with an error


@dataclass(slots=True, eq=False)
class Out:
    """A batch between `take` and `give_back`."""

    feed: Feed
    id: int
    batch: TrainBatch


class Home(Protocol):
    """What a feed asks of the stream that it is of. Thread-safe."""

    counts: StreamCounts

    @property
    def names(self) -> Names:
        """What columns are called."""

    @property
    def codec(self) -> RowCodec:
        """How gradients are sent."""

    @property
    def now(self) -> float:
        """By the clock of deadlines."""

    def vector(self) -> dict[int, int]:
        """The dense vector as it is told."""

    def asked(self, feed: int, lane: int) -> Asked:
        """Who asks."""

    def feed_link(self, address: str) -> Link:
        """A connection of one lane's own."""

    def put_out(self, out: Out, size: int) -> None:
        """A batch is handed over."""

    def notify(self) -> None:
        """Something has come, or a feed has ended."""

    def pause(self, seconds: float) -> None:
        """Wait so long, or until something has come."""


_feed_ids = itertools.count(secrets.randbits(48) << 8)
"""Feeds of this process; those of another begin elsewhere."""


class Feed:
    """One lane's connection to one embedder."""

    def __init__(self, stream: Home, lane: int, address: str) -> None:
        self.address = address
        self.error: FreshetError | None = None
        self._stream = stream
        self._asked = stream.asked(next(_feed_ids), lane)
        self._link = stream.feed_link(address)
        self._lock = threading.Lock()
        self._requests = 0  # that are not answered
        self._came: deque[Frame] = deque()
        self._room: list[list[F32]] = []
        self._given: Future[Frame] | None = None
        self._refused: list[bytes] = []  # gradients for which the embedder had no room, in order
        self._again: Future[Frame] | None = None  # the last of them that was sent again
        self._held_up = False  # the embedder has had too much in work since it was asked last
        self.again_at = 0.0  # until then it is asked nothing

    @property
    def has_news(self) -> bool:
        """Whether a batch has come, or the feed has ended, or asks for a pause."""
        return bool(self._came) or self._held_up or self.error is not None

    def ask(self, ahead: int) -> None:
        """Have so many requests and answers under way, unless the embedder has too much in work now."""
        self._held_up = False
        if self._stream.now < self.again_at:
            return
        self._give_again()
        if self._again is not None and not self._again.done():
            return  # requests would take the room that it needs
        while self.error is None and not self._held_up:
            with self._lock:
                if self._requests + len(self._came) >= ahead:
                    return
                self._requests += 1
            vector = self._stream.vector()
            answer = self._link.ask("Take", partial(take_frame, asked=self._asked, applied=vector))
            answer.add_done_callback(self._answered)

    def pop(self) -> Out | None:
        """The oldest batch that has come, decoded."""
        with self._lock:
            if not self._came:
                return None
            frame = self._came.popleft()
            room = self._room.pop() if self._room else None
        try:
            made = batch_of(frame, self._stream.names, room)
        except FreshetError as error:
            self.fail(error)
            return None
        if made is None:
            return None
        out = Out(self, *made)
        size = sum(array.nbytes for array in frame.sections.values())
        self._stream.put_out(out, size)
        return out

    def give(
        self, batch_id: int, gradients: Sequence[F32] | None, counts: Sequence[U32] | None = None
    ) -> None:
        """Send gradients home. If they get lost the feed ends: its embedder issues the batch again."""
        vector, codec = self._stream.vector(), self._stream.codec

        def make(number: int) -> bytes:
            return gradients_frame(number, self._asked, vector, batch_id, gradients, codec, counts)

        with self._lock:
            if self._refused:  # pushes go in order
                self._refused.append(make(0))
                return
        self._send(make)

    def _send(self, make: Callable[[int], bytes]) -> Future[Frame]:
        sent: list[bytes] = []

        def kept(number: int) -> bytes:
            sent.append(make(number))
            return sent[0]

        self._given = given = self._link.ask("Give", kept)
        given.add_done_callback(partial(self._taken, sent[0]))
        self._stream.counts.sent_bytes += len(sent[0])
        return given

    def _give_again(self) -> None:
        with self._lock:
            refused, self._refused = self._refused, []
        for data in refused:
            self._again = self._send(partial(_numbered, data))

    def recycle(self, rows: list[F32]) -> None:
        """Use this memory again for a batch to come."""
        with self._lock:
            if len(self._room) < 4:
                self._room.append([_whole(one) for one in rows])

    def settled(self, deadline: float) -> bool:
        """Whether all that was given back is acknowledged by the deadline."""
        if self._given is None:
            return True
        while self.error is None and (left := deadline - self._stream.now) > 0:
            if (pause := self.again_at - self._stream.now) > 0:
                self._stream.pause(min(left, pause))
                continue
            self._give_again()
            vector = self._stream.vector()
            answer = self._link.ask("Give", partial(settle_frame, asked=self._asked, applied=vector))
            try:
                if answer.result(left).flags and not self._refused:
                    return True
            except TimeoutError:
                return False
            except Overloaded as error:
                self._hold_up(error)
            except FreshetError as error:
                self.fail(error)
        return False

    def fail(self, error: FreshetError) -> None:
        """The feed is of no use any more."""
        self.error = self.error or error
        self._stream.notify()

    def close(self) -> None:
        """End the connection. The embedder notices, and issues again what is out."""
        self._link.close()

    def _answered(self, answer: Future[Frame]) -> None:
        error = answer.exception()
        with self._lock:
            self._requests -= 1
            if error is None:
                self._came.append(answer.result())
        self._failed(error)
        self._stream.notify()

    def _taken(self, data: bytes, answer: Future[Frame]) -> None:
        error = answer.exception()
        if isinstance(error, Overloaded):
            with self._lock:
                self._refused.append(data)
        elif answer is self._again:  # there is room for requests
            self._held_up = True
            self._stream.notify()
        self._failed(error)

    def _failed(self, error: BaseException | None) -> None:
        if isinstance(error, Overloaded):
            self._hold_up(error)
        elif error is not None:
            self.fail(error if isinstance(error, FreshetError) else FreshetError(repr(error)))

    def _hold_up(self, error: Overloaded) -> None:
        """Nothing is lost: what is out stays out, and what was refused is sent again."""
        self.again_at, self._held_up = self._stream.now + error.retry_after_s, True
        self._stream.notify()


def _numbered(data: bytes, number: int) -> bytes:
    """A frame under another id."""
    return encode_frame(replace(decode_frame(data, max_bytes=len(data)), id=number))


def _whole(rows: F32) -> F32:
    """The memory behind rows that are a part of it."""
    base = rows.base
    return base if isinstance(base, np.ndarray) and base.ndim == 2 and base.dtype == rows.dtype else rows
