"""The gRPC client of the batch stream: a trainer rank's connections to the embedders of its partitions.

Each lane keeps a feed to every embedder that owns partitions of the lane, prefetches batches from each, and
returns received batches round-robin. `freshet.batches.stream` defines the contract.

Letters: U rows of a group, G gradients of a group, S floats of a row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from freshet.batches.embedder_connection import Feed, Out, StreamCounts
from freshet.batches.frames import Names, RequestHeader
from freshet.batches.read_my_writes import ReadMyWrites
from freshet.batches.stream import BatchStream, TrainBatch
from freshet.clock import Clock
from freshet.errors import ConfigError, Corrupt, DataLost, Fenced, Mismatch
from freshet.log import EventLog
from freshet.model.inputs import ModelInputs
from freshet.rows.grpc.client import Link
from freshet.rpc.channel import Transport
from freshet.rpc.value_formats import RowCodec
from freshet.types import F32, U32, Fence, TopicPartition

__all__ = ["BATCHES", "RankAssignment", "RemoteStream", "StreamCounts"]

log = structlog.get_logger("freshet.trainer")

BATCHES = "Batches"
"""The name of the gRPC service."""

WAIT_MS = 500
"""How long an embedder holds a request while it has no batch: an idle lane sends two requests a second."""

AGAIN_S = 0.2
"""Seconds between two attempts to connect to an embedder."""

_FATAL = (ConfigError, Corrupt, DataLost, Mismatch)
"""Errors that end the stream. Fenced ends only its feed: another embedder owns the partitions."""


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """The membership of a rank in its quorum."""

    rank: int
    ranks: int
    lanes: int  # of each rank
    fence: Fence  # of the quorum; embedders refuse older ones


class RemoteStream(BatchStream):
    """The `freshet.batches.stream.BatchStream` of one rank. Thread-safe."""

    def __init__(
        self,
        *,
        assignment: RankAssignment,
        names: Names,
        partitions: int,
        owners: Callable[[], Mapping[int, str]],
        transport: Transport,
        metadata: Sequence[tuple[str, str]],
        dense_applied: Callable[[], Mapping[int, Sequence[int]]],
        remember: Callable[[ModelInputs], None],
        newest: Callable[[int], Sequence[ModelInputs]],
        log: EventLog,
        topic: str,
        clock: Clock,
        ahead: int,
        own: ReadMyWrites | None = None,
        codec: RowCodec = RowCodec.FP32,
    ) -> None:
        """Open no connection yet; `next_batch` does.

        Args:
            assignment: this rank's membership, which determines its lanes.
            names: the columns of the spec.
            partitions: of the model.
            owners: returns {partition: host:port of its embedder}; called by each `next_batch`, so it must be
                fast.
            transport: certificates, token and limits.
            metadata: the model and the hash of its spec, sent with each call.
            dense_applied: returns the dense vector, sent with each request (PROTOCOL 7).
            remember: stores learned samples for the gate.
            newest: returns them.
            log: the event log, for the lag.
            topic: the topic of samples, for the lag.
            clock: for deadlines.
            ahead: batches to prefetch a feed; 0: none (mode `sync`).
            own: applies this rank's pending gradients to received rows, if embedders send their states; None:
                rows are trained on as received.
            codec: of the gradients.
        """
        self._assignment, self._names, self._partitions, self._owners = assignment, names, partitions, owners
        self._transport, self._metadata = transport, metadata
        self._dense_applied, self._remember, self._newest = dense_applied, remember, newest
        self._log, self._topic, self._clock = log, topic, clock
        self._ahead, self._own, self._codec = ahead, own, codec
        self._changed = threading.Condition()  # guards all below
        self._feeds: dict[tuple[int, str], Feed] = {}
        self._turns = [0] * assignment.lanes
        self._out: dict[int, Out] = {}
        self._fences: dict[int, int] = {}  # partition -> highest seen
        self._covered: dict[int, int] = {}
        self._again_at: dict[tuple[int, str], float] = {}
        self._closed = False
        self.counts = StreamCounts()

    # --- BatchStream

    def next_batch(self, lane: int, wait_s: float) -> TrainBatch | None:
        """Return the lane's next batch, from its embedders round-robin; see the protocol.

        Raises ConfigError, Corrupt, DataLost, Mismatch if a feed ended with one of them.
        """
        deadline = self._clock.monotonic() + wait_s
        while True:
            feeds = self._feeds_of(lane)
            for feed in feeds:
                feed.ask(max(1, self._ahead))
            self._wait(feeds, deadline)
            with self._changed:
                if self._closed:
                    return None
                turn = self._turns[lane] = self._turns[lane] + 1
            for i, _ in enumerate(feeds):
                taken = feeds[(turn + i) % len(feeds)].pop()
                if taken is not None and self._is_current(lane, taken):
                    self._apply_pending(taken.batch)
                    return taken.batch
            self._forget_broken()
            if self._clock.monotonic() >= deadline:
                return None

    def push_gradients(
        self,
        lane: int,
        batch: TrainBatch,
        gradients: Sequence[F32] | None,
        counts: Sequence[U32] | None = None,
    ) -> None:
        """Send gradients, (G, S) float32 and counts (U,) uint32 a group, to the batch's embedder.

        The embedder handles refusals, so Refused is never raised. Raises ValueError if the batch is not out.
        """
        with self._changed:
            out = self._out.pop(id(batch), None)
        if out is None:
            raise ValueError(f"a batch of {batch.ranges} is returned that is not out")
        if gradients is not None and not batch.replayed:
            self._remember(batch.inputs)
            self._add_pending(batch, gradients, counts)
        out.feed.give(out.id, gradients, counts)
        out.feed.recycle([group.rows for group in batch.inputs.groups])

    def flush(self, wait_s: float) -> bool:
        """Wait until the embedders' pushes are acknowledged; see the protocol."""
        deadline = self._clock.monotonic() + wait_s
        with self._changed:
            feeds = list(self._feeds.values())
        return all(feed.flush(deadline) for feed in feeds)

    def recent(self, rows: int) -> Sequence[ModelInputs]:
        """Return the newest learned samples; see the protocol."""
        return self._newest(rows)

    def lag(self) -> Mapping[int, int]:
        """Return {partition of this rank: blocks that no received batch has contained}."""
        dense = self._dense_applied()
        places = self._assignment.ranks * self._assignment.lanes
        first = self._assignment.rank * self._assignment.lanes
        mine = [p for p in range(self._partitions) if first <= p % places < first + self._assignment.lanes]
        found = self._log.all_bounds([TopicPartition(self._topic, p) for p in mine])
        return {
            at.partition: bounds.end
            - max(self._covered.get(at.partition, 0), *dense.get(at.partition, ()), bounds.start)
            for at, bounds in found.items()
        }

    def seconds(self) -> dict[str, float]:
        """Return no stages: the embedders measure them."""
        return {}

    @property
    def stepped_rows(self) -> int:
        """Steps of pending gradients applied to received rows since the start."""
        return self._own.stepped_rows if self._own is not None else 0

    def close(self) -> None:
        """Close the connections; embedders issue unreturned batches again. Idempotent."""
        with self._changed:
            self._closed = True
            feeds, self._feeds = list(self._feeds.values()), {}
            self._changed.notify_all()
        for feed in feeds:
            feed.close()

    # --- the owner of the feeds

    def vector(self) -> dict[int, int]:
        """Return the dense vector as {partition: next offset}."""
        return {p: offsets[0] for p, offsets in self._dense_applied().items()}

    def notify(self) -> None:
        """Wake the lanes: a batch has arrived or a feed has ended."""
        with self._changed:
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until `notify`."""
        with self._changed:
            self._changed.wait(seconds)

    @property
    def now(self) -> float:
        """The monotonic time of deadlines in seconds."""
        return self._clock.monotonic()

    def put_out(self, out: Out, size: int) -> None:
        """Record a batch of `size` bytes that a feed hands over."""
        with self._changed:
            self._out[id(out.batch)] = out
            self.counts.batches += 1
            self.counts.samples += len(out.batch)
            self.counts.received_bytes += size

    def _wait(self, feeds: Sequence[Feed], deadline: float) -> None:
        """Wait until a feed has news or its backoff ends, or until the deadline."""
        now = self._clock.monotonic()
        until = min([deadline, *(feed.again_at for feed in feeds if feed.again_at > now)])
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or any(feed.has_news for feed in feeds), max(0.0, until - now)
            )

    def _add_pending(self, batch: TrainBatch, gradients: Sequence[F32], counts: Sequence[U32] | None) -> None:
        """Keep copies of gradients for batches with lookups that may have missed them.

        A rank receives no acknowledgements. But a feed has at most `ahead` + 1 batches in flight, and its
        embedder as many pushes, so twice that many writes suffice.
        """
        if self._own is None or batch.looked is None:
            return
        # Copies: the arrays are views of a large message, and the model overwrites the gradients.
        if counts is None:
            groups = [replace(g, keys=g.keys.copy(), tables=g.tables.copy()) for g in batch.looked.groups]
        else:
            groups = [g.repeated(of) for g, of in zip(batch.looked.groups, counts, strict=True)]
        self._own.add(batch.ranges, groups, [one.copy() for one in gradients])
        with self._changed:
            feeds = len(self._feeds)
        self._own.keep_newest(2 * (1 + self._ahead) * max(1, feeds))

    def _apply_pending(self, batch: TrainBatch) -> None:
        """Apply this rank's pending gradients to the batch's rows.

        A batch that starts before pending writes shows that its embedder has rewound and dropped them.
        """
        if self._own is not None and batch.looked is not None:
            self._own.drop_from(batch.ranges)
            self._own.apply_pending(batch.looked, [group.rows for group in batch.inputs.groups])

    def _is_current(self, lane: int, taken: Out) -> bool:
        """Return whether the batch's embedder still owns its partitions; refuse the batch otherwise."""
        ranges, fence = taken.batch.ranges, int(taken.batch.fence)
        with self._changed:
            if all(fence >= self._fences.get(r.partition, fence) for r in ranges):
                self._fences.update({r.partition: fence for r in ranges})
                self._covered.update({r.partition: r.stop for r in ranges})
                return True
            del self._out[id(taken.batch)]
            self.counts.fenced += 1
        log.warning("a batch of a replaced embedder is refused", lane=lane, fence=fence)
        taken.feed.fail(Fenced(f"fence {fence} of {taken.feed.address} is no longer the highest"))
        return False

    def _feeds_of(self, lane: int) -> list[Feed]:
        """Open a feed to each embedder that owns partitions of the lane, and close the others."""
        places = self._assignment.ranks * self._assignment.lanes
        place = self._assignment.rank * self._assignment.lanes + lane
        addresses = {a for p, a in self._owners().items() if p % places == place}
        now = self._clock.monotonic()
        with self._changed:
            gone = [key for key in self._feeds if key[0] == lane and key[1] not in addresses]
            dropped = [self._feeds.pop(key) for key in gone]
            for address in addresses:
                key = (lane, address)
                if key not in self._feeds and now >= self._again_at.get(key, 0.0) and not self._closed:
                    self._feeds[key] = Feed(self, lane, address)
            feeds = [feed for key, feed in sorted(self._feeds.items()) if key[0] == lane]
        for feed in dropped:
            feed.close()
        return feeds

    def _forget_broken(self) -> None:
        """Close the ended feeds, so that `next_batch` opens new ones; raises a fatal error of one."""
        with self._changed:
            broken = {key: feed for key, feed in self._feeds.items() if feed.error is not None}
            for key in broken:
                del self._feeds[key]
                self._again_at[key] = self._clock.monotonic() + AGAIN_S
            self.counts.broken += len(broken)
        for feed in broken.values():
            feed.close()
        for feed in broken.values():
            log.warning("a feed of an embedder ended", address=feed.address, reason=str(feed.error))
            if isinstance(feed.error, _FATAL):
                raise feed.error

    def feed_link(self, address: str) -> Link:
        """Open the connection of one lane, without a limit below that of the transport.

        Permits bound the bytes in flight; a lower limit could only break the feed.
        """
        bytes_under_way = self._transport.whole_bytes
        return Link(address, self._transport, BATCHES, self._metadata, in_flight_bytes=bytes_under_way)

    def request_header(self, feed: int, lane: int) -> RequestHeader:
        """Return the header of a feed's requests."""
        rank = self._assignment
        return RequestHeader(feed, rank.fence, rank.rank, rank.ranks, rank.lanes, lane, WAIT_MS)

    @property
    def names(self) -> Names:
        """The names of the columns."""
        return self._names

    @property
    def codec(self) -> RowCodec:
        """The codec of gradients."""
        return self._codec
