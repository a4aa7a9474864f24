"""Sources of a trainer's batches: their protocol, and the one with rows of the process.

`freshet.apps.remote_sources` has those with rows elsewhere, which need gRPC.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import structlog

from freshet.batches.stream import BatchStream, RecentSamples
from freshet.config.avro.schema import Record
from freshet.coordination.assignment import former_fences, slices_of
from freshet.coordination.claims import Claims, Lease
from freshet.embedder.block_decoder import BlockDecoders
from freshet.embedder.core import partitions_of_lane
from freshet.embedder.lane import DenseApplied, LanePartitions
from freshet.embedder.pipeline import BatchPipeline
from freshet.errors import Fenced, Unavailable
from freshet.log import Writer
from freshet.log.topics import ModelContext
from freshet.model import NATIVE_KINDS, DenseModel
from freshet.model.native_loop import NativeLoop
from freshet.paramserver.shard import Shard
from freshet.process.lifecycle import within
from freshet.rows.store import RowStore
from freshet.tables import NO_BOUND, RowsBound
from freshet.trainer.membership import FixedMembership, Membership, QuorumOptions
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.service import Trainer
from freshet.wires.row_wire import tables_of_groups, wires_status

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

    def running(
        self, trainer: Trainer, left_s: Callable[[], float | None]
    ) -> contextlib.AbstractContextManager[None]:
        """Do the work that the trainer needs while it runs, until the end of the block.

        Args:
            trainer: stopped if the source fails; the error is raised at the end of the block.
            left_s: returns the time for the last writes; None: no limit.
        """

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
        bound: RowsBound = NO_BOUND,
        reader: Record | None = None,
    ) -> None:
        """Claim slices, partitions and the trainer's lease; load rows.

        Args:
            rank: the rank.
            rows: the row store.
            stop: ends the start when set.
            bound: memory of rows, and what happens beyond it.
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
            bound=bound,
        )
        self._tables = tables_of_groups(spec, rank.model.layout)
        self._names = {table.id: table.name for table in spec.tables}
        if bound.ssd_folder:
            log.info("rows beyond memory go to a local disk", bytes=bound.bytes, path=bound.ssd_folder)
        elif bound.bytes:
            bounds = {self._names[table]: rows for table, rows in self.shard.store.max_rows.items()}
            log.info("rows are bounded", bytes=bound.bytes, max_rows=bounds)
        self.shard.load(stop, former_fences(slices, slices_of(spec.buckets)))
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

    @contextlib.contextmanager
    def running(self, trainer: Trainer, left_s: Callable[[], float | None]) -> Iterator[None]:
        """Publish and flush rows until the end of the block, then flush for the last time.

        Raises Fenced if a claim was lost, and the error of the shard if it failed; both stop the trainer.
        """
        self.shard.on_failed = trainer.stop.set
        for lease in self._leases:
            lease.on_lost(trainer.stop.set)
        self.shard.start()
        try:
            yield
        finally:
            self._flush_last(left_s())
        for lease in self._leases:
            if lease.lost.is_set():
                raise Fenced(f"{lease.thing} was claimed by another process; this one has stopped")
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
            "inexact_rows": store.inexact(),
            "ssd": asdict(store.ssd_rows()),
            "wires": wires_status({"publish": self.shard.flusher.wire}, self._tables),
        }

    def progress(self) -> dict[str, Any]:
        """Return the published offsets."""
        return {"published": asdict(self.shard.published)}

    def close(self) -> None:
        """Close the stream."""
        if self._stream is not None:
            self._stream.close()

    def _flush_last(self, seconds: float | None) -> None:
        """Flush; samples of unwritten rows are replayed at the next start, as after a kill."""
        try:
            done = within(seconds, "last-flush", self.shard.stop)
            reason = "" if done else f"the row store, or the log, has not answered within {seconds:.1f} s"
        except Unavailable as error:
            reason = str(error)
        if reason:
            log.warning("not everything was flushed", reason=reason)
