"""The inference server's process: routes, followers, lifecycle.

The event loop's thread scores all requests; more cores need more processes.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import parse_qs

import structlog
from prometheus_client import CollectorRegistry

from freshet.clock import STEADY_CLOCK, Clock
from freshet.config.avro.schema import Record, served_schema
from freshet.config.settings import Common
from freshet.config.settings import Inference as Settings
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.transforms import check_outcomes
from freshet.errors import BadInput, Overloaded
from freshet.features import EventExtractor, JsonTranscoder
from freshet.http.app import App
from freshet.http.authenticator import Authenticator
from freshet.http.browser_checks import AllowedSites
from freshet.http.messages import BodyLimits, Request, Response, json_response
from freshet.http.server import HttpListener, Listener, run_server
from freshet.inference import api, metrics
from freshet.inference.oip_http import OipRoutes
from freshet.inference.oip_model import OipModel
from freshet.inference.pipeline import Pipeline
from freshet.inference.progress import Progress, RowsWatch
from freshet.inference.rank import Ranker
from freshet.inference.requests import Filling
from freshet.inference.row_reads import RowReads
from freshet.inference.rows import RowFollower, ServingTable, rows_bound
from freshet.inference.scoring import Scoring, ServingState
from freshet.inference.served_log import Loggable, ServedLogger
from freshet.inference.versions import Scorer, VersionFollower
from freshet.log import EventLog
from freshet.log.schema_ids import SchemaRegistry
from freshet.log.topics import ensure_topics, limits_of
from freshet.model import SERVING_PREFIXES, build_model
from freshet.observability.grpc_metrics import public_counts
from freshet.observability.skipped_state import skipped_status
from freshet.observability.tracing import active
from freshet.process.lifecycle import CLOSE_S, LAST_S, join_all, within
from freshet.process.telemetry import service_registry
from freshet.rows.store import RowStore
from freshet.tables import SsdRows
from freshet.versions import VersionStore

MAX_QUERIES = 32
"""Bound of waiting queries about events. Each reads the metas of all buckets: ms of the row store's time."""

