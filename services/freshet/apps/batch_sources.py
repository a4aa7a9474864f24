"""Sources of a trainer's batches: its own rows, embedder processes, or its own lookups in shards."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import structlog

from freshet.batches.grpc_client import RankAssignment, RemoteStream
from freshet.batches.recent_samples import RecentSamples
from freshet.batches.stream import BatchStream
from freshet.config.avro.schema import Record
from freshet.coordination.assignment import ShardMap, slices_of
from freshet.coordination.claims import Claims, Lease
from freshet.embedder.block_decoder import BlockDecoders
from freshet.embedder.core import embedders_of, partitions_of_lane
from freshet.embedder.lane import DenseApplied, LanePartitions
from freshet.embedder.pipeline import BatchPipeline
from freshet.errors import Fenced, Unavailable
from freshet.log import Writer
from freshet.log.context import ModelContext
from freshet.model import NATIVE_KINDS, DenseModel
from freshet.model.native_loop import NativeLoop
from freshet.paramserver.shard import Shard
from freshet.process.lifecycle import within
from freshet.rows.grpc.client import RemoteRows, Served
from freshet.rows.store import RowStore
from freshet.rpc.channel import Transport
from freshet.rpc.frames import RowCodec
from freshet.trainer.membership import FixedMembership, Membership, QuorumOptions
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.service import Trainer

__all__ = ["BatchSource", "FromEmbedders", "FromShards", "OwnRows", "RankContext", "RankCounts", "Wire"]

log = structlog.get_logger("freshet.training")

CLAIM_WAIT_S = 30.0
"""Time limit for a former owner's lease to expire: ten leases."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """The parts of a rank that exist before its batch source."""

    model: ModelContext
    claims: Claims
    writer: Writer  # of dead letters
    recent: RecentSamples


@dataclass(frozen=True, slots=True)
class Wire:
    """The transport of a rank, and the formats of rows and gradients on it."""

    transport: Transport = field(default_factory=Transport)
    rows: RowCodec = RowCodec.FP32  # of lookups in shards; embedders have a setting of their own
    gradients: RowCodec = RowCodec.FP32


@dataclass(slots=True)
class RankCounts:
    """Counts since the start of the rank."""

    batches: int = 0  # returned to lanes
    sent_bytes: int = 0  # to embedders or shards
    received_bytes: int = 0
    stepped_rows: int = 0  # prefetched copies of rows, stepped by this rank's pushes (read-my-writes)
    seconds: dict[str, float] = field(default_factory=dict)  # stage -> time in this process
    refused: dict[str, int] = field(default_factory=dict)  # reason -> samples; empty where embedders decode
    broken: int = 0  # streams to embedders or shards that ended with an error
    fenced: int = 0  # batches of an embedder that no longer owns its partition

    def status(self) -> dict[str, Any]:
        """Return the figures for `freshet status` and metrics."""
        counts = asdict(self)
        return {"stage_seconds": counts.pop("seconds"), **counts}


class BatchSource(Protocol):
    """Builds the batch stream of each quorum of a rank."""

    def membership(
        self, options: QuorumOptions, stopping: Callable[[], bool]
    ) -> Membership | FixedMembership:
        """Return this rank's membership; `stopping` ends its wait for other ranks."""

    def native_loop(self, model: DenseModel, lanes: int) -> NativeLoop | None:
        """Return the native code that iterates over batches; None for batches that Python iterates over."""

    def stream(self, group: ProcessGroup, lanes: int, dense_applied: DenseApplied) -> BatchStream:
        """See `freshet.trainer.service.StreamFactory`."""

    def attach(self, trainer: Trainer) -> None:
        """Stop this trainer if the source fails. Called once, before `start`."""

    def start(self) -> None:
        """Start threads that are needed only while the trainer runs."""

    def finish(self, seconds: float | None) -> None:
        """Write what the run has changed, within `seconds` (None: no limit)."""

    def check(self) -> None:
        """Raise the error for which the source stopped its trainer, if there is one."""

    def missing(self) -> str | None:
        """Return None, or the reason why no batch can be built."""

    def status(self) -> dict[str, Any]:
        """Return figures over this quorum and earlier ones, with `stage_seconds`."""

    def progress(self) -> dict[str, Any]:
        """Return offsets that the console polls often."""

    def close(self) -> None:
        """Close connections that streams share. Idempotent."""


