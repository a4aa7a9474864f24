"""How a segment's entropy has changed: exact where it can be, honest where it cannot."""

from __future__ import annotations

import numpy as np
import pytest

from freshet.console.segments import SPAN_MS, SPANS, Segments, change_of

NOW = 10 * SPANS * SPAN_MS


def window(place: int, n: float, ne: float, *, rate: float = 0.1, **more: object) -> dict[str, object]:
    entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
    return {
        "of": "served",
        "label": "click",
        "segment": "country",
        "value": 7,
        "start_ms": place * SPAN_MS,
        "measures": {"n": n, "logloss": ne * entropy, "mean_label": rate},
        **more,
    }


def changes(*windows: dict[str, object]) -> list[dict[str, object]]:
    segments = Segments()
    for each in windows:
        segments.add(each, NOW)
    return segments.changes()


def test_the_newer_half_is_compared_with_the_older_half() -> None:
    found = changes(*[window(i, 200, 0.9 if i < 5 else 0.7) for i in range(10)])

    assert len(found) == 1
    assert found[0]["n"] == 2_000
    assert found[0]["ne"] == pytest.approx(0.7)
    assert found[0]["change"] == pytest.approx(-0.2)


def test_segments_with_too_few_samples_are_left_out() -> None:
    assert changes(*[window(i, 200, 0.9) for i in range(4)]) == []
    assert changes(*[window(i, 99, 0.9) for i in range(10)]) == []
    assert changes(*[window(i, 101, 0.9) for i in range(10)]) != []


def test_windows_older_than_an_hour_do_not_count() -> None:
    old = [window(i, 1_000, 5.0) for i in range(10)]
    new = [window(SPANS + 50 + i, 300, 0.8) for i in range(10)]

    (found,) = changes(*old, *new)

    assert (found["n"], found["ne"]) == (3_000, pytest.approx(0.8))
    assert found["change"] == pytest.approx(0)


@pytest.mark.parametrize("restarted", [False, True])
def test_windows_of_now_outlast_those_of_a_clock_ahead(restarted: bool) -> None:
    segments, day = Segments(), 24 * SPANS + 10  # so that the last windows replace those ahead
    for first, ahead in ((0, 0), (10, day), (20, 0)):
        for place in range(first, first + 10):
            now = 30 if restarted else place + ahead
            segments.add(window(place + ahead, 200, 0.9 if place < 20 else 0.7), now * SPAN_MS)

    (found,) = segments.changes()
    assert (found["n"], found["ne"]) == (4_000, pytest.approx(0.7))
    assert found["change"] == pytest.approx(-0.2)


def test_windows_shorter_than_a_span_are_added_up() -> None:
    parts = [{**window(0, 50, 0.9), "start_ms": i * SPAN_MS // 4} for i in range(40)]

    (found,) = changes(*parts)

    assert found["n"] == 2_000


def test_served_predictions_come_before_those_of_training() -> None:
    training = [window(i, 500, 0.5, of="training") for i in range(10)]
    served = [window(i, 500, 0.9) for i in range(10)]

    assert [c["of"] for c in changes(*training, *served)] == ["served"]
    assert [c["of"] for c in changes(*training)] == ["training"]


@pytest.mark.parametrize(
    "broken",
    [
        {"measures": None},
        {"measures": {"n": 10}},
        {"value": "DE"},
        {"value": True},
        {"start_ms": -5},
        {"start_ms": 1e9},
        {"label": None},
        {"measures": {"n": -3, "logloss": 1, "mean_label": 0.5}},
    ],
)
def test_a_window_that_is_not_understood_is_left_out(broken: dict[str, object]) -> None:
    segments = Segments()

    segments.add({**window(0, 500, 1.0), **broken}, NOW)

    assert segments.changes() == []


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    held, trials = 0, 400
    for _ in range(trials):
        halves = []
        for _ in range(2):
            rates = np.full((20, 60), 0.2)
            clicks = (rng.random(rates.shape) < rates).sum(1)
            loss = -clicks * np.log(0.25) - (60 - clicks) * np.log(0.75)  # a model that always says 0.25
            halves.append(np.column_stack([np.full(20, 60.0), loss, clicks]))
        change = change_of(*halves)
        assert change is not None
        held += change.low <= 0 <= change.high

    assert 0.92 <= held / trials <= 0.985, held / trials
