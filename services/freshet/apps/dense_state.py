"""Dense weights restored from a version, and the trainer on them, for local and remote rows."""

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
from freshet.trainer.training_loop import TrainingLoop
from freshet.trainer.version_writer import Pins, Versioner, restart_point
from freshet.types import Fence, TopicPartition
from freshet.versions import Manifest, VersionStore

__all__ = ["Dense", "Stores", "VersionTarget", "build_trainer", "restore_dense"]

_log = structlog.get_logger("freshet.training")


@dataclass(frozen=True, slots=True)
class Stores:
    """The log and the stores of a model."""

    log: EventLog
    rows: RowStore
    versions: VersionStore


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """Model, measures and applied offsets as of the version that training starts from."""

    model: DenseModel
    quality: Quality
    ledger: DenseLedger
    start: Manifest | None  # None: a new model
    log_id: str  # log id of the topic of samples
    progress: Progress


@dataclass(frozen=True, slots=True)
class VersionTarget:
    """The store, topics and identity with which a trainer writes versions."""

    versions: VersionStore
    writer: Writer
    topics: Topics
    spec_hash: str
    pins: Pins


def restore_dense(
    spec: Spec, log: EventLog, versions: VersionStore, topics: Topics, spec_hash: str, device: str = "cpu"
) -> Dense:
    """Load the newest version that training may start from, or initial weights, on `device`.

    Raises:
        ConfigError: the model cannot be computed on the device.
        Mismatch, Corrupt: the versions do not match this spec, its log, or the code of its transforms.
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


def build_trainer(
    spec: Spec,
    dense: Dense,
    training_loop: TrainingLoop,
    target: VersionTarget,
    *,
    recent: Callable[[int], Sequence[ModelInputs]],
    fence: Fence,
    clock: Clock,
    shared: SharedMeasures | None = None,
) -> Trainer:
    """Build the trainer of a training loop. `recent` returns samples for the gate; `shared`: measures that
    ranks sum."""
    versioner = Versioner(
        spec=spec,
        spec_hash=target.spec_hash,
        log_id=dense.log_id,
        store=target.versions,
        writer=target.writer,
        topic=target.topics.versions,
        fence=fence,
        clock=clock,
        scorer=lambda: build_model(spec, training=False),
        recent=recent,
        pins=target.pins,
    )
    return Trainer(
        spec=spec,
        model=dense.model,
        training_loop=training_loop,
        ledger=dense.ledger,
        quality=dense.quality,
        versioner=versioner,
        writer=target.writer,
        measures_topic=target.topics.measures,
        clock=clock,
        progress=dense.progress,
        shared=shared,
    )
