"""The embedder of a process: claims partitions and serves batches of their samples to trainer ranks."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import structlog

from freshet.batches.frames import Names
from freshet.clock import Clock
from freshet.config.spec.layout import Layout, layout_of
from freshet.config.spec.model import Spec
from freshet.coordination.assignment import PartitionAssignment
from freshet.coordination.claims import LEASE_S, Claims
from freshet.embedder.block_decoder import BlockDecoder
from freshet.embedder.core import shares_of
from freshet.embedder.partition_reader import RefusedSamples, refused_metrics
from freshet.embedder.pipelined_stream import PipelinedStream, Share
from freshet.embedder.server import BatchServer, LaneShape
from freshet.http.addresses import Address
from freshet.log import EventLog
from freshet.observability.metrics import CachedGauge, Metric
from freshet.rows.service import RowService
from freshet.rpc.server import GrpcServer
from freshet.rpc.value_formats import RowCodec
from freshet.types import Fence

__all__ = ["EMBEDDER_METRICS", "Embedder", "names_of"]

log = structlog.get_logger("freshet.embedder")

CHECK_S = 0.2
"""Seconds between two checks of the partition assignment."""

DRAIN_S = 1.0
"""Seconds for which the stopping server completes answers; gradients are pushed before."""

EMBEDDER_METRICS = (
    Metric("freshet_embedder_partitions", "gauge", "partitions", "Partitions of samples owned."),
    Metric("freshet_embedder_trainer_lanes", "gauge", "lanes", "Connected lanes of trainers."),
    Metric("freshet_embedder_batches", "counter", "batches", "Batches sent to trainers."),
    Metric("freshet_embedder_samples", "counter", "samples", "Samples sent to trainers."),
    Metric("freshet_embedder_sent_bytes", "counter", "bytes", "Bytes of batches sent to trainers."),
    Metric("freshet_embedder_rows_in_flight", "gauge", "samples", "Samples looked up and not yet applied."),
    Metric("freshet_embedder_batches_in_flight", "gauge", "batches", "Permits in use."),
    Metric("freshet_embedder_waiting_lanes", "gauge", "lanes", "Lanes that wait for a permit."),
    Metric("freshet_embedder_rewinds", "counter", "rewinds", "Restarts of lanes at the applied offsets."),
    Metric("freshet_embedder_void_rows", "counter", "samples", "Samples looked up and issued again."),
    Metric("freshet_embedder_lag_blocks", "gauge", "blocks", "Blocks in the log that are in no batch yet."),
    *refused_metrics("embedder"),
)


def names_of(spec: Spec, layout: Layout) -> Names:
    """Return the columns of a batch of this spec."""
    return Names(
        tuple(spec.train.segments),
        tuple(label.name for label in spec.labels),
        tuple(group.width for group in layout.groups),
        tuple(group.state_floats for group in layout.groups),
        spec.buckets,
    )


class Embedder:
    """The partition assignment, the batch server and the stream of one embedder process."""

    def __init__(
        self,
        *,
        spec: Spec,
        topic: str,
        log: EventLog,
        rows: RowService,
        decoder: Callable[[], BlockDecoder],
        refused: RefusedSamples,
        claims: Claims,
        server: GrpcServer,
        name: str,
        host: str,
        clock: Clock,
        codec: RowCodec,
    ) -> None:
        """Claim nothing yet; `run` does, and starts `server`.

        Args:
            spec: the spec.
            topic: the topic of samples.
            log: the event log.
            rows: the row service.
            decoder: creates a decoder, which counts in `refused`.
            refused: counts of refused samples.
            claims: the claims in `control`.
            server: the gRPC server.
            name: of the membership lease.
            host: at which trainers reach `server`.
            clock: for deadlines.
            codec: of the rows in batches.
        """
        self._spec, self._layout, self._topic, self._log = spec, layout_of(spec), topic, log
        self._rows, self._decoder, self._refused, self._clock = rows, decoder, refused, clock
        self._claims, self._server, self._name, self._host = claims, server, name, host
        self.batches = BatchServer(names_of(spec, self._layout), codec, self._open_stream)
        self.batches.add_to(server)
        self._partitions: PartitionAssignment | None = None
        self._rewinds = self._void_rows = 0
        self._lag = CachedGauge(self._read_lag, 0)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop`, then push queued gradients and release the partitions.

        Raises:
            Fenced: another process claimed this one's membership lease.
            DataLost, Corrupt: as the log and the row service do; an operator must act.
        """
        self._server.start()
        owner = f"{self._name}@{Address(self._host, self._server.port)}/{uuid.uuid4().hex}"
        partitions = shares_of(self._claims, self._name, owner, self._spec.partitions, self._clock)
        try:
            partitions.join(2 * LEASE_S)
            self._partitions = partitions
            while not stop.wait(CHECK_S):
                if partitions.update(lambda _: self.batches.renew()):
                    self.batches.renew()
                if self.batches.failed is not None:
                    raise self.batches.failed
        finally:
            self.batches.close()
            partitions.release()
            self._server.stop(DRAIN_S)

    def ready(self) -> str | None:
        """Return why the embedder serves no batches; None if it does."""
        if self._partitions is None:
            return "the previous process still holds its membership lease"
        if not self._partitions.fences:
            return "it owns no partition; other embedders do"
        return self._refused.trouble()

    def status(self) -> Mapping[str, Any]:
        """Return the figures for `freshet status` and metrics."""
        stream, batches = self.batches.stream(), self.batches
        counts = stream.counts() if stream is not None else []
        return {
            "partitions": sorted(self._partitions.fences) if self._partitions else [],
            "trainer_lanes": batches.ranks(),
            "batches": batches.served_batches,
            "samples": batches.served_samples,
            "sent_bytes": batches.served_bytes,
            "rows_in_flight": stream.limiter.rows() if stream else 0,
            "batches_in_flight": stream.limiter.batches() if stream else 0,
            "waiting_lanes": stream.limiter.waiting() if stream else 0,
            "rewinds": batches.rewinds + sum(c.rewinds for c in counts),
            "void_rows": batches.void_rows + sum(c.void_rows for c in counts),
            "lag_blocks": self._lag(),
            "refused": self._refused.counts(),
        }

    def _read_lag(self) -> int:
        stream = self.batches.stream()
        return sum(stream.lag().values()) if stream is not None else 0

    def _open_stream(
        self, shape: LaneShape, applied_of: Callable[[int], Mapping[int, Sequence[int]]]
    ) -> tuple[PipelinedStream, list[int]]:
        """Open a stream over the owned partitions, with a lane for each trainer lane and claim."""
        shares: dict[tuple[int, Fence], list[int]] = {}
        for p, fence in (self._partitions.fences if self._partitions else {}).items():
            shares.setdefault((p % shape.places, fence), []).append(p)
        train = self._spec.train
        stream = PipelinedStream(
            spec=self._spec,
            layout=self._layout,
            topic=self._topic,
            log=self._log,
            rows=self._rows,
            decoder=self._decoder,
            dense_applied=dict,
            lanes=[Share(mine, fence, partial(applied_of, place)) for (place, fence), mine in shares.items()],
            clock=self._clock,
            batch_rows=train.batch_rows,
            staleness_rows=train.staleness_rows,
            read_my_writes="trainer",
        )
        return stream, [place for place, _ in shares]
