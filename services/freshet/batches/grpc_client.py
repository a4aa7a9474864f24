"""The batch stream over gRPC: a trainer rank's side of the embedders that own its partitions.

Each lane keeps a feed to every embedder that owns partitions of its own, asks each for batches ahead of time,
and takes in turn what has come. See `freshet.batches.stream` for what is promised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from freshet.batches.embedder_connection import Feed, Out, StreamCounts
from freshet.batches.frames import Asked, Names
from freshet.batches.read_my_writes import OwnWrites
from freshet.batches.stream import TrainBatch
from freshet.clock import Clock
from freshet.errors import ConfigError, Corrupt, DataLost, Fenced, Mismatch
from freshet.log import EventLog
from freshet.model.inputs import ModelInputs
from freshet.rows.grpc.shard_connection import Link
from freshet.rpc.channel import Transport
from freshet.rpc.value_formats import RowCodec
from freshet.types import F32, U32, Fence, TopicPartition

__all__ = ["BATCHES", "RemoteStream", "Seat", "StreamCounts"]

log = structlog.get_logger("freshet.trainer")

BATCHES = "Batches"
"""The service's name."""

WAIT_MS = 500
"""How long an embedder holds a request that it has no batch for: it is asked in vain twice a second."""

AGAIN_S = 0.2
"""Between two attempts to reach an embedder."""

_ENDS = (ConfigError, Corrupt, DataLost, Mismatch)
"""What no further attempt can mend. A feed that is fenced ends alone: another embedder has its partitions."""


@dataclass(frozen=True, slots=True)
class Seat:
    """This rank among all."""

    rank: int
    ranks: int
    lanes: int  # of each rank
    fence: Fence  # of the claim on the seat; embedders serve the newest


