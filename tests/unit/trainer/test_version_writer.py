"""Versions and who moves `stable`: the gate, unless a person has put it somewhere, at whatever moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from freshet.clock import SYSTEM_CLOCK
from freshet.config.spec.layout import layout_of
from freshet.config.spec.parse import parse_spec
from freshet.log import EventLog
from freshet.log.sqlite.event_log import SqliteEventLog
from freshet.model import DenseModel, build_model
from freshet.model.inputs import GroupInputs, Labels, ModelInputs
from freshet.trainer.version_writer import Pins, Snapshot, Versioner
from freshet.types import Fence
from freshet.versions.folder import FolderVersionStore
from freshet.versions.promotions import move

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
    """A versioner, and what happens while it judges."""

    log: EventLog
    store: FolderVersionStore
    meanwhile: Callable[[], None] = lambda: None
    steps: int = 0
    versioner: Versioner = field(init=False)

    judged_by: Sequence[ModelInputs] = ()

    def recent(self, _rows: int) -> Sequence[ModelInputs]:
        return self.judged_by

    def scorer(self) -> DenseModel:
        self.meanwhile()
        return build_model(SPEC, training=False)

    def snapshot(self) -> Snapshot:
        self.steps += 1
        return Snapshot(
            dict(build_model(SPEC, training=True).state()), {0: 0}, self.steps, 0, {}, finite=True
        )

    def next(self) -> str:
        """The verdict on one more version."""
        return self.versioner.next(self.snapshot()).verdict

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
    made.versioner = Versioner(
        spec=SPEC,
        spec_hash="hash",
        log_id="log",
        store=made.store,
        writer=writer,
        topic="toy.versions",
        fence=Fence(1),
        clock=SYSTEM_CLOCK,
        scorer=made.scorer,
        recent=made.recent,
        pins=pins,
    )
    made.versioner.first(made.snapshot())
    yield made
    pins.close()
    writer.close()
    log.close()


def test_the_gate_moves_stable_while_nobody_has_rolled_back(bench: Bench) -> None:
    assert bench.next() == "promoted"
    assert bench.stable == 1


def test_after_a_rollback_stable_stays(bench: Bench) -> None:
    bench.next()
    bench.roll_back(0)

    assert bench.next() == "held"
    assert bench.stable == 0


def test_a_rollback_while_a_version_is_judged_is_not_undone_by_its_promotion(bench: Bench) -> None:
    bench.next()
    bench.meanwhile = lambda: bench.roll_back(0)

    assert bench.next() == "held"
    assert bench.stable == 0


def test_a_promotion_that_overtook_a_rollback_is_taken_back(bench: Bench) -> None:
    bench.next()
    bench.roll_back(0)
    bench.store.point("stable", 1)  # of the gate, which had looked just before

    assert bench.next() == "held"
    assert bench.stable == 0


def test_a_person_promotes_while_a_version_is_judged_and_the_gate_goes_on(bench: Bench) -> None:
    bench.next()
    bench.roll_back(0)
    bench.next()
    move(bench.store, bench.log, 2, pinned=False, by="console", now_ms=2)

    assert bench.next() == "promoted"
    assert bench.stable == 3


class Late(FolderVersionStore):
    """Lists the newest version only from the second look on, as if another trainer had just written it."""

    looks = 0

    def numbers(self) -> Sequence[int]:
        self.looks += 1
        found = super().numbers()
        return found[:-1] if self.looks == 1 else found


def test_a_version_that_another_trainer_wrote_meanwhile_keeps_its_number(
    bench: Bench, tmp_path: Path
) -> None:
    bench.versioner.store = Late(tmp_path / "versions")
    newest = bench.store.numbers()[-1]

    written = bench.versioner.next(bench.snapshot())

    assert written.number == newest + 1


def test_who_leads_first_writes_version_0_and_who_leads_later_does_not(tmp_path: Path, bench: Bench) -> None:
    bench.versioner.store = store = FolderVersionStore(tmp_path / "others")

    bench.versioner.begin(bench.snapshot())
    bench.versioner.begin(bench.snapshot())

    assert store.numbers() == [0]
    assert store.aliases()["stable"] == 0


@pytest.mark.parametrize("content", [b"x", b"", b"92", b"999999999999999999"])
def test_a_damaged_stable_is_mended_with_the_next_version(
    bench: Bench, tmp_path: Path, content: bytes
) -> None:
    bench.next()
    (tmp_path / "versions" / "aliases" / "stable").write_bytes(content)

    assert bench.next() == "promoted"
    assert bench.stable == 2


@pytest.mark.parametrize("content", [b"x", b"92", None])
def test_a_damaged_stable_is_mended_where_a_person_put_it(
    bench: Bench, tmp_path: Path, content: bytes | None
) -> None:
    bench.next()
    bench.roll_back(0)
    path = tmp_path / "versions" / "aliases" / "stable"
    path.unlink()
    if content is not None:
        path.write_bytes(content)

    assert bench.next() == "held"
    assert bench.stable == 0


@pytest.mark.parametrize("damage", ["weights.safetensors", "manifest.json"])
def test_a_damaged_stable_version_is_judged_without(bench: Bench, tmp_path: Path, damage: str) -> None:
    bench.next()
    (tmp_path / "versions" / "0000000001" / damage).write_bytes(b"\0")

    assert bench.next() == "promoted"


def test_a_stable_version_of_another_model_is_judged_without(bench: Bench) -> None:
    manifest = bench.store.manifest(0)
    bench.store.put(replace(manifest, number=1), {"other": np.zeros(3)})
    bench.store.point("stable", 1)

    assert bench.next() == "promoted"


@pytest.mark.parametrize("name", ["0000000001", "0000000002", "999999999999999999", "7"])
@pytest.mark.parametrize("kind", ["file", "folder", "garbage"])
def test_strays_among_versions_stop_no_publishing(bench: Bench, tmp_path: Path, name: str, kind: str) -> None:
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
    """Samples of the spec, some without a user."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, WIDTH)).astype(np.float32)
    positions = np.arange(n, dtype=np.int32)
    positions[rng.random(n) < 0.2] = -1
    group = GroupInputs(rows, positions, np.array([0, n], np.uint32), [None])
    labels = Labels(np.zeros(n, np.uint8), rng.integers(0, 2, n).astype(np.float32), np.ones(n, np.float32))
    return ModelInputs(n, [group], np.empty((n, 0), np.float32), labels)


