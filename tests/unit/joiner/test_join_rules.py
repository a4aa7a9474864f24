"""Rules of the join, tested on the native core through its numpy interface."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from freshet._native import join_kept, join_sample_id
from freshet.joiner.core import Joiner, Outcome
from freshet.joiner.plan import JoinPlan, LabelPlan
from tests.fixtures.join_events import (
    Action,
    Served,
    Shown,
    actions,
    impressions,
    key_of,
    label,
    plan_of,
    shown,
)

IMPRESSION = Served("r1", ("a",), 1_000)
CLOSED = 1_000 + 1_000 + 100
"""Watermark at which the window of IMPRESSION and its grace are over."""


class Bench:
    """A joiner that gets events of one kind at a time, with increasing offsets."""

    def __init__(self, plan: JoinPlan | None = None) -> None:
        self.plan = plan or plan_of()
        self.joiner = Joiner(self.plan)
        self.offsets = {"served": 0, "shown": 0, "action": 0}

    def _take(self, role: str, n: int) -> list[int]:
        start = self.offsets[role]
        self.offsets[role] += n
        return list(range(start, start + n))

    def serve(self, *events: Served) -> list[Outcome]:
        out = self.joiner.on_served(impressions(events, self._take("served", len(events))))
        return [Outcome(o) for o in out]

    def show(self, *events: Shown) -> list[Outcome]:
        return [Outcome(o) for o in self.joiner.on_shown(shown(events, self._take("shown", len(events))))]

    def act(self, *events: Action) -> list[Outcome]:
        out = self.joiner.on_actions(actions(self.plan, events, self._take("action", len(events))))
        return [Outcome(o) for o in out]

    def take(self, watermark: int | None = None) -> list[tuple[str, int, float, float]]:
        """Return (payload, label, value, weight) of the decided samples."""
        if watermark is not None:
            self.joiner.advance(watermark)
        s = self.joiner.take_samples()
        values = zip(s.payloads, s.labels.tolist(), s.values.tolist(), s.weights.tolist(), strict=True)
        return [(p.decode(), *rest) for p, *rest in values]

    def counts(self, name: str = "click") -> dict[str, int]:
        ledger = self.joiner.ledger()
        assert set(ledger.unexplained().values()) == {0}
        return {k: v for k, v in ledger.labels[name].items() if v}

    def events(self) -> dict[str, int]:
        return {k: v for k, v in self.joiner.ledger().events.items() if v}


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_action_makes_a_positive_at_once_in_early_mode(bench: Bench) -> None:
    bench.serve(IMPRESSION)
    bench.act(Action("r1/a", 1_500))

    assert bench.take() == [("<r1|a|1000>", 0, 1.0, 1.0)]
    assert bench.counts() == {"trained_positive": 1}


def test_impression_without_action_is_negative_after_the_grace(bench: Bench) -> None:
    bench.serve(IMPRESSION)

    assert bench.take(CLOSED - 1) == []
    assert bench.counts() == {"pending": 1}
    assert bench.take(CLOSED) == [("<r1|a|1000>", 0, 0.0, 1.0)]
    assert bench.counts() == {"trained_negative": 1}


def test_early_positive_is_not_emitted_again(bench: Bench) -> None:
    bench.serve(IMPRESSION)
    bench.act(Action("r1/a", 1_500))
    bench.take()

    assert bench.take(CLOSED + 10_000) == []


RAMP_END = 1_000 + 4 * 1_100
"""Time from which positives are not held, if IMPRESSION was the first and the warm-up takes 4 waits."""


def ramped(*labels: LabelPlan, require_shown: bool = False) -> Bench:
    """A bench after its first impression, at 1,000; a wait is 1,100."""
    bench = Bench(plan_of(*labels, require_shown=require_shown, ramp=4))
    bench.serve(Served("first", ("a",), 1_000))
    return bench


def test_first_positives_are_held_until_their_windows_close() -> None:
    bench = ramped()
    bench.act(Action("first/a", 1_500))
    bench.serve(Served("r1", ("a",), 1_000))

    assert bench.take(CLOSED - 1) == []
    assert bench.counts() == {"pending": 2}
    assert not bench.joiner.due(CLOSED - 1)
    assert bench.joiner.due(CLOSED)
    assert sorted(bench.take(CLOSED)) == [("<first|a|1000>", 0, 1.0, 0.75), ("<r1|a|1000>", 0, 0.0, 1.0)]
    assert bench.counts() == {"trained_positive": 1, "trained_negative": 1}


def test_later_positives_are_held_shorter_with_lower_weight() -> None:
    bench = ramped()
    half = 1_000 + 2 * 1_100
    bench.serve(Served("r1", ("a",), half))
    bench.act(Action("r1/a", half + 100))

    assert [p for p, *_ in bench.take(half + 549)] == ["<first|a|1000>"]
    assert bench.joiner.due(half + 550)
    assert bench.take(half + 550) == [("<r1|a|3200>", 0, 1.0, 0.75)]


def test_positives_after_the_warm_up_are_emitted_at_once() -> None:
    bench = ramped()
    bench.serve(Served("r1", ("a",), RAMP_END - 4), Served("r2", ("a",), RAMP_END))
    bench.act(Action("r1/a", RAMP_END - 4), Action("r2/a", RAMP_END))

    assert bench.take() == [("<r2|a|5400>", 0, 1.0, 1.0)]


def test_positive_after_its_hold_has_full_weight() -> None:
    bench = ramped()
    bench.serve(Served("r1", ("a",), 3_200))
    bench.act(Action("r1/a", 3_200 + 550))

    assert bench.take() == [("<r1|a|3200>", 0, 1.0, 1.0)]


def test_positive_read_after_its_hold_has_a_held_weight() -> None:
    bench = ramped()
    bench.serve(Served("r1", ("a",), 3_200))
    bench.take(3_800)
    bench.act(Action("r1/a", 3_300))

    assert bench.take() == [("<r1|a|3200>", 0, 1.0, 0.75)]


def test_impression_before_the_first_is_held_like_the_first() -> None:
    bench = ramped()
    bench.serve(Served("r1", ("a",), 900))
    bench.act(Action("r1/a", 950))

    assert bench.take(1_999) == []
    assert bench.take(2_000) == [("<r1|a|900>", 0, 1.0, 0.75)]


def test_conditional_label_is_held_by_the_longer_wait() -> None:
    bench = ramped(label("click"), label("buy", 3_000, given=0))
    bench.act(Action("first/a", 1_200), Action("first/a", 1_300, "buy"))

    assert bench.take(CLOSED - 1) == []
    assert bench.take(CLOSED) == [("<first|a|1000>", 0, 1.0, 0.75)]
    assert bench.take(4_099) == []
    assert bench.take(4_100) == [("<first|a|1000>", 1, 1.0, 0.75)]


def test_weight_of_a_held_positive_follows_its_last_condition() -> None:
    bench = ramped(label("click"), label("buy", 1_000, given=0), require_shown=True)
    for request, click, seen in (("r1", 3_800, 3_300), ("r2", 3_300, 3_800), ("r3", 3_300, 3_300)):
        bench.serve(Served(request, ("a",), 3_200))
        bench.act(Action(f"{request}/a", 3_250, "buy"), Action(f"{request}/a", click))
        bench.show(Shown(f"{request}/a", seen))

    assert bench.take() == [(f"<{r}|a|3200>", n, 1.0, 1.0) for r in ("r1", "r2") for n in (0, 1)]
    assert bench.take(3_750) == [("<r3|a|3200>", n, 1.0, 0.75) for n in (0, 1)]


def test_numeric_labels_and_window_emission_have_no_warm_up() -> None:
    number = ramped(label("watch", value="sum(action.amount)"))
    number.act(Action("first/a", 1_500, "watch", amount=3.0))
    window = Bench(plan_of(early=False, ramp=4))
    window.serve(IMPRESSION)
    window.act(Action("r1/a", 1_500))

    assert number.take(CLOSED) == [("<first|a|1000>", 0, 3.0, 1.0)]
    assert window.take(CLOSED) == [("<r1|a|1000>", 0, 1.0, 1.0)]


@pytest.mark.parametrize("ramp", [2, 4])
@pytest.mark.parametrize("delay", [50, 400, 900])
def test_positives_and_negatives_balance_from_the_start(delay: int, ramp: int) -> None:
    """Every tenth impression is clicked after `delay`; samples are checked as they are emitted."""
    bench = Bench(plan_of(ramp=ramp))
    weights = {0.0: 0.0, 1.0: 0.0}
    for now in range(1_000, 8_000, 10):
        bench.serve(Served(f"r{now}", ("a",), now))
        clicked = now - delay
        if clicked >= 1_000 and clicked % 100 == 0:
            bench.act(Action(f"r{clicked}/a", now))
        for _, _, value, weight in bench.take(now):
            weights[value] += weight
        if now >= 3_000:
            assert 0.09 < weights[1.0] / (weights[0.0] + weights[1.0]) < 0.11


def test_rebuilt_state_holds_the_same_positives() -> None:
    bench = Bench(plan_of(ramp=4))
    bench.joiner.begin_at(1_000)
    bench.serve(Served("r1", ("a",), 3_200))
    bench.act(Action("r1/a", 3_300))

    assert bench.joiner.began_ms == 1_000
    assert bench.take(3_749) == []
    assert len(bench.take(3_750)) == 1


def test_window_mode_emits_by_impression_time() -> None:
    bench = Bench(plan_of(early=False))
    bench.serve(Served("r2", ("b",), 1_010), Served("r1", ("a",), 1_000))
    bench.act(Action("r2/b", 1_500))

    assert bench.take() == []
    assert bench.take(CLOSED + 10) == [("<r1|a|1000>", 0, 0.0, 1.0), ("<r2|b|1010>", 0, 1.0, 1.0)]


def test_an_action_that_comes_before_its_impression_waits_for_it(bench: Bench) -> None:
    assert bench.act(Action("r1/a", 1_500)) == [Outcome.WAITING]
    bench.serve(IMPRESSION)

    assert bench.take() == [("<r1|a|1000>", 0, 1.0, 1.0)]
    assert bench.events() == {"impressions": 1, "actions_matched": 1}


def test_action_without_impression_is_orphan_after_the_grace(bench: Bench) -> None:
    bench.act(Action("nobody", 1_500))
    bench.joiner.advance(1_599)
    assert bench.events() == {}
    bench.joiner.advance(1_600)
    assert bench.events() == {"actions_orphan": 1}
    bench.joiner.advance(1_500 + bench.joiner.horizon_ms)

    assert bench.joiner.ids == 0
    assert bench.joiner.ledger().waiting == 0
    assert bench.events() == {"actions_orphan": 1}


def test_impression_after_its_orphaned_action_is_positive(bench: Bench) -> None:
    bench.act(Action("r1/a", 1_500))
    bench.joiner.advance(1_700)
    bench.serve(IMPRESSION)

    assert bench.take() == [("<r1|a|1000>", 0, 1.0, 1.0)]
    assert bench.events() == {"impressions": 1, "actions_orphan": 1}


def test_an_action_in_the_window_counts_during_the_grace(bench: Bench) -> None:
    bench.serve(IMPRESSION)
    bench.joiner.advance(CLOSED - 1)
    bench.act(Action("r1/a", 2_000))

    assert bench.counts() == {"trained_positive": 1}


def test_an_action_after_its_impression_was_decided_is_late(bench: Bench) -> None:
    bench.serve(IMPRESSION)
    bench.joiner.advance(CLOSED)

    assert bench.act(Action("r1/a", 2_000)) == [Outcome.LATE]
    assert bench.counts() == {"trained_negative": 1}


def test_an_action_after_the_window_does_not_count(bench: Bench) -> None:
    bench.serve(IMPRESSION)

    assert bench.act(Action("r1/a", 2_001)) == [Outcome.AFTER_WINDOW]
    assert bench.counts() == {"pending": 1}
    bench.joiner.advance(2_200)
    assert bench.events() == {"impressions": 1, "actions_orphan": 1}


def test_action_dated_before_its_impression_counts_within_grace(bench: Bench) -> None:
    bench.serve(IMPRESSION, Served("r2", ("a",), 1_000))

    assert bench.act(Action("r1/a", 900), Action("r2/a", 899)) == [Outcome.NEW, Outcome.OUT_OF_WINDOW]
    assert bench.counts() == {"trained_positive": 1, "pending": 1}


def test_second_served_event_of_an_id_is_a_duplicate(bench: Bench) -> None:
    bench.serve(IMPRESSION)

    assert bench.serve(IMPRESSION) == [Outcome.DUPLICATE]
    assert bench.serve(Served("r1", ("a", "b"), 1_001)) == [Outcome.LATER_DUPLICATE, Outcome.NEW]
    assert bench.counts() == {"pending": 2}
    assert bench.events() == {"impressions": 2, "impressions_repeated": 2}


def test_a_repeated_action_does_not_count_twice() -> None:
    bench = Bench(plan_of(label("watch", value="sum(action.amount)")))
    bench.serve(IMPRESSION)
    assert bench.act(Action("r1/a", 1_500, "watch", "x", 3.0)) == [Outcome.NEW]
    assert bench.act(Action("r1/a", 1_500, "watch", "x", 3.0)) == [Outcome.DUPLICATE]
    assert bench.act(Action("r1/a", 1_600, "watch", "x", 3.0)) == [Outcome.LATER_DUPLICATE]

    assert bench.take(CLOSED) == [("<r1|a|1000>", 0, 3.0, 1.0)]


def test_ids_are_known_until_the_horizon(bench: Bench) -> None:
    horizon = bench.joiner.horizon_ms
    bench.serve(IMPRESSION)
    bench.joiner.advance(1_000 + horizon - 1)
    assert bench.serve(IMPRESSION) == [Outcome.DUPLICATE]
    bench.joiner.advance(1_000 + horizon)

    assert bench.serve(IMPRESSION) == [Outcome.LATE]
    assert bench.act(Action("r1/a", 1_000)) == [Outcome.LATE]
    assert bench.counts() == {"trained_negative": 1, "late": 1}


def test_a_late_impression_keeps_its_bytes_and_has_no_value(bench: Bench) -> None:
    bench.joiner.advance(1_000_000)
    bench.serve(Served("r1", ("a", "b"), 1_000))

    late = bench.joiner.take_late_samples()
    assert list(late.payloads) == [b"<r1|a|1000>", b"<r1|b|1000>"]
    assert np.isnan(late.values).all()
    assert bench.take() == []


def test_impression_not_shown_is_dropped_if_required() -> None:
    bench = Bench(plan_of(require_shown=True))
    bench.serve(Served("r1", ("a", "b", "c"), 1_000))
    bench.act(Action("r1/a", 1_500), Action("r1/c", 1_500))
    assert bench.take() == []
    bench.show(Shown("r1/a", 1_600), Shown("r1/b", 1_600))

    assert bench.take() == [("<r1|a|1000>", 0, 1.0, 1.0)]
    assert bench.take(CLOSED) == [("<r1|b|1000>", 0, 0.0, 1.0)]
    assert bench.counts() == {"trained_positive": 1, "trained_negative": 1, "not_shown": 1}


def test_a_shown_event_may_come_before_its_impression() -> None:
    bench = Bench(plan_of(require_shown=True))
    bench.show(Shown("r1/a", 1_001), Shown("nobody", 1_001))
    bench.serve(IMPRESSION)

    assert bench.take(CLOSED) == [("<r1|a|1000>", 0, 0.0, 1.0)]
    assert bench.events() == {"impressions": 1, "shown_matched": 1, "shown_orphan": 1}


def test_a_shown_event_is_in_time_after_an_action_taught_early() -> None:
    bench = Bench(plan_of())
    bench.serve(IMPRESSION)
    bench.act(Action("r1/a", 1_500))
    assert bench.take() == [("<r1|a|1000>", 0, 1.0, 1.0)]
    bench.show(Shown("r1/a", 1_400))

    assert bench.events() == {"impressions": 1, "actions_matched": 1, "shown_matched": 1}


def test_conditional_label_is_emitted_only_if_its_given_is_true() -> None:
    bench = Bench(plan_of(label("click"), label("buy", 3_000, given=0)))
    bench.serve(Served("r1", ("a", "b", "c"), 1_000))
    bench.act(Action("r1/a", 1_200), Action("r1/b", 1_200), Action("r1/a", 3_900, "buy"))
    bench.act(Action("r1/c", 1_300, "buy"))
    bench.joiner.advance(4_100)

    assert bench.counts("click") == {"trained_positive": 2, "trained_negative": 1}
    assert bench.counts("buy") == {"trained_positive": 1, "trained_negative": 1, "given_false": 1}


def test_a_positive_given_another_waits_until_that_one_is_true() -> None:
    bench = Bench(plan_of(label("click"), label("buy", 3_000, given=0)))
    bench.serve(IMPRESSION)
    bench.act(Action("r1/a", 1_300, "buy"))
    assert bench.take() == []
    bench.act(Action("r1/a", 1_250))

    assert [(kind, value) for _, kind, value, _ in bench.take()] == [(0, 1.0), (1, 1.0)]


def test_label_waits_for_the_longer_window_of_its_given() -> None:
    bench = Bench(plan_of(label("click", 3_000), label("buy", 1_000, given=0)))
    bench.serve(IMPRESSION)
    bench.joiner.advance(CLOSED)
    assert bench.counts("buy") == {"pending": 1}
    bench.act(Action("r1/a", 3_500))
    bench.joiner.advance(4_100)

    assert bench.counts("buy") == {"trained_negative": 1}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("sum(action.amount)", 6.0),
        ("max(action.amount)", 3.0),
        ("min(action.amount)", 1.0),
        ("last(action.amount)", 1.0),
        ("count()", 4.0),
        ("count(action.amount)", 3.0),
        ("action.amount", 1.0),
        ("sum(action.amount) / count()", 1.5),
    ],
)
def test_numeric_label_aggregates_all_actions_of_the_window(value: str, expected: float) -> None:
    bench = Bench(plan_of(label("watch", value=value)))
    bench.serve(IMPRESSION)
    for time, amount in ((1_500, 3.0), (1_800, 1.0), (1_200, 2.0), (1_900, None)):
        bench.act(Action("r1/a", time, "watch", amount=amount))
    assert bench.take() == []

    assert bench.take(CLOSED) == [("<r1|a|1000>", 0, expected, 1.0)]


def test_numbers_do_not_depend_on_order_of_action_and_impression() -> None:
    plan = plan_of(label("watch", value="sum(action.amount) + last(action.amount)"))
    deeds = [Action("r1/a", 1_500, "watch", amount=0.1), Action("r1/a", 1_100, "watch", amount=0.7)]
    before, after = Bench(plan), Bench(plan)
    before.act(*deeds)
    before.serve(IMPRESSION)
    after.serve(IMPRESSION)
    after.act(*deeds)

    [one], [other] = before.take(CLOSED), after.take(CLOSED)
    assert one == other
    assert one[2] == np.float32(0.1 + 0.7 + 0.1)


def test_a_label_without_a_number_is_not_trained_and_counted() -> None:
    bench = Bench(plan_of(label("watch", value="max(action.amount)")))
    bench.serve(Served("r1", ("a", "b", "c"), 1_000))
    bench.act(Action("r1/a", 1_500, "watch", amount=2.0), Action("r1/b", 1_500, "watch", amount=None))

    assert bench.take(CLOSED) == [("<r1|a|1000>", 0, 2.0, 1.0)]
    assert bench.counts("watch") == {"trained_positive": 1, "no_value": 2}


def test_a_value_out_of_bounds_is_not_trained_and_counted_apart() -> None:
    bench = Bench(plan_of(replace(label("watch", value="sum(action.amount)"), bounds=(0.0, 0.1))))
    bench.serve(Served("r1", ("a", "b", "c", "d", "e"), 1_000))
    amounts = {"a": 0.1, "b": 1e18, "c": -0.1, "d": 1e300}  # nothing is done with e: its sum is 0
    bench.act(*(Action(f"r1/{item}", 1_500, "watch", amount=x) for item, x in amounts.items()))

    taken = [("<r1|a|1000>", 0, float(np.float32(0.1)), 1.0), ("<r1|e|1000>", 0, 0.0, 1.0)]
    assert sorted(bench.take(CLOSED)) == taken
    assert bench.counts("watch") == {"trained_positive": 1, "trained_negative": 1, "no_value": 3}
    assert set(bench.joiner.ledger().unexplained().values()) == {0}
    assert bench.joiner.take_out_of_bounds() == {"watch": 3}
    assert bench.joiner.take_out_of_bounds() == {"watch": 0}


def test_a_truth_out_of_the_bounds_of_a_label_is_not_trained() -> None:
    bench = Bench(plan_of(replace(label("click"), bounds=(0.5, 5.0))))
    bench.serve(Served("r1", ("a", "b"), 1_000))
    bench.act(Action("r1/a", 1_500, "click"))

    assert bench.take(CLOSED) == [("<r1|a|1000>", 0, 1.0, 1.0)]
    assert bench.counts("click") == {"trained_positive": 1, "no_value": 1}


def test_negatives_are_sampled_by_id_and_weighted() -> None:
    bench = Bench(plan_of(negatives=0.25))
    items = tuple(f"i{n}" for n in range(400))
    bench.serve(Served("r1", items, 1_000))
    bench.act(*(Action(f"r1/i{n}", 1_500) for n in range(0, 400, 4)))
    bench.joiner.advance(CLOSED)
    got = bench.take()

    negatives = {p for p, _, value, _ in got if value == 0.0}
    expected = set()
    for n in range(400):
        if n % 4 and join_kept(join_sample_id(*key_of(f"r1/i{n}"), 0), 0.25):
            expected.add(f"<r1|i{n}|1000>")
    assert negatives == expected
    assert {w for _, _, value, w in got if value == 0.0} == {4.0}
    assert sum(value == 1.0 for _, _, value, _ in got) == 100
    assert bench.counts() == {
        "trained_positive": 100,
        "trained_negative": len(expected),
        "sampled_out": 300 - len(expected),
    }
    assert 40 < len(expected) < 110


def test_samples_of_a_request_are_together_in_item_order() -> None:
    bench = Bench(plan_of(label("click"), label("buy"), early=False))
    bench.serve(Served("r1", ("b", "a"), 1_000), Served("r2", ("c",), 1_001), Served("r1", ("z",), 1_002))

    assert [(p, kind) for p, kind, _, _ in bench.take(CLOSED + 2)] == [
        ("<r1|b|1000>", 0),
        ("<r1|b|1000>", 1),
        ("<r1|a|1000>", 0),
        ("<r1|a|1000>", 1),
        ("<r1|z|1002>", 0),
        ("<r1|z|1002>", 1),
        ("<r2|c|1001>", 0),
        ("<r2|c|1001>", 1),
    ]


def test_an_action_that_matches_no_label_is_counted(bench: Bench) -> None:
    assert bench.act(Action("r1/a", 1_500, "buy")) == [Outcome.NO_LABEL]
    assert bench.events() == {"actions_no_label": 1}
    assert bench.joiner.ids == 0


def test_a_second_click_changes_nothing(bench: Bench) -> None:
    bench.serve(IMPRESSION)

    assert bench.act(Action("r1/a", 1_200), Action("r1/a", 1_300)) == [Outcome.NEW, Outcome.ALREADY_TRUE]
    assert len(bench.take()) == 1


def test_payload_memory_is_released_after_decisions() -> None:
    bench = Bench(plan_of(label("click", 200)))
    item = "x" * 1_000
    peak = 0
    for n in range(5_000):
        bench.serve(Served(f"r{n}", (item,), 1_000 + n))
        bench.joiner.advance(1_000 + n)
        bench.joiner.take_samples()
        peak = max(peak, bench.joiner.payload_bytes)

    assert peak < 2_000_000
    assert bench.counts() == {"trained_negative": 4_700, "pending": 300}


def test_a_restart_needs_what_the_remembered_ids_cover(bench: Bench) -> None:
    remembered = bench.joiner.horizon_ms + 1_000
    bench.serve(*(Served(f"r{n}", ("a",), 1_000 + 100 * n) for n in range(10)))
    assert bench.joiner.low("served", 10) == 0
    assert bench.joiner.low("action", 7) == 7
    bench.joiner.advance(1_000 + 350 + remembered)
    assert bench.joiner.low("served", 10) == 4
    bench.joiner.advance(10_000 + remembered)
    assert bench.joiner.low("served", 10) == 10


@pytest.mark.parametrize(
    "broken", ["prefix_ends", "suffix_begins", "ends", "element_ends", "begins", "element_begins"]
)
@pytest.mark.parametrize("value", [-1, 10**12, -(2**62)])
def test_spans_outside_the_data_are_refused_and_change_nothing(bench: Bench, broken: str, value: int) -> None:
    batch = impressions([IMPRESSION])
    getattr(batch, broken)[0] = value

    with pytest.raises(ValueError, match="must"):
        bench.joiner.on_served(batch)
    assert bench.events() == {}


@pytest.mark.parametrize("change", [{"grace_ms": -1}, {"negatives": 0.0}, {"negatives": 1.5}, {"ramp": 1}])
def test_a_plan_that_makes_no_sense_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        Joiner(plan_of(**change))  # type: ignore[arg-type]


def test_labels_given_each_other_in_a_circle_are_refused() -> None:
    with pytest.raises(ValueError, match="circle"):
        Joiner(plan_of(label("click", given=1), label("buy", given=0)))
