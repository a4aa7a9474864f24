"""The gate moves `stable`, unless an operator has pinned it at any moment before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.config.spec.topics import topics_of
from freshet.errors import Fenced, Unavailable
from freshet.log import EventLog
from freshet.log.records import newest
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.log.topics import ModelContext
from freshet.model import DenseModel, build_model
from freshet.model.inputs import GroupInputs, Labels, ModelInputs, inputs_of
from freshet.trainer.version_writer import JUDGING, Snapshot, VersionWriter, restart_point
from freshet.types import Fence, TopicPartition
from freshet.versions import Manifest, Version
from freshet.versions.folder import FolderVersionStore
from freshet.versions.promotions import Pins, move

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
[serve]
gate = { floor = 0 }
""")


@dataclass
class Bench:
    """A version writer, and an event during the gate's decision."""

    log: EventLog
    store: FolderVersionStore
    meanwhile: Callable[[], None] = lambda: None
    steps: int = 0
    fence: Fence = Fence(1)  # noqa: RUF009 - a NewType of int
    version_writer: VersionWriter = field(init=False)

    judged_by: Sequence[ModelInputs] = ()

    def recent(self, _rows: int) -> Sequence[ModelInputs]:
        return self.judged_by

    def scorer(self) -> DenseModel:
        self.meanwhile()
        return build_model(SPEC, training=False)

    def snapshot(self) -> Snapshot:
        self.steps += 1
        return Snapshot(
            dict(build_model(SPEC, training=True).state()), {0: 0}, self.steps, 0, {}, True, self.fence
        )

    def next(self) -> str:
        """Write one more version; return its verdict."""
        return self.version_writer.next(self.snapshot()).verdict

    def roll_back(self, number: int) -> None:
        move(self.store, self.log, number, pinned=True, by="operator", now_ms=1)

    @property
    def stable(self) -> int:
        return self.store.aliases()["stable"]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    log = SqliteEventLog(tmp_path / "log")
    log.create_topic("toy.versions", partitions=1)
    made = Bench(log, FolderVersionStore(tmp_path / "versions"))
    pins, writer = Pins(log, "toy.versions"), log.writer()
    context = ModelContext(SPEC, "hash", layout_of(SPEC), log, topics_of(SPEC))
    made.version_writer = VersionWriter(context, "log", made.store, writer, pins, made.recent, made.scorer)
    made.version_writer.first(made.snapshot())
    yield made
    pins.close()
    writer.close()
    log.close()


def test_gate_moves_stable_without_a_pin(bench: Bench) -> None:
    assert bench.next() == "promoted"
    assert bench.stable == 1


def test_rollback_keeps_stable(bench: Bench) -> None:
    bench.next()
    bench.roll_back(0)

    assert bench.next() == "held"
    assert bench.stable == 0


def test_moves_of_the_trainer_have_the_pin(bench: Bench) -> None:
    bench.next()
    bench.roll_back(0)
    bench.next()
    bench.next()

    at = TopicPartition("toy.versions", 0)
    records = [(offset, orjson.loads(value)) for offset, value in newest(bench.log, at, 3)]
    ((offset, pins),) = [(offset, r["pins"]) for offset, r in records if r["kind"] == "alias"]
    assert pins == {"upto": offset - 2, "stable": 0, "pinned": 0}


def test_rollback_during_the_gate_is_not_undone(bench: Bench) -> None:
    bench.next()
    bench.meanwhile = lambda: bench.roll_back(0)

    assert bench.next() == "held"
    assert bench.stable == 0


def test_promotion_that_overtook_a_rollback_is_undone(bench: Bench) -> None:
    bench.next()
    bench.roll_back(0)
    bench.store.point("stable", 1)  # by a gate that read the alias just before

    assert bench.next() == "held"
    assert bench.stable == 0


def test_operator_promotion_during_the_gate_removes_the_pin(bench: Bench) -> None:
    bench.next()
    bench.roll_back(0)
    bench.next()
    move(bench.store, bench.log, 2, pinned=False, by="console", now_ms=2)

    assert bench.next() == "promoted"
    assert bench.stable == 3


def test_snapshot_of_a_former_leader_is_dropped(bench: Bench) -> None:
    before = bench.snapshot()
    bench.fence = Fence(2)
    bench.next()

    with pytest.raises(Fenced, match="version 1 has fence 2, the snapshot 1"):
        bench.version_writer.next(before)

    assert (bench.store.numbers(), bench.stable) == ([0, 1], 1)
    assert bench.next() == "promoted"
    assert [bench.store.manifest(number).fence for number in bench.store.numbers()] == [1, 2, 2]


def test_former_leader_takes_no_number_after_a_later_one(bench: Bench, tmp_path: Path) -> None:
    before = bench.snapshot()
    bench.fence = Fence(2)
    bench.next()
    bench.version_writer.store = Late(tmp_path / "versions")

    with pytest.raises(Fenced):
        bench.version_writer.next(before)


