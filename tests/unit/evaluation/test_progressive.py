"""Measures over windows, labels and segments."""

from __future__ import annotations

import numpy as np
import pytest

from freshet.evaluation import Figures, LabelKind, Measures, auc
from freshet.evaluation.progressive import GROUP_SAMPLES, OTHER, RECENT_WINDOWS

CLICK, WATCH = LabelKind("click", False), LabelKind("watch", True)


class Stream:
    """Random samples with labels that follow their predictions."""

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
    assert found["brier"] == pytest.approx((w * (p - y) ** 2).sum() / w.sum())
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
        assert found["auc"] == pytest.approx(wanted, abs=1e-3)  # its bins are coarse; chance is .02 here


def test_segment_values_beyond_the_first_hundred_count_as_other() -> None:
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


def test_window_closes_once_after_the_lateness() -> None:
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


def test_late_sample_counts_in_total_but_opens_no_closed_window() -> None:
    stream, measures = Stream(5000), make(lateness_ms=0)
    stream.into(measures)
    measures.finished()
    before = find(measures.total(), "click").measures["n"]
    late = np.flatnonzero((stream.times < 60_000) & (stream.label == 0))[:5]
    stream.into(measures, late)
    assert find(measures.total(), "click").measures["n"] == before + 5
    assert 0 not in {f.start_ms for f in measures.windows()}


def test_no_samples_have_no_figures() -> None:
    measures = make()
    assert measures.total() == measures.windows() == measures.finished() == []


def test_loaded_state_continues_as_without_a_restart() -> None:
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


def test_segments_may_be_added_and_left_out() -> None:
    """`train.segments` is tunable: a restart with others keeps the figures of those that stay."""
    measures = make()
    Stream(4000).into(measures)
    measures.finished()
    for names in (["device", "country"], ["device"], []):
        other = Measures([CLICK, WATCH], names, window_ms=60_000)
        other.load_state(measures.state())
        kept = [f for f in measures.total() if f.segment is None or f.segment in names]
        same(other.total(), kept)
        back = make()
        back.load_state(other.state())
        same(back.total(), kept)


@pytest.mark.parametrize("names", [["country"], ["country", "device"]])
def test_an_earlier_state_has_segments_by_their_number(names: list[str]) -> None:
    measures, other = make(), Measures([CLICK, WATCH], names, window_ms=60_000)
    Stream(4000).into(measures)
    before = {name: array for name, array in measures.state().items() if name != "segments"}
    other.load_state(before)
    same(other.total(), [f for f in measures.total() if f.segment is None or names == ["country"]])


def test_a_state_without_an_array_is_refused() -> None:
    state = make().state()
    del state["cell"]
    with pytest.raises(ValueError, match="lacks cell"):
        make().load_state(state)


def test_state_of_another_window_length_counts_in_total_only() -> None:
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


def test_view_is_independent_of_later_samples() -> None:
    stream, measures, half = Stream(6000), make(), make()
    stream.into(measures, slice(0, 3000))
    stream.into(half, slice(0, 3000))
    view = measures.view()
    stream.into(measures, slice(3000, None))
    measures.finished()
    same(view.total(), half.total())
    same(view.windows(), half.windows())


def test_figures_without_segments_are_those_of_all_samples() -> None:
    stream, measures = Stream(GROUP_SAMPLES + 3000), make()
    stream.into(measures, slice(0, GROUP_SAMPLES))
    stream.into(measures, slice(GROUP_SAMPLES, None))  # the first samples are grouped, the last are not
    overall = measures.overall()
    same(overall.total(), [f for f in measures.total() if f.segment is None])
    same(overall.windows(), [f for f in measures.windows() if f.segment is None])


def clicks(p: np.ndarray, rng: np.random.Generator, weight: np.ndarray | None = None) -> Figures:
    """Return the figures of one window of samples with labels drawn from their predictions."""
    measures = Measures([CLICK])
    n = len(p)
    measures.add(
        p.astype(np.float32),
        np.zeros(n, np.uint8),
        (rng.random(n) < p).astype(np.float32),
        np.ones(n, np.float32) if weight is None else weight.astype(np.float32),
        np.zeros(n, np.int64),
    )
    return find(measures.total(), "click")