class RemoteStream:
    """See `freshet.batches.stream.BatchStream`. One rank; any thread may take and give back."""

    def __init__(
        self,
        *,
        seat: Seat,
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
        own: OwnWrites | None = None,
        codec: RowCodec = RowCodec.FP32,
    ) -> None:
        """Connects when batches are taken.

        Args:
            seat: which lanes are this rank's.
            names: what the columns are called, by the spec.
            partitions: of the model.
            owners: {partition: host:port of its embedder} now; cheap, asked at each take.
            transport: certificates, token and limits.
            metadata: the model and its spec's hash, shown with each call.
            dense_applied: the dense vector; told with each request (PROTOCOL 7).
            remember, newest: the samples kept for the gate.
            log, topic: for the lag.
            clock: for deadlines.
            ahead: batches asked for before the last was taken; 0: none (mode `sync`).
            own: brings rows up to what this rank has given back since their lookup, where embedders send
                what that takes; None: they are trained on as they come.
            codec: how gradients are sent.
        """
        self._seat, self._names, self._partitions, self._owners = seat, names, partitions, owners
        self._transport, self._metadata = transport, metadata
        self._dense_applied, self._remember, self._newest = dense_applied, remember, newest
        self._log, self._topic, self._clock = log, topic, clock
        self._ahead, self._own, self._codec = ahead, own, codec
        self._changed = threading.Condition()  # guards all below
        self._feeds: dict[tuple[int, str], Feed] = {}
        self._turns = [0] * seat.lanes
        self._out: dict[int, Out] = {}
        self._fences: dict[int, int] = {}  # partition -> highest seen
        self._covered: dict[int, int] = {}
        self._again_at: dict[tuple[int, str], float] = {}
        self._closed = False
        self.counts = StreamCounts()

    # --- BatchStream

    def take(self, lane: int, wait_s: float) -> TrainBatch | None:
        """The lane's next batch, of the embedders in turn; see the protocol."""
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
                    self._bring_up(taken.batch)
                    return taken.batch
            self._forget_broken()
            if self._clock.monotonic() >= deadline:
                return None

    def give_back(
        self,
        lane: int,
        batch: TrainBatch,
        gradients: Sequence[F32] | None,
        counts: Sequence[U32] | None = None,
    ) -> None:
        """Send a batch's gradients home; see the protocol. A refusal is the embedder's to deal with."""
        with self._changed:
            out = self._out.pop(id(batch), None)
        if out is None:
            raise ValueError(f"a batch of {batch.ranges} is given back that is not out")
        if gradients is not None and not batch.replayed:
            self._remember(batch.inputs)
            self._note(batch, gradients, counts)
        out.feed.give(out.id, gradients, counts)
        out.feed.recycle([group.rows for group in batch.inputs.groups])

    def settled(self, wait_s: float) -> bool:
        """Ask the embedders to wait until all is acknowledged; see the protocol."""
        deadline = self._clock.monotonic() + wait_s
        with self._changed:
            feeds = list(self._feeds.values())
        return all(feed.settled(deadline) for feed in feeds)

    def recent(self, rows: int) -> Sequence[ModelInputs]:
        """The newest samples given back; see the protocol."""
        return self._newest(rows)

    def lag(self) -> Mapping[int, int]:
        """{partition: blocks of this rank's partitions that no batch has covered that was taken}."""
        dense = self._dense_applied()
        places = self._seat.ranks * self._seat.lanes
        first = self._seat.rank * self._seat.lanes
        mine = [p for p in range(self._partitions) if first <= p % places < first + self._seat.lanes]
        found = self._log.all_bounds([TopicPartition(self._topic, p) for p in mine])
        return {
            at.partition: bounds.end
            - max(self._covered.get(at.partition, 0), *dense.get(at.partition, ()), bounds.start)
            for at, bounds in found.items()
        }

    def seconds(self) -> dict[str, float]:
        """Stages are the embedders' own: none here."""
        return {}

    @property
    def stepped_rows(self) -> int:
        """Copies of rows brought up to own pushes so far."""
        return self._own.stepped_rows if self._own is not None else 0

    def close(self) -> None:
        """End the connections; embedders issue again what was out. Idempotent."""
        with self._changed:
            self._closed = True
            feeds, self._feeds = list(self._feeds.values()), {}
            self._changed.notify_all()
        for feed in feeds:
            feed.close()

    # --- parts

    def vector(self) -> dict[int, int]:
        """The dense vector as it is told."""
        return {p: offsets[0] for p, offsets in self._dense_applied().items()}

    def notify(self) -> None:
        """Something has come, or a feed has ended."""
        with self._changed:
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait so long, or until something has come."""
        with self._changed:
            self._changed.wait(seconds)

    @property
    def now(self) -> float:
        """By the clock of deadlines."""
        return self._clock.monotonic()

    def put_out(self, out: Out, size: int) -> None:
        """A batch is handed over."""
        with self._changed:
            self._out[id(out.batch)] = out
            self.counts.batches += 1
            self.counts.samples += len(out.batch)
            self.counts.received_bytes += size

    def _wait(self, feeds: Sequence[Feed], deadline: float) -> None:
        """Wait until a feed has news or may be asked again, or the deadline."""
        now = self._clock.monotonic()
        until = min([deadline, *(feed.again_at for feed in feeds if feed.again_at > now)])
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or any(feed.has_news for feed in feeds), max(0.0, until - now)
            )

    def _note(self, batch: TrainBatch, gradients: Sequence[F32], counts: Sequence[U32] | None) -> None:
        """Keep what is given back for batches whose lookup cannot know it.

        A rank is told of no acknowledgement. But a feed has no more batches under way than were asked for,
        and an embedder no more that it has not pushed.
        """
        if self._own is None or batch.looked is None:
            return
        # Copies: the arrays are views of a message of many others, and the gradients the model's own.
        if counts is None:
            groups = [replace(g, keys=g.keys.copy(), tables=g.tables.copy()) for g in batch.looked.groups]
        else:
            groups = [g.repeated(of) for g, of in zip(batch.looked.groups, counts, strict=True)]
        self._own.given(batch.ranges, groups, [one.copy() for one in gradients])
        with self._changed:
            feeds = len(self._feeds)
        self._own.keep(2 * (1 + self._ahead) * max(1, feeds))

    def _bring_up(self, batch: TrainBatch) -> None:
        """Take into the rows what this rank has given back and they do not know. A batch from before that
        says that its embedder has begun again: what was given from there on was given up."""
        if self._own is not None and batch.looked is not None:
            self._own.restarted(batch.ranges)
            self._own.bring_up(batch.looked, [group.rows for group in batch.inputs.groups])

    def _is_current(self, lane: int, taken: Out) -> bool:
        """Whether no other embedder has claimed a partition of the batch since (a zombie is refused)."""
        ranges, fence = taken.batch.ranges, int(taken.batch.fence)
        with self._changed:
            if all(fence >= self._fences.get(r.partition, fence) for r in ranges):
                self._fences.update({r.partition: fence for r in ranges})
                self._covered.update({r.partition: r.stop for r in ranges})
                return True
            del self._out[id(taken.batch)]
            self.counts.fenced += 1
        log.warning("a batch of an embedder that was replaced is refused", lane=lane, fence=fence)
        taken.feed.fail(Fenced(f"fence {fence} of {taken.feed.address} is no longer the highest"))
        return False

    def _feeds_of(self, lane: int) -> list[Feed]:
        """A feed to each embedder that owns partitions of the lane; those to others are closed."""
        places = self._seat.ranks * self._seat.lanes
        place = self._seat.rank * self._seat.lanes + lane
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
        """Close feeds that have ended, to be made anew; raises what no further attempt can mend."""
        with self._changed:
            broken = {key: feed for key, feed in self._feeds.items() if feed.error is not None}
            for key in broken:
                del self._feeds[key]
                self._again_at[key] = self._clock.monotonic() + AGAIN_S
            self.counts.broken += len(broken)
        for feed in broken.values():
            feed.close()
        for feed in broken.values():
            log.warning("batches of an embedder stay away", address=feed.address, reason=str(feed.error))
            if isinstance(feed.error, _ENDS):
                raise feed.error

    def feed_link(self, address: str) -> Link:
        """A connection of one lane's own. What is under way on it is bounded by credits: one more limit could
        only break the feed, and have the batches issued again."""
        bytes_under_way = self._transport.whole_bytes
        return Link(address, self._transport, BATCHES, self._metadata, in_flight_bytes=bytes_under_way)

    def asked(self, feed: int, lane: int) -> Asked:
        """Who asks."""
        seat = self._seat
        return Asked(feed, seat.fence, seat.rank, seat.ranks, seat.lanes, lane, WAIT_MS)

    @property
    def names(self) -> Names:
        """What columns are called."""
        return self._names

    @property
    def codec(self) -> RowCodec:
        """How gradients are sent."""
        return self._codec
