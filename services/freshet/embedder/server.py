"""The embedder's listener: a pipelined stream's batches to trainer ranks, and their gradients home."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
import structlog

from freshet.batches.frames import (
    SETTLE,
    USED,
    Names,
    RequestHeader,
    batch_frame,
    batch_id_of,
    decode_header,
    empty_frame,
    given_frame,
    gradients_of,
)
from freshet.batches.stream import TrainBatch
from freshet.embedder.pipelined_stream import PipelinedStream
from freshet.errors import Fenced, FreshetError, Mismatch, Unavailable
from freshet.rpc.frames import Frame, Kind
from freshet.rpc.server import GrpcServer
from freshet.rpc.value_formats import RowCodec
from freshet.types import Fence

__all__ = ["BATCHES", "BatchServer", "LaneShape"]

log = structlog.get_logger("freshet.embedder")

BATCHES = "Batches"
SETTLE_S = 2.0
"""How long one question whether all is acknowledged is held."""


@dataclass(frozen=True, slots=True)
class LaneShape:
    """How partitions are dealt to lanes: place p % (ranks * lanes)."""

    ranks: int
    lanes: int

    @property
    def places(self) -> int:
        """Lanes of all ranks."""
        return self.ranks * self.lanes


@dataclass(slots=True, eq=False)
class _Feed:
    """A lane's connection: whose batches are out."""

    header: RequestHeader
    applied: dict[int, int]  # the rank's dense vector as it was told last
    out: dict[int, tuple[int, TrainBatch]] = field(default_factory=dict)  # id -> (lane of the stream, batch)


Streams = Callable[
    [LaneShape, Callable[[int], Mapping[int, Sequence[int]]]], tuple[PipelinedStream, list[int]]
]
"""Makes a stream for a shape and for `dense_applied` by place; and the place of each of its lanes."""


