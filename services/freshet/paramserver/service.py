"""A shard as a process: its listener, its seat and its slices, from the start to the drain."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from freshet.batches.frames import streams, work_bytes
from freshet.clock import SYSTEM_CLOCK, Clock
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.coordination.claims import LEASE_S, Claims
from freshet.errors import Unavailable
from freshet.http.addresses import Address
from freshet.log import EventLog
from freshet.log.topics import ensure_topics
from freshet.observability.grpc_metrics import GRPC_METRICS, REFUSALS, grpc_readings
from freshet.observability.metrics import Metric, Reading, register
from freshet.paramserver.balance_rules import MeteredRows, Why
from freshet.paramserver.balancer import DEFAULT_BOUNDS, Balancing, Bounds
from freshet.paramserver.flusher import store_metrics, store_readings
from freshet.paramserver.server import identity_of, serve_rows
from freshet.paramserver.shard import Shard
from freshet.paramserver.shard_manager import Keeper
from freshet.paramserver.store_watch import STORE_METRICS, StoreWatch
from freshet.process.lifecycle import LAST_S, Cleanup, Drain, Task, within
from freshet.rows.grpc.frames import Described
from freshet.rows.store import OnServers, RowStore
from freshet.rpc.channel import Transport
from freshet.rpc.server import STREAMS, WORK_BYTES, GrpcServer

__all__ = ["PARAMSERVER_METRICS", "ParamServer", "Place"]

log = structlog.get_logger("freshet.paramserver")

SEAT_WAIT_S = 10 * LEASE_S
"""How long a start waits for a former process of its name to be gone."""

PARAMSERVER_METRICS = (
    Metric("freshet_paramserver_slices", "gauge", "slices", "Slices of the model's buckets served here."),
    Metric("freshet_paramserver_moved_slices", "counter", "slices", "What happened to slices.", ("how",)),
    Metric("freshet_paramserver_pushes", "counter", "pushes", "Pushes answered, by outcome.", ("outcome",)),
    Metric(
        "freshet_paramserver_room_blocks",
        "gauge",
        "blocks",
        "Blocks between the start of samples and the smallest offset in the row store; below 0 is a loss.",
        ("partition",),
    ),
    Metric("freshet_paramserver_rows", "gauge", "rows", "Rows resident, by table.", ("table",)),
    Metric(
        "freshet_paramserver_loading_buckets",
        "gauge",
        "buckets",
        "Buckets served here whose rows are still being loaded: read by key meanwhile, and not flushed.",
    ),
    Metric("freshet_paramserver_loading_rows", "gauge", "rows", "Rows of those buckets in the row store."),
    Metric("freshet_paramserver_read_keys", "counter", "keys", "Keys read one by one while buckets loaded."),
    Metric(
        "freshet_paramserver_damaged_slices",
        "gauge",
        "slices",
        "Slices that the plan gives this shard and that it does not serve because their rows are damaged.",
    ),
    Metric("freshet_paramserver_bytes", "gauge", "bytes", "Memory of rows, indexes and sketches."),
    Metric(
        "freshet_paramserver_memory_limit_bytes",
        "gauge",
        "bytes",
        "What the rows' memory may grow to; 0: no limit.",
    ),
    Metric(
        "freshet_paramserver_refused_lookups",
        "counter",
        "lookups",
        "Lookups for training that were refused because the memory is full.",
    ),
    Metric(
        "freshet_paramserver_load_rows_per_second",
        "gauge",
        "rows/s",
        "Rows looked up and pushed here a second, over the last report to the other shards.",
    ),
    Metric(
        "freshet_paramserver_unevenness",
        "gauge",
        "1",
        "How far the shard that is worst off lies from its fair share of the load, as every shard sees it.",
    ),
    Metric(
        "freshet_paramserver_plans",
        "counter",
        "plans",
        "Plans of who should own which slice that this shard wrote, by what made them necessary.",
        ("why",),
    ),
    *store_metrics("paramserver"),
    Metric("freshet_paramserver_flushed_rows", "counter", "rows", "Rows written to the row store."),
    Metric("freshet_paramserver_flushes", "counter", "flushes", "Flushes to the row store that are written."),
    Metric(
        "freshet_paramserver_flushes_failed", "counter", "flushes", "Attempts at a flush that were in vain."
    ),
    Metric(
        "freshet_paramserver_unwritten_seconds",
        "gauge",
        "seconds",
        "For how long there has been a flush that is not written, tried once or often; 0 between flushes.",
    ),
    Metric("freshet_paramserver_published_rows", "counter", "rows", "Rows published for serving."),
    *STORE_METRICS,
    *GRPC_METRICS,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a shard stands."""

    name: str  # tells the shards of a model apart; kept over restarts
    host: str  # listens here
    port: int  # 0: a free one
    advertised: str = ""  # host that clients reach it by; empty: `host`