@pytest.mark.parametrize("change", [{"log_id": "other"}, {"spec_hash": "other"}])
def test_fence_of_another_log_or_spec_does_not_count(bench: Bench, change: dict[str, Any]) -> None:
    bench.store.put(replace(bench.store.manifest(0), number=1, fence=9, **change), {"w": np.zeros(1)})

    assert bench.next() == "promoted"


class Late(FolderVersionStore):
    """Lists the newest version from the second read on, as if another trainer had just written it."""

    looks = 0

    def numbers(self) -> Sequence[int]:
        self.looks += 1
        found = super().numbers()
        return found[:-1] if self.looks == 1 else found


def test_version_of_another_trainer_keeps_its_number(bench: Bench, tmp_path: Path) -> None:
    bench.version_writer.store = Late(tmp_path / "versions")
    newest = bench.store.numbers()[-1]

    written = bench.version_writer.next(bench.snapshot())

    assert written.number == newest + 1


def test_only_the_first_leader_writes_version_0(tmp_path: Path, bench: Bench) -> None:
    bench.version_writer.store = store = FolderVersionStore(tmp_path / "others")

    bench.version_writer.begin(bench.snapshot())
    bench.version_writer.begin(bench.snapshot())

    assert store.numbers() == [0]
    assert store.aliases()["stable"] == 0


class Interrupted(FolderVersionStore):
    """Fails at the first verdict, after the version was stored."""

    interruptions = 1

    def judge(self, number: int, verdict: str, reason: str) -> Manifest:
        if self.interruptions:
            self.interruptions -= 1
            raise Unavailable("the store is away")
        return super().judge(number, verdict, reason)


@pytest.mark.parametrize(("finite", "verdict", "stable"), [(True, "promoted", 0), (False, "held", None)])
def test_interrupted_promotion_of_version_0_is_completed(
    tmp_path: Path, bench: Bench, finite: bool, verdict: str, stable: int | None
) -> None:
    bench.version_writer.store = store = Interrupted(tmp_path / "others")
    snapshot = replace(bench.snapshot(), finite=finite)
    with pytest.raises(Unavailable):
        bench.version_writer.begin(snapshot)
    assert store.aliases().get("stable") is None

    bench.version_writer.begin(snapshot)

    assert (store.numbers(), store.manifest(0).verdict) == ([0], verdict)
    assert store.aliases().get("stable") == stable


def test_interrupted_nan_version_is_no_restart_point(tmp_path: Path, bench: Bench) -> None:
    bench.version_writer.store = Interrupted(tmp_path / "versions")
    with pytest.raises(Unavailable):
        bench.version_writer.next(replace(bench.snapshot(), finite=False))

    start = restart_point(bench.store, "hash", "log")

    assert bench.store.numbers() == [0, 1]
    assert start is not None
    assert start.number == 0


class Counting(FolderVersionStore):
    """Counts reads of manifests and of weights."""

    manifests = weights = 0

    def manifest(self, number: int) -> Manifest:
        self.manifests += 1
        return super().manifest(number)

    def get(self, number: int, prefixes: Sequence[str] = ()) -> Version:
        self.weights += 1
        return super().get(number, prefixes)


def write(bench: Bench, versions: int, *, finite: bool) -> None:
    for _ in range(versions):
        bench.version_writer.next(replace(bench.snapshot(), finite=finite))


def start_of(bench: Bench) -> int | None:
    found = restart_point(bench.store, "hash", "log")
    return None if found is None else found.number


@pytest.mark.parametrize("restarts", [False, True])
def test_versions_not_finite_push_no_restart_point_out(bench: Bench, tmp_path: Path, restarts: bool) -> None:
    write(bench, 1, finite=True)
    bench.roll_back(1)
    write(bench, 12, finite=True)
    if restarts:
        bench.version_writer = replace(bench.version_writer)
    write(bench, 25, finite=False)

    assert start_of(bench) == 13
    assert bench.store.numbers() == [0, 1, 13, *range(29, 39)]
    write(bench, 11, finite=True)
    assert bench.store.numbers() == [0, 1, *range(40, 50)]


def test_restart_point_of_another_leader_is_kept(bench: Bench) -> None:
    write(bench, 1, finite=True)
    bench.roll_back(0)
    mine, bench.version_writer = bench.version_writer, replace(bench.version_writer)
    write(bench, 12, finite=True)
    bench.version_writer = mine
    write(bench, 12, finite=False)

    assert start_of(bench) == 13


def test_damaged_version_is_not_kept_for_a_restart(bench: Bench, tmp_path: Path) -> None:
    write(bench, 3, finite=True)
    bench.roll_back(0)
    (tmp_path / "versions" / "0000000003" / "weights.safetensors").write_bytes(b"x")
    bench.version_writer = replace(bench.version_writer)
    write(bench, 12, finite=False)

    assert start_of(bench) == 2


