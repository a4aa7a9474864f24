"""The embedder of a process: claims partitions and serves batches of their samples to trainer ranks."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from freshet.batches.frames import (
    FLUSH,
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
from freshet.batches.grpc_client import BATCHES
from freshet.batches.stream import TrainBatch
from freshet.coordination.assignment import PartitionAssignment
from freshet.coordination.claims import LEASE_S, Claims
from freshet.embedder.block_decoder import BlockDecoders, refused_metrics
from freshet.embedder.core import PARTITION
from freshet.embedder.lane import LanePartitions
from freshet.embedder.pipeline import BatchPipeline
from freshet.errors import Fenced, Unavailable
from freshet.http.addresses import Address
from freshet.log.topics import ModelContext
from freshet.observability.metrics import CachedGauge, Metric
from freshet.rows.service import RowService
from freshet.rpc.frames import Frame, Kind
from freshet.rpc.probe import serve_probes
from freshet.rpc.server import Answer, FrameServer
from freshet.types import Fence
from freshet.wires.row_wire import RowWires

log = structlog.get_logger("freshet.embedder")

CHECK_S = 0.2
"""Seconds between two checks of the partition assignment."""

DRAIN_S = 1.0
"""Seconds for which the stopping server completes answers; gradients are pushed before."""

EMBEDDER_METRICS = (
    Metric("freshet_embedder_partitions", "gauge", "partitions", "Partitions of samples owned."),
    Metric("freshet_embedder_trainer_lanes", "gauge", "lanes", "Connected lanes of trainers."),
    Metric("freshet_embedder_batches", "counter", "batches", "Batches sent to trainers."),
    Metric("freshet_embedder_samples", "counter", "samples", "Samples sent to trainers."),
    Metric("freshet_embedder_sent_bytes", "counter", "bytes", "Bytes of batches sent to trainers."),
    Metric("freshet_embedder_rows_in_flight", "gauge", "samples", "Samples looked up and not yet applied."),
    Metric("freshet_embedder_batches_in_flight", "gauge", "batches", "Permits in use."),
    Metric("freshet_embedder_waiting_lanes", "gauge", "lanes", "Lanes that wait for a permit."),
    Metric("freshet_embedder_rewinds", "counter", "rewinds", "Restarts of lanes at the applied offsets."),
    Metric("freshet_embedder_void_rows", "counter", "samples", "Samples looked up and issued again."),
    Metric("freshet_embedder_lag_blocks", "gauge", "blocks", "Blocks in the log that are in no batch yet."),
    *refused_metrics("embedder"),
)


FLUSH_S = 2.0
"""Seconds for which a flush waits for acknowledgements."""


@dataclass(frozen=True, slots=True)
class LaneShape:
    """The ranks and lanes of a quorum: partition p belongs to the lane p % (ranks * lanes)."""

    ranks: int
    lanes: int

    @property
    def places(self) -> int:
        """The lanes of all ranks."""
        return self.ranks * self.lanes


@dataclass(slots=True, eq=False)
class _Feed:
    """A lane's connection and its batches that are out."""

    header: RequestHeader
    applied: dict[int, int]  # the newest dense vector of the rank
    out: dict[int, tuple[int, TrainBatch]] = field(default_factory=dict)  # id -> (lane of the stream, batch)
    turn: int = 0  # requests so far: each begins with another lane


Streams = Callable[[LaneShape, Callable[[int], Mapping[int, Sequence[int]]]], tuple[BatchPipeline, list[int]]]
"""Opens a stream for a shape and the dense vectors of its lanes; also returns each lane's trainer lane."""


