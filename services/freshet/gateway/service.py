"""The gateway as a process: routes, queue, lifecycle. Decisions are in `core`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping

import structlog
from prometheus_client import CollectorRegistry

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import BadInput, ConfigError, FreshetError
from freshet.features import SampleDecoder, partition_of
from freshet.gateway import api, metrics
from freshet.gateway.api import AVRO, AVRO_BATCH, AVRO_RAW
from freshet.gateway.codec import Accepted, Checked, StreamCodec
from freshet.gateway.commit import Committer
from freshet.gateway.core import (
    Entry,
    Limits,
    Refusal,
    answer,
    dead_letter,
    split_avro_batch,
    too_far_ahead,
)
from freshet.runtime.browsers import refuse_other_sites
from freshet.runtime.endpoint import LIVE
from freshet.runtime.http import App, Handler, HttpError, Request, Response, json_response
from freshet.runtime.server import bind, run_server, serve
from freshet.seams.eventlog import EventLog
from freshet.settings import Common
from freshet.settings import Gateway as Settings
from freshet.spec.avro import Record, sample_schema
from freshet.spec.layout import layout_of
from freshet.spec.model import Spec, Stream
from freshet.spec.topics import topics_of
from freshet.types import BytesColumn, TopicPartition
from freshet.wire.schemas import SchemaRegistry, frame

__all__ = ["Gateway", "codecs_of", "run"]

logger = structlog.get_logger(__name__)

CUT_S = 1.0
"""After the drain, how long the append under way may still take; those who waited for it were told 503."""
JSON = ("application/json", "")
JSON_LINES = ("application/x-ndjson", "application/jsonl")


class Gateway:
    """Events in over HTTP, records of the log out. Everything lives on one event loop, but appends."""

    def __init__(
        self,
        spec: Spec,
        log: EventLog,
        codecs: Mapping[str, StreamCodec],
        settings: Settings,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`codecs`: by role (`served`, `shown`, `action`), one for each stream of the spec."""
        self._spec, self._log, self._codecs = spec, log, codecs
        self._settings, self._clock = settings, clock
        self._topics = topics_of(spec)
        for plan in self._topics.plans:
            log.create_topic(
                plan.name, partitions=plan.partitions, retention_ms=plan.retention_ms, group=plan.group
            )
        registry = CollectorRegistry()
        self._writer = log.writer()
        self.committer = Committer(
            self._writer,
            Limits(settings.queue_events, settings.queue_bytes),
            registry,
            wait_s=settings.append_wait_ms / 1e3,
            batch_events=settings.append_events,
            retry_after_s=settings.retry_after_ms / 1e3,
        )
        self._events = metrics.EVENTS.counter(registry)
        self._counts = {role: {"accepted": 0, "refused": 0} for role in codecs}
        self.app = App(
            registry,
            max_body_bytes=settings.max_body_bytes,
            body_timeout_s=settings.body_timeout_ms / 1e3,
            admit=refuse_other_sites,
        )
        events = spec.events
        for stream in (events.served, events.shown, events.action):
            if stream is not None:
                self.app.route(api.events(stream.role), self._taker(stream))
        self.app.route(LIVE, self._live)
        self.app.route(api.READY, self._ready)
        self.app.route(api.STATUS, self._status)

    def close(self) -> None:
        """Free the writer."""
        self._writer.close()

    def _taker(self, stream: Stream) -> Handler:
        async def take(request: Request) -> Response:
            return await self._take(stream, request)

        return take

    async def _take(self, stream: Stream, request: Request) -> Response:
        checked = self._check(stream, request)
        now_ms = self._clock.now_ms()
        refused = list(checked.bad)
        taken: list[Accepted] = []
        for event in checked.good:
            if too_far_ahead(event.time_ms, now_ms, self._spec.join.max_ahead_ms):
                refused.append(self._ahead(stream, event, now_ms))
            else:
                taken.append(event)
        places = partition_of(BytesColumn.of(event.key for event in taken), self._spec.partitions)
        entries = [
            Entry(stream.topic, partition, event.key, event.record)
            for partition, event in zip(places.tolist(), taken, strict=True)
        ]
        accepted = len(entries)
        letters = [
            Entry(self._topics.refused, 0, b"", dead_letter(r, topic=stream.topic, now_ms=now_ms))
            for r in refused
        ]
        offsets = await self.committer.append([*entries, *letters])
        for outcome, count in (("accepted", accepted), ("refused", len(refused))):
            self._events.labels(stream.role, outcome).inc(count)
            self._counts[stream.role][outcome] += count
        acks = [
            {"topic": e.topic, "partition": e.partition, "offset": offset}
            for e, offset in zip(entries, offsets, strict=False)  # the letters' offsets are nobody's business
        ]
        return json_response(*answer(acks, refused, total=accepted + len(refused)))

    def _check(self, stream: Stream, request: Request) -> Checked:
        codec = self._codecs[stream.role]
        kind = request.content_type
        limit = self._settings.max_events
        if request.headers.get(b"content-encoding", b"identity") != b"identity":
            raise HttpError(
                415, "encoding", "compressed bodies are not taken", expected="identity",
                found=request.headers[b"content-encoding"].decode("latin-1"),
            )  # fmt: skip
        if kind in JSON or kind in JSON_LINES:
            return codec.from_json(request.body, lines=kind in JSON_LINES, max_events=limit)
        if kind == AVRO:
            return codec.from_avro([request.body])
        if kind == AVRO_BATCH:
            return codec.from_avro(split_avro_batch(request.body, limit))
        if kind == AVRO_RAW:
            schema_id = request.headers.get(b"freshet-schema-id", b"")
            if not schema_id.isdigit() or int(schema_id) >= 1 << 32:
                raise BadInput(
                    f"expected the schema id as a number in the header freshet-schema-id, found {schema_id!r}"
                )
            return codec.from_avro([frame(int(schema_id), request.body)])
        raise HttpError(
            415, "content_type", "events of this kind are not taken",
            expected=[JSON[0], *JSON_LINES, AVRO, AVRO_BATCH, AVRO_RAW], found=kind,
        )  # fmt: skip

    def _ahead(self, stream: Stream, event: Accepted, now_ms: int) -> Refusal:
        ahead_s = (event.time_ms - now_ms) / 1e3
        limit_s = self._spec.join.max_ahead_ms / 1e3
        return Refusal(
            event.index,
            stream.time.path,
            f"a time at most {limit_s:g} s ahead of now (unit {stream.time.unit})",
            f"{ahead_s:g} s ahead",
            event.record,
        )

    async def _live(self, _request: Request) -> Response:
        return json_response(200, {"status": "live"})

    async def _status(self, _request: Request) -> Response:
        return json_response(200, {**self.committer.figures(), "events": self._counts})

    async def _ready(self, _request: Request) -> Response:
        probe = TopicPartition(self._topics.served, 0)
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._log.bounds, probe)
        except (FreshetError, KeyError) as error:
            return json_response(503, {"status": "unready", "reason": f"the log cannot be read: {error}"})
        if not self.committer.healthy:
            return json_response(503, {"status": "unready", "reason": "the last append to the log failed"})
        return json_response(200, {"status": "ready"})


