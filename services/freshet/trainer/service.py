"""The trainer of a process: its training loop, with threads for versions and measures beside it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np
import orjson
import structlog

from freshet.batches.stream import BatchStream, TrainBatch
from freshet.errors import Corrupt, Fenced, Unavailable
from freshet.log import Writer
from freshet.log.topics import ModelContext
from freshet.model.native_loop import NativeLoop
from freshet.process.lifecycle import Pulse
from freshet.trainer.lanes import STAGES, LaneCallback, Lanes, RunLanes
from freshet.trainer.membership import FixedMembership, Membership
from freshet.trainer.process_group import ProcessGroup, RankLost
from freshet.trainer.quality import TOGETHER_ROWS
from freshet.trainer.state_average import average
from freshet.trainer.state_sync import DenseState
from freshet.trainer.step_coordinator import EXCHANGE_S, RankHooks, StepCoordinator
from freshet.trainer.version_writer import Snapshot, VersionWriter
from freshet.types import F32, Append, BytesColumn, Fence, TopicPartition
from freshet.versions import Manifest

log = structlog.get_logger("freshet.trainer")

WINDOWS_EVERY_S = 1.0
"""Seconds between two writes of complete windows of measures: the console reads about as often."""


Mode = Literal["hybrid", "sync", "async"]

FLUSH_S = 1.0
"""Seconds that the end of a quorum waits for the shards to acknowledge the last pushes; batches without an
acknowledgement are trained on again."""

WAITING_EVERY_S = 0.1
"""Seconds between two checks whether another rank waits to join."""


class StreamFactory(Protocol):
    """Opens the batch stream of a rank in a new quorum."""

    def __call__(self, group: ProcessGroup, lanes: int) -> BatchStream:
        """Open a stream under the group's fence that starts at the applied offsets.

        Lane i gets the partitions p with p % (ranks * lanes) == rank * lanes + i. The caller closes the
        stream when the quorum ends.
        """


class TrainingCallback(LaneCallback, Protocol):
    """A callback of the lanes that also follows the quorums of its rank."""

    def on_state_synced(self, group: ProcessGroup) -> None:
        """The ranks of a new quorum have the same state; training continues from it."""

    def flush_due(self) -> bool:
        """Return whether the leader waits for a flush point. Called before each step."""

    def on_flush_point(self) -> None:
        """The dense state may be written as a version: it lacks no part of a sample that its vector covers.

        Model, vector and carry stay unchanged until this returns.
        """


class TrainingLoop:
    """The rounds of a rank, from quorum to quorum (PROTOCOL 14, 15).

    When a rank is lost, joins or leaves, the quorum ends between two steps: the lanes return their batches,
    a new quorum forms, its ranks sync to the state of the highest step, partitions are assigned anew, and
    training continues. After a loss, ranks of which not every step is a flush point go back to their last one
    first. No process restarts. A rank alone has one quorum, which lasts.
    """

    def __init__(
        self,
        context: ModelContext,
        membership: Membership | FixedMembership,
        state: DenseState,
        open_stream: StreamFactory,
        *,
        site: str = "",
        native_loop: NativeLoop | None = None,
    ) -> None:
        """Join no quorum yet.

        Args:
            context: the model.
            membership: of this rank.
            state: of this rank.
            open_stream: opens the batch stream of a quorum.
            site: mode `async`: name of the site of this rank; ranks of a site step together. Empty: alone.
            native_loop: of a native model; streams are `RunStream` then.
        """
        self._train, self._clock = context.spec.train, context.clock
        self.membership, self._state, self._open_stream = membership, state, open_stream
        self._native_loop, self._site = native_loop, site
        self.quorums = 0  # that this rank was in
        self.lost = 0  # quorums that ended because a rank was lost
        self._past = dict.fromkeys(STAGES, 0.0)
        self._running: Lanes | None = None
        self._checked_s = float("-inf")
        self._members_waiting = False

    def run(self, callback: TrainingCallback, stop: threading.Event) -> None:
        """Train on the caller's thread and the lanes' threads until `stop` is set; raises a lane's error."""
        try:
            while not stop.is_set():
                group = self.membership.join()
                if group is None:
                    break
                self.quorums += 1
                try:
                    self._run_quorum(group, callback, stop)
                except (RankLost, Fenced) as error:
                    if isinstance(error, Fenced) and not self.membership.await_superseded():
                        raise
                    self.lost += 1
                    steps = self._state.roll_back()
                    log.warning(
                        "a rank was lost", world=int(group.fence), reason=str(error), steps_made_again=steps
                    )
                finally:
                    group.close()
        finally:
            self.membership.leave()

    def status(self) -> dict[str, int]:
        """Return this rank's membership for the status."""
        quorum = self.membership.quorum
        return {
            "seat": self.membership.member,
            "ranks": len(quorum.members) if quorum is not None else 0,
            "worlds": self.quorums,
            "lost": self.lost,
        }

    def seconds(self) -> dict[str, float]:
        """Return the seconds that the lanes have spent in each stage."""
        now = self._running.seconds() if self._running is not None else {}
        return {stage: past + now.get(stage, 0.0) for stage, past in self._past.items()}

    def _run_quorum(self, group: ProcessGroup, callback: TrainingCallback, stop: threading.Event) -> None:
        state = self._state
        state.sync(group)
        site = group.split(self._site or f"rank {group.rank}") if self._average_every else None
        try:
            self._run_in_site(group, site, callback, stop)
        finally:
            if site is not None:
                site.close()

    def _run_in_site(
        self,
        group: ProcessGroup,
        site: ProcessGroup | None,
        callback: TrainingCallback,
        stop: threading.Event,
    ) -> None:
        state = self._state
        coordinator = StepCoordinator(
            group,
            state.ledger,
            sums=state.sums,
            average_every=self._average_every,
            site=site,
            clock=self._clock,
        )
        coordinator.hooks = self._hooks(callback, keeps=not coordinator.every_step_flushes)
        if not coordinator.every_step_flushes:
            state.keep()
        callback.on_state_synced(group)
        quorum = self.membership.quorum
        assert quorum is not None
        stream = self._open_stream(group, quorum.lanes)
        lanes = (stream, state.model, coordinator, callback, quorum.lanes, self._wait_s, stop)
        try:
            loop = self._native_loop
            if loop is not None and state.sums.carry is not None:
                # Native code steps without the coordinator, so the carry of a version goes first.
                coordinator.hooks = replace(coordinator.hooks, must_regroup=lambda: state.sums.carry is None)
                self._run_lanes(Lanes(*lanes, step=state.progress.steps))
                coordinator.hooks = self._hooks(callback, keeps=False)
            step = state.progress.steps
            self._run_lanes(
                Lanes(*lanes, step=step) if loop is None else RunLanes(*lanes, step=step, loop=loop)
            )
            state.flush_point = None  # the quorum has ended at one
            stream.flush(FLUSH_S)
        finally:
            stream.close()

    def _run_lanes(self, lanes: Lanes) -> None:
        self._running = lanes
        try:
            lanes.run()
        finally:
            self._past, self._running = self.seconds(), None

    @property
    def _average_every(self) -> int:
        return self._train.average_every if self._train.mode == "async" else 0

    def _hooks(self, callback: TrainingCallback, *, keeps: bool) -> RankHooks:
        """Return the calls of a coordinator; `keeps`: copy the state at flush points, to go back to it."""
        state = self._state

        def reach_flush_point() -> None:
            if keeps:
                state.keep()
            callback.on_flush_point()

        return RankHooks(
            self._must_regroup,
            state.shared.exchange,
            callback.flush_due,
            lambda group, rows, step: average(state, group, rows, step, rounded=self._train.reduce == "int8"),
            reach_flush_point,
        )

    @property
    def _wait_s(self) -> float:
        """The longest wait of a lane without data (PROTOCOL 14)."""
        return self._train.batch_wait_ms / 1000

    def _must_regroup(self) -> bool:
        now = self._clock.monotonic()
        if now >= self._checked_s + WAITING_EVERY_S:
            self._checked_s, self._members_waiting = now, self.membership.members_waiting()
        return self._members_waiting


