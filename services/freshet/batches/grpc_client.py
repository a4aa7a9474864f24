"""The gRPC client of the batch stream: a trainer rank's connections to the embedders of its partitions.

Each lane keeps a feed to every embedder that owns partitions of the lane, prefetches batches from each, and
returns received batches round-robin. `freshet.batches.stream` defines the contract. Gradients that an
overloaded embedder refuses are sent again in order. An error of a connection ends its feed; the embedder then
issues the unreturned batches again.

Letters: U rows of a group, G gradients of a group, S floats of a row.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import structlog

from freshet.batches.frames import Names, RequestHeader, batch_of, flush_frame, gradients_frame, take_frame
from freshet.batches.read_my_writes import ReadMyWrites
from freshet.batches.stream import BatchStream, RecentSamples, TrainBatch
from freshet.errors import ConfigError, Corrupt, DataLost, Fenced, FreshetError, Mismatch, Overloaded
from freshet.log.topics import ModelContext
from freshet.model.inputs import ModelInputs
from freshet.rpc.channel import Transport
from freshet.rpc.frames import Frame, decode_frame, encode_frame
from freshet.rpc.link import Link, LinkCounts
from freshet.rpc.probe import LinkMonitor, codecs_of
from freshet.types import F32, U32, Fence, TopicPartition
from freshet.wires.link_codecs import EXACT, CodecChoice
from freshet.wires.row_wire import RowWires

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

    @property
    def places(self) -> int:
        """The lanes of all ranks; place i has the partitions p with p % places == i."""
        return self.ranks * self.lanes

    @property
    def own_places(self) -> range:
        """The places of this rank's lanes."""
        return range(self.rank * self.lanes, (self.rank + 1) * self.lanes)


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


class RemoteStream(BatchStream):
    """The `freshet.batches.stream.BatchStream` of one rank. Thread-safe."""

    def __init__(
        self,
        context: ModelContext,
        assignment: RankAssignment,
        *,
        owners: Callable[[], Mapping[int, str]],
        dense_applied: Callable[[], Mapping[int, Sequence[int]]],
        recent: RecentSamples,
        transport: Transport,
        wires: RowWires | None = None,
        choice: CodecChoice = EXACT,
        read_my_writes: bool = True,
    ) -> None:
        """Open no connection yet; `next_batch` does.

        Args:
            context: the model.
            assignment: this rank's membership, which determines its lanes.
            owners: returns {partition: host:port of its embedder}; called by each `next_batch`, so it must be
                fast.
            dense_applied: returns the dense vector, sent with each request (PROTOCOL 7).
            recent: stores learned samples for the gate.
            transport: certificates, token and limits.
            wires: decode rows and encode gradients; None: new ones.
            choice: encodings of rows in batches, and of gradients.
            read_my_writes: apply this rank's pending gradients to received rows, except in mode `sync`, which
                has none; False: rows are trained on as received.
        """
        spec, train = context.spec, context.spec.train
        self._context, self._assignment, self._owners = context, assignment, owners
        self._dense_applied, self._recent = dense_applied, recent
        self._transport, self.names = transport, Names.of(spec, context.layout)
        self.wires, self._choice = wires or RowWires.of(context.layout.scalars), choice
        self._monitor = LinkMonitor(self._links)
        ahead = train.mode != "sync"  # else a feed prefetches no batches
        self._ahead = 1 + train.staleness_rows // train.batch_rows if ahead else 0
        self._own = ReadMyWrites(context.layout) if read_my_writes and ahead else None
        self._changed = threading.Condition()  # guards all below
        self._feeds: dict[tuple[int, str], Feed] = {}
        self._turns = [0] * assignment.lanes
        self._out: dict[int, Out] = {}
        self._fences: dict[int, int] = {}  # partition -> highest seen
        self._covered: dict[int, int] = {}
        self._again_at: dict[tuple[int, str], float] = {}
        self._closed = False
        self._counts, self._before = StreamCounts(), LinkCounts()  # of all feeds; traffic of closed ones

    # --- BatchStream

    def next_batch(self, lane: int, wait_s: float) -> TrainBatch | None:
        """Return the lane's next batch, from its embedders round-robin; see the protocol.

        Raises ConfigError, Corrupt, DataLost, Mismatch if a feed ended with one of them.
        """
        deadline = self._context.clock.monotonic() + wait_s
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
            if self._context.clock.monotonic() >= deadline:
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
            self._recent.add(batch.inputs)
            self._add_pending(batch, gradients, counts)
        out.feed.give(out.id, gradients, counts)
        out.feed.recycle([group.rows for group in batch.inputs.groups])

    def flush(self, wait_s: float) -> bool:
        """Wait until the embedders' pushes are acknowledged; see the protocol."""
        deadline = self._context.clock.monotonic() + wait_s
        with self._changed:
            feeds = list(self._feeds.values())
        return all(feed.flush(deadline) for feed in feeds)

    def recent(self, rows: int) -> Sequence[ModelInputs]:
        """Return the newest learned samples; see the protocol."""
        return self._recent.newest(rows)

    def lag(self) -> Mapping[int, int]:
        """Return {partition of this rank: blocks that no received batch has contained}."""
        dense = self._dense_applied()
        rank, topic = self._assignment, self._context.topics.samples
        mine = [p for p in range(self._context.spec.partitions) if p % rank.places in rank.own_places]
        found = self._context.log.all_bounds([TopicPartition(topic, p) for p in mine])
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
            self._keep_counts(feeds)
            self._changed.notify_all()
        self._monitor.stop()
        for feed in feeds:
            feed.close()

    @property
    def counts(self) -> StreamCounts:
        """Counts since it was opened; bytes are those of all messages of its connections."""
        with self._changed:
            traffic = replace(self._before)
            for feed in self._feeds.values():
                traffic.add(feed.link.counts)
            return replace(self._counts, received_bytes=traffic.received_bytes, sent_bytes=traffic.sent_bytes)

    def _keep_counts(self, gone: Iterable[Feed]) -> None:
        """Keep the traffic of feeds that are closed next. Needs the lock."""
        for feed in gone:
            self._before.add(feed.link.counts)

    def codecs(self) -> dict[str, dict[str, Any]]:
        """Return the codecs of each link and why it uses them: {address: LinkCodecs.status()}."""
        return {link.address: link.codecs.status() for link in self._links()}

    def _links(self) -> list[Link]:
        with self._changed:
            return [feed.link for feed in self._feeds.values()]

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
        return self._context.clock.monotonic()

    def put_out(self, out: Out) -> None:
        """Record a batch that a feed hands over."""
        with self._changed:
            self._out[id(out.batch)] = out
            self._counts.batches += 1
            self._counts.samples += len(out.batch)

    def _wait(self, feeds: Sequence[Feed], deadline: float) -> None:
        """Wait until a feed has news or its backoff ends, or until the deadline."""
        now = self._context.clock.monotonic()
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
            self._counts.fenced += 1
        log.warning("a batch of a replaced embedder is refused", lane=lane, fence=fence)
        taken.feed.fail(Fenced(f"fence {fence} of {taken.feed.address} is no longer the highest"))
        return False

    def _feeds_of(self, lane: int) -> list[Feed]:
        """Open a feed to each embedder that owns partitions of the lane, and close the others."""
        rank = self._assignment
        place = rank.own_places[lane]
        addresses = {a for p, a in self._owners().items() if p % rank.places == place}
        now = self._context.clock.monotonic()
        with self._changed:
            gone = [key for key in self._feeds if key[0] == lane and key[1] not in addresses]
            dropped = [self._feeds.pop(key) for key in gone]
            self._keep_counts(dropped)
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
            self._keep_counts(broken.values())
            for key in broken:
                del self._feeds[key]
                self._again_at[key] = self._context.clock.monotonic() + AGAIN_S
            self._counts.broken += len(broken)
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
        metadata = [
            ("freshet-model", self._context.spec.name),
            ("freshet-spec", self._context.spec_hash),
        ]
        bytes_under_way = self._transport.whole_bytes
        self._monitor.start()
        codecs = codecs_of(address, self._choice)
        return Link(address, self._transport, BATCHES, metadata, codecs, in_flight_bytes=bytes_under_way)

    def request_header(self, feed: int, lane: int) -> RequestHeader:
        """Return the header of a feed's requests."""
        rank = self._assignment
        return RequestHeader(feed, rank.fence, rank.rank, rank.ranks, rank.lanes, lane, WAIT_MS)


