"""A trainer rank whose batches come from embedder processes: it holds the dense weights and no rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from freshet.cli.dense import Stores, restored, trainer_of
from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.embedder.core import lanes_for
from freshet.embedder.ownership import embedders_of
from freshet.embedder.recent import Recent
from freshet.embedder.service import names_of
from freshet.errors import Fenced
from freshet.runtime.lifecycle import Cleanup
from freshet.seams.batches.remote import RemoteStream, Seat
from freshet.seams.eventlog.claims import LEASE_S, Claims
from freshet.seams.eventlog.topics import ensure_topics
from freshet.seams.transport import Transport
from freshet.spec.layout import layout_of
from freshet.spec.model import Spec
from freshet.trainer.pins import Pins
from freshet.wire.values import RowCodec

__all__ = ["RemoteTraining"]

CLAIM_WAIT_S = 10 * LEASE_S
"""How long a start waits for a former owner of the seat."""

SETTLE_S = 5.0
"""How long a stop waits for the shards to acknowledge what the last batches taught."""


class RemoteTraining:
    """One rank. As `Training`, but for the rows, which shards hold and embedders look up."""

    def __init__(
        self,
        spec: Spec,
        stores: Stores,
        transport: Transport,
        *,
        spec_hash: str,
        codec: RowCodec,
        clock: Clock = SYSTEM_CLOCK,
        lanes: int | None = None,
    ) -> None:
        """Claim the seat and load the last version; embedders are found in `control`.

        Raises:
            Unavailable: another process holds the seat for longer than `CLAIM_WAIT_S`.
            Mismatch, Corrupt: the stores do not fit this spec, or each other.
        """
        self._cleanup = Cleanup()
        train = spec.train
        topics = ensure_topics(stores.log, spec)
        self._claims = claims = Claims(stores.log, topics.control, clock)
        self._cleanup.add("claims", claims.close)
        owner = f"trainer-{os.getpid()}"
        self._seat = claims.acquire("trainer:0", owner, clock.monotonic() + CLAIM_WAIT_S)
        dense = restored(spec, stores.log, stores.versions, topics, spec_hash)
        self.ledger, self.quality = dense.ledger, dense.quality
        self.lanes = lanes = (
            lanes
            or train.lanes
            or lanes_for(os.cpu_count() or 1, train.staleness_rows, train.batch_rows, spec.partitions)
        )
        writer = stores.log.writer()
        self._cleanup.add("writer", writer.close)
        recent = Recent(spec.serve.gate.samples, clock)
        self.stream = RemoteStream(
            seat=Seat(0, 1, lanes, self._seat.fence),
            names=names_of(spec, layout_of(spec)),
            partitions=spec.partitions,
            owners=lambda: embedders_of(claims.living()),
            transport=transport,
            metadata=[("freshet-model", spec.name), ("freshet-spec", spec_hash)],
            dense_applied=self.ledger.told,
            remember=recent.add,
            newest=recent.newest,
            log=stores.log,
            topic=topics.samples,
            clock=clock,
            ahead=0 if train.mode == "sync" else 1 + train.staleness_rows // train.batch_rows,
            codec=codec,
        )
        self._cleanup.add("stream", self.stream.close)
        pins = Pins(stores.log, topics.versions)
        self._cleanup.add("pins", pins.close)
        self.trainer = trainer_of(
            spec,
            dense,
            self.stream,
            versions=stores.versions,
            writer=writer,
            topics=topics,
            spec_hash=spec_hash,
            pins=pins,
            seat=self._seat.fence,
            clock=clock,
            lanes=lanes,
        )
        self._seat.on_lost(self.trainer.stop.set)

    def run(self) -> None:
        """Train until `stop`, then write a last version. Raises Fenced if the seat was lost."""
        try:
            self.trainer.run()
            self.stream.settled(SETTLE_S)
        finally:
            self._cleanup.run()
        if self._seat.lost.is_set():
            raise Fenced("trainer:0 was claimed by another process; this one has stopped")

    def stop(self) -> None:
        """Have `run` return after the batches in hand."""
        self.trainer.stop.set()

    def ready(self) -> str | None:
        """None, or why this process is not training."""
        if self._seat.lost.is_set():
            return "the claim of trainer:0 was lost"
        return None if embedders_of(self._claims.living()) else "no embedder owns a partition"

    def status(self) -> Mapping[str, Any]:
        """Figures for `freshet status` and metrics."""
        progress, quality = self.trainer.progress, self.quality.now()
        return {
            "samples": progress.samples,
            "steps": progress.steps,
            "event_time_ms": progress.event_time_ms,
            "version": progress.version,
            "applied": dict(self.ledger.applied),
            "batches": self.stream.counts.batches,
            "stage_seconds": self.trainer.stage_seconds(),
            "lag_blocks": sum(self.stream.lag().values()),
            "measures": quality.summary,
            "lately": quality.lately,
            "open": quality.open,
        }

    def progress(self) -> Mapping[str, Any]:
        """How far samples are applied to the dense weights."""
        return {"applied": dict(self.ledger.applied)}
