"""Exchanged measures of several ranks equal those of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from freshet.batches.stream import TrainBatch
from freshet.config.spec.model import Spec
from freshet.errors import Corrupt
from freshet.model.inputs import Labels, ModelInputs
from freshet.trainer.process_group import ProcessGroup, RankLost
from freshet.trainer.quality import Quality
from freshet.trainer.state_sync import SharedMeasures, pack_arrays, unpack_arrays
from freshet.types import F32, Fence, OffsetRange
from tests.fixtures.specs import make_spec

SPEC = make_spec(losses=("logloss", "mse"))
SIZE = 500


def batch(rank: int, number: int) -> tuple[TrainBatch, F32]:
    rng = np.random.default_rng(1000 * rank + number)
    label = rng.integers(0, 2, SIZE).astype(np.uint8)
    value = (rng.random(SIZE) < 0.3).astype(np.float32)
    labels = Labels(label, value, np.ones(SIZE, np.float32))
    ids = np.arange(SIZE, dtype=np.int64)
    times = 1_700_000_000_000 + number * 20_000 + rng.integers(0, 20_000, SIZE)
    made = TrainBatch(
        (OffsetRange(rank, number, number + 1),),
        Fence(1),
        ModelInputs(SIZE, (), np.empty((SIZE, 0), np.float32), labels),
        ids,
        ids.view(np.uint64),
        times,
        {},
        {name: rng.random(SIZE).astype(np.float32) for name in ("y0", "y1")},
        items=rng.integers(1, 50, SIZE).astype(np.uint64),
    )
    return made, rng.random((SIZE, 2)).astype(np.float32)


@dataclass
class Member:
    """The part of a `ProcessGroup` that an exchange uses."""

    rank: int
    sent: list[bytes]  # of all ranks, complete once each has exchanged
    lost: bool = False

    def exchange(self, data: bytes) -> Sequence[bytes]:
        self.sent[self.rank] = data
        if self.lost:
            raise RankLost("a rank is gone")
        return self.sent


@dataclass
class Rank:
    quality: Quality
    shared: SharedMeasures


def ranks(count: int, spec: Spec = SPEC) -> list[Rank]:
    made = [Rank(quality := Quality(spec), SharedMeasures(quality)) for _ in range(count)]
    for rank in made:
        rank.shared.begin(count, 0)
    return made


def exchange(made: Sequence[Rank], *, lost: Sequence[int] = ()) -> None:
    """Run one exchange, in which the ranks with these numbers are lost."""
    for rank in made:
        rank.shared.prepare(more=True)
    sent = [b""] * len(made)
    for i, rank in enumerate(made):
        group = cast(ProcessGroup, Member(i, sent, i in lost))
        if i in lost:
            with pytest.raises(RankLost):
                rank.shared.exchange(group, False)
        else:
            rank.shared.exchange(group, False)
    for i, rank in enumerate(made):
        if i not in lost:
            rank.shared.merge_received()


def close(found: Any, wanted: Any) -> None:
    """Assert that figures are equal up to the order of additions."""
    assert found.keys() == wanted.keys()
    for key, value in found.items():
        if isinstance(value, dict):
            close(value, wanted[key])
        else:
            assert value == pytest.approx(wanted[key], nan_ok=True, rel=1e-9), key


def feed(rank: Rank, which: int, numbers: Sequence[int]) -> None:
    for number in numbers:
        rank.quality.add(*batch(which, number))


def counted(rank: Rank) -> float:
    figures = rank.quality.summary()["training"]
    return float(sum(figures[label]["n"] for label in ("y0", "y1")))


def test_exchange_gives_every_rank_identical_figures() -> None:
    three = ranks(3)
    for i, rank in enumerate(three):
        feed(rank, i, range(3))

    exchange(three)

    states = [{name: a.tobytes() for name, a in rank.quality.state().items()} for rank in three]
    assert states[0] == states[1] == states[2]


def test_figures_equal_those_of_a_single_process() -> None:
    two, alone = ranks(2), Quality(SPEC)
    for number in range(4):
        for i, rank in enumerate(two):
            feed(rank, i, [number])
            alone.add(*batch(i, number))
        exchange(two)

    for of in ("training", "served"):
        close(two[0].quality.summary()[of], alone.summary()[of])


def test_windows_close_once_despite_later_samples() -> None:
    two = ranks(2)
    feed(two[0], 0, range(12))  # four minutes
    feed(two[1], 1, [0])
    exchange(two)
    closed = two[0].quality.finished_windows()
    feed(two[1], 1, [0, 1])  # of windows that were written
    exchange(two)

    again = two[0].quality.finished_windows()

    starts = {(w["of"], w["start_ms"]) for w in closed}
    assert starts
    assert not starts & {(w["of"], w["start_ms"]) for w in again}


def test_increments_of_a_failed_exchange_are_sent_again() -> None:
    two = ranks(2)
    feed(two[0], 0, [0])
    feed(two[1], 1, [0])
    exchange(two, lost=[0, 1])

    for rank in two:
        rank.shared.begin(2, 0)
    exchange(two)

    for rank in two:
        assert counted(rank) == 2 * SIZE


def test_increments_in_the_synced_state_are_not_sent_again() -> None:
    two = ranks(2)
    feed(two[0], 0, [0])
    feed(two[1], 1, [0])
    exchange(two, lost=[1])  # rank 0 received everything

    state, done = two[0].quality.state(), two[0].shared.done
    two[1].quality.load_state(state)
    for rank in two:
        rank.shared.begin(2, done)
    exchange(two)

    for rank in two:
        assert counted(rank) == 2 * SIZE


def test_last_rank_keeps_its_unsent_increments() -> None:
    two = ranks(2)
    feed(two[0], 0, [0])
    two[0].shared.prepare()
    feed(two[0], 0, [1])

    two[0].shared.begin(1, 0)

    assert counted(two[0]) == 2 * SIZE


@pytest.mark.parametrize("data", [b"x", b"\x09" + bytes(7) + b"short", (3).to_bytes(8, "little") + b"abc"])
def test_invalid_measures_are_refused(data: bytes) -> None:
    (rank,) = ranks(1)
    rank.shared.exchange(cast(ProcessGroup, Member(1, [data, b""])), False)

    with pytest.raises(Corrupt):
        rank.shared.merge_received()


def test_invalid_arrays_are_refused() -> None:
    with pytest.raises(Corrupt):
        unpack_arrays(b"no arrays")


def test_arrays_reach_another_rank_in_their_shape() -> None:
    arrays = {"scalar": np.array(2.5), "across": np.arange(6).reshape(2, 3).T, "none": np.zeros((0, 2))}
    found = unpack_arrays(pack_arrays(arrays))

    assert {name: array.shape for name, array in found.items()} == {
        "scalar": (),
        "across": (3, 2),
        "none": (0, 2),
    }
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
