"""Measures over windows, labels and segments."""

from __future__ import annotations

import numpy as np
import pytest

from freshet.measures import Figures, LabelKind, Measures, auc
from freshet.measures.streaming import GROUP_SAMPLES, OTHER

CLICK, WATCH = LabelKind("click", False), LabelKind("watch", True)


class Stream:
    """Samples whose labels follow their predictions."""

    def __init__(self, n: int, *, seed: int = 0, segments: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.p = np.stack([rng.random(n), rng.normal(size=n) * 5 + 20], 1).astype(np.float32)
        self.label = rng.integers(0, 2, n).astype(np.uint8)
        click = (rng.random(n) < self.p[:, 0]).astype(np.float32)
        watch = (self.p[:, 1] + rng.normal(size=n)).astype(np.float32)
        self.value = np.where(self.label == 0, click, watch).astype(np.float32)
        self.weight = rng.choice([1.0, 4.0], n).astype(np.float32)
        self.times = np.sort(rng.integers(0, 300_000, n))
        self.country = rng.integers(1, 1 + segments, n).astype(np.uint64)

    def into(self, measures: Measures, pick: slice | np.ndarray = slice(None)) -> None:
        measures.add(
            self.p[pick],
            self.label[pick],
            self.value[pick],
            self.weight[pick],
            self.times[pick],
            {"country": self.country[pick]},
        )


def make(**options: int) -> Measures:
    return Measures([CLICK, WATCH], ["country"], window_ms=60_000, **options)


def find(figures: list[Figures], label: str, segment: str | None = None, value: int | None = None) -> Figures:
    [one] = [f for f in figures if (f.label, f.segment, f.value) == (label, segment, value)]
    return one


def same(a: list[Figures], b: list[Figures]) -> None:
    def by(figures: list[Figures]) -> dict[tuple[object, ...], Figures]:
        return {(f.start_ms, f.label, f.segment, f.value): f for f in figures}

    assert by(a).keys() == by(b).keys()
    for key, one in by(a).items():
        assert one.measures == pytest.approx(by(b)[key].measures, nan_ok=True)


def test_figures_of_a_true_false_label_equal_their_definitions() -> None:
    stream, measures = Stream(4000), make()
    stream.into(measures)
    mine = stream.label == 0
    p, y, w = stream.p[mine, 0].astype(float), stream.value[mine], stream.weight[mine]
    logloss = -(w * (y * np.log(p) + (1 - y) * np.log(1 - p))).sum() / w.sum()
    rate = (w * y).sum() / w.sum()
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)

    found = find(measures.total(), "click").measures

    assert found["n"] == mine.sum()
    assert found["auc"] == pytest.approx(auc(p, y, w), abs=1e-4)
    assert found["logloss"] == pytest.approx(logloss)
    assert found["ne"] == pytest.approx(logloss / entropy)
    assert found["calibration"] == pytest.approx((w * p).sum() / (w * y).sum())
    assert "mse" not in found


def test_figures_of_a_number_equal_their_definitions() -> None:
    stream, measures = Stream(4000), make()
    stream.into(measures)
    mine = stream.label == 1
    error, w = stream.p[mine, 1].astype(float) - stream.value[mine], stream.weight[mine]

    found = find(measures.total(), "watch").measures

    assert found["mse"] == pytest.approx((w * error**2).sum() / w.sum())
    assert found["mae"] == pytest.approx((w * np.abs(error)).sum() / w.sum())
    assert "auc" not in found


def test_segments_have_figures_of_their_own_samples() -> None:
    stream, measures = Stream(3000), make()
    stream.into(measures)
    for value in (1, 2, 3):
        mine = (stream.label == 0) & (stream.country == value)
        found = find(measures.total(), "click", "country", value).measures
        assert found["n"] == mine.sum()
        wanted = auc(stream.p[mine, 0], stream.value[mine], stream.weight[mine])
        assert found["auc"] == pytest.approx(wanted, abs=1e-4)