class ParamServer:
    """One shard among others. `run` serves until told to stop, then drains."""

    def __init__(
        self,
        spec: Spec,
        log: EventLog,
        rows: RowStore,
        place: Place,
        transport: Transport,
        *,
        spec_hash: str,
        bounds: Bounds = DEFAULT_BOUNDS,
        evict_bytes: int = 0,
        clock: Clock = SYSTEM_CLOCK,
        stop: threading.Event | None = None,
    ) -> None:
        """Listen, take the seat and check the stores; no slice is claimed yet.

        Args:
            evict_bytes: of rows; beyond it the least recently used are evicted. 0: none are for memory.

        Raises:
            ConfigError: the address cannot be bound.
            Unavailable: another process of this name lives, or `stop` was set before it was gone.
            Mismatch: the stores are of another model, spec or log.
        """
        self._spec, self._place, self._bounds, self._clock = spec, place, bounds, clock
        topics = ensure_topics(log, spec)
        layout = layout_of(spec)
        self.shard = Shard(
            spec=spec,
            layout=layout,
            spec_hash=spec_hash,
            topics=topics,
            log=log,
            rows=rows,
            clock=clock,
            name=place.name,
            most_bytes=evict_bytes,
        )
        self.server = GrpcServer(
            str(Address(place.host, place.port)),
            transport,
            identity=identity_of(spec.name, spec_hash),
            streams=streams(spec, STREAMS),
            work_bytes=work_bytes(spec, WORK_BYTES),
        )
        widths = tuple(group.width for group in layout.groups)
        states = tuple(group.state_floats for group in layout.groups)
        described = Described(place.name, spec.name, spec_hash, spec.buckets, spec.partitions, widths, states)
        with Cleanup() as cleanup:
            claims = Claims(log, topics.control, clock)
            cleanup.add("claims", claims.close)
            self.balancing = Balancing(self.shard, claims, bounds, buckets=spec.buckets, clock=clock)
            self.rows = MeteredRows(self.shard, self.balancing.meter, lambda: self.balancing.full)
            serve_rows(self.server, self.rows, described)
            self.server.start()
            cleanup.add("listener", lambda: self.server.stop(0.0))
            self.address = str(Address(place.advertised or place.host, self.server.port))
            self.watch = StoreWatch(rows) if isinstance(rows, OnServers) else None
            self.keeper = Keeper(
                self.shard,
                claims,
                self.balancing,
                name=place.name,
                address=self.address,
                life=uuid.uuid4().hex,
                buckets=spec.buckets,
                clock=clock,
            )
            self.shard.create()
            self.keeper.take_seat(clock.monotonic() + SEAT_WAIT_S, stop)
            self._cleanup = cleanup.pop_all()

    def run(self, stop: threading.Event, *, drain_s: float) -> None:
        """Serve until `stop`, then give slices away, flush, release and close, all within `drain_s` of when
        `stop` was set, whatever hangs. Raises what ended the shard, if anything did."""
        drain, serving = Drain(drain_s, self._clock), True

        def keep() -> None:
            try:
                self.keeper.run(stop)
                drain.begin()
                if self.shard.failed is not None:
                    raise self.shard.failed
                left_s = drain.left_s() - drain_s / 2  # the other half is for calls in work, and the flush
                self.keeper.leave(self._clock.monotonic() + left_s)
            finally:
                stop.set()

        self.shard.start()
        if self.watch is not None:
            self.watch.start()
            self._cleanup.add("watch", self.watch.stop)
        self.shard.on_failed = stop.set
        try:
            keeping = Task("keeper", keep)
            stop.wait()
            drain.begin()
            if not keeping.done(drain_s / 2) and self.shard.failed is not None:
                raise self.shard.failed
            self.server.stop(drain.left_s() / 2)  # the rest is for the flush
            serving = False
        finally:
            drain.begin()
            try:
                self._flush_last(drain.left_s(LAST_S), release=not serving)
            finally:
                self._cleanup.run(drain.left_s(LAST_S))

    def ready(self) -> str | None:
        """None, or why it does not serve what it should."""
        return str(self.shard.failed) if self.shard.failed is not None else self.keeper.ready

    def status(self) -> Mapping[str, Any]:
        """Figures for `freshet status`."""
        memory = self.shard.store.memory()
        names = {table.id: table.name for table in self._spec.tables}
        return {
            "name": self._place.name,
            "address": self.address,
            "slices": len(self.keeper.slices),
            "loading": asdict(self.shard.loader.progress),
            "moved": asdict(self.keeper.counts),
            "damaged": dict(self.keeper.damaged),
            "rows": {names[table]: rows for table, rows in memory.rows.items()},
            "row_bytes": {names[table]: size for table, size in memory.row_bytes.items()},
            "evicted": {names[table]: rows for table, rows in self.shard.store.evicted().items()},
            "bytes": memory.bytes,
            "memory_limit_bytes": self._bounds.memory_bytes,
            "load": {
                "rows_per_s": round(self.balancing.rate),
                "unevenness": round(self.balancing.unevenness, 3),
                "plans": dict(self.balancing.plans),
            },
            "refused_lookups": self.rows.refused,
            "unwritten_s": round(self.shard.unwritten_s, 3),
            "shard": asdict(self.shard.counts),
            "store": asdict(self.shard.store.counts()),
            "refused": dict(self.server.counts.refused),
        }

    def progress(self) -> Mapping[str, Any]:
        """How far rows are published, of how many slices: what the console asks often, and no more."""
        return {"slices": len(self.keeper.slices), "published": asdict(self.shard.published)}

    def register(self, registry: CollectorRegistry) -> None:
        """Serve PARAMSERVER_METRICS from a registry."""
        register(registry, PARAMSERVER_METRICS, self._readings)

    def _readings(self) -> Mapping[str, Reading]:
        status, counts = self.status(), self.shard.counts
        applied = counts.pushes - counts.skipped
        return {
            "freshet_paramserver_slices": status["slices"],
            "freshet_paramserver_moved_slices": {(how,): n for how, n in status["moved"].items()},
            "freshet_paramserver_pushes": {
                ("applied",): applied,
                ("skipped",): counts.skipped,
                ("refused",): counts.refused,
                ("fenced",): counts.fenced,
            },
            "freshet_paramserver_rows": {(table,): n for table, n in status["rows"].items()},
            "freshet_paramserver_room_blocks": {(p,): n for p, n in counts.room_blocks.items()},
            "freshet_paramserver_loading_buckets": status["loading"]["buckets"],
            "freshet_paramserver_loading_rows": status["loading"]["rows"],
            "freshet_paramserver_read_keys": self.shard.loader.keys_read,
            "freshet_paramserver_damaged_slices": len(status["damaged"]),
            "freshet_paramserver_bytes": status["bytes"],
            "freshet_paramserver_memory_limit_bytes": status["memory_limit_bytes"],
            "freshet_paramserver_refused_lookups": status["refused_lookups"],
            "freshet_paramserver_load_rows_per_second": self.balancing.rate,
            "freshet_paramserver_unevenness": self.balancing.unevenness,
            "freshet_paramserver_plans": {(why.value,): self.balancing.plans[why.value] for why in Why},
            **store_readings("paramserver", status["store"], counts.replaced_buckets),
            "freshet_paramserver_flushed_rows": counts.flushed_rows,
            "freshet_paramserver_flushes": counts.flushes,
            "freshet_paramserver_flushes_failed": counts.flushes_failed,
            "freshet_paramserver_unwritten_seconds": self.shard.unwritten_s,
            "freshet_paramserver_published_rows": counts.published_rows,
            **(self.watch.readings() if self.watch is not None else {}),
            **grpc_readings(self.server.counts, REFUSALS),
        }

    def _flush_last(self, seconds: float, *, release: bool) -> None:
        """Flush, with `release` as one that leaves. What is not written is replayed, as after a kill."""

        def flush() -> None:
            flushed = False
            try:
                if release:
                    self.keeper.drain()
                flushed = True
            finally:
                self.shard.stop(flush=flushed)

        try:
            done = within(seconds, "last-flush", flush)
            reason = "" if done else f"the row store, or the log, has not answered within {seconds:.1f} s"
        except Unavailable as error:
            reason = str(error)
        if reason:
            log.warning("not everything was flushed and released", reason=reason)
