"""Remote batches teach what the native loop learns, to the bit, in steps within a batch or in one step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet.batches.stream import BatchStream, TrainBatch
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.errors import Refused
from freshet.features import GroupKeys, SampleColumns
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.model.hedge import HedgeDense
from freshet.model.inputs import Labels
from freshet.model.native_loop import Ended, LoopBatches, NativeLoop
from freshet.rows.service import KeyGroup, Push, RowStates
from freshet.tables import KnownPushes, PushOutcome, Store
from freshet.testing.contracts.rowservice import BUCKETS, PARTITIONS
from freshet.trainer.lanes import Lanes
from freshet.trainer.process_group import LocalProcessGroup
from freshet.trainer.step_coordinator import DenseLedger, StepCoordinator
from freshet.types import F32, I64, Append, BytesColumn, Fence
from tests.fixtures.blocks import encode_block
from tests.fixtures.embedder import LocalScene, PipelinedScene, RemoteScene

TEXT = f"""
name = "steps"
partitions = {PARTITIONS}
buckets = {BUCKETS}
[events]
served = {{ schema = "i.avsc", key = ["id"], time = "ts:ms" }}
action = {{ schema = "a.avsc", key = ["id"], time = "ts:ms" }}
[labels]
click = {{ on = "action.type == 'click'" }}
[tables]
user = {{ dim = 4 }}
[features]
user = {{ field = "user", table = "user" }}
[model]
deep = [16]
[train]
batch = {{ rows = 64 }}
"""
BLOCKS = [5, 3, 130, 64, 64, 200, 1, 60]
"""Samples of each request; a batch has whole blocks, so some have more than 64."""
BATCHES = [5, 3, 130, 64, 64, 200, 61]
STALENESS_ROWS = 3 * 64
"""An embedder then has as many batches in flight as the rank keeps pending writes for."""
USERS = 12
"""So few that a batch steps a row several times."""
TIME_MS = 1_700_000_000_000


class StoreRows:
    """A row service of a native store."""

    def __init__(self, text: str = TEXT) -> None:
        spec = parse_spec(text)
        self.store = Store.of(spec, layout_of(spec))
        self.several = 0  # pushes with several gradients of a row

    def lookup(
        self,
        groups: Sequence[KeyGroup],
        out: Sequence[F32],
        *,
        create: bool = True,
        states: RowStates | None = None,
    ) -> None:
        read: list[I64] = []
        for g, (group, rows) in enumerate(zip(groups, out, strict=True)):
            known = np.zeros((BUCKETS, PARTITIONS), np.int64)
            floats = None if states is None else states.floats[g]
            self.store.lookup(
                group.group,
                group,
                rows,
                create=create,
                states=floats,
                known=known,
            )
            read.append(known)
        if states is not None:
            states.known = KnownPushes.of(groups, read)

    def push(self, push: Push) -> bool:
        outcome = self.store.push(push.ranges, push.clock_ms, push.groups, push.gradients)
        if outcome is PushOutcome.REFUSED:
            raise Refused("not next", {p: min(offsets) for p, offsets in self.store.applied().items()})
        self.several += any(len(set(group.keys.tolist())) < len(group.keys) for group in push.groups)
        return outcome is PushOutcome.APPLIED

    def applied(self) -> Mapping[int, Sequence[int]]:
        return self.store.applied()


@dataclass
class Notes:
    """Records the learned samples; stops the lanes after the last."""

    samples: int
    stop: threading.Event
    batches: list[TrainBatch] = field(default_factory=list)
    predictions: list[F32] = field(default_factory=list)

    def on_trained(self, batch: TrainBatch, predictions: F32) -> None:
        self.batches.append(batch)
        self.predictions.append(predictions.copy())

    def on_stepped(self, step: int, rows: int) -> None:
        if sum(map(len, self.batches)) >= self.samples:
            self.stop.set()


def append_all(scene: LocalScene, blocks: Sequence[int] = BLOCKS) -> None:
    rng = np.random.default_rng(5)
    for n in blocks:
        users = rng.integers(0, USERS, n)
        block = encode_block(
            1,
            SampleColumns(
                sample_ids=users.astype(np.int64),
                event_times_ms=np.full(n, TIME_MS),
                request_ids=np.arange(n, dtype=np.uint64),
                values=(rng.random(n) < 0.2 + users / 20).astype(np.float32),
                weights=np.ones(n, np.float32),
                labels=np.zeros(n, np.uint8),
            ),
            payloads=BytesColumn.of([b"payload"] * n),
        )
        scene.writer.append([Append("samples", 0, BytesColumn.of([block]))])


def learn(scene: LocalScene, stream: BatchStream, model: HedgeDense, samples: int = sum(BLOCKS)) -> Notes:
    """Train one lane until all samples are learned."""
    stop = threading.Event()
    notes, ledger = Notes(samples, stop), DenseLedger(dict.fromkeys(range(PARTITIONS), 0))
    timer = threading.Timer(60.0, stop.set)
    timer.start()
    Lanes(stream, model, StepCoordinator(LocalProcessGroup(Fence(1)), ledger), notes, 1, 0.02, stop).run()
    timer.cancel()
    assert stream.flush(60)
    deadline = time.monotonic() + 60.0  # the embedder acknowledges gradients before it has pushed them
    end = [max(r.stop for batch in notes.batches for r in batch.ranges)]
    while scene.rows.applied()[0] != end and time.monotonic() < deadline:
        stream.flush(0.1)
    assert scene.rows.applied()[0] == end
    return notes


def natively(notes: Notes, text: str) -> tuple[dict[str, Any], list[F32]]:
    """Train the native loop of one lane on the same batches; returns its predictions."""
    spec = parse_spec(text)
    layout = layout_of(spec)
    model, store = HedgeDense(spec, training=True, precision="fp32"), Store.of(spec, layout)
    ids = np.concatenate([batch.sample_ids for batch in notes.batches])
    labels = [batch.inputs.labels for batch in notes.batches]
    values = np.concatenate([of.value for of in labels if of is not None])
    n, keys = len(ids), (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    ends = np.cumsum([len(batch) for batch in notes.batches])
    batches = LoopBatches(
        [GroupKeys(keys, np.array([0, n], np.uint32), [None])],
        np.empty((n, 0), np.float32),
        Labels(np.zeros(n, np.uint8), values, np.ones(n, np.float32)),
        np.full(n, TIME_MS),
        ends,
        [batch.ranges for batch in notes.batches],
    )
    ran = NativeLoop(spec, layout, model, store, 1).run(0, batches, np.ones(len(ends), np.uint8))
    assert ran.ended is Ended.DONE
    return state_of(model, store), np.split(ran.predictions, ends[:-1])


def state_of(model: HedgeDense, store: Store) -> dict[str, Any]:
    return dict(model.state()) | {"rows": store.collect_flush().runs.body}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


Make = Callable[..., LocalScene]
SCENES: dict[str, tuple[Make, str]] = {
    "looked up ahead": (lambda *of: PipelinedScene(*of, read_my_writes=True), "hybrid"),
    "looked up ahead by an embedder": (lambda *of: RemoteScene(*of, read_my_writes=True), "hybrid"),
    "looked up in turn": (PipelinedScene, "sync"),
    "looked up in turn by an embedder": (lambda *of: RemoteScene(*of, read_my_writes=True), "sync"),
}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SqliteEventLog]:
    log = SqliteEventLog(tmp_path)
    yield log
    log.close()


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("name", SCENES)
def test_remote_batches_teach_what_the_native_loop_learns(
    log: SqliteEventLog, name: str, steps: bool
) -> None:
    make, mode = SCENES[name]
    rows, text = StoreRows(), TEXT if steps else TEXT.replace("rows = 64", "rows = 64, steps = false")
    scene = make(log, text, rows)
    scene.dense_applied.update(dict.fromkeys(range(PARTITIONS), 0))
    model = HedgeDense(scene.spec, training=True, precision="fp32")
    append_all(scene)
    stream = scene.stream(batch_rows=64, staleness_rows=STALENESS_ROWS, mode=mode)
    try:
        notes = learn(scene, stream, model)
    finally:
        stream.close()
        if isinstance(scene, RemoteScene):
            scene.close()

    assert [len(batch) for batch in notes.batches] == BATCHES
    wanted, predictions = natively(notes, text)
    assert_same(state_of(model, rows.store), wanted)
    for mine, theirs in zip(notes.predictions, predictions, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert rows.several >= sum(n > 16 for n in BATCHES) if steps else rows.several == 0
