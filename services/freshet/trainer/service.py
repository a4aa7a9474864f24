"""The trainer as a part of a process: lanes in front, versions and measures behind them."""

from __future__ import annotations

import queue
import threading

import numpy as np
import orjson
import structlog

from freshet.batches.stream import TrainBatch
from freshet.clock import Clock
from freshet.config.spec.model import Spec
from freshet.errors import Corrupt, Unavailable
from freshet.log import Writer
from freshet.model import DenseModel
from freshet.process.lifecycle import Pulse
from freshet.trainer.quality import TOGETHER_ROWS, Quality
from freshet.trainer.rank_measures import SharedMeasures
from freshet.trainer.ranks import RankGroup
from freshet.trainer.state_sync import Progress
from freshet.trainer.step_coordinator import EXCHANGE_S, DenseLedger
from freshet.trainer.training_loop import Course
from freshet.trainer.version_writer import Snapshot, Versioner
from freshet.types import F32, Append, BytesColumn
from freshet.versions import Manifest

__all__ = ["Progress", "Trainer"]

log = structlog.get_logger("freshet.trainer")

WINDOWS_EVERY_S = 1.0
"""How often complete windows of measures are written: a console looks about as often."""


class Trainer:
    """One rank. `run` trains on the caller's thread (and the lanes' own) until told to stop."""

    def __init__(
        self,
        *,
        spec: Spec,
        model: DenseModel,
        course: Course,
        ledger: DenseLedger,
        quality: Quality,
        versioner: Versioner,
        writer: Writer,
        measures_topic: str,
        clock: Clock,
        progress: Progress,
        shared: SharedMeasures | None = None,
    ) -> None:
        """`ledger`, `quality`, `progress` and the model's state are those of the version started from.

        `shared`: what carries the measures, of a rank among others.
        """
        self._spec, self._model, self._ledger, self._quality = spec, model, ledger, quality
        self._versioner, self._writer, self._topic, self._clock = versioner, writer, measures_topic, clock
        self._due = clock.monotonic() + spec.train.version_interval_ms / 1000
        self._to_measure = threading.Event()
        self._snapshots: queue.Queue[Snapshot | None] = queue.Queue(maxsize=1)
        self._shared, self._leads = shared, True
        self._last_step = progress.steps
        self._failed: Exception | None = None
        self.progress = progress
        self.stop = threading.Event()
        self._over = threading.Event()
        self._course = course
        self.pulse = Pulse()  # beats between two rounds

    def run(self) -> None:
        """Train until `stop` is set; then write a last version. Raises what a lane or the version writer
        raised."""
        keeper = threading.Thread(target=self._keep_versions, name="versions", daemon=True)
        measurer = threading.Thread(target=self._measure, name="measures", daemon=True)
        keeper.start()
        measurer.start()
        last: Snapshot | None = None  # a lane that failed leaves a vector ahead of the weights: no version
        try:
            self._course.run(self, self.stop)
            self.pulse.rest()
            self._tell_windows()
            last = self.snapshot() if self._leads and self.progress.steps > self._last_step else None
        finally:
            self._over.set()
            self._to_measure.set()
            measurer.join()
            self._snapshots.put(last)
            self._snapshots.put(None)
            keeper.join()
        if self._failed is not None:
            raise self._failed

    def begin(self) -> None:
        """Write version 0 of a new model, unless that is done."""
        self._versioner.begin(self.snapshot())

    def snapshot(self) -> Snapshot:
        """Dense state and vector as they are; between two steps only."""
        tensors = {name: np.array(tensor) for name, tensor in self._model.state().items()}
        tensors.update({f"measures/{name}": np.array(t) for name, t in self._quality.state().items()})
        return Snapshot(
            tensors=tensors,
            applied=dict(self._ledger.applied),
            step=self.progress.steps,
            event_time_ms=self.progress.event_time_ms,
            measures=self._quality.summary(),
            finite=self._model.finite(),
        )

    def stage_seconds(self) -> dict[str, float]:
        """How long the lanes have been in each stage of their work, summed over them."""
        return self._course.seconds()

    # --- Observer of the lanes

    def trained(self, batch: TrainBatch, predictions: F32) -> None:
        """Batches that counted: take note of their measures, unless some store had applied them before."""
        self.progress.samples += len(batch)
        newest = int(batch.event_times_ms.max(initial=0))
        self.progress.event_time_ms = max(self.progress.event_time_ms, newest)
        if batch.replayed:
            return
        if self._quality.add(batch, predictions) >= TOGETHER_ROWS:
            self._to_measure.set()

    def stepped(self, step: int, rows: int) -> None:
        """Between two steps: copy a snapshot when one is due."""
        self.pulse.beat()
        self.progress.steps = step
        now = self._clock.monotonic()
        if self._failed is not None:
            self.stop.set()
        if not self._leads or step == self._last_step or now < self._due:
            return
        try:
            self._snapshots.put_nowait(self.snapshot())
        except queue.Full:
            return  # the last one is still being written
        self._last_step = step
        self._due = now + self._spec.train.version_interval_ms / 1000

    def leveled(self, group: RankGroup) -> None:
        """A new world: who leads writes versions and measures, under the world's fence."""
        self._leads, self._versioner.fence = group.rank == 0, group.fence
        if self._leads:
            self.begin()
        else:
            self.progress.version_error = ""  # who leads now tells of versions

    def _measure(self) -> None:
        """Count what the lanes leave, and write windows that are complete: beside the lanes, which would wait
        for each other meanwhile."""
        due = self._clock.monotonic()
        try:
            while not self._over.is_set():
                self._to_measure.wait(WINDOWS_EVERY_S if self._shared is None else EXCHANGE_S)
                self._to_measure.clear()
                self._quality.count()
                if self._shared is not None:
                    self._shared.take_in()
                    self._shared.prepare()
                if (now := self._clock.monotonic()) >= due:
                    due = now + WINDOWS_EVERY_S
                    self._tell_windows()
        except Exception as error:  # the lanes stop, and `run` raises it
            log.error("samples cannot be measured", reason=str(error))
            self._failed = error

    def _tell_windows(self) -> None:
        windows = (
            self._quality.finished_windows()
        )  # of a rank that does not lead: its figures are the leader's
        if windows and self._leads:
            values = [orjson.dumps(w, option=orjson.OPT_SERIALIZE_NUMPY) for w in windows]
            try:
                self._writer.append([Append(self._topic, 0, BytesColumn.of(values))])
            except Unavailable as error:
                log.warning("windows of measures were not written", reason=str(error), windows=len(windows))

    def _keep_versions(self) -> None:
        while (snapshot := self._snapshots.get()) is not None:
            try:
                manifest: Manifest = self._versioner.next(snapshot)
                self.progress.version, self.progress.version_error = manifest.number, ""
            except (
                Unavailable,
                Corrupt,
                KeyError,
                ValueError,
                OSError,
            ) as error:  # of the store, not of training
                log.error("version not written; the next one is tried", step=snapshot.step, reason=str(error))
                self.progress.version_error = str(error)
                self.progress.versions_failed += 1
            except Exception as error:  # the lanes stop, and `run` raises it
                log.error("versions cannot be written", step=snapshot.step, reason=str(error))
                self._failed = error