def test_each_version_is_read_once_to_keep_the_restart_point(bench: Bench, tmp_path: Path) -> None:
    bench.roll_back(0)
    write(bench, 10, finite=True)
    bench.version_writer = replace(bench.version_writer, store=Counting(tmp_path / "versions"))
    store = bench.version_writer.store
    assert isinstance(store, Counting)
    counts = []
    for finite in (False, False, False, True, True):
        before = (store.manifests, store.weights)
        write(bench, 1, finite=finite)
        counts.append((store.manifests - before[0], store.weights - before[1]))

    assert counts[1] == counts[2], "nothing is read again"
    assert counts[0] > counts[1], "the first search finds the last restart point"
    assert counts[3] == counts[4]


@pytest.mark.parametrize("content", [b"x", b"", b"92", b"999999999999999999"])
def test_damaged_alias_is_repaired_with_the_next_version(
    bench: Bench, tmp_path: Path, content: bytes
) -> None:
    bench.next()
    (tmp_path / "versions" / "aliases" / "stable").write_bytes(content)

    assert bench.next() == "promoted"
    assert bench.stable == 2


@pytest.mark.parametrize("content", [b"x", b"92", None])
def test_damaged_alias_is_repaired_to_the_pin(bench: Bench, tmp_path: Path, content: bytes | None) -> None:
    bench.next()
    bench.roll_back(0)
    path = tmp_path / "versions" / "aliases" / "stable"
    path.unlink()
    if content is not None:
        path.write_bytes(content)

    assert bench.next() == "held"
    assert bench.stable == 0


@pytest.mark.parametrize("damage", ["weights.safetensors", "manifest.json"])
def test_gate_ignores_a_damaged_stable_version(bench: Bench, tmp_path: Path, damage: str) -> None:
    bench.next()
    (tmp_path / "versions" / "0000000001" / damage).write_bytes(b"\0")

    assert bench.next() == "promoted"


def test_gate_ignores_a_stable_version_of_another_model(bench: Bench) -> None:
    manifest = bench.store.manifest(0)
    bench.store.put(replace(manifest, number=1), {"other": np.zeros(3)})
    bench.store.point("stable", 1)

    assert bench.next() == "promoted"


@pytest.mark.parametrize("name", ["0000000001", "0000000002", "999999999999999999", "7"])
@pytest.mark.parametrize("kind", ["file", "folder", "garbage"])
def test_strays_do_not_stop_publishing(bench: Bench, tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / "versions" / name
    if kind == "file":
        path.write_bytes(b"")
    else:
        path.mkdir()
        if kind == "garbage":
            (path / "manifest.json").write_bytes(b"{}")

    for _ in range(6):
        assert bench.next() == "promoted"
    assert 3 < bench.stable < 12


def batch_of(n: int, seed: int) -> ModelInputs:
    """Return samples of the spec, some without a user."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, WIDTH)).astype(np.float32)
    positions = np.arange(n, dtype=np.int32)
    positions[rng.random(n) < 0.2] = -1
    group = GroupInputs(rows, positions, np.array([0, n], np.uint32), [None])
    labels = Labels(np.zeros(n, np.uint8), rng.integers(0, 2, n).astype(np.float32), np.ones(n, np.float32))
    return ModelInputs(n, [group], np.empty((n, 0), np.float32), labels)


WIDTH = layout_of(SPEC).groups[0].width


def restarted(bench: Bench) -> VersionWriter:
    """Return the version writer of the next process."""
    return replace(bench.version_writer, context=replace(bench.version_writer.context, spec=FLOOR))


FLOOR = replace(SPEC, serve=replace(SPEC.serve, gate=replace(SPEC.serve.gate, floor=100)))


def test_restarted_trainer_uses_the_carried_samples(bench: Bench) -> None:
    bench.judged_by = before = [batch_of(30, 1), batch_of(90, 2)]
    assert bench.next() == "promoted"
    bench.judged_by = []
    carried = bench.store.get(1, (JUDGING,)).tensors
    kept = inputs_of({name.removeprefix(JUDGING): array for name, array in carried.items()})

    assert kept.size == 120
    lane = build_model(SPEC, training=False).lane()
    assert np.array_equal(lane.score(kept), np.concatenate([lane.score(batch).copy() for batch in before]))
    assert kept.labels is not None
    values = [batch.labels.value for batch in before if batch.labels is not None]
    assert np.array_equal(kept.labels.value, np.concatenate(values))
    assert restarted(bench).next(bench.snapshot()).verdict == "promoted", "judged by 100 samples or more"


@pytest.mark.parametrize("n", [0, 1, 99])
def test_restarted_trainer_needs_enough_samples_to_promote(bench: Bench, n: int) -> None:
    bench.next()
    bench.judged_by = [batch_of(n, 1)] if n else []
    held = restarted(bench).next(bench.snapshot())

    assert held.verdict == "held"
    assert held.reason == f"{n} labelled samples, fewer than serve.gate.floor = 100"
    assert bench.stable == 1