class OwnRows:
    """Batches with rows of this process: it owns all slices and partitions, and its shard all rows."""

    def __init__(
        self,
        rank: RankContext,
        rows: RowStore,
        *,
        stop: threading.Event | None = None,
        most_bytes: int = 0,
        reader: Record | None = None,
    ) -> None:
        """Claim slices, partitions and the trainer's lease; load rows.

        Args:
            rank: the rank.
            rows: the row store.
            stop: ends the start when set.
            most_bytes: rows beyond these are evicted, least recently used first; 0: no bound.
            reader: see `SampleDecoder`.

        Raises:
            Unavailable: another process holds a claim for longer than `CLAIM_WAIT_S`, or `stop` was set.
            Mismatch, DataLost, Corrupt: the row store does not match the spec, or is damaged.
        """
        self._model, self._recent = rank.model, rank.recent
        spec, clock = rank.model.spec, rank.model.clock
        owner, deadline = f"trainer-{os.getpid()}", clock.monotonic() + CLAIM_WAIT_S
        self._leases: Sequence[Lease] = [
            rank.claims.acquire_all(things, owner, deadline, stop)
            for things in (
                list(slices_of(spec.buckets)),
                [f"partition:{p}" for p in range(spec.partitions)],  # as embedder processes claim them
                ["trainer:0"],
            )
        ]
        slices, self._partitions, self._lease = self._leases
        self.shard = Shard(
            rank.model,
            rows,
            fence=slices.fence,
            held=lambda: not slices.lost.is_set(),
            most_bytes=most_bytes,
        )
        self._names = {table.id: table.name for table in spec.tables}
        if most_bytes:
            bounds = {self._names[table]: rows for table, rows in self.shard.store.max_rows.items()}
            log.info("rows are bounded", bytes=most_bytes, max_rows=bounds)
        self.shard.load(stop)
        self._decoders = BlockDecoders(rank.model, rank.writer, reader)
        self._stream: BatchPipeline | None = None

    def membership(self, options: QuorumOptions, stopping: Callable[[], bool]) -> FixedMembership:
        """Return the membership of the only rank."""
        return FixedMembership(self._lease.fence, options.lanes)

    def native_loop(self, model: DenseModel, lanes: int) -> NativeLoop | None:
        """Return the loop of a native model; None for a model in Python."""
        spec = self._model.spec
        if spec.model.kind not in NATIVE_KINDS:
            return None
        from freshet.model.hedge import HedgeDense

        assert isinstance(model, HedgeDense)
        sync = spec.train.mode == "sync"
        return NativeLoop(spec, self._model.layout, model, self.shard.store, lanes, sync=sync)

    def stream(self, group: ProcessGroup, lanes: int, dense_applied: DenseApplied) -> BatchPipeline:
        """Return the stream of the only quorum, the same at each call."""
        if self._stream is None:
            partitions, fence = range(self._model.spec.partitions), self._partitions.fence
            mine = [partitions_of_lane(i, lanes, partitions) for i in range(lanes)]
            self._stream = BatchPipeline(
                self._model,
                self.shard,
                self._decoders,
                [LanePartitions(each, fence, dense_applied) for each in mine],
                prefetch=False,
                recent=self._recent,
            )
        return self._stream

    def attach(self, trainer: Trainer) -> None:
        """Stop the trainer if a claim is lost or the shard fails."""
        self.shard.on_failed = trainer.stop.set
        for held in self._leases:
            held.on_lost(trainer.stop.set)

    def start(self) -> None:
        """Start to publish and flush rows."""
        self.shard.start()

    def finish(self, seconds: float | None) -> None:
        """Flush; samples of unwritten rows are replayed at the next start, as after a kill."""
        try:
            done = within(seconds, "last-flush", self.shard.stop)
            reason = "" if done else f"the row store, or the log, has not answered within {seconds:.1f} s"
        except Unavailable as error:
            reason = str(error)
        if reason:
            log.warning("not everything was flushed", reason=reason)

    def check(self) -> None:
        """Raise Fenced if a claim was lost, and the error of the shard if it failed."""
        for held in self._leases:
            if held.lost.is_set():
                raise Fenced(f"{held.thing} was claimed by another process; this one has stopped")
        if self.shard.failed is not None:
            raise self.shard.failed

    def missing(self) -> str | None:
        """Return None, or why this process cannot train: a failed shard, a lost claim, refused samples."""
        if self.shard.failed is not None:
            return str(self.shard.failed)
        lost = [held.thing for held in self._leases if held.lost.is_set()]
        return f"the claim of {', '.join(lost)} was lost" if lost else self._decoders.refused.trouble()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of the stream's stages."""
        return self._stream.seconds() if self._stream is not None else {}

    def status(self) -> dict[str, Any]:
        """Return the figures of the shard and the stream."""
        store, names = self.shard.store, self._names
        memory = store.memory()
        return {
            "stage_seconds": self.seconds(),
            "batches": self.shard.counts.pushes,
            "refused": self._decoders.refused.counts(),
            "rows": {names[table]: rows for table, rows in memory.rows.items()},
            "evicted": {names[table]: rows for table, rows in store.evicted().items()},
            "max_rows": {names[table]: rows for table, rows in store.max_rows.items() if rows},
            "row_bytes": {names[table]: size for table, size in memory.row_bytes.items()},
            "bytes": memory.bytes,
            "published": asdict(self.shard.published),
            "shard": asdict(self.shard.counts),
            "store": asdict(store.counts()),
            "unwritten_s": round(self.shard.unwritten_s, 3),
        }

    def progress(self) -> dict[str, Any]:
        """Return the published offsets."""
        return {"published": asdict(self.shard.published)}

    def close(self) -> None:
        """Close the stream."""
        if self._stream is not None:
            self._stream.close()