NOTICE_S = 0.25
"""Seconds in which an idle thread ends after `stop` is set."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """Spec, schema, storage and clock of an inference server."""

    spec: Spec
    spec_hash: str  # of the identity keys; row store and versions must have the same
    served: Record  # the user's schema of served events
    log: EventLog
    store: RowStore
    versions: VersionStore
    clock: Clock = STEADY_CLOCK
    rng: random.Random = field(default_factory=random.Random)  # nosec B311  # exploring


class Inference:
    """Serves one model: requests on one event loop; followers and the served log on threads."""

    def __init__(
        self,
        parts: Parts,
        settings: Settings,
        *,
        authenticator: Authenticator | None = None,
        sites: AllowedSites | None = None,
    ) -> None:
        """Create missing topics, the followers and the routes.

        Raises:
            ConfigError: the spec does not fit the schema, or a topic has too low a limit.
            ImportError: the model needs torch, and it is not installed.
            Mismatch: a topic does not fit, as `ensure_topics` raises.
        """
        spec, clock = parts.spec, parts.clock
        pipeline = Pipeline(spec, parts.served)
        topics = ensure_topics(parts.log, spec)
        limits = limits_of(parts.log, spec)
        registry = service_registry()
        layout = layout_of(spec)

        build_model(spec, training=False)  # fail at the start, not at every version

        bound = rows_bound(settings)

        def new_table() -> ServingTable:
            return ServingTable(
                layout, buckets=spec.buckets, partitions=spec.partitions, seed=spec.model.seed, bound=bound
            )

        new_table()  # likewise, if its folder cannot hold rows

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
            control=topics.control,
        )
        self.rows_watch = RowsWatch(parts.log, self.rows, topics.rows, clock)
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
            self._writer = parts.log.group_writer()
            self.logger = ServedLogger(
                spec,
                self._writer,
                JsonTranscoder(extended, schema_id=schema_id, ignore_unknown=True),
                registry,
                queue_events=settings.queue_served,
                queue_bytes=settings.queue_served_bytes,
                extractor=EventExtractor(spec.events.served, extended) if active() is not None else None,
            )
        self._progress = Progress(spec, parts.log, parts.store)
        self._queries, self._clock = 0, clock
        self._progress_thread = ThreadPoolExecutor(1, thread_name_prefix="progress")
        self._live = ServingState(self.rows, self.versions, clock)
        self._measure(registry, spec)
        self._reads: RowReads | None = None
        seconds = metrics.ROW_READ_SECONDS.histogram(registry).observe
        if bound.ssd_folder:
            self._reads = RowReads(settings.rows_wait_ms / 1e3, seconds)
        scoring = Scoring(pipeline, self._live, settings, registry, self._reads)
        self._counts = scoring.counts
        ranker = Ranker(
            spec,
            scoring,
            Filling.of(spec.events.served, parts.served),
            settings,
            logger=self.logger,
            loggable=Loggable(spec, parts.served, limits) if spec.serve.log_served else None,
            clock=clock,
            rng=parts.rng,
        )
        self.app = App(
            registry,
            BodyLimits(settings.max_body_bytes, settings.body_timeout_ms / 1e3, settings.max_bodies_bytes),
            check=(sites or AllowedSites()).check,
            authenticator=authenticator,
            role="inference",
        )
        self.authenticator = authenticator
        self.app.route_hot(api.RANK, ranker.handle)
        self.app.route(api.PROGRESS, self._progressed)
        self.app.route(api.READY, self._ready)
        self.app.route(api.STATUS, self._status)
        self.oip = OipModel(spec, parts.served, scoring, clock=clock, max_rows=settings.max_candidates)
        OipRoutes(self.oip, settings.max_body_bytes).add_to(self.app)
        self.grpc_counts = public_counts(registry)

    def _measure(self, registry: CollectorRegistry, spec: Spec) -> None:
        metrics.VERSION.gauge(registry, self._served_number)
        metrics.FRESHNESS.gauge(registry, lambda: (self._live.freshness_ms() or 0) / 1e3)
        metrics.ROWS_FRESHNESS.gauge(registry, lambda: (self._live.rows_freshness_ms() or 0) / 1e3)
        metrics.ROWS_UNREAD.gauge(registry, lambda: self.rows_watch.worst_s)
        metrics.LABEL_DELAY.gauge(registry).set(label_delay_ms(spec) / 1e3)
        metrics.PUBLISH_INTERVAL.gauge(registry).set(spec.train.publish_interval_ms / 1e3)
        metrics.CORRUPT_DELTAS.gauge(registry, lambda: self.rows.state.corrupt)
        metrics.NOT_FINITE_ROWS.gauge(registry, lambda: self.rows.state.not_finite)
        metrics.DAMAGED_BUCKETS.gauge(registry, lambda: len(self.rows.state.damaged))
        metrics.MISSING_ROWS.gauge(registry, self._missing_rows)
        metrics.ROW_BYTES.gauge(registry, self._row_bytes)
        metrics.SSD_ROWS.gauge(registry, lambda: self._ssd_rows().rows)
        metrics.SSD_BYTES.gauge(registry, lambda: self._ssd_rows().bytes_in_use)
        metrics.SSD_FULL.gauge(registry, lambda: self._ssd_rows().full)

    def _missing_rows(self) -> int:
        return sum(damage.rows for damage in self.rows.state.damaged.values())

    def _row_bytes(self) -> int:
        table = self.rows.state.sink
        return table.memory_bytes if isinstance(table, ServingTable) else 0

    def _ssd_rows(self) -> SsdRows:
        table = self.rows.state.sink
        return table.ssd_rows() if isinstance(table, ServingTable) else SsdRows()

    def _served_number(self) -> int:
        serving = self._live.version()
        return serving.manifest.number if serving is not None else -1

    def start(self, stop: threading.Event, rest_s: Callable[[], float]) -> list[threading.Thread]:
        """Start the followers and the served log, which end after `stop` is set; see `ServedLogger.run`."""
        jobs: list[tuple[str, Callable[[], None]]] = [
            ("rows", lambda: self.rows.run(stop)),
            ("rows-watch", lambda: self.rows_watch.run(stop)),
            ("versions", lambda: self.versions.run(stop)),
        ]
        served = self.logger
        if served is not None:
            jobs.append(("served", lambda: served.run(stop, rest_s)))
        threads = [threading.Thread(target=job, name=name, daemon=True) for name, job in jobs]
        for thread in threads:
            thread.start()
        return threads

    def close(self) -> None:
        """Close the progress thread, the writer of the served log and reads of rows."""
        self._progress_thread.shutdown(wait=False)
        if self.logger is not None:
            self._writer.close()
        if self._reads is not None:
            self._reads.close(NOTICE_S)

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
            if self._queries >= MAX_QUERIES:
                raise Overloaded(f"{self._queries} queries about events wait; try again", retry_after_s=1)
            self._queries += 1
            try:
                stage = await asyncio.get_running_loop().run_in_executor(
                    self._progress_thread,
                    self._progress.stage_of,
                    query["topic"],
                    partition,
                    offset,
                    rows.next,
                )
            finally:
                self._queries -= 1
            body |= {"served": stage.served, "waits_for": stage.waits_for}
        return json_response(200, body)

    async def _ready(self, _request: Request) -> Response:
        body = self._figures()
        serving = self._live.version()
        if serving is not None:
            return json_response(200, {"status": "ready", "reason": "", **body})
        reason = body["rows"] or body["versions"]
        return json_response(503, {"status": "unready", "reason": reason, **body})

    async def _status(self, _request: Request) -> Response:
        return json_response(200, {**self._figures(), "skipped": skipped_status()})

    def _figures(self) -> dict[str, Any]:
        """Return the figures of `/status`; `rows`, `versions` and `served_log` are problems, or ""."""
        serving, rows = self._live.version(), self.rows.state
        table = rows.sink
        return {
            "version": serving.manifest.number if serving is not None else None,
            "freshness_ms": self._live.freshness_ms(),
            "rows_held": sum(table.rows().values()) if isinstance(table, ServingTable) else 0,
            "row_bytes": self._row_bytes(),
            "ssd": asdict(self._ssd_rows()),
            "corrupt_deltas": rows.corrupt,
            "not_finite_rows": rows.not_finite,
            "missing_rows": self._missing_rows(),
            **asdict(self._counts.totals),
            "rows_next": {str(p): n for p, n in rows.next.items()},
            "rows": rows.reason or self.rows_watch.reason,
            "versions": self.versions.state.reason,
            "served_log": self.logger.reason if self.logger is not None else "",
            "losses": self.logger.losses(self._clock.monotonic()) if self.logger is not None else {},
        }


def run(
    parts: Parts,
    settings: Settings,
    common: Common,
    *,
    stop: threading.Event,
    ready: Callable[[str], None] = lambda url: None,
    grpc_listener: Callable[[Inference], Listener] | None = None,
    authenticator: Authenticator | None = None,
) -> None:
    """Serve on the calling thread until `stop` is set, then append queued impressions within the drain time.

    Rank requests wait at most `start_wait` for rows and a version. Installs no signal handler.

    Args:
        ready: called with the address once the listener accepts connections.
        grpc_listener: makes a second listener.
        authenticator: authenticator of clients.

    Raises:
        ConfigError: the port cannot be bound, or the spec does not fit the schema.
        Mismatch: a topic does not fit, as `ensure_topics` raises.
    """
    left_s = 0.0

    def rest_s() -> float:
        return max(left_s, LAST_S)

    with HttpListener(common, settings.port) as listener:
        sites = AllowedSites(common.bind_address, common.hosts)
        server = Inference(parts, settings, authenticator=authenticator, sites=sites)
        stop_threads = threading.Event()  # set after `stop`: open requests are still scored and logged

        async def main() -> None:
            nonlocal left_s
            second = grpc_listener(server) if grpc_listener is not None else None
            left_s = await listener.serve(server.app, stop, ready, second)

        threads = server.start(stop_threads, rest_s)
        try:
            run_server(main)
        finally:
            stop_threads.set()
            threads_left = join_all(threads, rest_s() + NOTICE_S)
            within(CLOSE_S / 2, "close", server.close)  # a writer waits for its append
            logger.info("inference stopped", threads_left=threads_left)


def label_delay_ms(spec: Spec) -> int:
    """Return the time from an impression to its first negative sample.

    Labels that only some impressions have (`given`) do not count.
    """
    return min(label.window_ms for label in spec.labels if label.given is None) + spec.join.grace_ms
