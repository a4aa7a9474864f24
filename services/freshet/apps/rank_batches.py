"""Sources of a rank's batches: embedder processes, or the rank's own lookups in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from freshet.apps.training import refused_writer
from freshet.batches.grpc_client import RankAssignment, RemoteStream
from freshet.batches.read_my_writes import ReadMyWrites
from freshet.batches.stream import BatchStream
from freshet.clock import Clock
from freshet.config.avro.schema import Record
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import Topics
from freshet.coordination.assignment import ShardMap
from freshet.coordination.claims import Claims
from freshet.embedder.block_decoder import BlockDecoder
from freshet.embedder.core import embedders_of, partitions_of_lane
from freshet.embedder.partition_reader import RefusedSamples
from freshet.embedder.pipelined_stream import DenseApplied, PipelinedStream, Share
from freshet.embedder.recent_samples import RecentSamples
from freshet.embedder.service import names_of
from freshet.errors import Unavailable
from freshet.features import SampleDecoder
from freshet.log import EventLog
from freshet.log.schema_ids import SchemaRegistry
from freshet.process.lifecycle import Cleanup
from freshet.rows.grpc.client import RemoteRows, Served
from freshet.rpc.channel import Transport
from freshet.rpc.value_formats import RowCodec
from freshet.trainer.ranks import ProcessGroup

__all__ = ["FromEmbedders", "FromShards", "RankBatches", "RankCounts", "RankParts", "Wire"]


@dataclass(frozen=True, slots=True)
class RankParts:
    """The context of a rank that its batch source needs."""

    spec: Spec
    spec_hash: str
    log: EventLog
    topics: Topics
    claims: Claims
    dense_applied: DenseApplied
    recent: RecentSamples
    clock: Clock


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


class RankBatches(Protocol):
    """Builds the batch stream of each quorum of a rank."""

    def stream(self, group: ProcessGroup, lanes: int) -> BatchStream:
        """See `freshet.trainer.training_loop.StreamFactory`."""

    def missing(self) -> str | None:
        """Return None, or the reason why no batch can be built."""

    def counts(self) -> RankCounts:
        """Return counts over this quorum and earlier ones."""

    def close(self) -> None:
        """Close connections that streams share. Idempotent."""


class FromEmbedders:
    """Batches with their rows from the embedders that own the partitions. The first batch connects."""

    def __init__(self, parts: RankParts, wire: Wire) -> None:
        self._parts, self._wire = parts, wire
        self._layout = layout_of(parts.spec)
        self._names = names_of(parts.spec, self._layout)
        self._stream: RemoteStream | None = None
        self._before = RankCounts()

    def stream(self, group: ProcessGroup, lanes: int) -> RemoteStream:
        """Build a stream over the embedders that `control` lists."""
        parts, train = self._parts, self._parts.spec.train
        self._before, self._stream = self.counts(), None
        self._stream = RemoteStream(
            assignment=RankAssignment(group.rank, group.size, lanes, group.fence),
            names=self._names,
            partitions=parts.spec.partitions,
            owners=self._owners,
            transport=self._wire.transport,
            metadata=[("freshet-model", parts.spec.name), ("freshet-spec", parts.spec_hash)],
            dense_applied=parts.dense_applied,
            remember=parts.recent.add,
            newest=parts.recent.newest,
            log=parts.log,
            topic=parts.topics.samples,
            clock=parts.clock,
            ahead=0 if train.mode == "sync" else 1 + train.staleness_rows // train.batch_rows,
            own=None if train.mode == "sync" else ReadMyWrites(self._layout),
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

    def close(self) -> None:
        """Do nothing: streams close their connections."""

    def _owners(self) -> Mapping[int, str]:
        return embedders_of(self._parts.claims.living())


class FromShards:
    """Batches that the rank reads and decodes itself, with rows looked up ahead in the shards.

    Pushes carry the fence of the rank's quorum, which is higher than that of any earlier claim, so shards
    refuse late pushes of an earlier quorum or embedder.
    """

    def __init__(self, parts: RankParts, wire: Wire, reader: Record | None = None) -> None:
        """Prepare a source; the first batch connects. `reader`: see `SampleDecoder`."""
        self._parts, self._cleanup = parts, Cleanup()
        self._layout = layout_of(parts.spec)
        self._shards = ShardMap(parts.claims, parts.spec.buckets)
        self.rows = RemoteRows(
            Served(parts.spec.name, parts.spec_hash),
            self._shards,
            wire.transport,
            lookup_codec=wire.rows,
            push_codec=wire.gradients,
        )
        self._cleanup.add("rows", self.rows.close)
        writer = parts.log.writer()
        self._cleanup.add("refused", writer.close)
        self._refused = RefusedSamples(refused_writer(writer, parts.topics.refused), parts.clock.monotonic)
        schemas = SchemaRegistry(parts.log)
        self._decoder = SampleDecoder(parts.spec, self._layout, schemas.get_now, reader)
        self._stream: PipelinedStream | None = None
        self._before = RankCounts()

    def stream(self, group: ProcessGroup, lanes: int) -> PipelinedStream:
        """Build a stream of this rank's partitions."""
        parts, spec = self._parts, self._parts.spec
        self._before, self._stream = self.counts(), None
        places = group.size * lanes
        self._stream = PipelinedStream(
            spec=spec,
            layout=self._layout,
            topic=parts.topics.samples,
            log=parts.log,
            rows=self.rows,
            decoder=self._block_decoder(),
            dense_applied=parts.dense_applied,
            lanes=[
                Share(partitions_of_lane(group.rank * lanes + i, places, range(spec.partitions)), group.fence)
                for i in range(lanes)
            ],
            clock=parts.clock,
            batch_rows=spec.train.batch_rows,
            staleness_rows=spec.train.staleness_rows,
            recent=parts.recent,
            read_my_writes="stream",
        )
        return self._stream

    def missing(self) -> str | None:
        """Return None, or that a bucket has no owner, or that many samples cannot be decoded."""
        try:
            self._shards().check_whole()
        except Unavailable as error:
            return str(error)
        return self._refused.trouble()

    def counts(self) -> RankCounts:
        """Return counts; bytes are those of requests to shards and of their answers."""
        batches, seconds, stepped = (
            self._before.batches,
            dict(self._before.seconds),
            self._before.stepped_rows,
        )
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
            self._refused.counts(),
            totals.broken,
        )

    def close(self) -> None:
        """Close the connections to the shards."""
        self._cleanup.run()

    def _block_decoder(self) -> Callable[[], BlockDecoder]:
        return lambda: BlockDecoder(
            self._decoder,
            len(self._parts.spec.labels),
            self._refused,
            self._parts.clock,
            self._parts.spec.bounds,
        )