class BatchServer:
    """Serves one stream at a time, to the newest quorum. Thread-safe.

    It opens a new stream when the number of ranks or lanes changes, and after `renew`. A batch that is out is
    in `_Feed.out`, or one request takes or returns it; then only this request pushes it. So a connection or a
    stream may end between any two steps of a request.
    """

    def __init__(self, names: Names, open_stream: Streams) -> None:
        self._names, self._open_stream = names, open_stream
        self.wires = RowWires.of(names.scalars)
        self._changed = threading.Condition()  # guards all below
        self._shape: LaneShape | None = None
        self._stream: BatchPipeline | None = None
        self._lanes_of: dict[int, list[int]] = {}  # trainer lane -> lanes of the stream
        self._feeds: dict[int, _Feed] = {}  # by trainer lane
        self._fences: dict[int, Fence] = {}  # newest fence of each rank
        self._next_id = 0
        self._closed = False
        self.failed: Exception | None = None  # of the log, the rows or a lane, which ends the embedder
        self.served_batches = self.served_samples = self.served_bytes = 0
        self.rewinds = self.void_rows = 0  # of streams that have ended

    def add_to(self, server: FrameServer) -> None:
        """Add the methods of `Batches` to a listener."""

        @contextmanager
        def taking() -> Iterator[Answer]:
            feeds: set[tuple[int, int]] = set()
            try:
                yield lambda frame: self.take(frame, feeds)
            finally:
                for place, feed in feeds:
                    self.leave(place, feed)

        server.add_sessions(BATCHES, "Take", taking)
        server.add_stream(BATCHES, "Give", self.give)
        serve_probes(server, BATCHES)

    def take(self, frame: Frame, feeds: set[tuple[int, int]]) -> bytes:
        """Answer NEXT_BATCH; adds its (lane, feed) to the connection's `feeds`.

        Raises:
            Fenced: a newer process or quorum replaced the rank.
            Unavailable: this embedder owns no partition of the lane now, or stops.
        """
        header, applied = decode_header(frame, Kind.NEXT_BATCH)
        stream, lanes, feed = self._connect(header, applied)
        feeds.add((header.global_lane, header.feed))
        if not lanes:
            raise Unavailable(
                f"no partition of lane {header.global_lane} of {self._shape} is owned by this embedder"
            )
        feed.turn += 1
        first = feed.turn % len(lanes)
        order = [*lanes[first:], *lanes[:first]]
        try:
            found = stream.next_batch_of(
                order, header.wait_ms / 1000, lambda: self._feeds.get(header.global_lane) is feed
            )
        except Fenced as error:  # the assignment follows; until then no batch is served
            self.renew()
            raise Unavailable(
                f"a partition of lane {header.global_lane} has another embedder: {error}"
            ) from error
        except Exception as error:  # a lane that has failed would answer every request with its error
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
            stream.push_gradients(lane, batch, None)
            raise Unavailable("another connection replaced this one")
        encoded = batch_frame(frame.id, batch_id, batch, self._names, self.wires.rows, frame.codec)
        self.served_batches += 1
        self.served_samples += len(batch)
        self.served_bytes += len(encoded)
        return encoded

    def give(self, frame: Frame) -> bytes:
        """Answer GRADIENTS; drops those of a batch that is no longer out, since it was issued again."""
        header, applied = decode_header(frame, Kind.GRADIENTS)
        with self._changed:
            feed, stream = self._feeds.get(header.global_lane), self._stream
            if feed is None or feed.header.feed != header.feed or stream is None:
                return given_frame(frame.id, done=False)
            feed.applied = _merge_vectors(feed.applied, applied)
            lanes = list(self._lanes_of.get(header.global_lane, ()))
            if frame.flags & FLUSH:
                found = None
            else:
                batch_id = batch_id_of(frame)
                found = feed.out.get(batch_id)
                if found is None:
                    return given_frame(frame.id, done=False)
        if found is None:
            return given_frame(frame.id, done=all(stream.flush_lane(lane, FLUSH_S) for lane in lanes))
        lane, batch = found
        gradients = counts = None
        if frame.flags & USED:
            gradients, counts = gradients_of(frame, batch, self.wires.gradients)
        with self._changed:
            if feed.out.pop(batch_id, None) is None:
                return given_frame(frame.id, done=False)
        try:
            stream.push_gradients(lane, batch, gradients, counts)
        except Exception as error:  # the lane counts the batch as out, and no connection has it any more
            self.failed = error
            raise
        return given_frame(frame.id)

    def leave(self, place: int, feed_id: int) -> None:
        """End a connection: the batches that its lane held are issued again."""
        with self._changed:
            feed = self._feeds.get(place)
            if feed is None or feed.header.feed != feed_id:
                return
            del self._feeds[place]
            self._abandon(place, feed)

    def renew(self) -> None:
        """Close the stream, so that the next request opens one over the present partitions."""
        with self._changed:
            self._end_stream()

    def close(self) -> None:
        """Push queued gradients, then close the stream; later requests are refused. Idempotent."""
        with self._changed:
            self._closed = True
            self._end_stream()

    def stream(self) -> BatchPipeline | None:
        """Return the present stream, for metrics."""
        return self._stream

    def ranks(self) -> int:
        """Return the connected lanes. Lock-free: a closing stream holds the lock for seconds."""
        return len(self._feeds)

    def _connect(
        self, header: RequestHeader, applied: dict[int, int]
    ) -> tuple[BatchPipeline, list[int], _Feed]:
        """Return the stream, its lanes of the request's trainer lane, and the feed; open what is missing."""
        shape = LaneShape(header.ranks, header.lanes)
        with self._changed:
            if self._closed:
                raise Unavailable("this embedder is stopping; the next owner of its partitions takes over")
            newest = max(self._fences.values(), default=Fence(-1))
            if header.fence < self._fences.get(header.rank, -1) or (
                shape != self._shape and header.fence < newest
            ):
                raise Fenced(
                    f"rank {header.rank} was replaced by another process (fence {header.fence} is old)"
                )
            if shape != self._shape:
                self._end_stream()
                self._shape, self._fences = shape, {}
            self._fences[header.rank] = header.fence
            feed = self._feeds.get(header.global_lane)
            if feed is None or feed.header.feed != header.feed:
                if feed is not None:
                    self._abandon(header.global_lane, feed)
                feed = self._feeds[header.global_lane] = _Feed(header, applied)
            feed.applied = _merge_vectors(feed.applied, applied)
            if self._stream is None:
                self._stream, places = self._open_stream(shape, self._applied_of)
                self._lanes_of = {}
                for lane, place in enumerate(places):
                    self._lanes_of.setdefault(place, []).append(lane)
            return self._stream, list(self._lanes_of.get(header.global_lane, ())), feed

    def _applied_of(self, place: int) -> Mapping[int, Sequence[int]]:
        """Return the newest dense vector of a lane's rank. Lock-free: a closing stream may call it."""
        feed = self._feeds.get(place)
        if feed is None:
            raise Unavailable(f"no trainer is connected for lane {place}")
        return {p: (offset,) for p, offset in feed.applied.items()}

    def _abandon(self, place: int, feed: _Feed) -> None:
        held, feed.out = list(feed.out.values()), {}
        if self._stream is not None:
            for lane in self._lanes_of.get(place, ()):
                self._stream.abandon(lane, [batch for of, batch in held if of == lane])

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        self._lanes_of = {}
        for feed in self._feeds.values():
            feed.out.clear()
        if stream is not None:
            stream.close()
            self.rewinds += sum(counts.rewinds for counts in stream.counts())
            self.void_rows += sum(counts.void_rows for counts in stream.counts())


