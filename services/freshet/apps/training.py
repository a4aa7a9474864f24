"""Composition of a training process with its own embedder and shard."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import structlog

from freshet.apps.dense_state import Stores, VersionTarget, build_trainer, restore_dense
from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.avro.schema import Record
from freshet.config.spec.layout import Layout, layout_of
from freshet.config.spec.model import Spec
from freshet.coordination.assignment import slices_of
from freshet.coordination.claims import Claims, Held
from freshet.embedder.block_decoder import BlockDecoder
from freshet.embedder.core import lanes_for
from freshet.embedder.local_stream import LocalStream
from freshet.embedder.partition_reader import RefusedSamples
from freshet.errors import Fenced, Unavailable
from freshet.features import SampleDecoder
from freshet.log import Writer
from freshet.log.schema_ids import SchemaRegistry
from freshet.log.topics import ensure_topics
from freshet.model import NATIVE_KINDS, DenseModel
from freshet.model.native_loop import NativeLoop
from freshet.observability.metrics import CachedGauge
from freshet.paramserver.shard import Shard, ShardContext
from freshet.process.lifecycle import LAST_S, Cleanup, Drain, within
from freshet.trainer.training_loop import LocalTrainer
from freshet.trainer.version_writer import Pins
from freshet.types import Append, BytesColumn

__all__ = ["Stores", "Training", "refused_writer"]

log = structlog.get_logger("freshet.training")

CLAIM_WAIT_S = 30.0
"""Time limit for a former owner's lease to expire: ten leases."""