class BatchServer:
    """Serves one stream at a time, to the newest ranks that ask; encoded anew when their number changes, or when
    `renew` says that the partitions have. Thread-safe."""

    def __init__(self, names: Names, codec: RowCodec, make: Streams) -> None:
        self._names, self._codec, self._make = names, codec, make
        self._widths = names.widths
        self._changed = threading.Condition()  # guards all below
        self._shape: LaneShape | None = None
        self._stream: PipelinedStream | None = None
        self._lanes_of: dict[int, list[int]] = {}  # place -> lanes of the stream
        self._feeds: dict[int, _Feed] = {}  # by place
        self._seats: dict[int, Fence] = {}  # by rank, the newest
        self._turns: dict[int, int] = {}
        self._next_id = 0
        self.failed: FreshetError | None = None  # what the log or the rows say that no retry can mend
        self.served_batches = self.served_samples = self.served_bytes = 0
        self.rewinds = self.void_rows = 0  # of streams that have ended

    def add_to(self, server: GrpcServer) -> None:
        """Add the methods of `Batches` to a listener."""

        def take(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            feeds: set[tuple[int, int]] = set()
            try:
                yield from server.answers("Take", requests, lambda frame: self.take(frame, feeds), context)
            finally:
                for place, feed in feeds:
                    self.leave(place, feed)

        server.add(BATCHES, "Take", grpc.stream_stream_rpc_method_handler(take))
        server.answered(BATCHES, "Give", self.give)

    def take(self, frame: Frame, feeds: set[tuple[int, int]]) -> bytes:
        """Answer a TAKE; `feeds` gathers who has asked over this connection.

        Raises:
            Fenced: the rank's seat was claimed by another process since.
            Unavailable: this embedder owns no partition of the lane now.
        """
        header, applied = decode_header(frame, Kind.TAKE)
        stream, feed = self._enter(header, applied)
        feeds.add((header.global_lane, header.feed))
        with self._changed:
            lanes = list(self._lanes_of.get(header.global_lane, ()))
            turn = self._turns[header.global_lane] = self._turns.get(header.global_lane, 0) + 1
        if not lanes:
            raise Unavailable(f"no partition of lane {header.global_lane} of {self._shape} is owned here")
        first = turn % len(lanes)
        order = [*lanes[first:], *lanes[:first]]
        try:
            found = stream.take_of(
                order, header.wait_ms / 1000, lambda: self._feeds.get(header.global_lane) is feed
            )
        except Fenced as error:  # who claims partitions sees it as well; until then none is handed out
            self.renew()
            raise Unavailable(
                f"a partition of lane {header.global_lane} has another embedder: {error}"
            ) from error
        except FreshetError as error:
            self.failed = error
            raise
        if found is None:
            return empty_frame(frame.id)
        lane, batch = found
        with self._changed:
            current = self._feeds.get(header.global_lane) is feed and self._stream is stream
            if current:
                self._next_id += 1
                batch_id = self._next_id
                feed.out[batch_id] = (lane, batch)
        if not current:
            stream.give_back(lane, batch, None)
            raise Unavailable("the lane was taken over while it waited")
        encoded = batch_frame(frame.id, batch_id, batch, self._names, self._codec)
        self.served_batches += 1
        self.served_samples += len(batch)
        self.served_bytes += len(encoded)
        return encoded

    def give(self, frame: Frame) -> bytes:
        """Answer GRADIENTS. A batch that is not out any more was issued again: its gradients are dropped."""
        header, applied = decode_header(frame, Kind.GRADIENTS)
        with self._changed:
            feed, stream = self._feeds.get(header.global_lane), self._stream
            if feed is None or feed.header.feed != header.feed or stream is None:
                return given_frame(frame.id, done=False)
            feed.applied = _larger(feed.applied, applied)
            lanes = list(self._lanes_of.get(header.global_lane, ()))
            if frame.flags & SETTLE:
                found = None
            else:
                batch_id = batch_id_of(frame)
                found = feed.out.get(batch_id)
                if found is None:
                    return given_frame(frame.id, done=False)
        if found is None:
            return given_frame(frame.id, done=all(stream.settled_lane(lane, SETTLE_S) for lane in lanes))
        lane, batch = found
        gradients = counts = None
        if frame.flags & USED:
            gradients, counts = gradients_of(frame, batch)
        with self._changed:
            if feed.out.pop(batch_id, None) is None:
                return given_frame(frame.id, done=False)
        stream.give_back(lane, batch, gradients, counts)
        return given_frame(frame.id)

    def leave(self, place: int, feed_id: int) -> None:
        """A connection has ended: what its lane held is issued again."""
        with self._changed:
            feed = self._feeds.get(place)
            if feed is None or feed.header.feed != feed_id:
                return
            del self._feeds[place]
            self._abandon(place, feed)

    def renew(self) -> None:
        """Other partitions are owned now: make the stream anew at the next request."""
        with self._changed:
            self._end_stream()

    def close(self) -> None:
        """Push what was given back, then end. Idempotent."""
        self.renew()

    def stream(self) -> PipelinedStream | None:
        """The stream that is served now, for metrics."""
        return self._stream

    def ranks(self) -> int:
        """Lanes that are connected."""
        with self._changed:
            return len(self._feeds)

    def _enter(self, header: RequestHeader, applied: dict[int, int]) -> tuple[PipelinedStream, _Feed]:
        shape = LaneShape(header.ranks, header.lanes)
        with self._changed:
            newest = max(self._seats.values(), default=Fence(-1))
            if header.seat < self._seats.get(header.rank, -1) or (
                shape != self._shape and header.seat < newest
            ):
                raise Fenced(
                    f"rank {header.rank} was claimed by another process (fence {header.seat} is old)"
                )
            if shape != self._shape:
                self._end_stream()
                self._shape, self._seats = shape, {}
            self._seats[header.rank] = header.seat
            feed = self._feeds.get(header.global_lane)
            if feed is None or feed.header.feed != header.feed:
                if feed is not None:
                    self._abandon(header.global_lane, feed)
                feed = self._feeds[header.global_lane] = _Feed(header, applied)
            feed.applied = _larger(feed.applied, applied)
            if self._stream is None:
                self._stream, places = self._make(shape, self._applied_of)
                self._lanes_of = {}
                for lane, place in enumerate(places):
                    self._lanes_of.setdefault(place, []).append(lane)
            return self._stream, feed

    def _applied_of(self, place: int) -> Mapping[int, Sequence[int]]:
        """What the rank that trains this lane's batches has told of its dense vector. Takes no lock: a stream
        that is being closed may still ask."""
        feed = self._feeds.get(place)
        if feed is None:
            raise Unavailable(f"no trainer asks for batches of lane {place}")
        return {p: (offset,) for p, offset in feed.applied.items()}

    def _abandon(self, place: int, feed: _Feed) -> None:
        feed.out.clear()
        if self._stream is not None:
            for lane in self._lanes_of.get(place, ()):
                self._stream.abandon(lane)

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        self._lanes_of = {}
        for feed in self._feeds.values():
            feed.out.clear()
        if stream is not None:
            stream.close()
            self.rewinds += sum(counts.rewinds for counts in stream.counts())
            self.void_rows += sum(counts.void_rows for counts in stream.counts())


def _larger(told: dict[int, int], now: Mapping[int, int]) -> dict[int, int]:
    """Of one rank's vector as told twice, the later: it only rises, and messages may overtake each other."""
    return {p: max(offset, told.get(p, 0)) for p, offset in now.items()}


def check_names(names: Names) -> None:
    """Raise Mismatch if a frame cannot tell these columns apart (a byte numbers them)."""
    if max(len(names.segments), len(names.labels), len(names.widths)) > 255:
        raise Mismatch("a frame numbers segments, labels and store groups with a byte: 255 at most")