class _RemoteRows:
    """The parts of a source whose rows are elsewhere."""

    def __init__(self, rank: RankContext) -> None:
        self._rank, self._model = rank, rank.model

    def membership(self, options: QuorumOptions, stopping: Callable[[], bool]) -> Membership:
        """Return a membership among the ranks that `control` lists."""
        return Membership(self._rank.claims, options, stopping, self._model.clock)

    def native_loop(self, model: DenseModel, lanes: int) -> None:
        """Return None: native code pushes to rows of its own process only."""

    def attach(self, trainer: Trainer) -> None:
        """Do nothing: streams raise their errors."""

    def start(self) -> None:
        """Do nothing: streams have threads of their own."""

    def finish(self, seconds: float | None) -> None:
        """Do nothing: embedders and shards have the rows."""

    def check(self) -> None:
        """Do nothing: streams have raised their errors."""

    def progress(self) -> dict[str, Any]:
        """Return nothing: shards publish rows."""
        return {}


class FromEmbedders(_RemoteRows):
    """Batches with their rows from the embedders that own the partitions. The first batch connects."""

    def __init__(self, rank: RankContext, wire: Wire) -> None:
        super().__init__(rank)
        self._wire = wire
        self._stream: RemoteStream | None = None
        self._before = RankCounts()

    def stream(self, group: ProcessGroup, lanes: int, dense_applied: DenseApplied) -> RemoteStream:
        """Build a stream over the embedders that `control` lists."""
        self._before, self._stream = self.counts(), None
        self._stream = RemoteStream(
            self._model,
            RankAssignment(group.rank, group.size, lanes, group.fence),
            owners=self._owners,
            dense_applied=dense_applied,
            recent=self._rank.recent,
            transport=self._wire.transport,
            codec=self._wire.gradients,
        )
        return self._stream

    def missing(self) -> str | None:
        """Return None, or that no embedder owns a partition yet."""
        return None if self._owners() else "no embedder owns a partition"

    def counts(self) -> RankCounts:
        """Return counts; `seconds` is empty, since the stages run in the embedders."""
        before = self._before
        if self._stream is None:
            return before
        now = self._stream.counts
        return RankCounts(
            before.batches + now.batches,
            before.sent_bytes + now.sent_bytes,
            before.received_bytes + now.received_bytes,
            before.stepped_rows + self._stream.stepped_rows,
            broken=before.broken + now.broken,
            fenced=before.fenced + now.fenced,
        )

    def status(self) -> dict[str, Any]:
        """Return the counts."""
        return self.counts().status()

    def close(self) -> None:
        """Do nothing: streams close their connections."""

    def _owners(self) -> Mapping[int, str]:
        return embedders_of(self._rank.claims.living())