_feed_ids = itertools.count(secrets.randbits(48) << 8)
"""Ids of this process's feeds; other processes start at other random numbers."""


class Feed:
    """One lane's connection to one embedder."""

    def __init__(self, stream: RemoteStream, lane: int, address: str) -> None:
        self.address = address
        self.error: FreshetError | None = None
        self._stream = stream
        self._header = stream.request_header(next(_feed_ids), lane)
        self.link = stream.feed_link(address)
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
            make = partial(take_frame, header=self._header, applied=vector, codec=self.link.codecs.rows)
            answer = self.link.ask("Take", make)
            answer.add_done_callback(self._answered)

    def pop(self) -> Out | None:
        """Decode the oldest received batch; None if there is none, or it is empty or invalid."""
        with self._lock:
            if not self._received:
                return None
            frame = self._received.popleft()
            memory = self._memory.pop() if self._memory else None
        try:
            decoded = batch_of(frame, self._stream.names, self._stream.wires.rows, memory)
        except FreshetError as error:
            self.fail(error)
            return None
        if decoded is None:
            return None
        self.link.codecs.count_rows(sum(group.rows.nbytes for group in decoded[1].inputs.groups))
        out = Out(self, *decoded)
        self._stream.put_out(out)
        return out

    def give(
        self, batch_id: int, gradients: Sequence[F32] | None, counts: Sequence[U32] | None = None
    ) -> None:
        """Send a batch's gradients, (G, S) float32 and counts (U,) uint32 a group; None: unused.

        If they are lost, the feed ends and its embedder issues the batch again.
        """
        vector, wire, codec = self._stream.vector(), self._stream.wires.gradients, self.link.codecs.gradients
        self.link.codecs.count_gradients(sum(each.nbytes for each in gradients or ()))

        def make(number: int) -> bytes:
            return gradients_frame(number, self._header, vector, batch_id, gradients, wire, codec, counts)

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

        self._last_push = push = self.link.ask("Give", kept)
        push.add_done_callback(partial(self._push_answered, sent[0]))
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
            answer = self.link.ask("Give", partial(flush_frame, header=self._header, applied=vector))
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
        self.link.close()

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
