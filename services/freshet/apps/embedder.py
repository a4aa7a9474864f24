"""Composition of an embedder process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from freshet.adapters import open_eventlog
from freshet.batches.frames import check_messages, streams, work_bytes
from freshet.config.avro.schema import Record
from freshet.config.settings import Settings
from freshet.config.spec.identity import identity_hash
from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import load_schemas, sample_reader
from freshet.coordination.assignment import ShardMap
from freshet.coordination.claims import Claims
from freshet.embedder.block_decoder import BlockDecoders
from freshet.embedder.service import EMBEDDER_METRICS, Embedder, EmbedderAddress
from freshet.http.addresses import Address
from freshet.http.admin import Admin
from freshet.log.topics import ModelContext
from freshet.observability.grpc_metrics import GRPC_METRICS
from freshet.observability.metrics import register
from freshet.process.lifecycle import Cleanup
from freshet.process.telemetry import service_registry
from freshet.rows.grpc.client import RemoteRows, Served
from freshet.rpc.channel import Transport, transport_of
from freshet.rpc.server import STREAMS, WORK_BYTES, FrameServer
from freshet.wires.link_codecs import CodecChoice
from freshet.wires.row_wire import WIRE_METRICS, WiresStatus, tables_of_groups, wires_status


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


class EmbedderProcess:
    """An embedder process: claims, gRPC listener, client of the shards."""

    def __init__(self, context: ModelContext, settings: Settings, reader: Record | None = None) -> None:
        """Open all parts; `run` claims partitions. `reader`: see `SampleDecoder`. Raises the errors of the
        parts."""
        spec, common, own = context.spec, settings.common, settings.embedder
        transport = build_transport(settings, spec)
        served = Served(spec.name, context.spec_hash, context.layout.scalars)
        with Cleanup() as cleanup:
            claims = Claims(context.log, context.topics.control)
            cleanup.add("claims", claims.close)
            self._rows = rows = RemoteRows(
                served,
                ShardMap(claims, spec.buckets),
                transport,
                choice=CodecChoice.of(own.rows, own.gradients, context.layout.shapes),
            )
            cleanup.add("rows", rows.close)
            writer = context.log.writer()
            cleanup.add("writer", writer.close)
            self.server = FrameServer(
                str(Address(common.bind_address, own.port)),
                transport,
                identity=dict(served.metadata),
                streams=streams(spec, STREAMS),
                work_bytes=work_bytes(spec, WORK_BYTES),
            )
            self._embedder = Embedder(
                context,
                claims,
                rows,
                BlockDecoders(context, writer, reader),
                self.server,
                EmbedderAddress(own.name, own.advertised_host or common.bind_address),
            )
            self._tables = tables_of_groups(spec, context.layout)
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
        return {**self._embedder.status(), "wires": self.wires(), "codecs": self._rows.codecs()}

    def wires(self) -> WiresStatus:
        """Return what the wires to shards and trainers carried."""
        shards, trainers = self._rows.wires, self._embedder.batches.wires
        wires = {"lookup": shards.rows, "push": shards.gradients}
        wires |= {"batch": trainers.rows, "gradients": trainers.gradients}
        return wires_status(wires, self._tables)


def run(spec: Spec, settings: Settings, stop: threading.Event) -> None:
    """Run an embedder: samples with their rows to trainer ranks."""
    with Cleanup() as cleanup:
        made: list[EmbedderProcess] = []
        registry = service_registry()
        register(registry, EMBEDDER_METRICS, lambda: made[0].status() if made else None)
        register(registry, GRPC_METRICS, lambda: made[0].server.counts if made else None)
        register(registry, WIRE_METRICS, lambda: made[0].wires() if made else None)
        admin = Admin(
            settings.common.bind_address,
            settings.embedder.admin_port,
            hosts=settings.common.hosts,
            registry=registry,
            ready=lambda: made[0].ready() if made else "starting",
            status=lambda: made[0].status() if made else {},
        )
        cleanup.add("admin", admin.close)
        log = open_eventlog(settings.common.log_url)
        cleanup.add("log", log.close)
        schemas = load_schemas(spec)
        context = ModelContext.open(spec, identity_hash(spec, schemas), log)
        made.append(EmbedderProcess(context, settings, sample_reader(spec, schemas)))
        made[0].run(stop)