class Training:
    """A trainer with its embedder and shard. Tests may use its parts without `run`."""

    def __init__(
        self,
        spec: Spec,
        stores: Stores,
        *,
        spec_hash: str,
        clock: Clock = SYSTEM_CLOCK,
        lanes: int | None = None,
        device: str = "cpu",
        drain_s: float | None = None,
        stop: threading.Event | None = None,
        most_bytes: int = 0,
        reader: Record | None = None,
    ) -> None:
        """Claim slices, partitions and the trainer's lease; load rows and the newest version. After `stop`
        the last flush has the rest of `drain_s` (None: no limit). Rows beyond `most_bytes` (0: no bound) are
        evicted, least recently used first. `reader`: see `SampleDecoder`.

        Raises:
            ConfigError: the model cannot be computed on `device`.
            Unavailable: another process holds a claim for longer than `CLAIM_WAIT_S`, or `stop` was set
                before the start was complete.
            Mismatch, DataLost, Corrupt: the stores do not match this spec, its transforms, or each other.
        """
        self.spec, self._stores, self._clock, self._reader = spec, stores, clock, reader
        self._drain = None if drain_s is None else Drain(drain_s, clock)
        with Cleanup() as cleanup:
            self._open(cleanup, spec_hash, lanes, device, stop, most_bytes)
            self._cleanup = cleanup.pop_all()
        self.shard.on_failed = self.trainer.stop.set
        for held in self._held:
            held.on_lost(self.trainer.stop.set)

    def _open(
        self,
        cleanup: Cleanup,
        spec_hash: str,
        lanes: int | None,
        device: str,
        stop: threading.Event | None,
        most_bytes: int,
    ) -> None:
        spec, stores, clock = self.spec, self._stores, self._clock
        topics = ensure_topics(stores.log, spec)
        layout = layout_of(spec)
        owner = f"trainer-{os.getpid()}"
        claims = Claims(stores.log, topics.control, clock)
        cleanup.add("claims", claims.close)
        deadline = clock.monotonic() + CLAIM_WAIT_S
        self._held: Sequence[Held] = [
            claims.acquire_all(things, owner, deadline, stop)
            for things in (
                list(slices_of(spec.buckets)),
                [f"partition:{p}" for p in range(spec.partitions)],  # as embedder processes claim them
                ["trainer:0"],
            )
        ]
        shard_claim, partitions_claim, seat = self._held
        self.shard = Shard(
            ShardContext(spec, spec_hash, stores.log, stores.rows, clock),
            fence=shard_claim.fence,
            held=lambda: not shard_claim.lost.is_set(),
            most_bytes=most_bytes,
        )
        if most_bytes:
            names = {table.id: table.name for table in spec.tables}
            bounds = {names[table]: rows for table, rows in self.shard.store.max_rows.items()}
            log.info("rows are bounded", bytes=most_bytes, max_rows=bounds)
        self.shard.load(stop)
        dense = restore_dense(spec, stores.log, stores.versions, topics, spec_hash, device)
        self.ledger, self.quality = dense.ledger, dense.quality
        self.lanes = lanes = (
            lanes
            or spec.train.lanes
            or lanes_for(
                os.cpu_count() or 1, spec.train.staleness_rows, spec.train.batch_rows, spec.partitions
            )
        )
        writer = stores.log.writer()
        cleanup.add("writer", writer.close)
        decoder = SampleDecoder(spec, layout, SchemaRegistry(stores.log).get_now, self._reader)
        self.refused = RefusedSamples(refused_writer(writer, topics.refused), clock.monotonic)
        self.stream = LocalStream(
            spec=spec,
            layout=layout,
            topic=topics.samples,
            log=stores.log,
            rows=self.shard,
            decoder=lambda: BlockDecoder(decoder, len(spec.labels), self.refused, clock, spec.bounds),
            dense_applied=self.ledger.applied_offsets,
            fence=partitions_claim.fence,
            lanes=lanes,
            clock=clock,
            batch_rows=spec.train.batch_rows,
            staleness_rows=spec.train.staleness_rows,
        )
        self._lag = CachedGauge(lambda: sum(self.stream.lag().values()), 0)
        cleanup.add("stream", self.stream.close)
        pins = Pins(stores.log, topics.versions)
        cleanup.add("pins", pins.close)
        training_loop = LocalTrainer(
            self.stream,
            dense.model,
            dense.ledger,
            lanes,
            spec.train.batch_wait_ms / 1000,
            dense.progress.steps,
            self._loop(layout, dense.model),
        )
        self.trainer = build_trainer(
            spec,
            dense,
            training_loop,
            VersionTarget(stores.versions, writer, topics, spec_hash, pins),
            recent=self.stream.recent,
            fence=seat.fence,
            clock=clock,
        )
        self.trainer.begin()

    def _loop(self, layout: Layout, model: DenseModel) -> NativeLoop | None:
        """Return the native code that iterates over batches; None for a model in Python."""
        if self.spec.model.kind not in NATIVE_KINDS:
            return None
        from freshet.model.hedge import HedgeDense

        assert isinstance(model, HedgeDense)
        sync = self.spec.train.mode == "sync"
        return NativeLoop(self.spec, layout, model, self.shard.store, self.lanes, sync=sync)

    def run(self) -> None:
        """Train until `stop`, then flush and write a last version. Raises Fenced if a claim was lost."""
        self.shard.start()
        try:
            self.trainer.run()
        finally:
            try:
                self._flush_last()
            finally:
                self._cleanup.run(self._left_s())
        for held in self._held:
            if held.lost.is_set():
                raise Fenced(f"{held.what} was claimed by another process; this one has stopped")
        if self.shard.failed is not None:
            raise self.shard.failed

    def run_to_the_end(self) -> None:
        """Train on all samples that the log holds, then stop."""
        watcher = threading.Thread(target=self._stop_at_the_end, name="end", daemon=True)
        watcher.start()
        try:
            self.run()
        finally:
            self.trainer.stop.set()
            watcher.join()

    def stop(self) -> None:
        """Let `run` return after the current batches."""
        self._left_s()
        self.trainer.stop.set()

    def ready(self) -> str | None:
        """Return None, or the reason why this process does not train."""
        if self.shard.failed is not None:
            return str(self.shard.failed)
        lost = [held.what for held in self._held if held.lost.is_set()]
        return f"the claim of {', '.join(lost)} was lost" if lost else self.refused.trouble()

    def stuck(self) -> str | None:
        """Return None, or a text that says for how long the lanes have made no progress."""
        return self.trainer.pulse.stuck()

    def status(self) -> Mapping[str, Any]:
        """Return figures for `freshet status` and metrics."""
        memory = self.shard.store.memory()
        names = {table.id: table.name for table in self.spec.tables}
        quality = self.quality.now()
        return {
            "samples": self.trainer.progress.samples,
            "steps": self.trainer.progress.steps,
            "event_time_ms": self.trainer.progress.event_time_ms,
            "version": self.trainer.progress.version,
            "outliers": self.quality.outliers,
            "versions_failed": self.trainer.progress.versions_failed,
            "version_error": self.trainer.progress.version_error,
            "applied": dict(self.ledger.applied),
            "batches": self.shard.counts.pushes,
            "refused": self.refused.counts(),
            "stage_seconds": {**self.stream.seconds(), **self.trainer.stage_seconds()},
            "lag_blocks": self._lag(),
            "rows": {names[table]: rows for table, rows in memory.rows.items()},
            "evicted": {names[table]: rows for table, rows in self.shard.store.evicted().items()},
            "max_rows": {names[table]: rows for table, rows in self.shard.store.max_rows.items() if rows},
            "row_bytes": {names[table]: size for table, size in memory.row_bytes.items()},
            "bytes": memory.bytes,
            "measures": quality.summary,
            "lately": quality.lately,
            "open": quality.open,
            "published": asdict(self.shard.published),
            "shard": asdict(self.shard.counts),
            "store": asdict(self.shard.store.counts()),
            "unwritten_s": round(self.shard.unwritten_s, 3),
        }

    def progress(self) -> Mapping[str, Any]:
        """Return the applied and published offsets, which the console polls often."""
        return {"applied": dict(self.ledger.applied), "published": asdict(self.shard.published)}

    def _left_s(self) -> float | None:
        """Begin the drain and return its rest, in seconds; None: no limit."""
        if self._drain is None:
            return None
        self._drain.begin()
        return self._drain.left_s(LAST_S)

    def _flush_last(self) -> None:
        """Flush within the drain; samples of unwritten rows are replayed at the next start, as after a
        kill."""
        seconds = self._left_s()
        try:
            done = within(seconds, "last-flush", self.shard.stop)
            reason = "" if done else f"the row store, or the log, has not answered within {seconds:.1f} s"
        except Unavailable as error:
            reason = str(error)
        if reason:
            log.warning("not everything was flushed", reason=reason)

    def _stop_at_the_end(self) -> None:
        before = -1
        while not self.trainer.stop.wait(0.02):
            samples = self.trainer.progress.samples
            # A query of the log's end holds the GIL, which would slow the lanes while they make progress.
            if samples == before and not any(self.stream.lag().values()):
                self.trainer.stop.set()
            before = samples


def refused_writer(writer: Writer, topic: str) -> Callable[[list[bytes]], None]:
    """Return a function that appends dead letters of samples to `topic`."""

    def append(dead_letters: list[bytes]) -> None:
        writer.append([Append(topic, 0, BytesColumn.of(dead_letters))])

    return append
