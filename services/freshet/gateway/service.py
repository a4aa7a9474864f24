"""The gateway's process: routes, queue, lifecycle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping

import structlog

from freshet.clock import STEADY_CLOCK, Clock
from freshet.config.avro.schema import Record, Written, sample_schema, served_schema, spell
from freshet.config.settings import Common
from freshet.config.settings import Gateway as Settings
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec, Stream
from freshet.errors import ConfigError, FreshetError
from freshet.features import written_path
from freshet.features.decoder import columns_of
from freshet.gateway import api, metrics
from freshet.gateway.codec import StreamCodec
from freshet.gateway.group_commit import Committer, QueueLimits
from freshet.gateway.stream_endpoint import Rules, StreamEndpoint
from freshet.http.app import App
from freshet.http.authenticator import Authenticator
from freshet.http.browser_checks import AllowedSites
from freshet.http.messages import BodyLimits, Request, Response, json_response
from freshet.http.server import HttpListener, Listener, run_server
from freshet.log import EventLog
from freshet.log.schema_ids import SchemaRegistry
from freshet.log.topics import ensure_topics, limits_of
from freshet.observability.grpc_metrics import public_counts
from freshet.observability.skipped_state import skipped_status
from freshet.process.lifecycle import LAST_S
from freshet.process.telemetry import service_registry
from freshet.types import TopicPartition

logger = structlog.get_logger(__name__)


class Gateway:
    """Appends events from HTTP requests to the log. All but appends runs on one event loop."""

    def __init__(
        self,
        spec: Spec,
        log: EventLog,
        codecs: Mapping[str, StreamCodec],
        settings: Settings,
        *,
        clock: Clock = STEADY_CLOCK,
        authenticator: Authenticator | None = None,
        sites: AllowedSites | None = None,
    ) -> None:
        """Create missing topics, the queue and the routes.

        Args:
            codecs: one per stream of the spec, by role (`served`, `shown`, `action`).
            authenticator: authenticator of clients; None: tokens are not required.
            sites: accepted host names and origins.

        Raises:
            ConfigError: a topic has too low a limit, as `limits_of` raises.
            Mismatch: a topic does not fit, as `ensure_topics` raises.
        """
        self._spec, self._log, self._codecs = spec, log, codecs
        self._settings, self._clock = settings, clock
        self._topics = ensure_topics(log, spec)
        self._limits = limits_of(log, spec)
        registry = service_registry()
        self._writer = log.group_writer()
        self.committer = Committer(
            self._writer,
            QueueLimits(settings.queue_events, settings.queue_bytes),
            registry,
            wait_s=settings.append_wait_ms / 1e3,
            batch_events=settings.append_events,
            retry_after_s=settings.retry_after_ms / 1e3,
        )
        self._events = metrics.EVENTS.counter(registry)
        self.app = App(
            registry,
            BodyLimits(settings.max_body_bytes, settings.body_timeout_ms / 1e3, settings.max_bodies_bytes),
            check=(sites or AllowedSites()).check,
            authenticator=authenticator,
            role="gateway",
        )
        self.authenticator = authenticator
        self.endpoints: dict[str, StreamEndpoint] = {}  # by role of the stream
        self.grpc_counts = public_counts(registry)
        events = spec.events
        for stream in (events.served, events.shown, events.action):
            if stream is not None and not stream.external:
                self.endpoints[stream.role] = endpoint = self._make_endpoint(stream)
                self.app.route_hot(api.events(stream.role), endpoint.handle)
        self.app.route(api.READY, self._ready)
        self.app.route(api.STATUS, self._status)

    def close(self) -> None:
        """Close the writer, unless groups have no answer yet: then the end of the process closes it."""
        if not self.committer.appending:
            self._writer.close()

    def _make_endpoint(self, stream: Stream) -> StreamEndpoint:
        rules = Rules(
            partitions=self._spec.partitions,
            refused_topic=self._topics.refused,
            max_events=self._settings.max_events,
            max_ahead_ms=self._spec.join.max_ahead_ms,
            limits=self._limits,
            labels=len(self._spec.labels),
        )
        charge = {} if self.authenticator is None else {"charge": self.authenticator.charge_events}
        return StreamEndpoint(
            stream,
            self._codecs[stream.role],
            self.committer,
            rules,
            clock=self._clock,
            counter=self._events,
            **charge,
        )

    async def _status(self, _request: Request) -> Response:
        events = {role: endpoint.counts for role, endpoint in self.endpoints.items()}
        return json_response(200, {**self.committer.figures(), "events": events, "skipped": skipped_status()})

    async def _ready(self, _request: Request) -> Response:
        probe = TopicPartition(self._topics.served, 0)
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._log.bounds, probe)
        except (FreshetError, KeyError) as error:
            return json_response(503, {"status": "unready", "reason": f"the log cannot be read: {error}"})
        if not self.committer.healthy:
            return json_response(503, {"status": "unready", "reason": "the last append to the log failed"})
        return json_response(200, {"status": "ready"})


def codecs_of(
    spec: Spec, schemas: Mapping[str, Record], log: EventLog, clock: Clock = STEADY_CLOCK
) -> dict[str, StreamCodec]:
    """Make a codec for each stream of the spec that is not external.

    Args:
        schemas: the streams' Avro schemas by role (`served`, `shown`, `action`).

    Raises:
        ConfigError: a schema is missing, or the spec does not fit one.
    """
    registry = SchemaRegistry(log, clock)
    features = columns_of(spec, layout_of(spec))

    def fits(written: Written, reader: Record) -> None:
        explode = spec.events.served.explode
        there = explode and written_path(written, reader, explode)
        sample = sample_schema(written, there)
        where = f"schema {spell(written)!r} of the served events"
        features.program(spec, sample, sample_schema(reader, explode), where, names=True)

    codecs: dict[str, StreamCodec] = {}
    for stream in (spec.events.served, spec.events.shown, spec.events.action):
        if stream is None or stream.external:
            continue
        if stream.role not in schemas:
            raise ConfigError(
                f"events.{stream.role}", "schema", stream.schema, "the path of the events' Avro schema",
                "the gateway checks events against it before it acknowledges them",
            )  # fmt: skip
        served = stream.role == "served"
        codecs[stream.role] = StreamCodec(
            spec,
            stream,
            schemas[stream.role],
            registry,
            reader=served_schema(schemas[stream.role], stream.explode) if served else None,
            fits=fits if served else lambda written, reader: None,
        )
    return codecs


def run(
    build: Callable[[], Gateway],
    port: int,
    common: Common,
    *,
    stop: threading.Event,
    ready: Callable[[str], None] = lambda url: None,
    grpc_listener: Callable[[Gateway], Listener] | None = None,
) -> None:
    """Serve on the calling thread until `stop` is set, then append queued events. Installs no signal handler.

    Args:
        build: makes the gateway, once the port is bound.
        ready: called with the address once the listener accepts connections.
        grpc_listener: makes a second listener.

    Raises:
        ConfigError: the port cannot be bound.
        Mismatch: a topic exists with other partitions or limits, or one of another system does not exist.
    """
    with HttpListener(common, port) as listener:
        gateway = build()

        async def main() -> None:
            gateway.committer.start()
            left_s = 0.0
            try:
                second = grpc_listener(gateway) if grpc_listener is not None else None
                left_s = await listener.serve(gateway.app, stop, ready, second)
            finally:
                failed = await gateway.committer.close(left_s, LAST_S)
            logger.info("gateway stopped", events_cut_off=failed, append_left=gateway.committer.appending)

        try:
            run_server(main)
        finally:
            gateway.close()
