"""The dense part of a training process: restored from the last version, and put together with its stream.

What a trainer is, wherever its batches come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from freshet.clock import Clock
from freshet.config.spec.model import Spec
from freshet.config.spec.topics import Topics
from freshet.config.spec.transforms import check_outcomes
from freshet.log import EventLog, Writer
from freshet.model import DenseModel, build_model
from freshet.model.inputs import ModelInputs
from freshet.rows.store import RowStore
from freshet.trainer.quality import Quality
from freshet.trainer.rank_measures import SharedMeasures
from freshet.trainer.service import Trainer
from freshet.trainer.state_sync import Progress
from freshet.trainer.step_coordinator import DenseLedger
from freshet.trainer.training_loop import Course
from freshet.trainer.version_writer import Pins, Versioner, restart_point
from freshet.types import Fence, TopicPartition
from freshet.versions import Manifest, VersionStore

__all__ = ["Dense", "Stores", "restored", "trainer_of"]

_log = structlog.get_logger("freshet.training")


@dataclass(frozen=True, slots=True)
class Stores:
    """Where a model lives."""

    log: EventLog
    rows: RowStore
    versions: VersionStore


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """Weights, measures and vector, as of the version started from."""

    model: DenseModel
    quality: Quality
    ledger: DenseLedger
    start: Manifest | None  # None: a new model
    log_id: str  # of the topic of samples
    progress: Progress


def restored(
    spec: Spec, log: EventLog, versions: VersionStore, topics: Topics, spec_hash: str, device: str = "cpu"
) -> Dense:
    """The newest version that training may start from, or initial weights; on `device`.

    Raises:
        ConfigError: the model cannot be computed on the device.
        Mismatch, Corrupt: the versions do not fit this spec or log, or the code of its transforms.
    """
    log_id = str(log.topics()[topics.samples].log_id)
    model, quality = build_model(spec, training=True, device=device), Quality(spec)
    if device != "cpu":
        _log.info("the network computes on a GPU", device=device)
        from freshet.model.trial import try_out

        try_out(spec, device=device)
    start = restart_point(versions, spec_hash, log_id)
    if start is None:
        starts = {p: log.bounds(TopicPartition(topics.samples, p)).start for p in range(spec.partitions)}
        return Dense(model, quality, DenseLedger(starts), None, log_id, Progress())
    check_outcomes(spec, start.transforms, f"version {start.number}")
    version = versions.get(start.number)
    model.load_state(version.tensors)
    prefix = "measures/"
    quality.load_state(
        {name[len(prefix) :]: t for name, t in version.tensors.items() if name.startswith(prefix)}
    )
    _log.info("starting from a version", version=start.number, step=start.step)
    ledger = DenseLedger({int(p): offset for p, offset in start.applied.items()})
    progress = Progress(steps=start.step, event_time_ms=start.event_time_ms)
    return Dense(model, quality, ledger, start, log_id, progress)


def trainer_of(
    spec: Spec,
    dense: Dense,
    course: Course,
    *,
    recent: Callable[[int], Sequence[ModelInputs]],
    versions: VersionStore,
    writer: Writer,
    topics: Topics,
    spec_hash: str,
    pins: Pins,
    fence: Fence,
    clock: Clock,
    shared: SharedMeasures | None = None,
) -> Trainer:
    """The trainer on a course; `recent` are samples for the gate. `shared`: of a rank among others."""
    versioner = Versioner(
        spec=spec,
        spec_hash=spec_hash,
        log_id=dense.log_id,
        store=versions,
        writer=writer,
        topic=topics.versions,
        fence=fence,
        clock=clock,
        scorer=lambda: build_model(spec, training=False),
        recent=recent,
        pins=pins,
    )
    return Trainer(
        spec=spec,
        model=dense.model,
        course=course,
        ledger=dense.ledger,
        quality=dense.quality,
        versioner=versioner,
        writer=writer,
        measures_topic=topics.measures,
        clock=clock,
        progress=dense.progress,
        shared=shared,
    )
