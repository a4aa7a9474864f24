"""The paramserver process: listener, membership lease and slices of one shard, from start to drain."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from freshet.batches.frames import streams, work_bytes
from freshet.coordination.claims import LEASE_S, Claims
from freshet.errors import FreshetError, Unavailable
from freshet.http.addresses import Address
from freshet.log.topics import ModelContext
from freshet.observability.grpc_metrics import GRPC_METRICS
from freshet.observability.metrics import Metric, register
from freshet.paramserver.balancer import DEFAULT_BOUNDS, Bounds, LoadBalancer
from freshet.paramserver.placement import PlanReason
from freshet.paramserver.server import MeteredRows, RowSizes, identity_of, serve_rows
from freshet.paramserver.shard import Shard, store_metrics
from freshet.paramserver.shard_manager import ShardManager
from freshet.process.lifecycle import LAST_S, Cleanup, Drain, Task, within
from freshet.rows.store import OnServers, RowStore, StoreServer
from freshet.rpc.channel import Transport
from freshet.rpc.server import STREAMS, WORK_BYTES, FrameServer
from freshet.tables import NO_BOUND, RowsBound
from freshet.wires.row_wire import WIRE_METRICS, WiresStatus, tables_of_groups, wires_status

POLL_S = 10.0

STOP_TIMEOUT_S = 0.2
"""Longest wait of `stop` for a poll that hangs: claims are released after it, within LAST_S."""

STORE_METRICS = (
    Metric(
        "freshet_paramserver_store_replicas",
        "gauge",
        "replicas",
        "Replicas of this master of the row store. All of these gauges are absent while a master is silent.",
        ("server",),
        at=lambda servers: {server.name: server.replicas for server in servers},
    ),
    Metric(
        "freshet_paramserver_store_used_bytes",
        "gauge",
        "bytes",
        "Memory that this master of the row store uses.",
        ("server",),
        at=lambda servers: {server.name: server.used_bytes for server in servers},
    ),
    Metric(
        "freshet_paramserver_store_limit_bytes",
        "gauge",
        "bytes",
        "Memory at which this master refuses writes; 0: no limit, or it reports none.",
        ("server",),
        at=lambda servers: {server.name: server.limit_bytes for server in servers},
    ),
)

log = structlog.get_logger("freshet.paramserver")


class StoreWatch:
    """Polls the servers on a thread of its own, because a silent server blocks a poll."""

    def __init__(self, store: OnServers, poll_s: float = POLL_S) -> None:
        """Start without figures."""
        self._store, self._poll_s = store, poll_s
        self._stop = threading.Event()
        self._failed = False  # the last poll
        self._thread = threading.Thread(target=self._run, name="store watch", daemon=True)
        self.seen: Sequence[StoreServer] = ()
        """Servers at the last poll; empty if it failed, since old figures would hide the failure"""

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling; waits up to STOP_TIMEOUT_S for a running poll. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)

    def poll_servers(self) -> None:
        """Poll once."""
        try:
            self.seen = self._store.servers()
            self._failed = False
        except Exception as error:  # also of third-party stores: the thread must go on
            self.seen = ()
            if not self._failed:
                log.warning(
                    "the row store's servers do not answer; their figures are absent until they do",
                    reason=str(error) if isinstance(error, FreshetError) else repr(error),
                )
            self._failed = True

    def _run(self) -> None:
        while not self._stop.is_set():
            self.poll_servers()
            self._stop.wait(self._poll_s)


JOIN_TIMEOUT_S = 10 * LEASE_S
"""Longest wait of a start for the lease of a former process of the same name."""


def _pushes(counts: Mapping[str, int]) -> dict[str, int]:
    outcomes = {outcome: counts[outcome] for outcome in ("skipped", "refused", "fenced")}
    return {"applied": counts["pushes"] - counts["skipped"], **outcomes}


PARAMSERVER_METRICS = (
    Metric("freshet_paramserver_slices", "gauge", "slices", "Slices of the model's buckets served here."),
    Metric(
        "freshet_paramserver_moved_slices",
        "counter",
        "slices",
        "Ownership changes of slices: `taken`, `given` to other shards, `lost` to them, `doubted` (changed "
        "while loading, and claimed anew).",
        ("how",),
        at="moved",
    ),
    Metric(
        "freshet_paramserver_pushes",
        "counter",
        "pushes",
        "Pushes answered, by outcome.",
        ("outcome",),
        at=lambda status: _pushes(status["shard"]),
    ),
    Metric(
        "freshet_paramserver_loading_buckets",
        "gauge",
        "buckets",
        "Buckets served here whose rows still load; until then they are read by key, and not flushed.",
        at="loading.buckets",
    ),
    Metric(
        "freshet_paramserver_loading_rows",
        "gauge",
        "rows",
        "Rows of those buckets in the row store.",
        at="loading.rows",
    ),
    Metric("freshet_paramserver_read_keys", "counter", "keys", "Keys read one by one while buckets loaded."),
    Metric(
        "freshet_paramserver_damaged_slices",
        "gauge",
        "slices",
        "Slices planned for this shard that it does not serve because their rows are damaged.",
        at="damaged",
    ),
    Metric("freshet_paramserver_bytes", "gauge", "bytes", "Memory of rows, indexes and sketches."),
    Metric(
        "freshet_paramserver_memory_limit_bytes",
        "gauge",
        "bytes",
        "Bound on the memory of rows; 0: no limit.",
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
        at="load.rows_per_s",
    ),
    Metric(
        "freshet_paramserver_unevenness",
        "gauge",
        "1",
        "Largest deviation of a shard's load from its fair share, as a part of that; all shards report it.",
        at="load.unevenness",
    ),
    Metric(
        "freshet_paramserver_plans",
        "counter",
        "plans",
        "Plans of the slices' owners that this shard published, by the reason.",
        ("why",),
        at=lambda status: {reason.value: 0 for reason in PlanReason} | status["load"]["plans"],
    ),
    *store_metrics("paramserver"),
)


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """Name of a shard, and the address on which it listens."""

    name: str  # distinguishes the shards of a model; kept over restarts
    host: str
    port: int  # 0: any free one
    advertised: str = ""  # host under which clients reach it; empty: `host`


class ParamServer:
    """A shard among others. `run` serves until `stop` is set, then drains."""

    def __init__(
        self,
        context: ModelContext,
        rows: RowStore,
        place: ShardAddress,
        transport: Transport,
        *,
        bounds: Bounds = DEFAULT_BOUNDS,
        rows_bound: RowsBound = NO_BOUND,
        stop: threading.Event | None = None,
    ) -> None:
        """Listen, acquire the membership lease and check the stores; no slice is claimed yet.

        Args:
            context: the model, its log and clock; clients must have the same spec hash.
            rows: the row store.
            place: name and address of this shard.
            transport: gRPC options.
            bounds: balancing and memory bounds.
            rows_bound: memory of rows, and what happens beyond it.
            stop: ends the wait for the membership lease.

        Raises:
            ConfigError: the address cannot be bound.
            Unavailable: another process of this name lives, or `stop` was set before its lease expired.
            Mismatch: the stores belong to another model, spec or log.
        """
        spec, spec_hash, clock = context.spec, context.spec_hash, context.clock
        self._spec, self._place, self._bounds, self._clock = spec, place, bounds, clock
        layout = context.layout
        self.shard = Shard(context, rows, name=place.name, bound=rows_bound)
        self.server = FrameServer(
            str(Address(place.host, place.port)),
            transport,
            identity=identity_of(spec.name, spec_hash),
            streams=streams(spec, STREAMS),
            work_bytes=work_bytes(spec, WORK_BYTES),
        )
        self._tables = tables_of_groups(spec, layout)
        widths = tuple(group.width for group in layout.groups)
        states = tuple(group.state_floats for group in layout.groups)
        sizes = RowSizes(spec.buckets, widths, states)
        with Cleanup() as cleanup:
            claims = Claims(context.log, context.topics.control, clock)
            cleanup.add("claims", claims.close)
            self.balancer = LoadBalancer(self.shard, claims, bounds, buckets=spec.buckets, clock=clock)
            self.rows = MeteredRows(self.shard, self.balancer.meter, lambda: self.balancer.full)
            self.wires = serve_rows(self.server, self.rows, sizes, layout.scalars)
            self.server.start()
            cleanup.add("listener", lambda: self.server.stop(0.0))
            self.address = str(Address(place.advertised or place.host, self.server.port))
            self.watch = StoreWatch(rows) if isinstance(rows, OnServers) else None
            self.manager = ShardManager(
                self.shard,
                claims,
                self.balancer,
                name=place.name,
                address=self.address,
                life=uuid.uuid4().hex,
                buckets=spec.buckets,
                clock=clock,
            )
            self.shard.buckets.create()
            self.manager.join(clock.monotonic() + JOIN_TIMEOUT_S, stop)
            self._cleanup = cleanup.pop_all()

    def run(self, stop: threading.Event, *, drain_s: float) -> None:
        """Serve until `stop` is set, then hand slices over, flush, release and close within `drain_s`.

        The limit holds even if the row store or the log hangs. Raises the error that ended the shard, if any.
        """
        drain, serving = Drain(drain_s, self._clock), True

        def manage() -> None:
            try:
                self.manager.run(stop)
                drain.begin()
                if self.shard.failed is not None:
                    raise self.shard.failed
                left_s = drain.left_s() - drain_s / 2  # the other half is for open calls and the flush
                self.manager.leave(self._clock.monotonic() + left_s)
            finally:
                stop.set()

        self.shard.start()
        if self.watch is not None:
            self.watch.start()
            self._cleanup.add("watch", self.watch.stop)
        self.shard.on_failed = stop.set
        try:
            managing = Task("shard manager", manage)
            stop.wait()
            drain.begin()
            if not managing.done(drain_s / 2) and self.shard.failed is not None:
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
        """None, or the reason why this shard does not serve its planned slices."""
        return str(self.shard.failed) if self.shard.failed is not None else self.manager.ready

    def status(self) -> Mapping[str, Any]:
        """Return the figures of `freshet status`."""
        memory = self.shard.store.memory()
        names = {table.id: table.name for table in self._spec.tables}
        return {
            "name": self._place.name,
            "address": self.address,
            "slices": len(self.manager.slices),
            "loading": asdict(self.shard.buckets.progress),
            "moved": asdict(self.manager.counts),
            "damaged": dict(self.manager.damaged),
            "rows": {names[table]: rows for table, rows in memory.rows.items()},
            "row_bytes": {names[table]: size for table, size in memory.row_bytes.items()},
            "evicted": {names[table]: rows for table, rows in self.shard.store.evicted().items()},
            "bytes": memory.bytes,
            "memory_limit_bytes": self._bounds.memory_bytes,
            "load": {
                "rows_per_s": round(self.balancer.rate),
                "unevenness": round(self.balancer.unevenness, 3),
                "plans": dict(self.balancer.plans),
            },
            "refused_lookups": self.rows.refused,
            "unwritten_s": round(self.shard.unwritten_s, 3),
            "inexact_rows": self.shard.store.inexact(),
            "ssd": asdict(self.shard.store.ssd_rows()),
            "shard": asdict(self.shard.counts),
            "store": asdict(self.shard.store.counts()),
            "refused": dict(self.server.counts.refused),
            "wires": self._wires(),
        }

    def _wires(self) -> WiresStatus:
        wires = {"lookup": self.wires.rows, "push": self.wires.gradients, "publish": self.shard.flusher.wire}
        return wires_status(wires, self._tables)

    def progress(self) -> Mapping[str, Any]:
        """Return the slices and the progress of publishing, which the console polls."""
        return {"slices": len(self.manager.slices), "published": asdict(self.shard.published)}

    def register(self, registry: CollectorRegistry) -> None:
        """Register PARAMSERVER_METRICS, STORE_METRICS, GRPC_METRICS and WIRE_METRICS."""
        register(
            registry,
            PARAMSERVER_METRICS,
            lambda: {**self.status(), "read_keys": self.shard.buckets.keys_read},
        )
        register(registry, STORE_METRICS, lambda: None if self.watch is None else self.watch.seen)
        register(registry, GRPC_METRICS, lambda: self.server.counts)
        register(registry, WIRE_METRICS, self._wires)

    def _flush_last(self, seconds: float, *, release: bool) -> None:
        """Flush and stop; with `release` also release all claims. Unwritten rows are replayed."""

        def flush() -> None:
            flushed = False
            try:
                if release:
                    self.manager.drain()
                flushed = True
            finally:
                self.shard.stop(flush=flushed)

        try:
            done = within(seconds, "last-flush", flush)
            reason = "" if done else f"no answer of the row store or the log within {seconds:.1f} s"
        except Unavailable as error:
            reason = str(error)
        if reason:
            log.warning("not everything was flushed and released", reason=reason)