def test_values_beyond_the_first_hundred_of_a_segment_are_counted_together() -> None:
    stream, measures = Stream(5000, segments=300), make(max_values=100)
    stream.into(measures)
    clicks = [f for f in measures.total() if f.label == "click" and f.segment == "country"]
    assert len(clicks) == 101
    assert sum(f.measures["n"] for f in clicks) == (stream.label == 0).sum()
    assert any(f.value == OTHER for f in clicks)


def test_the_size_of_additions_does_not_change_the_figures() -> None:
    stream, whole, pieces = Stream(2 * GROUP_SAMPLES + 77), make(), make()
    stream.into(whole)
    for start in range(0, len(stream.label), 4096):
        stream.into(pieces, slice(start, start + 4096))
    same(whole.windows(), pieces.windows())


def test_a_window_closes_once_when_event_time_has_passed_it_by_the_lateness() -> None:
    stream, measures = Stream(5000), make(lateness_ms=30_000)
    stream.into(measures, stream.times < 80_000)
    assert measures.finished() == []
    stream.into(measures, stream.times >= 80_000)
    closed = measures.finished()
    assert {f.start_ms for f in closed} == {0, 60_000, 120_000, 180_000}
    first = find([f for f in closed if f.start_ms == 0], "click")
    assert first.stop_ms == 60_000
    assert first.measures["n"] == ((stream.label == 0) & (stream.times < 60_000)).sum()
    assert measures.finished() == []
    assert {f.start_ms for f in measures.windows()} == {240_000}


def test_a_late_sample_counts_since_the_beginning_but_opens_no_closed_window() -> None:
    stream, measures = Stream(5000), make(lateness_ms=0)
    stream.into(measures)
    measures.finished()
    before = find(measures.total(), "click").measures["n"]
    late = np.flatnonzero((stream.times < 60_000) & (stream.label == 0))[:5]
    stream.into(measures, late)
    assert find(measures.total(), "click").measures["n"] == before + 5
    assert 0 not in {f.start_ms for f in measures.windows()}


def test_nothing_counted_has_no_figures() -> None:
    measures = make()
    assert measures.total() == measures.windows() == measures.finished() == []


def test_a_saved_state_goes_on_as_if_never_stopped() -> None:
    stream, straight, saved = Stream(6000), make(), make()
    half = slice(0, 3000), slice(3000, None)
    for part in half:
        stream.into(straight, part)
    stream.into(saved, half[0])
    state = saved.state()
    resumed = make()
    resumed.load_state({name: array.copy() for name, array in state.items()})
    stream.into(saved, half[1])  # must not change the state taken before
    stream.into(resumed, half[1])
    same(resumed.windows(), straight.windows())
    same(resumed.finished(), straight.finished())
    same(resumed.total(), straight.total())


def test_a_state_of_other_segments_is_refused() -> None:
    with pytest.raises(ValueError, match="known/0"):
        make().load_state(Measures([CLICK, WATCH]).state())


def test_another_window_length_keeps_only_what_was_counted_since_the_beginning() -> None:
    stream, measures = Stream(1000), make()
    stream.into(measures)
    longer = Measures([CLICK, WATCH], ["country"], window_ms=120_000)
    longer.load_state(measures.state())
    assert longer.windows() == []
    same(longer.total(), measures.total())


def test_measures_of_two_ranks_merge_into_those_of_one() -> None:
    stream, one, left, right = Stream(3000), make(), make(), make()
    stream.into(one)
    stream.into(left, slice(0, None, 2))
    stream.into(right, slice(1, None, 2))
    left.merge(right)
    same(left.windows(), one.windows())


def test_predictions_that_are_not_finite_are_counted_apart() -> None:
    measures = Measures([CLICK])
    measures.add(
        np.array([0.5, np.nan, np.inf], np.float32),
        np.zeros(3, np.uint8),
        np.array([1, 0, 1], np.float32),
        np.ones(3, np.float32),
        np.zeros(3, np.int64),
    )
    found = find(measures.total(), "click").measures
    assert (found["n"], found["not_finite"]) == (1, 2)
    assert found["logloss"] == pytest.approx(np.log(2))
