"""The samples of each measure, restarts, and reads from other threads."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from freshet.batches.stream import TrainBatch
from freshet.config.spec.model import Explore, Spec
from freshet.config.spec.parse import parse_spec
from freshet.model.inputs import Labels, ModelInputs
from freshet.trainer.quality import Quality, lateness_ms
from freshet.types import F32, Fence, OffsetRange

SPEC = parse_spec("""
name = "shop"
[events]
served = { schema = "i.avsc", key = ["request", "item"], time = "ts:ms" }
action = { schema = "a.avsc", key = ["request", "item"], time = "ts:ms" }
[labels]
click = { on = "action.type == 'click'" }
[tables]
user = { dim = 4 }
item = { dim = 4 }
[features]
user = { field = "user", table = "user" }
item = { field = "item", table = "item" }
""")
N = 400
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
PLAIN = np.uint64(pow(int(GOLDEN), -1, 1 << 64))  # the inverse of the multiplication


def exploring(share: float) -> Spec:
    return replace(SPEC, serve=replace(SPEC.serve, explore=Explore(policy="epsilon", share=share)))


def batch(turn: int = 0, *, items: bool = True, served: bool = True) -> tuple[TrainBatch, F32]:
    """A batch of a second, in which even items come true, and what the model says of it. Every fourth sample
    was explored; every second one was logged."""
    rng = np.random.default_rng(turn)
    numbers = rng.integers(0, 50, N)
    value = (rng.random(N) < np.where(numbers % 2 == 0, 0.4, 0.1)).astype(np.float32)
    labels = Labels(np.zeros(N, np.uint8), value, np.ones(N, np.float32))
    place = np.arange(N)
    logged = np.where(place % 2 == 0, 0.2, np.nan).astype(np.float32)
    made = TrainBatch(
        (OffsetRange(0, turn, turn + 1),),
        Fence(1),
        ModelInputs(N, (), np.empty((N, 0), np.float32), labels),
        place,
        place.astype(np.uint64),
        turn * 1000 + place,
        segments={},
        served={"click": logged} if served else {},
        explored=place % 4 == 0,
        items=(numbers + 1).astype(np.uint64) * GOLDEN if items else None,
    )
    return made, np.full((N, 1), 0.25, np.float32)


def deciding_in_three_seconds(emit: Literal["early", "window"]) -> Spec:
    [click] = SPEC.labels
    spec = exploring(0.25)
    return replace(
        spec,
        labels=(replace(click, window_ms=2_000),),
        join=replace(spec.join, emit=emit, grace_ms=1_000),
    )


def decided(
    turn: int, emit: Literal["early", "window"], rates: tuple[float, float] = (0.4, 0.1)
) -> tuple[TrainBatch, F32]:
    """What is decided in a second: what was served three seconds ago, but positives at once if they come
    `early`. Even items come true at the first of the rates, odd ones at the second."""
    made, predictions = batch(turn)
    rng = np.random.default_rng(100 + turn)
    assert made.items is not None
    assert made.inputs.labels is not None
    even = (made.items * PLAIN) % np.uint64(2) == 1
    value = (rng.random(N) < np.where(even, *rates)).astype(np.float32)
    late = (value == 0) | (emit == "window")
    labels = replace(made.inputs.labels, value=value)
    return (
        replace(
            made,
            inputs=replace(made.inputs, labels=labels),
            event_times_ms=made.event_times_ms - np.where(late, 3_000, 0),
        ),
        predictions,
    )


def settled(quality: Quality) -> Quality:
    """Keep the learned rates of items, with empty figures."""
    fresh = Quality(deciding_in_three_seconds("early"))
    none = {k: v for k, v in fresh.state().items() if not k.startswith("rates/")}
    fresh.load_state(none | {k: v for k, v in quality.state().items() if k.startswith("rates/")})
    return fresh


def counts(quality: Quality) -> dict[str, float]:
    return {of: labels["click"]["n"] for of, labels in quality.summary().items() if labels}


def test_baseline_is_scored_on_samples_in_random_order() -> None:
    quality = Quality(exploring(0.25))
    quality.add(*batch())
    assert counts(quality) == {"training": N, "served": N / 2, "random": N / 4, "popularity": N / 4}


def test_baseline_without_exploration_uses_all_samples() -> None:
    quality = Quality(SPEC)
    quality.add(*batch(served=False))
    assert counts(quality) == {"training": N, "popularity": N}


def test_no_baseline_without_an_item_feature() -> None:
    quality = Quality(exploring(0.25))
    quality.add(*batch(items=False))
    assert counts(quality) == {"training": N, "served": N / 2, "random": N / 4}


def test_baseline_predicts_before_it_learns() -> None:
    quality = Quality(deciding_in_three_seconds("early"))
    quality.add(*decided(0, "early"))
    first = quality.summary()["popularity"]["click"]
    assert np.isclose(first["auc"], 0.5)  # no item is known yet
    for turn in range(1, 20):
        quality.add(*decided(turn, "early"))
    quality = settled(quality)
    for turn in range(20, 40):
        quality.add(*decided(turn, "early"))
    learned = quality.summary()["popularity"]["click"]
    assert learned["auc"] > 0.65  # random samples alone, a quarter of these, would not say as much
    assert learned["calibration"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("emit", ["early", "window"])
def test_baseline_does_not_know_the_labels_it_is_scored_by(
    emit: Literal["early", "window"],
) -> None:
    """The first window of a cold start, in whose first seconds only positives come: all items are alike."""
    spec = deciding_in_three_seconds(emit)
    quality = Quality(replace(spec, train=replace(spec.train, measure_window_ms=5_000)))
    for turn in range(14):
        quality.add(*decided(turn, emit, rates=(0.2, 0.2)))
    [first] = [
        window["measures"]
        for window in quality.finished_windows()
        if (window["of"], window["start_ms"]) == ("popularity", 0)
    ]
    assert first["n"] == pytest.approx(5 * N / 4, rel=0.15)
    assert first["auc"] == pytest.approx(0.5, abs=0.1)


def test_score_ignores_samples_learned_since_the_page() -> None:
    spec = deciding_in_three_seconds("early")
    quality = Quality(replace(spec, serve=SPEC.serve))
    losses = [0.0]
    for turn in (*range(9), 8):  # the last batch twice: by now its own samples are known
        quality.add(*decided(turn, "early"))
        total = quality.summary()["popularity"]["click"]
        losses.append(total["n"] * total["logloss"])
    assert losses[-1] - losses[-2] == pytest.approx(losses[-2] - losses[-3])


def test_restart_continues_the_measures_of_the_version() -> None:
    straight, first, resumed = (Quality(exploring(0.25)) for _ in range(3))
    for turn in range(6):
        straight.add(*batch(turn))
        if turn < 3:
            first.add(*batch(turn))
    resumed.load_state(first.state())
    for turn in range(3, 6):
        resumed.add(*batch(turn))
    for of, labels in straight.summary().items():
        assert resumed.summary()[of]["click"] == pytest.approx(labels["click"], nan_ok=True)
    assert [(w["of"], w["start_ms"], w["measures"]["n"]) for w in resumed.now().open] == [
        (w["of"], w["start_ms"], w["measures"]["n"]) for w in straight.now().open
    ]


def test_version_without_training_measures_is_refused() -> None:
    with pytest.raises(ValueError, match="another spec wrote it"):
        Quality(SPEC).load_state({})


def test_open_windows_are_reported_until_they_close() -> None:
    quality = Quality(SPEC)
    quality.add(*batch())
    [window] = [w for w in quality.now().open if w["of"] == "training"]
    assert (window["v"], window["kind"], window["start_ms"], window["label"]) == (1, "window", 0, "click")
    assert window["measures"]["n"] == N
    assert sum(n for n, _, _ in window["reliability"]) == N
    assert quality.finished_windows() == []

    quality.add(*batch((2 * SPEC.train.measure_window_ms + lateness_ms(SPEC)) // 1000))
    closed = quality.finished_windows()
    assert [w["start_ms"] for w in closed if w["of"] == "training"] == [0]
    assert 0 not in {w["start_ms"] for w in quality.now().open}


@pytest.mark.parametrize(
    ("emit", "windows_s", "late_s"),
    [
        ("early", (10,), 13),  # event time is now, by the first clicks; a negative comes 12 s after its page
        ("early", (10, 20), 23),
        ("early", (1,), 10),  # never less than a window: samples come out of order
        ("early", (86_400,), 600),  # and never more than 60 windows
        ("window", (60,), 10),  # all samples are as late as each other
        ("window", (10, 60), 51),
    ],
)
def test_window_waits_for_negatives_of_the_slowest_label(
    emit: Literal["early", "window"], windows_s: tuple[int, ...], late_s: int
) -> None:
    [click] = SPEC.labels
    spec = replace(
        SPEC,
        labels=tuple(replace(click, window_ms=1_000 * s) for s in windows_s),
        join=replace(SPEC.join, emit=emit, grace_ms=2_000),
        train=replace(SPEC.train, measure_window_ms=10_000),
    )

    assert lateness_ms(spec) == 1_000 * late_s


def test_figures_are_readable_while_samples_arrive() -> None:
    quality, stop = Quality(exploring(0.25)), threading.Event()
    batches = [batch(turn) for turn in range(300)]
    seen: list[float] = []
    wrong: list[BaseException] = []

    def ask() -> None:
        try:
            while not stop.is_set():
                now = quality.now()
                summary, windows = now.summary, now.open
                n = summary["training"]["click"]["n"] if summary["training"] else 0.0
                assert n % N == 0
                assert sum(w["measures"]["n"] for w in windows if w["of"] == "training") <= n
                seen.append(n)
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    for one in batches:
        quality.add(*one)
        quality.finished_windows()
    stop.set()
    thread.join(60)
    assert not wrong
    assert seen == sorted(seen)
    assert counts(quality)["training"] == 300 * N


@pytest.mark.parametrize("extreme", [1e18, -1e30, 3e38, np.nan, np.inf])
def test_one_outlier_does_not_ruin_the_totals(extreme: float) -> None:
    [click] = SPEC.labels
    spec = replace(exploring(0.25), labels=(replace(click, loss="huber", value="sum(action.amount)"),))
    quality = Quality(spec)
    for turn in range(4):
        made, predictions = batch(turn)
        labels = made.inputs.labels
        assert labels is not None
        value = np.random.default_rng(turn).uniform(1, 9, N).astype(np.float32)
        if turn == 2:
            value[7] = extreme
        inputs = replace(made.inputs, labels=replace(labels, value=value))
        quality.add(replace(made, inputs=inputs), predictions * 20)
    summary = quality.summary()

    assert quality.outliers == (0 if np.isnan(extreme) else 1)
    for of in ("training", "popularity"):
        assert 0 < summary[of]["click"]["mse"] < 100, of
        assert summary[of]["click"]["not_finite"] == 0, of  # of predictions, not of labels
    versions = Quality(spec)
    versions.load_state(quality.state())
    assert versions.summary()["training"]["click"]["mse"] < 100
