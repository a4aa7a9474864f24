"""A leader trains on while the version store is unavailable, and writes version 0 of a new model later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from freshet.apps.trainer import restore_state
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.config.spec.topics import topics_of
from freshet.errors import Unavailable
from freshet.log import Writer
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.log.topics import ModelContext
from freshet.model import build_model
from freshet.testing.conditions import wait_for
from freshet.trainer.process_group import LocalProcessGroup, ProcessGroup
from freshet.trainer.service import Trainer, TrainingCallback, TrainingLoop
from freshet.trainer.state_sync import DenseState
from freshet.trainer.version_writer import VersionWriter
from freshet.types import Fence, TopicPartition
from freshet.versions import Manifest
from freshet.versions.folder import FolderVersionStore
from freshet.versions.promotions import Pins

SPEC = parse_spec("""
name = "toy"
[events]
served = { key = ["user"], time = "ts:ms" }
action = { key = ["user"], time = "ts:ms" }
[labels]
click = { on = "action.click == 1" }
[tables]
all = { dim = 4 }
[features]
user = { field = "user", table = "all" }
[train]
version_interval = "100ms"
""")


class Away(FolderVersionStore):
    """A store that cannot be listed while it is `away`: a request waits for `answer`, then fails.

    While it is `unjudged`, it takes no verdict.
    """

    away = False
    unjudged = False
    requests = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.answer = threading.Event()

    def numbers(self) -> Sequence[int]:
        self.requests += 1
        if self.away:
            assert self.answer.wait(60)
            raise Unavailable("the store is away")
        return super().numbers()

    def judge(self, number: int, verdict: str, reason: str) -> Manifest:
        if self.unjudged:
            raise Unavailable("the store is away")
        return super().judge(number, verdict, reason)


@dataclass
class Rounds:
    """A training loop that runs `quorums` instead."""

    quorums: Callable[[TrainingCallback], None]

    def run(self, callback: TrainingCallback, stop: threading.Event) -> None:
        self.quorums(callback)


@dataclass
class Scene:
    """A trainer of one process at a time, on a log and a version store."""

    context: ModelContext
    writer: Writer
    store: Away
    state: DenseState = field(init=False)
    trainer: Trainer = field(init=False)

    def start(self) -> None:
        """Start the trainer of a new process."""
        self.state = restore_state(self.context, self.store, "log", "cpu")
        self.store.requests = 0

    def run(self, quorums: Callable[[TrainingCallback], None]) -> None:
        """Run the trainer with the calls that a training loop makes in its quorums."""
        pins = Pins(self.context.log, self.context.topics.versions)
        self.trainer = Trainer(
            self.context,
            self.state,
            cast(TrainingLoop, Rounds(quorums)),
            VersionWriter(
                self.context,
                "log",
                self.store,
                self.writer,
                pins,
                lambda _rows: [],
                lambda: build_model(SPEC, training=False),
            ),
            self.writer,
        )
        try:
            self.trainer.run()
        finally:
            pins.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    log = SqliteEventLog(tmp_path / "log")
    topics = topics_of(SPEC)
    log.create_topic(topics.versions, partitions=1)
    log.create_topic(topics.measures, partitions=1)
    log.create_topic(topics.samples, partitions=SPEC.partitions)
    writer = log.writer()
    made = Scene(
        ModelContext(SPEC, "hash", layout_of(SPEC), log, topics), writer, Away(tmp_path / "versions")
    )
    made.start()
    yield made
    writer.close()
    log.close()


def lead(callback: TrainingCallback, fence: int) -> None:
    callback.on_state_synced(LocalProcessGroup(Fence(fence)))


def test_leader_waits_for_no_store_and_writes_version_0_later(scene: Scene) -> None:
    store = scene.store
    store.away = True

    def quorums(callback: TrainingCallback) -> None:
        lead(callback, 1)
        wait_for(lambda: store.requests == 1)
        callback.on_stepped(1, 1)
        lead(callback, 2)
        store.answer.set()
        wait_for(lambda: scene.state.progress.version_error == "the store is away")
        store.away = False
        wait_for(lambda: scene.state.progress.begun)

    scene.run(quorums)

    first = store.manifest(0)
    assert (first.step, first.fence, first.verdict) == (0, 1, "promoted")
    assert scene.state.progress.version_error == ""


def test_leader_that_started_from_a_version_reads_no_store(scene: Scene) -> None:
    scene.run(lambda callback: lead(callback, 1))
    assert scene.store.numbers() == [0]
    scene.start()
    scene.store.away = True

    scene.run(lambda callback: lead(callback, 2))

    assert scene.store.requests == 0


def test_restarted_leader_promotes_a_pending_version_0(scene: Scene) -> None:
    store = scene.store
    store.unjudged = True
    scene.run(lambda callback: lead(callback, 1))
    assert (store.numbers(), store.manifest(0).verdict) == ([0], "pending")
    store.unjudged = False
    scene.start()

    scene.run(lambda callback: lead(callback, 2))

    assert store.manifest(0).verdict == "promoted"
    assert store.aliases()["stable"] == 0


def test_version_has_the_fence_of_its_snapshot(scene: Scene) -> None:
    def quorums(callback: TrainingCallback) -> None:
        trainer = cast(Trainer, callback)
        lead(callback, 1)
        before = trainer.snapshot()
        lead(callback, 5)
        assert (before.fence, trainer.snapshot().fence) == (1, 5)

    scene.run(quorums)


def test_dropped_version_ends_no_trainer(scene: Scene) -> None:
    scene.run(lambda callback: lead(callback, 1))
    scene.store.put(replace(scene.store.manifest(0), number=1, fence=9), scene.store.get(0).tensors)
    scene.start()

    def quorums(callback: TrainingCallback) -> None:
        lead(callback, 3)
        callback.on_stepped(1, 1)

    scene.run(quorums)

    assert scene.store.numbers() == [0, 1]
    assert scene.state.progress.versions_failed == 0


def test_trainer_takes_its_terms_from_the_spec(scene: Scene) -> None:
    assert scene.state.terms["train.reduce"] == SPEC.train.reduce


@pytest.mark.parametrize("finite", [True, False])
def test_only_a_finite_version_moves_the_retention_pin(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, finite: bool
) -> None:
    held: list[Mapping[TopicPartition, int]] = []
    monkeypatch.setattr(scene.context.log, "hold", lambda name, offsets: held.append(offsets))
    monkeypatch.setattr(scene.state.model, "finite", lambda: finite)
    before = dict(scene.state.ledger.applied)
    scene.state.progress.begun = True

    def quorums(callback: TrainingCallback) -> None:
        lead(callback, 1)
        scene.state.ledger.applied[0] = 7
        callback.on_stepped(1, 1)

    scene.run(quorums)

    after = {**before, 0: 7}
    assert held == [{TopicPartition("toy.samples", p): at for p, at in after.items()}] * finite
    assert scene.trainer.restart == (after if finite else before)


def test_version_counts_as_written_if_its_pin_is_not_set(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hold(name: str, offsets: object) -> None:
        raise Unavailable("the log is away")

    monkeypatch.setattr(scene.context.log, "hold", hold)

    def quorums(callback: TrainingCallback) -> None:
        lead(callback, 1)
        callback.on_stepped(1, 1)

    scene.run(quorums)

    progress = scene.state.progress
    assert (progress.version, progress.versions_failed, progress.version_error) == (1, 0, "")


def test_rank_that_writes_no_versions_knows_no_restart_point(scene: Scene) -> None:
    other = cast(ProcessGroup, SimpleNamespace(rank=1, fence=Fence(1)))

    scene.run(lambda callback: callback.on_state_synced(other))

    assert scene.trainer.restart is None
