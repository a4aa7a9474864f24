"""A trainer rank whose batches come from embedder processes: it holds the dense weights and no rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from freshet.cli.dense import restored, trainer_of
from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.embedder.core import lanes_for
from freshet.embedder.ownership import embedders_of
from freshet.embedder.recent import Recent
from freshet.embedder.service import names_of
from freshet.runtime.lifecycle import Cleanup
from freshet.seams.batches.remote import RemoteStream, Seat
from freshet.seams.eventlog import EventLog
from freshet.seams.eventlog.claims import LEASE_S, Claims
from freshet.seams.eventlog.topics import ensure_topics
from freshet.seams.transport import Transport
from freshet.seams.versions import VersionStore
from freshet.spec.layout import layout_of
from freshet.spec.model import Spec
from freshet.trainer.course import ManyRanks
from freshet.trainer.leveling import DenseState
from freshet.trainer.membership import Membership, Terms
from freshet.trainer.pins import Pins
from freshet.trainer.ranks import RankGroup
from freshet.trainer.sharing import SharedMeasures
from freshet.types import Fence
from freshet.wire.values import RowCodec

__all__ = ["RemoteTraining"]


class RemoteTraining:
    """One rank. As `Training`, but for the rows, which shards hold and embedders look up."""

    def __init__(
        self,
        spec: Spec,
        log: EventLog,
        versions: VersionStore,
        transport: Transport,
        *,
        spec_hash: str,
        codec: RowCodec,
        address: str = "127.0.0.1",
        answer_s: float = LEASE_S,
        clock: Clock = SYSTEM_CLOCK,
        lanes: int | None = None,
    ) -> None:
        """Load the last version. Embedders and other ranks are found in `control`; `address` is this host's,
        as other ranks reach it, and who of them is silent for `answer_s` is lost.

        Raises Mismatch, Corrupt: the stores do not fit this spec, or each other.
        """
        self._cleanup = Cleanup()
        self._spec, self._clock = spec, clock
        train = spec.train
        topics = ensure_topics(log, spec)
        self._claims = claims = Claims(log, topics.control, clock)
        self._cleanup.add("claims", claims.close)
        dense = restored(spec, log, versions, topics, spec_hash)
        self.ledger, self.quality, self._batches = dense.ledger, dense.quality, 0
        self.lanes = lanes = (
            lanes
            or train.lanes
            or lanes_for(os.cpu_count() or 1, train.staleness_rows, train.batch_rows, spec.partitions)
        )
        writer = log.writer()
        self._cleanup.add("writer", writer.close)
        self._recent = Recent(spec.serve.gate.samples, clock)
        self._log, self._topic, self._transport, self._codec = log, topics.samples, transport, codec
        self._metadata = [("freshet-model", spec.name), ("freshet-spec", spec_hash)]
        self.stream: RemoteStream | None = None  # of the present world
        pins = Pins(log, topics.versions)
        self._cleanup.add("pins", pins.close)
        shared = SharedMeasures(dense.quality)
        terms = Terms(address, lanes, spec.partitions, answer_s=answer_s)
        self.course = ManyRanks(
            Membership(claims, terms, self._stopping, clock),
            DenseState(dense.model, dense.ledger, dense.quality, shared, dense.progress, spec_hash),
            self._stream_of,
            train.batch_wait_ms / 1000,
            train.mode,
            clock,
        )
        self.trainer = trainer_of(
            spec,
            dense,
            self.course,
            recent=self._recent.newest,
            versions=versions,
            writer=writer,
            topics=topics,
            spec_hash=spec_hash,
            pins=pins,
            fence=Fence(-1),  # of no world yet
            clock=clock,
            shared=shared,
        )

    def run(self) -> None:
        """Train until `stop`, with whatever ranks there are; the one that leads writes a last version."""
        try:
            self.trainer.run()
        finally:
            self._cleanup.run()

    def stop(self) -> None:
        """Have `run` return after the batches in hand."""
        self.trainer.stop.set()

    def ready(self) -> str | None:
        """None, or why this process is not training."""
        if self.course.worlds == 0:
            return "it is in no world of ranks yet"
        return None if embedders_of(self._claims.living()) else "no embedder owns a partition"

    def status(self) -> Mapping[str, Any]:
        """Figures for `freshet status` and metrics."""
        progress, quality, stream = self.trainer.progress, self.quality.now(), self.stream
        return {
            "samples": progress.samples,
            "steps": progress.steps,
            "event_time_ms": progress.event_time_ms,
            "version": progress.version,
            "applied": dict(self.ledger.applied),
            "batches": self._batches + (stream.counts.batches if stream is not None else 0),
            "stage_seconds": self.trainer.stage_seconds(),
            "lag_blocks": sum(stream.lag().values()) if stream is not None else 0,
            "ranks": self.course.standing(),
            "measures": quality.summary,
            "lately": quality.lately,
            "open": quality.open,
        }

    def progress(self) -> Mapping[str, Any]:
        """How far samples are applied to the dense weights."""
        return {"applied": dict(self.ledger.applied)}

    def _stopping(self) -> bool:
        return self.trainer.stop.is_set()

    def _stream_of(self, group: RankGroup, lanes: int) -> RemoteStream:
        train = self._spec.train
        if self.stream is not None:
            self._batches += self.stream.counts.batches
        self.stream = RemoteStream(
            seat=Seat(group.rank, group.size, lanes, group.fence),
            names=names_of(self._spec, layout_of(self._spec)),
            partitions=self._spec.partitions,
            owners=lambda: embedders_of(self._claims.living()),
            transport=self._transport,
            metadata=self._metadata,
            dense_applied=self.ledger.told,
            remember=self._recent.add,
            newest=self._recent.newest,
            log=self._log,
            topic=self._topic,
            clock=self._clock,
            ahead=0 if train.mode == "sync" else 1 + train.staleness_rows // train.batch_rows,
            codec=self._codec,
        )
        return self.stream