WIDTH = layout_of(SPEC).groups[0].width


def restarted(bench: Bench) -> Versioner:
    """The versioner of the next process."""
    return replace(bench.versioner, spec=FLOOR)


FLOOR = replace(SPEC, serve=replace(SPEC.serve, gate=replace(SPEC.serve.gate, floor=100)))


def test_a_restarted_trainer_judges_by_the_samples_that_versions_carry(bench: Bench) -> None:
    bench.judged_by = [batch_of(30, 1), batch_of(90, 2)]
    before = bench.versioner._score(bench.snapshot().tensors, bench.judged_by)
    assert bench.next() == "promoted"
    bench.judged_by = []
    after = restarted(bench)

    [kept] = after._judging()
    scored = after._score(bench.snapshot().tensors, [kept])

    assert kept.size == 120
    assert np.array_equal(scored.predictions, before.predictions)
    assert np.array_equal(scored.value, before.value)
    assert after.next(bench.snapshot()).verdict == "promoted"


@pytest.mark.parametrize("n", [0, 1, 99])
def test_a_restarted_trainer_promotes_nothing_on_a_few_samples(bench: Bench, n: int) -> None:
    bench.next()
    bench.judged_by = [batch_of(n, 1)] if n else []
    held = restarted(bench).next(bench.snapshot())

    assert held.verdict == "held"
    assert held.reason == f"{n} labelled samples to judge by, fewer than serve.gate.floor = 100"
    assert bench.stable == 1
