"""Sources of a trainer's batches with rows elsewhere: embedder processes, or its own lookups in shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from freshet.apps.batch_sources import RankContext
from freshet.batches.grpc_client import RankAssignment, RemoteStream
from freshet.config.avro.schema import Record
from freshet.config.spec.layout import Layout
from freshet.coordination.assignment import ShardMap
from freshet.coordination.claim_rules import Claim
from freshet.embedder.block_decoder import BlockDecoders
from freshet.embedder.core import embedders_of, partitions_of_lane
from freshet.embedder.lane import DenseApplied, LanePartitions
from freshet.embedder.pipeline import BatchPipeline
from freshet.errors import Unavailable
from freshet.model import DenseModel
from freshet.rows.grpc.client import RemoteRows, Served
from freshet.rpc.channel import Transport
from freshet.trainer.membership import Membership, QuorumOptions
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.service import Trainer
from freshet.wires.link_codecs import CodecChoice
from freshet.wires.row_wire import RowWires, tables_of_groups, wires_status


@dataclass(frozen=True, slots=True)
class Wire:
    """The transport of a rank, and the settings of the codecs on it."""

    transport: Transport = field(default_factory=Transport)
    rows: str = "fp32"
    gradients: str = "fp32"

    def choice(self, layout: Layout) -> CodecChoice:
        """Return the choice of codecs for rows of this layout."""
        return CodecChoice.of(self.rows, self.gradients, layout.shapes)


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


class _RemoteRows:
    """The parts of a source whose rows are elsewhere."""

    def __init__(self, rank: RankContext) -> None:
        self._rank, self._model = rank, rank.model
        self._tables = tables_of_groups(rank.model.spec, rank.model.layout)

    def membership(self, options: QuorumOptions, stopping: Callable[[], bool]) -> Membership:
        """Return a membership among the ranks that `control` lists."""
        return Membership(self._rank.claims, options, stopping, self._model.clock)

    def native_loop(self, model: DenseModel, lanes: int) -> None:
        """Return None: native code pushes to rows of its own process only."""

    def running(
        self, trainer: Trainer, left_s: Callable[[], float | None]
    ) -> contextlib.AbstractContextManager[None]:
        """Do nothing: streams have threads of their own and raise their errors."""
        return contextlib.nullcontext()

    def progress(self) -> dict[str, Any]:
        """Return nothing: shards publish rows."""
        return {}


class FromEmbedders(_RemoteRows):
    """Batches with their rows from the embedders that own the partitions. The first batch connects."""

    def __init__(self, rank: RankContext, wire: Wire) -> None:
        super().__init__(rank)
        self._wire = wire
        self._wires = RowWires.of(rank.model.layout.scalars)
        self._seen: tuple[Mapping[str, Claim], Mapping[int, str]] = ({}, {})  # claims, the owners by them
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
            wires=self._wires,
            choice=self._wire.choice(self._model.layout),
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
        wires = {"batch": self._wires.rows, "gradients": self._wires.gradients}
        return {
            **self.counts().status(),
            "wires": wires_status(wires, self._tables),
            "codecs": self._codecs(),
        }

    def _codecs(self) -> dict[str, Any]:
        return {} if self._stream is None else self._stream.codecs()

    def close(self) -> None:
        """Do nothing: streams close their connections."""

    def _owners(self) -> Mapping[int, str]:
        living = self._rank.claims.living()
        seen, owners = self._seen
        if living is not seen:  # lanes read it for each batch
            owners = embedders_of(living)
            self._seen = living, owners
        return owners


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
            Served(model.spec.name, model.spec_hash, model.layout.scalars),
            self._shards,
            wire.transport,
            choice=wire.choice(model.layout),
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
        wires = {"lookup": self.rows.wires.rows, "push": self.rows.wires.gradients}
        return {
            **self.counts().status(),
            "wires": wires_status(wires, self._tables),
            "codecs": self.rows.codecs(),
        }

    def close(self) -> None:
        """Close the connections to the shards."""
        self.rows.close()
