"""Composition of a trainer process: dense weights of a version, a batch source, and the trainer on both."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import structlog

from freshet.adapters import open_eventlog, open_rowstore, open_versions
from freshet.apps.batch_sources import BatchSource, OwnRows, RankContext
from freshet.apps.metrics import DAMAGED_STATE, TRAINER_METRICS
from freshet.apps.row_memory import trainer_rows_bound
from freshet.batches.stream import BatchStream, RecentSamples
from freshet.config.settings import Settings
from freshet.config.spec.identity import identity_hash
from freshet.config.spec.layout import layout_of
from freshet.config.spec.model import Spec
from freshet.config.spec.schemas import load_schemas, sample_reader
from freshet.config.spec.transforms import check_outcomes
from freshet.coordination.claims import LEASE_S, Claims
from freshet.embedder.core import lanes_for
from freshet.errors import Corrupt
from freshet.http.admin import Admin
from freshet.log.topics import ModelContext
from freshet.model import FreezesVariance, LeavesOut, build_model
from freshet.observability.metrics import CachedGauge, register
from freshet.process.lifecycle import CLOSE_S, LAST_S, Cleanup, Drain, interruptible_start
from freshet.process.telemetry import service_registry
from freshet.rows.store import RowStore
from freshet.tables import Store
from freshet.trainer.gradient_sums import GradientSums
from freshet.trainer.membership import FixedMembership, QuorumOptions
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.quality import Quality
from freshet.trainer.reducers.build import build_reducer, reducer_name
from freshet.trainer.service import Trainer, TrainingLoop
from freshet.trainer.state_sync import DenseState, Progress, SharedMeasures, terms_of
from freshet.trainer.step_coordinator import AVERAGE_S, DenseLedger
from freshet.trainer.version_writer import VersionWriter, restart_point
from freshet.types import Bucket, TopicPartition
from freshet.versions import VersionStore
from freshet.versions.promotions import Pins
from freshet.wires.row_wire import WIRE_METRICS, WiresStatus

log = structlog.get_logger("freshet.training")


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """Settings of a trainer process."""

    lanes: int | None = None  # None: by the spec, or by the machine's cores
    device: str = "cpu"
    address: str = "127.0.0.1"  # of this host, as other ranks reach it
    site: str = ""  # mode async: ranks of one site step together
    answer_s: float = LEASE_S  # time after which a rank without an answer is lost
    drain_s: float | None = None  # time for the last flush, and to close, after `stop`; None: no limit


class TrainerProcess:
    """One rank: alone with its own rows, or one of several with rows elsewhere.

    Tests may use its parts without `run`.
    """

    def __init__(
        self,
        context: ModelContext,
        versions: VersionStore,
        open_source: Callable[[RankContext], BatchSource],
        options: TrainerOptions = TrainerOptions(),
    ) -> None:
        """Open the batch source, then load the newest version.

        Raises:
            ConfigError: the model cannot be computed on the device.
            Mismatch, DataLost, Corrupt: the stores do not match this spec, its transforms, or each other.
            Unavailable: as `open_source` does, or the log cannot be written.
        """
        self._context, spec, clock = context, context.spec, context.clock
        self._drain = None if options.drain_s is None else Drain(options.drain_s, clock)
        with Cleanup() as cleanup:
            claims = Claims(context.log, context.topics.control, clock)
            cleanup.add("claims", claims.close)
            writer = context.log.writer()
            cleanup.add("writer", writer.close)
            recent = RecentSamples(spec.serve.gate.samples, clock)
            self.source = open_source(RankContext(context, claims, writer, recent))
            cleanup.add("batches", self.source.close)
            log_id = str(context.log.topics()[context.topics.samples].log_id)
            self.state = state = restore_state(context, versions, log_id, options.device)
            self.ledger, self.quality = state.ledger, state.quality
            self.lanes = lanes = (
                options.lanes
                or spec.train.lanes
                or lanes_for(
                    os.cpu_count() or 1, spec.train.staleness_rows, spec.train.batch_rows, spec.partitions
                )
            )
            pins = Pins(context.log, context.topics.versions)
            cleanup.add("pins", pins.close)
            terms = QuorumOptions(
                options.address,
                lanes,
                spec.partitions,
                answer_s=options.answer_s,
                meet_s=AVERAGE_S if spec.train.mode == "async" else 0.0,
            )
            membership = self.source.membership(terms, self._is_stopping)
            self.training_loop = TrainingLoop(
                context,
                membership,
                state,
                self._open_stream,
                site=options.site,
                native_loop=self.source.native_loop(state.model, lanes),
            )
            self.trainer = Trainer(
                context,
                state,
                self.training_loop,
                VersionWriter(
                    context,
                    log_id,
                    versions,
                    writer,
                    pins,
                    recent.newest,
                    lambda: build_model(spec, training=False),
                ),
                writer,
            )
            self._stream: BatchStream | None = None  # of the current quorum
            self.trainer.hold_retention()
            self._cached_lag = CachedGauge(self.lag, 0)
            self._cached_margin = CachedGauge[Mapping[str, int]](self.retention_margin, {})
            self._alone = isinstance(membership, FixedMembership)
            if isinstance(membership, FixedMembership):
                self._open_stream(membership.group, lanes)
                self.trainer.begin(membership.group.fence)
            self._cleanup = cleanup.pop_all()

    def run(self) -> None:
        """Train with the ranks of each quorum until `stop`, then write rows and a last version.

        Raises Fenced if a claim was lost, and the errors of the trainer and of the source.
        """
        try:
            with self.source.running(self.trainer, self._left_s):
                self.trainer.run()
        finally:
            self._cleanup.run(self._left_s())

    def run_to_the_end(self) -> None:
        """Train on all samples that the log holds, then stop."""
        watcher = threading.Thread(target=self._stop_at_the_end, name="end", daemon=True)
        watcher.start()
        try:
            self.run()
        finally:
            self.trainer.stop.set()
            watcher.join()

    def stop(self) -> None:
        """Let `run` return after the current batches."""
        self._left_s()
        self.trainer.stop.set()

    def lag(self) -> int:
        """Return the blocks in the log that no batch of the current quorum has contained."""
        stream = self._stream
        return sum(stream.lag().values()) if stream is not None else 0

    def retention_margin(self) -> Mapping[str, int]:
        """Return {partition: blocks between the log's start and where the dense weights of a restart begin}.

        Empty for a rank that writes no versions. Raises Unavailable if the log does not answer.
        """
        held, topic = self.trainer.restart or {}, self._context.topics.samples
        found = self._context.log.all_bounds(TopicPartition(topic, p) for p in held)
        return {str(at.partition): held[at.partition] - bounds.start for at, bounds in found.items()}

    def ready(self) -> str | None:
        """Return None, or the reason why this process does not train."""
        return self.training_loop.membership.missing() or self.source.missing()

    def stuck(self) -> str | None:
        """Return None, or a text that says for how long the lanes have made no progress.

        None with other ranks: a rank may wait for them without a limit.
        """
        return self.trainer.pulse.stuck() if self._alone else None

    def status(self) -> Mapping[str, Any]:
        """Return figures for `freshet status` and metrics."""
        progress, quality, source = self.trainer.progress, self.quality.now(), self.source.status()
        model = self.state.model
        return {
            "samples": progress.samples,
            "steps": progress.steps,
            "event_time_ms": progress.event_time_ms,
            "version": progress.version,
            "outliers": self.quality.outliers,
            **({"not_finite": dict(model.not_finite)} if isinstance(model, LeavesOut) else {}),
            "versions_failed": progress.versions_failed,
            "version_error": progress.version_error,
            "applied": dict(self.ledger.applied),
            **source,
            "stage_seconds": {**source["stage_seconds"], **self.trainer.stage_seconds()},
            "lag_blocks": self._cached_lag(),
            "room_blocks": self._cached_margin(),
            **({} if self._alone else {"ranks": self.training_loop.status()}),
            "wires": self._with_dense(source.get("wires", {})),
            "codecs": {**self._choice_of_ranks(), **source.get("codecs", {})},
            "measures": quality.summary,
            "lately": quality.lately,
            "open": quality.open,
        }

    def wires(self) -> WiresStatus:
        """Return what the wires carried: of rows, of rows published by this process, of dense gradients."""
        return self._with_dense(self.source.status().get("wires", {}))

    def progress(self) -> Mapping[str, Any]:
        """Return the applied and published offsets, which the console polls often."""
        return {"applied": dict(self.ledger.applied), **self.source.progress()}

    def _with_dense(self, wires: WiresStatus) -> WiresStatus:
        counts = {codec: asdict(counts) for codec, counts in [*self.state.sums.counts.items()]}
        return {**wires, "dense": {"weights": counts}} if counts else wires

    def _choice_of_ranks(self) -> Mapping[str, Mapping[str, Mapping[str, str]]]:
        """Return the codec of sums or averagings with other ranks, once there was one."""
        sums, train = self.state.sums, self._context.spec.train
        if not sums.counts:
            return {}
        if train.mode == "async":
            return {"other ranks": {"averagings": {"codec": train.reduce, "why": "as set"}}}
        return {"other ranks": {"gradients": sums.choice}}

    def _open_stream(self, group: ProcessGroup, lanes: int) -> BatchStream:
        self._stream = self.source.stream(group, lanes, self.ledger.applied_offsets)
        return self._stream

    def _is_stopping(self) -> bool:
        return self.trainer.stop.is_set()

    def _left_s(self) -> float | None:
        """Begin the drain and return its rest, in seconds; None: no limit."""
        if self._drain is None:
            return None
        self._drain.begin()
        return self._drain.left_s(LAST_S)

    def _stop_at_the_end(self) -> None:
        before = -1
        while not self.trainer.stop.wait(0.02):
            samples = self.trainer.progress.samples
            # A query of the log's end holds the GIL, which would slow the lanes while they make progress.
            if samples == before and not self.lag():
                self.trainer.stop.set()
            before = samples


def restore_state(context: ModelContext, versions: VersionStore, log_id: str, device: str) -> DenseState:
    """Load the newest version that training may start from, or initial weights, on `device`.

    Raises:
        ConfigError: the model cannot be computed on the device.
        Mismatch, Corrupt: the versions do not match this spec, its log, or the code of its transforms.
    """
    spec, topics = context.spec, context.topics
    model, quality = build_model(spec, training=True, device=device), Quality(spec, context.clock)
    if device != "cpu":
        log.info("the network computes on a GPU", device=device)
        from freshet.model.trial import try_out

        try_out(spec, device=device)
    start = restart_point(versions, context.spec_hash, log_id)
    adam = model if isinstance(model, FreezesVariance) else None
    sums = GradientSums(build_reducer(spec, model), adam=adam, name=reducer_name(spec))
    if start is None:
        first = {
            p: context.log.bounds(TopicPartition(topics.samples, p)).start for p in range(spec.partitions)
        }
        ledger, progress = DenseLedger(first), Progress()
    else:
        check_outcomes(spec, start.transforms, f"version {start.number}")
        tensors = versions.get(start.number).tensors
        model.load_state(tensors)
        prefix = "measures/"
        quality.load_state({n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)})
        log.info("starting from a version", version=start.number, step=start.step)
        ledger = DenseLedger({int(p): offset for p, offset in start.applied.items()})
        begun = start.number > 0 or start.verdict == "promoted"  # else version 0 is not promoted yet
        progress = Progress(steps=start.step, event_time_ms=start.event_time_ms, begun=begun)
        sums.load_state(tensors)
    shared = SharedMeasures(quality)
    return DenseState(model, ledger, quality, shared, progress, context.spec_hash, sums, terms=terms_of(spec))


def run(spec: Spec, settings: Settings, stop: threading.Event) -> None:
    """Run a trainer: with embedder and shard in the process, or as a rank with remote rows."""
    with Cleanup(CLOSE_S) as cleanup:
        training: list[TrainerProcess] = []
        damage: list[str] = []  # the reason why it does not start
        registry = service_registry()
        register(registry, [DAMAGED_STATE], lambda: {"damaged": not training and bool(damage)})
        register(registry, TRAINER_METRICS, lambda: training[0].status() if training else None)
        register(registry, WIRE_METRICS, lambda: training[0].wires() if training else None)
        admin = Admin(
            settings.common.bind_address,
            settings.trainer.admin_port,
            hosts=settings.common.hosts,
            registry=registry,
            ready=lambda: (
                training[0].ready() if training else "".join(damage) or "claiming buckets and loading rows"
            ),
            status=lambda: training[0].status() if training else {},
            progress=lambda: training[0].progress() if training else {},
            stuck=lambda: training[0].stuck() if training else None,
        )
        cleanup.add("admin", admin.close)
        log = open_eventlog(settings.common.log_url)
        cleanup.add("log", log.close)
        versions = open_versions(settings.common.versions_url)
        cleanup.add("versions", versions.close)
        schemas = load_schemas(spec)
        context = ModelContext.open(spec, identity_hash(spec, schemas), log)
        reader, own = sample_reader(spec, schemas), settings.trainer
        if own.batches != "own":
            from freshet.apps.embedder import build_transport
            from freshet.apps.remote_sources import FromEmbedders, FromShards, Wire

            wire = Wire(build_transport(settings, spec), own.rows, own.gradients)
            options = TrainerOptions(
                device=own.device,
                address=own.advertised_host or settings.common.bind_address,
                site=own.site,
                answer_s=own.rank_answer_ms / 1000,
            )
            source = (
                partial(FromShards, wire=wire, reader=reader)
                if own.batches == "shards"
                else partial(FromEmbedders, wire=wire)
            )
            training.append(TrainerProcess(context, versions, source, options))
        else:

            def start(rows: RowStore) -> TrainerProcess:
                own_rows = partial(
                    OwnRows, rows=rows, stop=stop, bound=trainer_rows_bound(settings), reader=reader
                )
                options = TrainerOptions(device=own.device, drain_s=settings.common.drain_ms / 1000)
                return TrainerProcess(context, versions, own_rows, options)

            def open_rows() -> RowStore:
                return open_rowstore(settings.common.rows_url)

            with interruptible_start(stop):
                opened = _start_when_repaired(open_rows, spec, start, stop, damage)
                if opened is not None:
                    cleanup.add("rows", opened[0].close)
                    training.append(opened[1])
        if not training:
            return

        def forward_stop() -> None:
            stop.wait()
            training[0].stop()

        threading.Thread(target=forward_stop, name="stop", daemon=True).start()
        training[0].run()


REPAIR_POLL_S, MAX_REPAIR_POLL_S = 10.0, 30.0
"""Least and greatest interval between two starts on damaged state; within them, ten times a start's
duration."""


def _start_when_repaired(
    open_rows: Callable[[], RowStore],
    spec: Spec,
    start: Callable[[RowStore], TrainerProcess],
    stop: threading.Event,
    damage: list[str],
) -> tuple[RowStore, TrainerProcess] | None:
    """Return the row store and the training on it; None after `stop`.

    While rows, or other state that training starts from, are damaged, retry until an operator has repaired
    them; `damage` holds the reason meanwhile.
    """
    while True:
        began_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            try:
                rows = open_rows()
                stack.callback(rows.close)
                if damage:  # check before claiming: `freshet rows mend` needs unclaimed buckets
                    _check_rows(rows, spec)
                training = start(rows)
            except Corrupt as error:
                if not damage:
                    log.error("damaged state: the trainer waits until it is repaired", reason=str(error))
                    damage.append(str(error))
            else:
                stack.pop_all()
                damage.clear()
                return rows, training
        if stop.wait(min(MAX_REPAIR_POLL_S, max(REPAIR_POLL_S, 10 * (time.monotonic() - began_s)))):
            return None


def _check_rows(rows: RowStore, spec: Spec) -> None:
    """Raise Corrupt if any rows are damaged."""
    every = [Bucket(bucket) for bucket in range(spec.buckets)]
    store = Store.of(spec, layout_of(spec), changes=False, owned=False)  # empty: it only checks records
    rows.metas(every)
    for runs in rows.scan(every):
        store.unpack_runs(runs)
