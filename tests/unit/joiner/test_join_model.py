"""Native join against the reference join, on random events."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.joiner.core import REPLAY_EXCLUDED, Joiner
from freshet.joiner.plan import JoinPlan
from tests.fixtures.effort import examples
from tests.fixtures.join_events import (
    Action,
    Event,
    Served,
    Shown,
    actions,
    impressions,
    label,
    plan_of,
    shown,
)
from tests.unit.joiner.oracle import Oracle

PLANS = st.builds(
    lambda labels, grace, require, early, negatives, ramp: plan_of(
        *labels, grace_ms=grace, require_shown=require, early=early, negatives=negatives, ramp=ramp
    ),
    st.sampled_from(
        [
            (label("click", 30),),
            (label("click", 30), label("buy", 90, given=0)),
            (label("click", 90), label("buy", 20, given=0)),
            (label("buy", 20, given=1), label("click", 60)),
            (label("watch", 50, value="sum(action.amount)"), label("click", 20, given=0)),
            (label("watch", 50, value="last(action.amount)"), label("click", 20)),
            (label("watch", 50, value="max(action.amount)"), label("buy", 70, given=0)),
        ]
    ),
    st.sampled_from([0, 10, 40]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1.0, 0.5]),
    st.sampled_from([0, 2, 3, 4]),
)

ITEMS = st.sampled_from(["a", "b", "c"])
REQUESTS = st.sampled_from(["r", "s", "t"])
TIMES = st.integers(0, 400)
NAMES = st.builds(lambda r, i: f"{r}/{i}", REQUESTS, ITEMS)
EVENTS = st.one_of(
    st.builds(
        lambda r, i, t: Served(r, tuple(i), t), REQUESTS, st.lists(ITEMS, min_size=1, max_size=4), TIMES
    ),
    st.builds(Shown, NAMES, TIMES),
    st.builds(
        lambda n, t, y, i, a: Action(n, t, y, f"e{i}", a),
        NAMES,
        TIMES,
        st.sampled_from(["click", "watch", "buy"]),
        st.integers(0, 30),
        st.none() | st.integers(-3, 9).map(float),
    ),
)
STEPS = st.lists(st.tuples(st.lists(EVENTS, max_size=12), st.integers(-5, 60)), max_size=12)


class Native:
    """The joiner, with batches as the service makes them."""

    def __init__(self, plan: JoinPlan) -> None:
        self.plan, self.joiner = plan, Joiner(plan)
        self.next = {Served: 0, Shown: 0, Action: 0}

    def feed(self, events: list[Event]) -> None:
        """Join runs of one kind, one batch each."""
        while events:
            kind = type(events[0])
            n = next((i for i, e in enumerate(events) if type(e) is not kind), len(events))
            run, events = events[:n], events[n:]
            offsets = list(range(self.next[kind], self.next[kind] + n))
            self.next[kind] += n
            if kind is Served:
                self.joiner.on_served(impressions(run, offsets))  # type: ignore[arg-type]
            elif kind is Shown:
                self.joiner.on_shown(shown(run, offsets))  # type: ignore[arg-type]
            else:
                self.joiner.on_actions(actions(self.plan, run, offsets))  # type: ignore[arg-type]

    def take(self) -> list[tuple[str, int, float, float]]:
        s = self.joiner.take_samples()
        columns = (s.labels.tolist(), s.values.tolist(), s.weights.tolist())
        return sorted((p.decode(), *rest) for p, *rest in zip(s.payloads, *columns, strict=True))


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(PLANS, STEPS)
def test_the_native_join_does_what_the_plain_one_does(
    plan: JoinPlan, steps: list[tuple[list[Event], int]]
) -> None:
    native, oracle, w = Native(plan), Oracle(plan), 0
    for events, ahead in steps:
        native.feed(list(events))
        for event in events:
            {Served: oracle.serve, Shown: oracle.show, Action: oracle.act}[type(event)](event)  # type: ignore[operator]
        w += ahead
        native.joiner.advance(w)
        oracle.advance(w)
        assert native.take() == oracle.take()
    assert sorted(p.decode() for p in native.joiner.take_late_samples().payloads) == sorted(
        oracle.late * len(plan.labels)
    )
    ledger = native.joiner.ledger()
    assert {k: v for k, v in ledger.events.items() if v} == {k: v for k, v in oracle.counts.items() if v}
    assert set(ledger.unexplained().values()) <= {0}
    for counts, expected in zip(ledger.labels.values(), oracle.labels, strict=True):
        assert {k: v for k, v in counts.items() if v and k != "pending"} == dict(expected)
    assert ledger.waiting == sum(map(len, oracle.waiting.values()))
    native.joiner.advance(10_000)
    assert native.joiner.ids == 0


@settings(max_examples=examples(150), deadline=None)
@given(PLANS, STEPS, st.randoms(use_true_random=False))
def test_order_of_streams_between_watermarks_does_not_matter(
    plan: JoinPlan, steps: list[tuple[list[Event], int]], chance: random.Random
) -> None:
    one, other, w = Native(plan), Native(plan), 0
    for events, ahead in steps:
        one.feed(list(events))
        streams = [[e for e in events if type(e) is kind] for kind in (Action, Served, Shown)]
        mixed: list[Event] = []
        while any(streams):
            mixed.append(chance.choice([s for s in streams if s]).pop(0))
        other.feed(mixed)
        w += ahead
        one.joiner.advance(w)
        other.joiner.advance(w)
        a, b = one.joiner.take_samples(), other.joiner.take_samples()
        assert (list(a.payloads), a.ids.tolist(), a.values.tolist()) == (
            list(b.payloads),
            b.ids.tolist(),
            b.values.tolist(),
        )
    assert one.joiner.ledger() == other.joiner.ledger()


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(PLANS, STEPS, st.lists(EVENTS, max_size=15), st.integers(0, 300))
def test_state_rebuilt_from_low_offsets_equals_the_old_one(
    plan: JoinPlan, steps: list[tuple[list[Event], int]], later: list[Event], ahead: int
) -> None:
    """A restart without a log: events before `low` are gone, and excluded events are skipped."""
    live, w = Native(plan), 0
    history: list[tuple[list[tuple[Event, int, list[int]]], int]] = []
    for events, by in steps:
        fed = []
        for event in events:
            offset = live.next[type(event)]
            live.next[type(event)] += 1
            outcomes = _feed_one(live, event, offset)
            fed.append((event, offset, outcomes))
        w += by
        live.joiner.advance(w)
        live.joiner.discard()
        history.append((fed, w))
    low = {
        kind: live.joiner.low(role, live.next[kind])
        for kind, role in ((Served, "served"), (Shown, "shown"), (Action, "action"))
    }
    rebuilt = Native(plan)
    if live.joiner.began_ms is not None:
        rebuilt.joiner.begin_at(live.joiner.began_ms)
    rebuilt.next = dict(live.next)
    for fed, at in history:
        for event, offset, skipped in fed:
            if offset >= low[type(event)]:
                _feed_one(rebuilt, event, offset, skipped)
        rebuilt.joiner.advance(at)
        rebuilt.joiner.discard()
    before, after = live.joiner.ledger(), rebuilt.joiner.ledger()
    assert {k: v["pending"] for k, v in before.labels.items()} == {
        k: v["pending"] for k, v in after.labels.items()
    }
    rebuilt.joiner.set_counters(before)
    for one in (live, rebuilt):
        one.feed(list(later))
        one.joiner.advance(w + ahead)
    assert live.take() == rebuilt.take()
    for one in (live, rebuilt):
        one.joiner.advance(10_000)
    end, again = live.joiner.ledger(), rebuilt.joiner.ledger()
    assert end.labels == again.labels
    for stream in (
        "impressions",
        "actions",
        "shown",
    ):  # each event is counted once, if not always as the same
        assert _sum_of(end.events, stream) == _sum_of(again.events, stream)


def _sum_of(events: Mapping[str, int], stream: str) -> int:
    return sum(count for name, count in events.items() if name.startswith(stream))


def _feed_one(native: Native, event: Event, offset: int, skipped: list[int] | None = None) -> list[int]:
    """Join one event without excluded elements; returns the elements that a replay must exclude."""
    if isinstance(event, Served):
        batch = impressions([event], [offset])
        take = batch.where(~np.isin(batch.places[1], skipped or []))
        outcomes = native.joiner.on_served(take)
    elif isinstance(event, Shown):
        if skipped:
            return []
        outcomes = native.joiner.on_shown(shown([event], [offset]))
    else:
        if skipped:
            return []
        outcomes = native.joiner.on_actions(actions(native.plan, [event], [offset]))
    return np.flatnonzero(np.isin(outcomes, REPLAY_EXCLUDED)).tolist() if skipped is None else []
