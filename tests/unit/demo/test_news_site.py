"""The simulated site: draws do not depend on their order, and probabilities are as stated."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from freshet.demo.news_site import LONGEST_CLICK_S, Draws, DriftPlan, NewsSite, SiteOptions
from freshet.types import F64

SMALL = SiteOptions(users=20, items=60, candidates=6, shown=4)


def alike(one: F64, other: F64) -> float:
    """Return the correlation of two (T,) tastes."""
    return float(np.corrcoef(one, other)[0, 1])


def clicks_by_position(site: NewsSite, visits: int) -> F64:
    """(K,) float64: share of clicks at each position, in random orders."""
    clicked = []
    for number in range(visits):
        visit = site.visit(number, 10.0)
        shown = np.random.default_rng(number).permutation(len(visit.items))[: site.options.shown]
        clicked.append(site.reactions(visit, shown).clicked)
    share: F64 = np.mean(clicked, axis=0)
    return share


def test_visit_does_not_depend_on_earlier_draws() -> None:
    one, other = NewsSite(3), NewsSite(3)
    for number in (9, 2, 5):
        other.visit(number, 77.0)

    first, second = one.visit(5, 40.0), other.visit(5, 40.0)

    assert (first.user, first.device, first.hour) == (second.user, second.device, second.hour)
    assert first.items.tolist() == second.items.tolist()
    assert first.attraction.tolist() == second.attraction.tolist()


def test_reactions_do_not_depend_on_earlier_draws() -> None:
    site = NewsSite(3)
    visit, shown = site.visit(5, 40.0), np.arange(10)
    first = site.reactions(visit, shown)
    site.reactions(site.visit(6, 41.0), shown[::-1])

    again = site.reactions(visit, shown)

    assert again.clicked.tolist() == first.clicked.tolist()
    assert again.click_after_s.tolist() == first.click_after_s.tolist()
    assert again.bought.tolist() == first.bought.tolist()


def test_another_seed_gives_other_visits() -> None:
    visits = [NewsSite(seed).visit(0, 0.0) for seed in (1, 2)]

    assert visits[0].items.tolist() != visits[1].items.tolist()
    assert visits[0].attraction.tolist() != visits[1].attraction.tolist()


def test_draws_are_the_same_one_by_one_and_together() -> None:
    draws = Draws(7)

    together = draws.uniform("click", 3, np.arange(5))

    assert together.tolist() == [draws.uniform("click", 3, n)[0] for n in range(5)]
    assert draws.uniform("other", 3, np.arange(5)).tolist() != together.tolist()


def test_draws_are_uniform_and_normal() -> None:
    uniform, normal = Draws(1).uniform("u", np.arange(100_000)), Draws(1).normal("n", np.arange(100_000))

    assert np.histogram(uniform, 10, (0, 1))[0] == pytest.approx(10_000, rel=0.05)
    assert (normal.mean(), normal.std()) == pytest.approx((0.0, 1.0), abs=0.02)


@pytest.mark.parametrize("number", range(5))
def test_no_order_of_the_candidates_is_better_than_the_best(number: int) -> None:
    site = NewsSite(11, options=SMALL)
    visit = site.visit(number, 12.0)

    orders = itertools.permutations(range(SMALL.candidates), SMALL.shown)
    best = max(float(site.expected(visit, np.array(order)).sum()) for order in orders)

    assert site.best(visit) == pytest.approx(best, rel=1e-12)


def test_clicks_are_as_frequent_as_expected() -> None:
    site, visits = NewsSite(5), 2_000
    expected = clicks = 0.0
    for number in range(visits):
        visit = site.visit(number, number / 100)
        shown = np.arange(site.options.shown)
        expected += float(site.expected(visit, shown).sum())
        clicks += float(site.reactions(visit, shown).clicked.sum())

    assert clicks == pytest.approx(expected, abs=4 * expected**0.5)


def test_clicks_fall_with_position() -> None:
    shares = clicks_by_position(NewsSite(5), 2_000)

    assert shares[0] > 1.3 * shares[2] > 1.3 * shares[9]


def test_most_items_shown_are_not_clicked_and_readers_differ() -> None:
    site = NewsSite(5)
    visits = [site.visit(number, 30.0) for number in range(1_000)]
    best = np.mean([site.best(v) for v in visits]) / 10
    random = np.mean([site.expected(v, np.arange(10)).sum() for v in visits]) / 10  # as drawn

    assert 0.02 < random < 0.06
    assert 2.5 < best / random < 4.0


def test_candidates_are_different_items_of_the_catalogue() -> None:
    site = NewsSite(2)
    for number in range(200):
        visit = site.visit(number, 90.0)
        first, stop = site.catalogue(90.0)

        assert len(set(visit.items.tolist())) == site.options.candidates
        assert (visit.items >= first).all()
        assert (visit.items < stop).all()
        assert (visit.ages_s >= 0).all()


def test_item_does_not_depend_on_earlier_draws() -> None:
    late = np.array([20_000])
    fresh, grown = NewsSite(2).items, NewsSite(2).items
    grown.topic(np.arange(30_000))

    for items in (late, np.array([3]), np.array([4_000, 5_000])):
        assert fresh.topic(items).tolist() == grown.topic(items).tolist()
        assert fresh.format(items).tolist() == grown.format(items).tolist()
        assert fresh.quality(items).tolist() == grown.quality(items).tolist()
        assert fresh.price(items).tolist() == grown.price(items).tolist()


def test_catalogue_keeps_its_size() -> None:
    site = NewsSite(2)
    before, after = site.catalogue(0.0), site.catalogue(100.0)

    assert before == (0, 2_000)
    assert after == (100, 2_100)
    assert site.age_s(np.array([1_999, 2_099]), 100.0).tolist() == [100.0, 0.0]


def test_delays_of_clicks_and_purchases_are_bounded() -> None:
    site = NewsSite(5)
    for number in range(500):
        visit = site.visit(number, 0.0)
        reactions = site.reactions(visit, np.arange(10))

        assert (reactions.click_after_s <= LONGEST_CLICK_S).all()
        bought = reactions.bought
        assert (reactions.purchase_after_s[bought] > reactions.click_after_s[bought] + 0.9).all()
        assert not (reactions.bought & ~reactions.clicked).any()


def test_abrupt_drift_changes_tastes_of_many_readers() -> None:
    still, drifting = NewsSite(4), NewsSite(4, DriftPlan((60.0,)))
    readers = range(still.options.users)

    def correlation(time_s: float, reader: int) -> float:
        return alike(still.tastes.log_odds(reader, time_s), drifting.tastes.log_odds(reader, time_s))

    assert all(correlation(59.9, reader) == pytest.approx(1.0) for reader in readers)
    changed = np.mean([correlation(60.0, reader) < 0.9 for reader in readers])
    assert 0.5 < changed < 0.9


def test_clicks_of_best_order_stay_level_over_drift() -> None:
    site = NewsSite(4, DriftPlan((60.0,)))

    before, after = (np.mean([site.best(site.visit(n, at)) for n in range(1_000)]) for at in (59.0, 61.0))

    assert after == pytest.approx(before, rel=0.12)


def test_tastes_drift_slowly_all_the_time() -> None:
    tastes = NewsSite(4).tastes
    now, soon, later = (tastes.log_odds(0, at) for at in (0.0, 30.0, 1_350.0))

    assert alike(now, soon) > 0.99
    assert alike(now, later) < 0.6


@pytest.mark.parametrize(("time_s", "passed"), [(0, 0), (149.9, 0), (150, 1), (449, 1), (450, 2), (1_050, 4)])
def test_drifts_repeat_at_their_interval(time_s: float, passed: int) -> None:
    assert DriftPlan((150.0,), 300.0).passed(time_s) == passed


def test_each_drift_has_its_time() -> None:
    plan = DriftPlan((20.0, 50.0), 100.0)

    assert [plan.time_s(number) for number in (1, 2, 3, 4)] == [20.0, 50.0, 150.0, 250.0]
