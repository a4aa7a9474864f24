"""Where the batches of a rank come from: embedder processes, or shards in which the rank looks rows up
itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from freshet.apps.training import refuser
from freshet.batches.grpc_client import RemoteStream, Seat
from freshet.batches.read_my_writes import OwnWrites
from freshet.batches.stream import BatchStream
from freshet.clock import Clock
from freshet.config.avro.schema import Record
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import Topics
from freshet.coordination.claims import Claims
from freshet.coordination.slices import ShardMap
from freshet.embedder.block_decoder import BlockDecoder
from freshet.embedder.core import embedders_of, partitions_of_lane
from freshet.embedder.partition_reader import RefusedSamples
from freshet.embedder.pipelined_stream import DenseApplied, PipelinedStream, Share
from freshet.embedder.recent_samples import Recent
from freshet.embedder.service import names_of
from freshet.errors import Unavailable
from freshet.features import SampleDecoder
from freshet.log import EventLog
from freshet.log.schema_ids import SchemaRegistry
from freshet.process.lifecycle import Cleanup
from freshet.rows.grpc.client import RemoteRows, Served
from freshet.rpc.channel import Transport
from freshet.rpc.value_formats import RowCodec
from freshet.trainer.ranks import RankGroup

__all__ = ["FromEmbedders", "FromShards", "RankBatches", "RankCounts", "RankParts", "Wire"]


@dataclass(frozen=True, slots=True)
class RankParts:
    """What a rank has that its batches need."""

    spec: Spec
    spec_hash: str
    log: EventLog
    topics: Topics
    claims: Claims
    dense_applied: DenseApplied
    recent: Recent
    clock: Clock


@dataclass(frozen=True, slots=True)
class Wire:
    """How a rank talks to others: certificates and limits, and what rows and gradients travel as."""

    transport: Transport = field(default_factory=Transport)
    rows: RowCodec = RowCodec.FP32  # from shards; embedders decide it themselves
    gradients: RowCodec = RowCodec.FP32


@dataclass(slots=True)
class RankCounts:
    """What has come and gone since the rank was started."""

    batches: int = 0  # handed out
    sent_bytes: int = 0  # to embedders or shards
    received_bytes: int = 0
    stepped_rows: int = 0  # copies of rows brought up to this rank's own pushes
    seconds: dict[str, float] = field(default_factory=dict)  # of batches in each stage on this side
    refused: dict[str, int] = field(default_factory=dict)  # reason -> samples; empty where embedders decode
    broken: int = 0  # streams to embedders or shards that ended with an error
    fenced: int = 0  # batches of an embedder that was replaced


class RankBatches(Protocol):
    """Makes the batch stream of each world that a rank is in."""

    def stream(self, group: RankGroup, lanes: int) -> BatchStream:
        """See `freshet.trainer.training_loop.StreamOf`."""

    def missing(self) -> str | None:
        """None, or why no batch can come."""

    def counts(self) -> RankCounts:
        """Of this world and those before."""

    def close(self) -> None:
        """Close what outlives streams. Idempotent."""


class FromEmbedders:
    """Batches come with their rows from the embedders that own the partitions."""

    def __init__(self, parts: RankParts, wire: Wire) -> None:
        """Connects when batches are taken."""
        self._parts, self._wire = parts, wire
        self._layout = layout_of(parts.spec)
        self._names = names_of(parts.spec, self._layout)
        self._stream: RemoteStream | None = None
        self._before = RankCounts()

    def stream(self, group: RankGroup, lanes: int) -> RemoteStream:
        """A stream that asks the embedders found in `control`."""
        parts, train = self._parts, self._parts.spec.train
        self._before, self._stream = self.counts(), None
        self._stream = RemoteStream(
            seat=Seat(group.rank, group.size, lanes, group.fence),
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
            own=None if train.mode == "sync" else OwnWrites(self._layout),
            codec=self._wire.gradients,
        )
        return self._stream

    def missing(self) -> str | None:
        """No embedder may own anything yet."""
        return None if self._owners() else "no embedder owns a partition"

    def counts(self) -> RankCounts:
        """Stages are the embedders' own: none here."""
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
        """Nothing outlives a stream."""

    def _owners(self) -> Mapping[int, str]:
        return embedders_of(self._parts.claims.living())


class FromShards:
    """The rank reads and decodes its partitions itself, and looks their rows up in the shards, ahead.

    Pushes and batches carry the fence of the rank's world, which is higher than that of any claim before it:
    shards refuse what a former world, or an embedder of before, still sends.
    """

    def __init__(self, parts: RankParts, wire: Wire, reader: Record | None = None) -> None:
        """Connects when batches are taken. `reader`: see `SampleDecoder`."""
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
        self._refused = RefusedSamples(refuser(writer, parts.topics.refused), parts.clock.monotonic)
        schemas = SchemaRegistry(parts.log)
        self._decoder = SampleDecoder(parts.spec, self._layout, schemas.get_now, reader)
        self._stream: PipelinedStream | None = None
        self._before = RankCounts()

    def stream(self, group: RankGroup, lanes: int) -> PipelinedStream:
        """A stream of this rank's partitions."""
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
            own_writes="here",
        )
        return self._stream

    def missing(self) -> str | None:
        """Some bucket may have no owner yet."""
        try:
            self._shards().check_whole()
        except Unavailable as error:
            return str(error)
        return self._refused.trouble()

    def counts(self) -> RankCounts:
        """Bytes of requests to shards and of their answers; see the protocol."""
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
        told = self.rows.total()
        return RankCounts(
            batches,
            told.sent_bytes,
            told.received_bytes,
            stepped,
            seconds,
            self._refused.counts(),
            told.broken,
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
