"""Measures after clocks ran ahead, and an operator set event time back (docs/operations.md)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from freshet.batches.stream import TrainBatch
from freshet.config.spec.parse import parse_spec
from freshet.model.inputs import Labels, ModelInputs
from freshet.testing.clock import SettableClock
from freshet.trainer.quality import Quality, lateness_ms
from freshet.types import F32, Fence, OffsetRange

SPEC = parse_spec("""
name = "shop"
[events]
served = { schema = "i.avsc", key = ["request", "item"], time = "ts:ms" }
action = { schema = "a.avsc", key = ["request", "item"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'click'", window = "1 m" }
[join]
emit = "early"
grace = "10 s"
[tables]
item = { dim = 4 }
[features]
item = { field = "item", table = "item" }
""")
MINUTE_MS = 60_000
DAY_MS = 1_440 * MINUTE_MS
START_MS = 1_700_000_040_000  # a full minute
LATE_MINUTES = -(-lateness_ms(SPEC) // MINUTE_MS)
N = 400


def minute(start_ms: int, rate: float) -> tuple[TrainBatch, F32]:
    """Return samples of a minute, with this share of true labels, and the model's predictions of .3."""
    rng = np.random.default_rng(start_ms // MINUTE_MS)
    value = (rng.random(N) < rate).astype(np.float32)
    labels = Labels(np.zeros(N, np.uint8), value, np.ones(N, np.float32))
    made = TrainBatch(
        (OffsetRange(0, 0, 1),),
        Fence(1),
        ModelInputs(N, (), np.empty((N, 0), np.float32), labels),
        np.arange(N),
        np.arange(N).astype(np.uint64),
        np.sort(rng.integers(start_ms, start_ms + MINUTE_MS, N)),
        segments={},
        served={"click": np.full(N, 0.3, np.float32)},
        items=np.ones(N, np.uint64),
    )
    return made, np.full((N, 1), 0.3, np.float32)


class Trainer:
    """Ranks that measure alike. The first reads minute after minute at the pace of its wall clock."""

    def __init__(self, ranks: int = 1) -> None:
        self.clock = SettableClock(START_MS)
        self.ranks = [self.started() for _ in range(ranks)]
        self.closed: list[int] = []  # starts of windows of `training`

    def started(self) -> Quality:
        return Quality(SPEC, self.clock)

    def restart(self) -> None:
        """Start one process from the state of the last."""
        [former] = self.ranks
        self.ranks = [self.started()]
        self.ranks[0].load_state(former.state())

    def read(self, start_ms: int, rate: float, rank: int = 0) -> None:
        """Measure a minute, and close windows."""
        several = len(self.ranks) > 1
        for quality in self.ranks:
            quality.share(several)
        self.ranks[rank].add(*minute(start_ms, rate))
        if several:
            increments = [quality.increment() for quality in self.ranks]
            for quality in self.ranks:
                quality.merge(increments)
        [windows, *_] = [quality.finished_windows() for quality in self.ranks]
        self.closed += [w["start_ms"] for w in windows if w["of"] == "training"]

    def live(self, minutes: Sequence[int], rate: float, ahead_ms: int = 0) -> None:
        """Read these minutes since the start as their time passes, on clocks that are `ahead_ms` ahead."""
        for number in minutes:
            start_ms = START_MS + number * MINUTE_MS + ahead_ms
            self.clock.jump(start_ms + MINUTE_MS)
            self.read(start_ms, rate, number % len(self.ranks))

    def lately(self, of: str, measure: str) -> float:
        return float(self.ranks[0].now().lately[of]["click"][measure])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("restarts", [False, True])
def test_measures_follow_event_time_that_was_set_back(ranks: int, restarts: bool) -> None:
    trainer = Trainer(ranks)
    trainer.live(range(6), 0.1)
    trainer.live(range(6, 9), 0.1, ahead_ms=DAY_MS)
    trainer.clock.jump(START_MS + 9 * MINUTE_MS)
    if restarts and ranks == 1:
        trainer.restart()
    before = len(trainer.closed)

    trainer.live(range(9, 9 + LATE_MINUTES + 2), 0.9)

    now = [start for start in trainer.closed[before:] if start < START_MS + DAY_MS]
    assert now[0] == START_MS + 9 * MINUTE_MS
    assert trainer.lately("training", "mean_label") == pytest.approx(0.9, abs=0.05)

    trainer.live(range(9 + LATE_MINUTES + 2, 40), 0.9)

    assert trainer.lately("training", "n") == 10 * N
    # The baseline's mean covers all samples: three quarters of them are those of the new rate.
    assert trainer.lately("popularity", "calibration") == pytest.approx(0.75 / 0.9, abs=0.1)
    assert len(trainer.closed) == len(set(trainer.closed)), "a window was written twice"
    assert len({str(sorted(q.summary()["training"]["click"].items())) for q in trainer.ranks}) == 1


def test_windows_of_a_clock_that_ran_ahead_are_written() -> None:
    trainer = Trainer()
    trainer.live(range(6), 0.1)
    trainer.live(range(6, 9), 0.1, ahead_ms=DAY_MS)
    trainer.live(range(9, 20), 0.1)

    ahead = [start for start in trainer.closed if start >= START_MS + DAY_MS]
    assert ahead == [START_MS + DAY_MS + n * MINUTE_MS for n in (6, 7, 8)]
    assert {w["start_ms"] // DAY_MS for w in trainer.ranks[0].now().open} == {START_MS // DAY_MS}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lagging_partition_takes_no_measure_back(ranks: int) -> None:
    trainer = Trainer(ranks)
    trainer.live(range(300, 330), 0.1)
    for number in range(200):  # all others are idle meanwhile
        trainer.read(START_MS + number * MINUTE_MS, 0.9)
    trainer.live(range(330, 340), 0.1)

    assert trainer.closed == [START_MS + n * MINUTE_MS for n in range(300, 340 - LATE_MINUTES)]
    assert trainer.lately("training", "mean_label") == pytest.approx(0.1, abs=0.05)