def test_ne_error_equals_the_spread_of_ne_over_windows() -> None:
    rng = np.random.default_rng(3)
    p = 1 / (1 + np.exp(-rng.normal(-3, 1, 2000)))  # rare labels, as clicks are
    found = [clicks(p, rng).measures for _ in range(400)]
    spread = np.std([m["ne"] for m in found])
    assert np.mean([m["ne_error"] for m in found]) == pytest.approx(spread, rel=0.15)


def test_mean_label_as_prediction_has_ne_of_one_without_error() -> None:
    rng = np.random.default_rng(4)
    measures = Measures([CLICK])
    value = (rng.random(5000) < 0.05).astype(np.float32)
    p = np.full(5000, value.mean(), np.float32)
    measures.add(p, np.zeros(5000, np.uint8), value, np.ones(5000, np.float32), np.zeros(5000, np.int64))
    found = find(measures.total(), "click").measures
    assert found["ne"] == pytest.approx(1)
    assert found["ne_error"] == pytest.approx(0, abs=1e-3)


def test_a_sample_of_weight_four_is_no_four_samples() -> None:
    p = np.full(4000, 0.3) + np.linspace(-0.2, 0.2, 4000)
    light = clicks(p, np.random.default_rng(5)).measures
    heavy = clicks(p, np.random.default_rng(5), np.full(4000, 4.0)).measures
    assert heavy["ne_error"] == pytest.approx(light["ne_error"])


def test_window_without_true_labels_has_no_ne_error() -> None:
    assert np.isnan(clicks(np.full(10, 1e-6), np.random.default_rng(0)).measures["ne_error"])


def test_reliability_has_mean_prediction_and_mean_label() -> None:
    rng = np.random.default_rng(6)
    p = 1 / (1 + np.exp(-rng.normal(-2, 1.5, 50_000)))
    curve = np.array(clicks(p, rng).reliability)
    n, predicted, labelled = curve.T
    assert 5 <= len(curve) <= 15
    assert n.sum() == 50_000
    assert (np.diff(predicted) > 0).all()
    error = np.sqrt(predicted * (1 - predicted) / n)
    assert (np.abs(labelled - predicted) < 4 * error + 1e-3).all()


def test_reliability_has_at_most_fifteen_bins_at_any_spread() -> None:
    curve = clicks(1 / (1 + np.exp(-np.linspace(-19, 19, 9000))), np.random.default_rng(7)).reliability
    assert curve is not None
    assert len(curve) <= 15


def test_numbers_and_segments_have_no_reliability() -> None:
    stream, measures = Stream(1000), make()
    stream.into(measures)
    assert all(
        (f.reliability is None) == (f.label == "watch" or f.segment is not None) for f in measures.total()
    )


def test_lately_sums_the_last_closed_windows_of_all_samples() -> None:
    window_ms = 60_000 // (2 * RECENT_WINDOWS)
    stream = Stream(6000)
    stream.times = stream.times // 5  # a minute: twice as many windows as count
    measures = Measures([CLICK, WATCH], ["country"], window_ms=window_ms, lateness_ms=0)
    straight = Measures([CLICK, WATCH], ["country"])
    assert measures.lately() == []
    for start in range(0, 6000, 500):
        stream.into(measures, slice(start, start + 500))
        measures.finished()
    closed = int(stream.times[-1]) // window_ms * window_ms
    stream.into(straight, (stream.times >= closed - RECENT_WINDOWS * window_ms) & (stream.times < closed))
    wanted = [f for f in straight.total() if f.segment is None]
    assert [f.segment for f in measures.lately()] == [None, None]
    same(measures.lately(), wanted)
    same(measures.view().overall().lately(), wanted)
