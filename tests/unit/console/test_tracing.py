"""A trace's stages by offsets: in order, also over restarts."""

from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.console.traces import STAGES, Published, Trace, Traces, furthest, offsets_of, published_by


def logged(offset: int = 7) -> Trace:
    trace = Trace("action", 2, offset, appended_ms=1_000)
    trace.logged(1_004)
    return trace


def test_stages_are_reached_in_order_and_measured_from_the_log() -> None:
    trace = logged()
    trace.joined(7, 40, 1_010)
    assert "joined" not in trace.stages, "the commit is before the action"
    trace.joined(8, 41, 1_020)
    trace.trained({2: 40}, {2: 40}, {0: 5}, 1_030)
    assert "trained" not in trace.stages
    trace.trained({2: 41}, {2: 40}, {0: 5}, 1_050)
    assert "published" not in trace.stages
    trace.trained({2: 41}, {2: 41}, {0: 6, 1: 3}, 1_070)
    trace.served({0: 6, 1: 2}, 1_080)
    assert "served" not in trace.stages
    trace.served({0: 6, 1: 3}, 1_090)

    assert trace.waits_for is None
    assert trace.stages == {"logged": 4, "joined": 20, "trained": 50, "published": 70, "served": 90}


def test_one_look_may_find_several_stages_reached() -> None:
    trace = logged()
    trace.joined(9, 41, 1_020)
    trace.trained({2: 50}, {2: 50}, {0: 1}, 1_030)

    assert trace.stages["trained"] == trace.stages["published"] == 30


def test_nothing_is_trained_before_the_samples_are_known() -> None:
    trace = logged()
    trace.trained({2: 10**9}, {2: 10**9}, {0: 1}, 1_030)

    assert trace.waits_for == "joined"


def test_a_trace_waits_for_a_restarted_trainer() -> None:
    trace = logged()
    trace.joined(8, 41, 1_020)
    trace.trained({}, {}, {}, 1_030)
    trace.trained({2: 41}, {}, {}, 1_040)
    assert trace.waits_for == "published"
    trace.trained({2: 30}, {2: 30}, {0: 1}, 1_050)  # a restart replays
    assert trace.waits_for == "published"
    trace.trained({2: 41}, {2: 41}, {0: 2}, 1_060)

    assert trace.stages["published"] == 60


def test_stages_never_decrease_after_a_clock_jump() -> None:
    trace = logged()
    trace.joined(8, 41, 900)
    trace.trained({2: 41}, {2: 41}, {0: 2}, 500)

    assert list(trace.stages.values()) == sorted(trace.stages.values())


def test_figures_and_failures_are_of_the_newest_traces() -> None:
    traces = Traces()
    assert traces.to_json() is None

    traces.add(logged(), 5_000, "the trainer does not answer: refused")
    first = traces.to_json()
    assert first is not None
    assert first["failed"] == {
        "at_ms": 5_000,
        "stage": "joined",
        "reason": "the trainer does not answer: refused",
    }

    for n in range(1, 31):
        trace = logged()
        trace.joined(8, 1, 1_000 + n)
        trace.trained({2: 1}, {2: 1}, {0: 1}, 1_000 + 2 * n)
        trace.served({0: 1}, 1_000 + 3 * n)
        traces.add(trace, 10_000 + n)
    found = traces.to_json()

    assert found is not None
    assert (found["n"], found["at_ms"], found["failed"]) == (20, 10_030, None)
    assert [s["stage"] for s in found["stages"]] == list(STAGES)
    served = found["stages"][-1]
    assert served["ms"] == pytest.approx(3 * 20.5)
    assert served["p90"] == pytest.approx(3 * 28.1)
    assert traces.newest == {"logged": 4, "joined": 30, "trained": 60, "published": 60, "served": 90}


def test_figures_are_read_while_a_thread_adds_traces() -> None:
    traces, stop = Traces(), threading.Event()
    trace = Trace("action", 2, 7, 0, dict.fromkeys(STAGES, 1.0))

    def add() -> None:
        while not stop.is_set():
            traces.add(trace, 5)

    adding, interval = threading.Thread(target=add), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    adding.start()
    try:
        for _ in range(3_000):
            traces.to_json()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        adding.join()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=5),
    )
)
def test_offsets_are_read_from_any_answer(value: object) -> None:
    assert all(type(p) is int and type(n) is int for p, n in offsets_of(value).items())


def test_offsets_come_with_text_or_number_as_partition() -> None:
    assert offsets_of({"0": 5, "12": 7, "x": 1, "-1": 3, "٣": 4, "2": True}) == {0: 5, 12: 7}


# --- several of a role


def shard(slices: int, applied: dict[str, int], rows_next: dict[str, int]) -> dict[str, object]:
    return {"slices": slices, "published": {"applied": applied, "rows_next": rows_next}}


def test_shards_publish_the_least_applied_and_furthest_rows() -> None:
    shards = [
        shard(40, {"0": 9, "1": 4}, {"0": 100, "1": 20}),
        shard(24, {"0": 7, "1": 5}, {"0": 90, "1": 30}),
    ]

    assert published_by(shards, 64) == Published({0: 7, 1: 4}, {0: 100, 1: 30})


def test_nothing_is_published_while_a_shard_is_silent() -> None:
    known = [shard(40, {"0": 9}, {"0": 100})]

    assert published_by(known, 64) == Published({}, {})
    assert published_by([], 64) == Published({}, {})


def test_a_shard_without_slices_delays_no_trace() -> None:
    assert published_by([shard(64, {"0": 9}, {"0": 100}), shard(0, {}, {})], 64).applied == {0: 9}


def test_a_shard_that_took_its_slices_just_now_is_waited_for() -> None:
    assert published_by([shard(60, {"0": 9}, {"0": 100}), shard(4, {}, {})], 64).applied == {}


def test_a_trainer_that_holds_its_rows_itself_speaks_alone() -> None:
    alone = {"published": {"applied": {"0": 3}, "rows_next": {"0": 8}}}

    assert published_by([alone], 0) == Published({0: 3}, {0: 8})
    assert published_by([{"slices": True, "published": "x"}], 0) == Published({}, {})


def test_ranks_have_applied_the_furthest_offsets() -> None:
    assert furthest([{0: 5, 1: 2}, {0: 4, 2: 1}]) == {0: 5, 1: 2, 2: 1}


def test_an_action_is_served_once_all_replicas_have_its_rows() -> None:
    trace = logged()
    trace.joined(8, 41, 1_020)
    trace.trained({2: 41}, {2: 41}, {0: 6}, 1_030)
    trace.served_by({}, 1_040)
    trace.served_by({"inference-0": {0: 6}, "inference-1": {0: 5}}, 1_050)
    assert trace.waits_for == "served"

    trace.served_by({"inference-0": {0: 6}, "inference-1": {0: 6}}, 1_060)

    assert trace.stages["served"] == 60