class FromShards(_RemoteRows):
    """Batches that the rank reads and decodes itself, with rows looked up ahead in the shards.

    Pushes carry the fence of the rank's quorum, which is higher than that of any earlier claim, so shards
    refuse late pushes of an earlier quorum or embedder.
    """

    def __init__(self, rank: RankContext, wire: Wire, reader: Record | None = None) -> None:
        """Prepare a source; the first batch connects. `reader`: see `SampleDecoder`."""
        super().__init__(rank)
        model = rank.model
        self._shards = ShardMap(rank.claims, model.spec.buckets)
        self.rows = RemoteRows(
            Served(model.spec.name, model.spec_hash),
            self._shards,
            wire.transport,
            lookup_codec=wire.rows,
            push_codec=wire.gradients,
        )
        self._decoders = BlockDecoders(model, rank.writer, reader)
        self._stream: BatchPipeline | None = None
        self._before = RankCounts()

    def stream(self, group: ProcessGroup, lanes: int, dense_applied: DenseApplied) -> BatchPipeline:
        """Build a stream of this rank's partitions."""
        self._before, self._stream = self.counts(), None
        partitions, places, first = range(self._model.spec.partitions), group.size * lanes, group.rank * lanes
        mine = [partitions_of_lane(first + i, places, partitions) for i in range(lanes)]
        self._stream = BatchPipeline(
            self._model,
            self.rows,
            self._decoders,
            [LanePartitions(each, group.fence, dense_applied) for each in mine],
            prefetch=True,
            recent=self._rank.recent,
            read_my_writes="stream",
        )
        return self._stream

    def missing(self) -> str | None:
        """Return None, or that a bucket has no owner, or that many samples cannot be decoded."""
        try:
            self._shards().check_whole()
        except Unavailable as error:
            return str(error)
        return self._decoders.refused.trouble()

    def counts(self) -> RankCounts:
        """Return counts; bytes are those of requests to shards and of their answers."""
        before = self._before
        batches, seconds, stepped = before.batches, dict(before.seconds), before.stepped_rows
        if self._stream is not None:
            batches += sum(lane.batches for lane in self._stream.counts())
            stepped += self._stream.stepped_rows
            for name, value in self._stream.seconds().items():
                seconds[name] = seconds.get(name, 0.0) + value
        totals = self.rows.total()
        return RankCounts(
            batches,
            totals.sent_bytes,
            totals.received_bytes,
            stepped,
            seconds,
            self._decoders.refused.counts(),
            totals.broken,
        )

    def status(self) -> dict[str, Any]:
        """Return the counts."""
        return self.counts().status()

    def close(self) -> None:
        """Close the connections to the shards."""
        self.rows.close()
