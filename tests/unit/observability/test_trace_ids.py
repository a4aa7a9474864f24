"""Sampled events and the ids of their traces: equal in all processes, carried by none."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.observability.trace_ids import MOST_LINKS, TraceIds
from freshet.types import OffsetRange

REQUESTS = np.random.default_rng(1).integers(0, 2**64, 20_000, dtype=np.uint64)
RANGES = (OffsetRange(0, 3, 7), OffsetRange(2, 0, 4))


def ids(ratio: float = 1.0, model: str = "news") -> TraceIds:
    return TraceIds(model, ratio)


def ids_elsewhere(code: str) -> str:
    """Return the ids that another process derives, with another seed of Python's hashes."""
    command = f"import numpy as np\nfrom tests.unit.observability.test_trace_ids import *\nprint({code})"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    "code",
    [
        "ids().event(7, 'served')",
        "ids().batch(RANGES, np.array([7], np.uint64)).context('push')",
        "ids().version('abc', 3)",
        "ids().rows(1, np.array([5]))[0]",
    ],
)
def test_every_process_derives_the_same_names(code: str) -> None:
    assert ids_elsewhere(code) == str(eval(code))


def test_ids_equal_those_of_earlier_releases() -> None:
    assert ids().event(7, "served") == (0xB4C2E90284AFBD5EC90A573379C7FB2C, 0xC24DEA8646C3F930)
    batch = ids().batch(RANGES, np.array([7], np.uint64))
    assert batch is not None
    assert batch.context("push") == (0x7D5E30029B0EB706CB2CF7DADF6C04BC, 0x3C5C25E7D9B2520D)
    assert ids().version("abc", 3) == (0x9FBF21A55C23F8BD76E70D2D9B447DEE, 0x1969C0B92FAC7E98)
    assert ids().rows(1, np.array([5])) == [(5, (0xB7C76C05FF974F27A2D15968FA0F8C74, 0x3C4DE82E408AE0EA))]


@pytest.mark.parametrize("ratio", [0.001, 0.1, 0.5, 1.0])
def test_about_the_ratio_of_events_is_traced(ratio: float) -> None:
    hits = int(ids(ratio).sampled(REQUESTS).sum())

    expected = ratio * len(REQUESTS)
    assert abs(hits - expected) <= 5 * (expected * (1 - ratio)) ** 0.5


def test_a_higher_ratio_traces_a_superset() -> None:
    few, more = ids(0.01).sampled(REQUESTS), ids(0.1).sampled(REQUESTS)

    assert more[few].all()
    assert more.sum() > few.sum()


@given(st.integers(0, 2**64 - 1))
def test_the_id_of_an_event_agrees_with_its_sampling(request_hash: int) -> None:
    """A sampler by ratio elsewhere, which reads the lower half of a trace's id, decides alike."""
    made = ids(0.3)

    low = made.event(request_hash, "served").trace_id & (2**64 - 1)

    assert bool(made.sampled(np.array([request_hash], np.uint64))[0]) == (low < int(0.3 * 2**64))


def test_spans_of_an_event_share_a_trace_and_models_none() -> None:
    served, samples = ids().event(7, "served"), ids().event(7, "samples")

    assert served.trace_id == samples.trace_id
    assert served.span_id != samples.span_id
    assert ids(model="shop").event(7, "served").trace_id != served.trace_id


def test_traces_of_many_events_are_many() -> None:
    made = ids()

    names = {made.event(int(one), "served").trace_id for one in REQUESTS[:5_000]}

    assert len(names) == 5_000
    assert all(0 < name < 2**128 for name in names)


def test_a_batch_is_traced_if_an_event_of_it_is() -> None:
    made = ids(0.5)
    hits = made.sampled(REQUESTS)

    batch = made.batch(RANGES, REQUESTS[:10])
    assert batch is not None
    traced = sorted(REQUESTS[:10][hits[:10]].tolist())
    assert list(batch.events) == [made.event(one, "samples") for one in traced]
    assert made.batch(RANGES, REQUESTS[~hits][:50]) is None


def test_batches_of_other_ranges_are_other_traces() -> None:
    requests = np.array([7], np.uint64)
    batches = [
        ids().batch((OffsetRange(p, a, b),), requests) for p, a, b in ((0, 1, 2), (1, 1, 2), (0, 1, 3))
    ]

    assert len({batch.trace_id for batch in batches if batch is not None}) == 3


def test_a_batch_names_so_many_events_as_a_span_may_link_to() -> None:
    batch = ids().batch(RANGES, REQUESTS)

    assert batch is not None
    assert len(batch.events) == MOST_LINKS


def test_records_of_rows_are_chosen_by_their_offset() -> None:
    made, offsets = ids(0.1), np.arange(1_000, dtype=np.int64)

    chosen = made.rows(3, offsets)

    assert 50 < len(chosen) <= MOST_LINKS
    assert made.rows(3, np.array([chosen[0][0]])) == [chosen[0]], "whatever it is read with"
    assert {offset for offset, _ in made.rows(2, offsets)} != {offset for offset, _ in chosen}