def codecs_of(spec: Spec, schemas: Mapping[str, Record], log: EventLog) -> dict[str, StreamCodec]:
    """A codec for each stream of the spec.

    Args:
        schemas: by role (`served`, `shown`, `action`), the Avro schema that the spec names for the stream.

    Raises ConfigError if a schema is missing, or the spec does not fit one.
    """
    registry = SchemaRegistry(log)
    layout = layout_of(spec)

    def fits(schema: Record) -> None:
        sample = sample_schema(schema, spec.events.served.explode)
        SampleDecoder(spec, layout, lambda _: sample).program(0)

    codecs: dict[str, StreamCodec] = {}
    for stream in (spec.events.served, spec.events.shown, spec.events.action):
        if stream is None:
            continue
        if stream.role not in schemas:
            raise ConfigError(
                f"events.{stream.role}", "schema", stream.schema, "the path of the events' Avro schema",
                "the gateway checks events against it before it acknowledges them",
            )  # fmt: skip
        served = stream.role == "served"
        codecs[stream.role] = StreamCodec(
            stream, schemas[stream.role], registry, fits if served else lambda schema: None
        )
    return codecs


def run(
    spec: Spec,
    log: EventLog,
    codecs: Mapping[str, StreamCodec],
    settings: Settings,
    common: Common,
    *,
    stop: threading.Event,
    clock: Clock = SYSTEM_CLOCK,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve on the calling thread until `stop` is set, then drain: what was acknowledged is durable.

    `ready` is called with the address once connections are taken. Signals are the caller's.

    Raises:
        ConfigError: the port cannot be had. Mismatch: a topic exists with another shape.
    """
    sock = bind(common.bind_address, settings.port)
    gateway = Gateway(spec, log, codecs, settings, clock=clock)
    host, port = sock.getsockname()[:2]

    async def main() -> None:
        gateway.committer.start()
        await serve(
            gateway.app,
            sock,
            stop,
            started=lambda: ready(f"http://{host}:{port}"),
            drain_s=common.drain_ms / 1e3,
        )
        cut = await gateway.committer.close(CUT_S)
        logger.info("gateway stopped", events_cut_off=cut)

    try:
        run_server(main)
    finally:
        gateway.close()
        sock.close()
