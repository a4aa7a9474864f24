"""The inference server as a process: routes, followers, lifecycle. Decisions are in `core`.

Requests are scored on the event loop's thread, those that wait at the same moment together (`batching`): a
request of 100 candidates takes a fraction of a millisecond, most of it native; a hop to another thread and
back would cost as much again. More cores serve by more processes.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, cast
from urllib.parse import parse_qs

import structlog
from prometheus_client import CollectorRegistry

from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.errors import BadInput, Unavailable
from freshet.features import JsonTranscoder
from freshet.inference import api, metrics
from freshet.inference.batching import Batcher
from freshet.inference.core import (
    Order,
    events_of,
    freshness_ms,
    get_path,
    order,
    parse_rank,
)
from freshet.inference.explaining import explained
from freshet.inference.filling import Filling
from freshet.inference.oip_api import OipRoutes
from freshet.inference.pipeline import Encoded, Lookup, Pipeline, Scored
from freshet.inference.progress import Progress
from freshet.inference.rows import RowFollower
from freshet.inference.served import Served, ServedLogger, served_events
from freshet.inference.table import ServingTable
from freshet.inference.versions import Scorer, ServingVersion, VersionFollower
from freshet.model import SERVING_PREFIXES, build_model
from freshet.runtime.browsers import refuse_other_sites
from freshet.runtime.endpoint import LIVE
from freshet.runtime.http import App, Request, Response, json_response
from freshet.runtime.server import bind, run_server, serve
from freshet.seams.eventlog import EventLog
from freshet.seams.rowstore import RowStore
from freshet.seams.versions import VersionStore
from freshet.settings import Common
from freshet.settings import Inference as Settings
from freshet.spec.avro import Record, served_schema
from freshet.spec.layout import layout_of
from freshet.spec.model import Explore, Spec
from freshet.spec.outcomes import check_outcomes
from freshet.spec.topics import topics_of
from freshet.types import I64
from freshet.wire.schemas import SchemaRegistry

__all__ = ["Inference", "Parts", "run"]

logger = structlog.get_logger(__name__)


START_LOOK_S = 0.02
"""How often a request that waits for the server's start looks whether it can be answered."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an inference server stands on."""

    spec: Spec
    spec_hash: str  # of the identity keys, as the row store and the versions carry it
    served: Record  # the user's schema of served events
    log: EventLog
    store: RowStore
    versions: VersionStore


@dataclass(slots=True)
class Totals:
    """What the server has done since it started."""

    requests: int = 0  # answered with scores, those of the Open Inference Protocol too
    candidates: int = 0  # scored
    explored: int = 0  # requests ordered at random


