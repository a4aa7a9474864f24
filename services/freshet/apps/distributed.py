"""Composition of processes that use gRPC: an embedder, and a trainer rank with remote rows."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from freshet.apps.rank_batches import FromEmbedders, FromShards, Wire
from freshet.apps.remote_training import RemoteTraining
from freshet.apps.training import refused_writer
from freshet.batches.frames import check_messages, streams, work_bytes
from freshet.clock import SYSTEM_CLOCK
from freshet.config.avro.schema import Record
from freshet.config.settings import Settings
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.coordination.assignment import ShardMap
from freshet.coordination.claims import Claims
from freshet.embedder.block_decoder import BlockDecoder
from freshet.embedder.partition_reader import RefusedSamples
from freshet.embedder.service import Embedder
from freshet.features import SampleDecoder
from freshet.http.addresses import Address
from freshet.log import EventLog
from freshet.log.schema_ids import SchemaRegistry
from freshet.log.topics import ensure_topics
from freshet.process.lifecycle import Cleanup
from freshet.rows.grpc.client import RemoteRows, Served
from freshet.rpc.channel import Transport, transport_of
from freshet.rpc.server import STREAMS, WORK_BYTES, GrpcServer
from freshet.rpc.value_formats import RowCodec
from freshet.versions import VersionStore

__all__ = ["Embedding", "build_rank", "build_transport"]


def build_transport(settings: Settings, spec: Spec) -> Transport:
    """Build certificates, token and limits. Raises ConfigError as `transport_of` and `check_messages` do."""
    transport = transport_of(
        ca_file=settings.grpc.ca_file,
        cert_file=settings.grpc.cert_file,
        key_file=settings.grpc.key_file,
        token_file=settings.grpc.token_file,
        max_message_bytes=settings.grpc.max_message_bytes,
    )
    check_messages(spec, transport)
    return transport


def build_rank(
    spec: Spec, log: EventLog, versions: VersionStore, settings: Settings, spec_hash: str, reader: Record
) -> RemoteTraining:
    """Build a rank with remote rows; `reader`: see `SampleDecoder`. Raises as `RemoteTraining` does."""
    return RemoteTraining(
        spec,
        log,
        versions,
        Wire(
            build_transport(settings, spec),
            RowCodec[settings.trainer.rows.upper()],
            RowCodec[settings.trainer.gradients.upper()],
        ),
        spec_hash=spec_hash,
        batches=partial(FromShards, reader=reader) if settings.trainer.batches == "shards" else FromEmbedders,
        address=settings.trainer.advertised_host or settings.common.bind_address,
        answer_s=settings.trainer.rank_answer_ms / 1000,
        device=settings.trainer.device,
    )


class Embedding:
    """An embedder process: claims, gRPC listener, client of the shards."""

    def __init__(
        self, spec: Spec, log: EventLog, settings: Settings, spec_hash: str, reader: Record | None = None
    ) -> None:
        """Open all parts; `run` claims partitions. `reader`: see `SampleDecoder`. Raises the errors of the
        parts."""
        transport = build_transport(settings, spec)
        topics, served = ensure_topics(log, spec), Served(spec.name, spec_hash)
        with Cleanup() as cleanup:
            claims = Claims(log, topics.control)
            cleanup.add("claims", claims.close)
            rows = RemoteRows(
                served,
                ShardMap(claims, spec.buckets),
                transport,
                lookup_codec=RowCodec[settings.embedder.rows.upper()],
                push_codec=RowCodec[settings.embedder.gradients.upper()],
            )
            cleanup.add("rows", rows.close)
            writer = log.writer()
            cleanup.add("writer", writer.close)
            decoder = SampleDecoder(spec, layout_of(spec), SchemaRegistry(log).get_now, reader)
            refused = RefusedSamples(refused_writer(writer, topics.refused), SYSTEM_CLOCK.monotonic)
            address = str(Address(settings.common.bind_address, settings.embedder.port))
            self.server = GrpcServer(
                address,
                transport,
                identity=dict(served.metadata),
                streams=streams(spec, STREAMS),
                work_bytes=work_bytes(spec, WORK_BYTES),
            )
            self._embedder = Embedder(
                spec=spec,
                topic=topics.samples,
                log=log,
                rows=rows,
                decoder=lambda: BlockDecoder(decoder, len(spec.labels), refused, bounds=spec.bounds),
                refused=refused,
                claims=claims,
                server=self.server,
                name=settings.embedder.name,
                host=settings.embedder.advertised_host or settings.common.bind_address,
                clock=SYSTEM_CLOCK,
                codec=RowCodec[settings.embedder.rows.upper()],
            )
            self._cleanup = cleanup.pop_all()

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop`; see `Embedder.run`."""
        try:
            self._embedder.run(stop)
        finally:
            self._cleanup.run()

    def ready(self) -> str | None:
        """Return None, or the reason why this embedder serves no batch."""
        return self._embedder.ready()

    def status(self) -> Mapping[str, Any]:
        """Return figures for `freshet status` and metrics."""
        return self._embedder.status()