def _merge_vectors(before: dict[int, int], now: Mapping[int, int]) -> dict[int, int]:
    """Merge two vectors of one rank: offsets only rise, and messages may arrive out of order."""
    return {p: max(offset, before.get(p, 0)) for p, offset in now.items()}


@dataclass(frozen=True, slots=True)
class EmbedderAddress:
    """The name of an embedder's membership lease, and the host at which trainers reach it."""

    name: str
    host: str


class Embedder:
    """The partition assignment, the batch server and the stream of one embedder process."""

    def __init__(
        self,
        context: ModelContext,
        claims: Claims,
        rows: RowService,
        decoders: BlockDecoders,
        server: FrameServer,
        place: EmbedderAddress,
    ) -> None:
        """Claim nothing yet; `run` does, and starts `server`."""
        self._context, self._claims, self._rows, self._decoders = context, claims, rows, decoders
        self._server, self._place = server, place
        self.batches = BatchServer(Names.of(context.spec, context.layout), self._open_stream)
        self.batches.add_to(server)
        self._partitions: PartitionAssignment | None = None
        self._lag = CachedGauge(self._read_lag, 0)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop`, then push queued gradients and release the partitions.

        Raises:
            Fenced: another process claimed this one's membership lease.
            DataLost, Corrupt: as the log and the row service do; an operator must act.
            Exception: a lane has failed by an error of its own, which a restart may mend.
        """
        self._server.start()
        name, context = self._place.name, self._context
        owner = f"{name}@{Address(self._place.host, self._server.port)}/{uuid.uuid4().hex}"
        partitions = PartitionAssignment(
            self._claims, "embedder", PARTITION, name, owner, context.spec.partitions, context.clock
        )
        try:
            partitions.join(2 * LEASE_S)
            self._partitions = partitions
            while not stop.wait(CHECK_S):
                if partitions.update(lambda _: self.batches.renew()):
                    self.batches.renew()
                if self.batches.failed is not None:
                    raise self.batches.failed
        finally:
            self.batches.close()
            partitions.release()
            self._server.stop(DRAIN_S)

    def ready(self) -> str | None:
        """Return why the embedder serves no batches; None if it does."""
        if self._partitions is None:
            return "the previous process still holds its membership lease"
        if not self._partitions.fences:
            return "it owns no partition; other embedders do"
        return self._decoders.refused.trouble()

    def status(self) -> Mapping[str, Any]:
        """Return the figures for `freshet status` and metrics."""
        stream, batches = self.batches.stream(), self.batches
        counts = stream.counts() if stream is not None else []
        return {
            "partitions": sorted(self._partitions.fences) if self._partitions else [],
            "trainer_lanes": batches.ranks(),
            "batches": batches.served_batches,
            "samples": batches.served_samples,
            "sent_bytes": batches.served_bytes,
            "rows_in_flight": stream.limiter.rows() if stream else 0,
            "batches_in_flight": stream.limiter.batches() if stream else 0,
            "waiting_lanes": stream.limiter.waiting() if stream else 0,
            "rewinds": batches.rewinds + sum(c.rewinds for c in counts),
            "void_rows": batches.void_rows + sum(c.void_rows for c in counts),
            "lag_blocks": self._lag(),
            "refused": self._decoders.refused.counts(),
        }

    def _read_lag(self) -> int:
        stream = self.batches.stream()
        return sum(stream.lag().values()) if stream is not None else 0

    def _open_stream(
        self, shape: LaneShape, applied_of: Callable[[int], Mapping[int, Sequence[int]]]
    ) -> tuple[BatchPipeline, list[int]]:
        """Open a stream over the owned partitions, with a lane for each trainer lane and claim."""
        owned: dict[tuple[int, Fence], list[int]] = {}
        for p, fence in (self._partitions.fences if self._partitions else {}).items():
            owned.setdefault((p % shape.places, fence), []).append(p)
        lanes = [
            LanePartitions(mine, fence, partial(applied_of, place)) for (place, fence), mine in owned.items()
        ]
        stream = BatchPipeline(
            self._context, self._rows, self._decoders, lanes, prefetch=True, read_my_writes="trainer"
        )
        return stream, [place for place, _ in owned]
