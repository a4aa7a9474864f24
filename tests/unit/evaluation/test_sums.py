"""Tables of samples and their merges, equal to the bit to the reference implementation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.evaluation import LabelKind, Measures, progressive
from freshet.evaluation.progressive import ScoredSamples, Table, table_of
from freshet.types import I64, U64, Bool
from tests.unit.evaluation import by_sorting

NUMBER = np.array([False, True, False])
LABELS = [LabelKind("click", False), LabelKind("watch", True), LabelKind("buy", False)]
VALUES = (np.array([0, 3, 5, 9], np.uint64), np.array([0], np.uint64))
"""Values with a cell of their own, of two segment fields; the second has none."""


def draw(rng: np.random.Generator, n: int) -> ScoredSamples:
    """Draw samples with number and true/false labels, odd weights, and predictions that are not finite."""
    label = rng.integers(0, 3, n).astype(np.uint8)
    prediction = np.where(NUMBER[label], rng.normal(20, 5, n), rng.random(n) ** 3)
    prediction[rng.random(n) < 0.02] = rng.choice([np.nan, np.inf])
    return ScoredSamples(
        rng.integers(0, 100_000, n),
        label,
        prediction.astype(np.float32),
        np.where(NUMBER[label], rng.normal(20, 5, n), rng.random(n) < 0.2).astype(np.float32),
        rng.choice([0.0, 1.0, 3.3], n).astype(np.float32),
        (rng.integers(0, 12, n).astype(np.uint64), rng.integers(0, 3, n).astype(np.uint64)),
    )


def grouped(samples: ScoredSamples, window_ms: int) -> Table:
    return table_of(samples, samples.times_ms - samples.times_ms % window_ms, NUMBER, VALUES)


@given(st.integers(0, 1 << 32), st.integers(1, 400), st.sampled_from([1, 700, 30_000, 1 << 30]))
def test_grouped_table_equals_that_of_sorting(seed: int, n: int, window_ms: int) -> None:
    samples = draw(np.random.default_rng(seed), n)
    window = samples.times_ms - samples.times_ms % window_ms
    assert by_sorting.same_bits(
        table_of(samples, window, NUMBER, VALUES), by_sorting.table_of(samples, window, NUMBER, VALUES)
    )


def test_more_than_65536_windows_give_the_same_table() -> None:
    samples = draw(np.random.default_rng(1), 30_000)
    assert len(grouped(samples, 1).keys) > 1 << 16
    assert by_sorting.same_bits(
        grouped(samples, 1), by_sorting.table_of(samples, samples.times_ms, NUMBER, VALUES)
    )


@given(st.integers(0, 1 << 32), st.lists(st.integers(0, 300), min_size=1, max_size=5))
def test_merge_of_all_equals_merges_one_by_one(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    tables = [grouped(draw(rng, n), 30_000) if n else Table.empty() for n in sizes]
    assert by_sorting.same_bits(Table.merge(tables), by_sorting.merge(tables))


@given(st.integers(0, 1 << 32))
def test_windows_moved_into_one_are_added_in_their_order(seed: int) -> None:
    table = grouped(draw(np.random.default_rng(seed), 500), 10_000)
    keys = table.keys.copy()
    keys["window"] = -7
    wanted = by_sorting.grouped(keys, table.sums, table.cell, table.bin, table.counts)
    assert by_sorting.same_bits(table.moved_to(-7), wanted)


def test_empty_table_moves_to_an_empty_table() -> None:
    assert by_sorting.same_bits(Table.empty().moved_to(5), Table.empty())


@pytest.mark.parametrize("seed", range(4))
def test_state_equals_that_of_sorting_and_merging_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progressive, "GROUP_SAMPLES", 1_000)
    monkeypatch.setattr(progressive, "MERGE_ENTRIES", 3_000)
    quick = stream(seed)
    monkeypatch.setattr(progressive, "table_of", table_by_sorting)
    monkeypatch.setattr(progressive, "MERGE_ENTRIES", -1)
    monkeypatch.setattr(Table, "merge", staticmethod(by_sorting.merge))
    plain = stream(seed)
    assert len(quick) == len(plain)
    for one, other in zip(quick, plain, strict=True):
        assert {k: v.tobytes() for k, v in one.items()} == {k: v.tobytes() for k, v in other.items()}


def table_by_sorting(samples: ScoredSamples, window: I64, number: Bool, values: Sequence[U64]) -> Table:
    return by_sorting.table_of(samples, window, number, values)


def stream(seed: int) -> list[dict[str, np.ndarray]]:
    """Return states of measures on a random stream, with figures computed now and then."""
    rng = np.random.default_rng(seed)
    measures = Measures(LABELS, ["x", "y"], window_ms=20_000, lateness_ms=10_000, max_values=5)
    states = []
    for turn in range(60):
        samples = draw(rng, int(rng.integers(1, 400)))
        measures.add(
            samples.prediction,
            samples.label,
            samples.value,
            samples.weight,
            samples.times_ms // 5 + 2_000 * turn,
            {"x": samples.segments[0]} | ({"y": samples.segments[1]} if turn % 7 else {}),
        )
        if turn % 3 == 0:
            measures.finished()
        if turn % 10 == 0:
            measures.view().overall().total()
        if turn % 20 == 19:
            states.append(measures.state())
    return states