class Inference:
    """A model served. Requests live on one event loop; rows, versions and the served log on threads of
    their own.
    """

    def __init__(
        self,
        parts: Parts,
        settings: Settings,
        *,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        """Raises ConfigError if the spec does not fit the schema."""
        spec = parts.spec
        self._spec, self._settings, self._clock = spec, settings, clock
        self._rng = rng or random.Random()
        self._pipeline = Pipeline(spec, parts.served)
        topics = topics_of(spec)
        for plan in topics.plans:  # whoever of the services starts first
            parts.log.create_topic(
                plan.name, partitions=plan.partitions, retention_ms=plan.retention_ms, group=plan.group
            )
        registry = CollectorRegistry()
        layout = layout_of(spec)

        def new_table() -> ServingTable:
            return ServingTable(
                layout, buckets=spec.buckets, partitions=spec.partitions, seed=spec.model.seed
            )

        def load(tensors: Mapping[str, Any]) -> Scorer:
            model = build_model(spec, training=False)
            model.load_state(tensors, weights_only=True)
            return model

        self.rows = RowFollower(
            parts.log,
            parts.store,
            topics.rows,
            new_table,
            spec_hash=parts.spec_hash,
            wait_s=settings.follow_wait_ms / 1e3,
        )
        self.versions = VersionFollower(
            parts.versions,
            load,
            registry,
            model=spec.name,
            spec_hash=parts.spec_hash,
            poll_s=settings.version_poll_ms / 1e3,
            prefixes=SERVING_PREFIXES,
            fits=lambda m: check_outcomes(spec, m.transforms, f"version {m.number}"),
        )
        self.logger: ServedLogger | None = None
        if spec.serve.log_served:
            extended = served_schema(parts.served, spec.events.served.explode)
            schema_id = SchemaRegistry(parts.log).register(extended)
            self._writer = parts.log.writer()
            self.logger = ServedLogger(
                spec,
                self._writer,
                JsonTranscoder(extended, schema_id=schema_id, ignore_unknown=True),
                registry,
                queue_events=settings.queue_served,
            )
        self._progress = Progress(spec, parts.log, parts.store)
        self._progress_thread = ThreadPoolExecutor(1, thread_name_prefix="progress")
        self._filling = Filling.of(spec.events.served, parts.served)
        self._totals = Totals()
        self._measure(registry)
        self._batcher: Batcher[tuple[Scored, ServingVersion]] = Batcher(
            self._score_requests,
            budget_s=settings.batch_budget_ms / 1e3,
            observe=metrics.BATCH_REQUESTS.histogram(registry).observe,
        )
        self.app = App(
            registry,
            max_body_bytes=settings.max_body_bytes,
            body_timeout_s=settings.body_timeout_ms / 1e3,
            admit=refuse_other_sites,
        )
        self.app.route(api.RANK, self._rank)
        self.app.route(api.PROGRESS, self._progressed)
        self.app.route(LIVE, self._live)
        self.app.route(api.READY, self._ready)
        self.app.route(api.STATUS, self._status)
        OipRoutes(
            spec, self._pipeline, self._score_rows, self._serving, clock.now_ms, settings.max_candidates
        ).add_to(self.app)

    def _measure(self, registry: CollectorRegistry) -> None:
        self._candidates = metrics.CANDIDATES.counter(registry)
        self._unknown = metrics.UNKNOWN_ROWS.counter(registry)
        self._explored = metrics.EXPLORED.counter(registry)
        metrics.FRESHNESS.gauge(registry, lambda: (self._freshness() or 0) / 1e3)
        metrics.CORRUPT_DELTAS.gauge(registry, lambda: self.rows.state.corrupt)

    def start(self, stop: threading.Event, drain_s: float) -> list[threading.Thread]:
        """Start the followers and the served log; they end when `stop` is set."""
        jobs: list[tuple[str, Callable[[], None]]] = [
            ("rows", lambda: self.rows.run(stop)),
            ("versions", lambda: self.versions.run(stop)),
        ]
        served = self.logger
        if served is not None:
            jobs.append(("served", lambda: served.run(stop, drain_s)))
        threads = [threading.Thread(target=job, name=name, daemon=True) for name, job in jobs]
        for thread in threads:
            thread.start()
        return threads

    def close(self) -> None:
        """Free what the server holds."""
        self._progress_thread.shutdown(wait=False)
        if self.logger is not None:
            self._writer.close()

    # --- what is served now

    def _serving(self) -> ServingVersion | None:
        return self.versions.state.serving if self.rows.state.sink is not None else None

    def _now_served(self) -> tuple[Lookup, ServingVersion]:
        table, serving = self.rows.state.sink, self.versions.state.serving
        if table is None:
            raise Unavailable(f"rows are not served yet: {self.rows.state.reason}")
        if serving is None:
            raise Unavailable(f"no version is served yet: {self.versions.state.reason}")
        return cast(Lookup, table), serving

    def _freshness(self) -> int | None:
        serving = self.versions.state.serving
        dense_ms = serving.manifest.event_time_ms if serving is not None else 0
        return freshness_ms(self._clock.now_ms(), self.rows.state.event_time_ms, dense_ms)

    # --- requests

    def _score_rows(self, rows: list[dict[str, Any]], times_ms: I64) -> tuple[Scored, ServingVersion]:
        table, serving = self._now_served()
        scored = self._pipeline.score(self._pipeline.rows(rows, times_ms), table, serving.scorer)
        self._count(scored)
        return scored, serving

    def _score_requests(
        self, asked: Sequence[Encoded]
    ) -> Sequence[tuple[Scored, ServingVersion] | Exception]:
        table, serving = self._now_served()
        return [
            one if isinstance(one, Exception) else (one, serving)
            for one in self._pipeline.score_all(asked, table, serving.scorer)
        ]

    def _score_explained(self, asked: Encoded) -> tuple[Scored, ServingVersion]:
        table, serving = self._now_served()
        return self._pipeline.score_one(asked, table, serving.scorer, explain=True), serving

    def _count(self, scored: Scored) -> None:
        self._totals.requests += 1
        self._totals.candidates += len(scored.scores)
        self._candidates.inc(len(scored.scores))
        for feature, n in scored.unknown.items():
            self._unknown.labels(feature).inc(n)

    async def _until_served(self) -> None:
        """Hold a request back while the server starts: a restart is then a pause to its clients, no error."""
        if self._serving() is not None:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.start_wait_ms / 1e3
        while self._serving() is None and loop.time() < deadline:
            await asyncio.sleep(START_LOOK_S)

    async def _rank(self, request: Request) -> Response:
        asked = parse_rank(request.body, self._settings.max_candidates)
        await self._until_served()
        now_ms = self._clock.now_ms()
        context, candidates = self._filling.filled(asked.context, asked.request_id, now_ms), asked.candidates
        events = events_of(self._spec, context, candidates)
        encoded = self._pipeline.encoded(events, len(candidates))
        if asked.explain:
            scored, serving = self._score_explained(encoded)
        else:
            scored, serving = await self._batcher.ask(encoded)
        self._count(scored)
        explore = Explore() if asked.dry_run else self._spec.serve.explore
        found = order(scored.scores, asked.k, explore, self._rng)
        if found.explored:
            self._explored.inc()
            self._totals.explored += 1
        version = serving.manifest.number
        if self.logger is not None and not asked.dry_run:
            events = served_events(
                self._spec, context, candidates, found, scored.scores, scored.predictions, version
            )
            self.logger.offer(Served(events))
        return json_response(
            200,
            {
                "request_id": get_path(context, self._spec.events.served.key[0]),
                "items": self._items(found, scored, now_ms),
                "version": version,
                "freshness_ms": self._freshness(),
                "unknown_rows": scored.unknown,
                "explored": found.explored,
            },
        )

    def _items(self, found: Order, scored: Scored, now_ms: int) -> list[dict[str, Any]]:
        """The answer's items, best first."""
        labels = [label.name for label in self._spec.labels]
        indices = found.indices
        items: list[dict[str, Any]] = [
            {"index": i, "score": s, "predictions": dict(zip(labels, p, strict=True)), "propensity": q}
            for i, s, p, q in zip(
                indices.tolist(),
                scored.scores[indices].tolist(),
                scored.predictions[indices].tolist(),
                found.propensity.tolist(),
                strict=True,
            )
        ]
        if scored.rows is not None:
            for item in items:
                item["rows"] = explained(scored.rows, item["index"], now_ms)
        return items

    async def _progressed(self, request: Request) -> Response:
        query = {k: v[-1] for k, v in parse_qs(request.query).items()}
        rows, serving = self.rows.state, self.versions.state.serving
        body: dict[str, Any] = {
            "rows_next": {str(p): n for p, n in rows.next.items()},
            "rows_event_time_ms": rows.event_time_ms,
            "version": serving.manifest.number if serving else None,
            "dense_applied": {str(p): n for p, n in serving.manifest.applied.items()} if serving else {},
            "dense_event_time_ms": serving.manifest.event_time_ms if serving else None,
        }
        if "topic" in query:
            try:
                partition, offset = int(query["partition"]), int(query["offset"])
            except (KeyError, ValueError):
                raise BadInput("expected topic, partition and offset, the last two as integers") from None
            stage = await asyncio.get_running_loop().run_in_executor(
                self._progress_thread, self._progress.ask, query["topic"], partition, offset, rows.next
            )
            body |= {"served": stage.served, "waits_for": stage.waits_for}
        return json_response(200, body)

    async def _live(self, _request: Request) -> Response:
        return json_response(200, {"status": "live"})

    async def _ready(self, _request: Request) -> Response:
        body = self._figures()
        serving = self._serving()
        if serving is not None:
            return json_response(200, {"status": "ready", "reason": "", **body})
        reason = body["rows"] or body["versions"]
        return json_response(503, {"status": "unready", "reason": reason, **body})

    async def _status(self, _request: Request) -> Response:
        return json_response(200, self._figures())

    def _figures(self) -> dict[str, Any]:
        """What people ask first; `rows`, `versions` and `served_log` say what is wrong, if anything is."""
        serving, rows = self._serving(), self.rows.state
        table = rows.sink
        return {
            "version": serving.manifest.number if serving is not None else None,
            "freshness_ms": self._freshness(),
            "rows_held": sum(table.rows().values()) if isinstance(table, ServingTable) else 0,
            "corrupt_deltas": rows.corrupt,
            **asdict(self._totals),
            "rows_next": {str(p): n for p, n in rows.next.items()},
            "rows": rows.reason,
            "versions": self.versions.state.reason,
            "served_log": self.logger.reason if self.logger is not None else "",
        }


def run(
    parts: Parts,
    settings: Settings,
    common: Common,
    *,
    stop: threading.Event,
    clock: Clock = SYSTEM_CLOCK,
    rng: random.Random | None = None,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve on the calling thread until `stop` is set; then what was served is logged, for at most the
    drain time.

    `ready` is called with the address once connections are taken; rank requests wait until rows and a
    version are there, for `start_wait` at most. Signals are the caller's.

    Raises:
        ConfigError: the port cannot be had, or the spec does not fit the schema.
    """
    sock = bind(common.bind_address, settings.port)
    host, port = sock.getsockname()[:2]
    drain_s = common.drain_ms / 1e3
    server = Inference(parts, settings, clock=clock, rng=rng)
    stop_threads = threading.Event()  # later than `stop`: requests in hand are still scored and logged

    async def main() -> None:
        await serve(server.app, sock, stop, started=lambda: ready(f"http://{host}:{port}"), drain_s=drain_s)

    threads = server.start(stop_threads, drain_s)
    try:
        run_server(main)
    finally:
        stop_threads.set()
        for thread in threads:
            thread.join(drain_s + 1)
        server.close()
        sock.close()
        logger.info("inference stopped", threads_left=[t.name for t in threads if t.is_alive()])