class Trainer:
    """One rank; the callback of its lanes."""

    def __init__(
        self,
        context: ModelContext,
        state: DenseState,
        training_loop: TrainingLoop,
        version_writer: VersionWriter,
        writer: Writer,
    ) -> None:
        """Start no thread yet. `writer` appends windows of measures."""
        self._context, self._state, self._training_loop = context, state, training_loop
        self._version_writer, self._writer = version_writer, writer
        self._interval_s = context.spec.train.version_interval_ms / 1000
        self._due = context.clock.monotonic() + self._interval_s
        self._to_measure = threading.Event()
        self._snapshots: queue.Queue[Snapshot | None] = queue.Queue(maxsize=1)
        self._leads, self._fence = True, Fence(-1)
        self.progress = state.progress
        self._last_step = self.progress.steps
        self._failed: Exception | None = None
        self.restart: Mapping[int, int] | None = dict(state.ledger.applied)
        """Vector of the newest version that training may start from; None: another rank writes versions, or
        this one has written none since it leads."""
        self.stop = threading.Event()
        self._over = threading.Event()
        self.pulse = Pulse()  # beats between two rounds

    def run(self) -> None:
        """Train until `stop` is set, then write a last version.

        Lane 0 runs on the caller's thread. Raises the error of a lane, the measures or the version writer.
        """
        versions = threading.Thread(target=self._write_versions, name="versions", daemon=True)
        measurer = threading.Thread(target=self._measure, name="measures", daemon=True)
        versions.start()
        measurer.start()
        last: Snapshot | None = None  # none after an error: the vector is ahead of the weights
        try:
            self._training_loop.run(self, self.stop)
            self.pulse.rest()
            self._write_windows()
            last = self.snapshot() if self._leads and self.progress.steps > self._last_step else None
        finally:
            self._over.set()
            self._to_measure.set()
            measurer.join()
            self._snapshots.put(last)
            self._snapshots.put(None)
            versions.join()
        if self._failed is not None:
            raise self._failed

    def begin(self, fence: Fence) -> None:
        """Write version 0 of a new model before `run`, unless the store has a version: for the only rank."""
        self._fence = fence
        if not self.progress.begun:
            self._version_writer.begin(self.snapshot())
            self.progress.begun = True

    def hold_retention(self) -> None:
        """Hold retention of samples at the vector from which a restart trains (PROTOCOL 12).

        Rows may be stored further than that, so the shard's pin does not keep all that dense weights lack.
        All ranks share one pin. At a start call it before rows are flushed. Raises Unavailable.
        """
        topic = self._context.topics.samples
        held = {TopicPartition(topic, p): offset for p, offset in (self.restart or {}).items()}
        if held:
            self._context.log.hold(f"trainer-{self._context.spec.name}", held)

    def snapshot(self) -> Snapshot:
        """Copy the dense state and the vector. Call it at flush points only (PROTOCOL 15)."""
        tensors = {name: np.array(tensor) for name, tensor in self._state.model.state().items()}
        tensors.update({f"measures/{name}": np.array(t) for name, t in self._state.quality.state().items()})
        tensors.update(self._state.sums.state())
        return Snapshot(
            tensors=tensors,
            applied=dict(self._state.ledger.applied),
            step=self.progress.steps,
            event_time_ms=self.progress.event_time_ms,
            measures=self._state.quality.summary(),
            finite=self._state.model.finite(),
            fence=self._fence,
        )

    def stage_seconds(self) -> dict[str, float]:
        """Return the seconds that the lanes have spent in each stage, summed over them."""
        return self._training_loop.seconds()

    # --- the callback of the lanes

    def on_trained(self, batch: TrainBatch, predictions: F32) -> None:
        """Add a batch that counted, with its (B, L) predictions, to the measures unless it is replayed."""
        self.progress.samples += len(batch)
        newest = int(batch.event_times_ms.max(initial=0))
        self.progress.event_time_ms = max(self.progress.event_time_ms, newest)
        if batch.replayed:
            return
        if self._state.quality.add(batch, predictions) >= TOGETHER_ROWS:
            self._to_measure.set()

    def on_stepped(self, step: int, rows: int) -> None:
        """Follow the steps; stop after an error of the measures or of the version writer."""
        self.pulse.beat()
        self.progress.steps = step
        if self._failed is not None:
            self.stop.set()

    def flush_due(self) -> bool:
        """Return whether a version is due, and the writer has written the last one."""
        new = self._leads and self.progress.steps != self._last_step
        return new and self._context.clock.monotonic() >= self._due and not self._snapshots.full()

    def on_flush_point(self) -> None:
        """Copy a snapshot when a version is due."""
        if self.flush_due():
            self._snapshots.put_nowait(self.snapshot())  # no other thread puts
            self._last_step = self.progress.steps
            self._due = self._context.clock.monotonic() + self._interval_s

    def on_state_synced(self, group: ProcessGroup) -> None:
        """Adopt the quorum's fence; its rank 0 writes versions and measures from now on."""
        self._leads, self._fence = group.rank == 0, group.fence
        if not self._leads:
            self.progress.version_error, self.restart = "", None  # the leader reports on versions
        elif not self.progress.begun and not self._snapshots.full():
            # For the writer's thread: the store may be unavailable, and the other ranks wait for this one.
            self._snapshots.put_nowait(replace(self.snapshot(), first=True))

    def _measure(self) -> None:
        """Count the added batches and write complete windows, on a thread of its own: lanes must not wait."""
        due = self._context.clock.monotonic()
        try:
            while not self._over.is_set():
                self._to_measure.wait(EXCHANGE_S)
                self._to_measure.clear()
                self._state.quality.count()
                self._state.shared.merge_received()
                self._state.shared.prepare()
                if (now := self._context.clock.monotonic()) >= due:
                    due = now + WINDOWS_EVERY_S
                    self._write_windows()
        except Exception as error:  # stops the lanes; `run` raises it
            log.error("samples cannot be measured", reason=str(error))
            self._failed = error

    def _write_windows(self) -> None:
        windows = self._state.quality.finished_windows()
        if windows and self._leads:  # the figures of all ranks are the same
            values = [orjson.dumps(w, option=orjson.OPT_SERIALIZE_NUMPY) for w in windows]
            try:
                self._writer.append([Append(self._context.topics.measures, 0, BytesColumn.of(values))])
            except Unavailable as error:
                log.warning("windows of measures were not written", reason=str(error), windows=len(windows))

    def _write_versions(self) -> None:
        first: Snapshot | None = None  # not written yet
        while (snapshot := self._next_snapshot(first)) is not None:
            first = snapshot if snapshot.first and first is None else first
            try:
                if first is not None:
                    self._version_writer.begin(first)
                    first, self.progress.begun, self.progress.version_error = None, True, ""
                if not snapshot.first:
                    manifest: Manifest = self._version_writer.next(snapshot)
                    self.progress.version, self.progress.version_error = manifest.number, ""
                    self._stored(snapshot)
            except Fenced as error:
                log.warning("a version was dropped", step=snapshot.step, reason=str(error))
            except (Unavailable, Corrupt, KeyError, ValueError, OSError) as error:  # of the version store
                log.error("version not written; the next one is tried", step=snapshot.step, reason=str(error))
                self.progress.version_error = str(error)
                self.progress.versions_failed += 1
            except Exception as error:  # stops the lanes; `run` raises it
                log.error("versions cannot be written", step=snapshot.step, reason=str(error))
                self._failed = error

    def _stored(self, snapshot: Snapshot) -> None:
        """Move the retention pin to a stored version, if it is finite.

        While the log is away the pin stays, and the next version moves it.
        """
        if not (snapshot.finite and self._leads):
            return
        self.restart = snapshot.applied
        try:
            self.hold_retention()
        except Unavailable as error:
            log.warning("retention is still held for an older version", reason=str(error))

    def _next_snapshot(self, first: Snapshot | None) -> Snapshot | None:
        """Wait for the next snapshot; return `first` if there is none for an interval of versions."""
        try:
            return self._snapshots.get(timeout=None if first is None else self._interval_s)
        except queue.Empty:
            return first
