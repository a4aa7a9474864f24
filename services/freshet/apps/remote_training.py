"""A trainer rank that holds the dense weights; shards hold the rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from freshet.apps.dense_state import VersionTarget, build_trainer, restore_dense
from freshet.apps.rank_batches import FromEmbedders, RankBatches, RankParts, Wire
from freshet.batches.stream import BatchStream
from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.spec.model import Spec
from freshet.coordination.claims import LEASE_S, Claims
from freshet.embedder.core import lanes_for
from freshet.embedder.recent_samples import RecentSamples
from freshet.log import EventLog
from freshet.log.topics import ensure_topics
from freshet.observability.metrics import CachedGauge
from freshet.process.lifecycle import Cleanup
from freshet.trainer.membership import Membership, QuorumOptions
from freshet.trainer.rank_measures import SharedMeasures
from freshet.trainer.ranks import ProcessGroup
from freshet.trainer.state_sync import DenseState
from freshet.trainer.training_loop import ElasticTrainer
from freshet.trainer.version_writer import Pins
from freshet.types import Fence
from freshet.versions import VersionStore

__all__ = ["RemoteTraining"]


class RemoteTraining:
    """One trainer rank with remote rows, which embedders or the rank look up."""

    def __init__(
        self,
        spec: Spec,
        log: EventLog,
        versions: VersionStore,
        wire: Wire,
        *,
        spec_hash: str,
        batches: Callable[[RankParts, Wire], RankBatches] = FromEmbedders,
        address: str = "127.0.0.1",
        answer_s: float = LEASE_S,
        clock: Clock = SYSTEM_CLOCK,
        lanes: int | None = None,
        device: str = "cpu",
    ) -> None:
        """Load the newest version. `control` lists embedders, shards and other ranks. `address` is this host
        as other ranks reach it; a rank that does not answer for `answer_s` is lost.

        Raises ConfigError if the model cannot be computed on `device`; Mismatch or Corrupt if the stores do
        not match this spec, or each other.
        """
        self._spec, self._clock = spec, clock
        with Cleanup() as cleanup:
            train = spec.train
            topics = ensure_topics(log, spec)
            claims = Claims(log, topics.control, clock)
            cleanup.add("claims", claims.close)
            dense = restore_dense(spec, log, versions, topics, spec_hash, device)
            self.ledger, self.quality = dense.ledger, dense.quality
            self.lanes = lanes = (
                lanes
                or train.lanes
                or lanes_for(os.cpu_count() or 1, train.staleness_rows, train.batch_rows, spec.partitions)
            )
            writer = log.writer()
            cleanup.add("writer", writer.close)
            recent = RecentSamples(spec.serve.gate.samples, clock)
            parts = RankParts(
                spec, spec_hash, log, topics, claims, self.ledger.applied_offsets, recent, clock
            )
            self._batches = batches(parts, wire)
            cleanup.add("batches", self._batches.close)
            self._stream: BatchStream | None = None  # of the current quorum
            self._lag = CachedGauge(self._count_lag, 0)
            pins = Pins(log, topics.versions)
            cleanup.add("pins", pins.close)
            shared = SharedMeasures(dense.quality)
            terms = QuorumOptions(address, lanes, spec.partitions, answer_s=answer_s)
            self.training_loop = ElasticTrainer(
                Membership(claims, terms, self._stopping, clock),
                DenseState(dense.model, dense.ledger, dense.quality, shared, dense.progress, spec_hash),
                self._stream_of,
                train.batch_wait_ms / 1000,
                train.mode,
                clock,
            )
            self.trainer = build_trainer(
                spec,
                dense,
                self.training_loop,
                VersionTarget(versions, writer, topics, spec_hash, pins),
                recent=recent.newest,
                fence=Fence(-1),  # before the first quorum
                clock=clock,
                shared=shared,
            )
            self._cleanup = cleanup.pop_all()

    def run(self) -> None:
        """Train with the ranks of each quorum until `stop`; the leader then writes a last version."""
        try:
            self.trainer.run()
        finally:
            self._cleanup.run()

    def stop(self) -> None:
        """Let `run` return after the current batches."""
        self.trainer.stop.set()

    def ready(self) -> str | None:
        """Return None, or the reason why this process does not train."""
        if self.training_loop.quorums == 0:
            return "this rank is in no quorum yet"
        return self._batches.missing()

    def stuck(self) -> str | None:
        """Return None: a rank may wait for other ranks without a limit."""
        return None

    def status(self) -> Mapping[str, Any]:
        """Return figures for `freshet status` and metrics."""
        progress, quality = self.trainer.progress, self.quality.now()
        counts = self._batches.counts()
        return {
            "samples": progress.samples,
            "steps": progress.steps,
            "event_time_ms": progress.event_time_ms,
            "version": progress.version,
            "outliers": self.quality.outliers,
            "versions_failed": progress.versions_failed,
            "version_error": progress.version_error,
            "applied": dict(self.ledger.applied),
            "batches": counts.batches,
            "sent_bytes": counts.sent_bytes,
            "received_bytes": counts.received_bytes,
            "stepped_rows": counts.stepped_rows,
            "refused": counts.refused,
            "broken": counts.broken,
            "fenced": counts.fenced,
            "stage_seconds": {**counts.seconds, **self.trainer.stage_seconds()},
            "lag_blocks": self._lag(),
            "ranks": self.training_loop.status(),
            "measures": quality.summary,
            "lately": quality.lately,
            "open": quality.open,
        }

    def _count_lag(self) -> int:
        stream = self._stream
        return sum(stream.lag().values()) if stream is not None else 0

    def progress(self) -> Mapping[str, Any]:
        """Return the offsets that the dense weights have applied."""
        return {"applied": dict(self.ledger.applied)}

    def _stopping(self) -> bool:
        return self.trainer.stop.is_set()

    def _stream_of(self, group: ProcessGroup, lanes: int) -> BatchStream:
        self._stream = self._batches.stream(group, lanes)
        return self._stream
