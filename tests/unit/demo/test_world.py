"""The demo's world: the same whatever is asked first, and as plausible as it claims to be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from freshet.demo.draws import Draws
from freshet.demo.world import LONGEST_CLICK_S, DriftPlan, World, WorldOptions
from freshet.types import F64

SMALL = WorldOptions(users=20, items=60, candidates=6, shown=4)


def alike(one: F64, other: F64) -> float:
    """Correlation of two tastes over topics."""
    return float(np.corrcoef(one, other)[0, 1])


def clicks_by_place(world: World, visits: int) -> F64:
    """(K,) share of clicks at each place, of orders by chance."""
    clicked = []
    for number in range(visits):
        visit = world.visit(number, 10.0)
        shown = np.random.default_rng(number).permutation(len(visit.items))[: world.options.shown]
        clicked.append(world.reactions(visit, shown).clicked)
    share: F64 = np.mean(clicked, axis=0)
    return share


def test_a_visit_is_the_same_whatever_was_asked_before() -> None:
    one, other = World(3), World(3)
    for number in (9, 2, 5):
        other.visit(number, 77.0)

    mine, theirs = one.visit(5, 40.0), other.visit(5, 40.0)

    assert (mine.user, mine.device, mine.hour) == (theirs.user, theirs.device, theirs.hour)
    assert mine.items.tolist() == theirs.items.tolist()
    assert mine.attraction.tolist() == theirs.attraction.tolist()


def test_reactions_are_the_same_whatever_was_asked_before() -> None:
    world = World(3)
    visit, shown = world.visit(5, 40.0), np.arange(10)
    first = world.reactions(visit, shown)
    world.reactions(world.visit(6, 41.0), shown[::-1])

    again = world.reactions(visit, shown)

    assert again.clicked.tolist() == first.clicked.tolist()
    assert again.click_after_s.tolist() == first.click_after_s.tolist()
    assert again.bought.tolist() == first.bought.tolist()


def test_another_seed_is_another_world() -> None:
    visits = [World(seed).visit(0, 0.0) for seed in (1, 2)]

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
    world = World(11, options=SMALL)
    visit = world.visit(number, 12.0)

    orders = itertools.permutations(range(SMALL.candidates), SMALL.shown)
    best = max(float(world.expected(visit, np.array(order)).sum()) for order in orders)

    assert world.best(visit) == pytest.approx(best, rel=1e-12)


def test_random_orders_earn_the_mean_of_all_orders() -> None:
    world = World(11, options=SMALL)
    visit = world.visit(0, 12.0)

    orders = itertools.permutations(range(SMALL.candidates), SMALL.shown)
    earned = [float(world.expected(visit, np.array(order)).sum()) for order in orders]

    assert world.random(visit) == pytest.approx(np.mean(earned), rel=1e-12)


def test_clicks_come_as_often_as_expected() -> None:
    world, visits = World(5), 2_000
    expected = made = 0.0
    for number in range(visits):
        visit = world.visit(number, number / 100)
        shown = np.arange(world.options.shown)
        expected += float(world.expected(visit, shown).sum())
        made += float(world.reactions(visit, shown).clicked.sum())

    assert made == pytest.approx(expected, abs=4 * expected**0.5)


def test_the_first_place_is_clicked_most_and_the_last_least() -> None:
    places = clicks_by_place(World(5), 2_000)

    assert places[0] > 1.3 * places[2] > 1.3 * places[9]


def test_most_items_shown_are_not_clicked_and_readers_differ() -> None:
    world = World(5)
    visits = [world.visit(number, 30.0) for number in range(1_000)]
    best, random = (np.mean([f(v) for v in visits]) / 10 for f in (world.best, world.random))

    assert 0.02 < random < 0.06
    assert 2.5 < best / random < 4.0


def test_candidates_are_different_items_of_the_catalogue() -> None:
    world = World(2)
    for number in range(200):
        visit = world.visit(number, 90.0)
        first, stop = world.catalogue(90.0)

        assert len(set(visit.items.tolist())) == world.options.candidates
        assert (visit.items >= first).all()
        assert (visit.items < stop).all()
        assert (visit.ages_s >= 0).all()


def test_an_item_is_the_same_however_many_were_asked_for_before() -> None:
    late = np.array([20_000])
    fresh, grown = World(2).items, World(2).items
    grown.topic(np.arange(30_000))

    for items in (late, np.array([3]), np.array([4_000, 5_000])):
        assert fresh.topic(items).tolist() == grown.topic(items).tolist()
        assert fresh.format(items).tolist() == grown.format(items).tolist()
        assert fresh.quality(items).tolist() == grown.quality(items).tolist()
        assert fresh.price(items).tolist() == grown.price(items).tolist()


def test_items_arrive_and_retire_and_the_catalogue_keeps_its_size() -> None:
    world = World(2)
    before, after = world.catalogue(0.0), world.catalogue(100.0)

    assert before == (0, 2_000)
    assert after == (100, 2_100)
    assert world.age_s(np.array([1_999, 2_099]), 100.0).tolist() == [100.0, 0.0]


def test_every_click_comes_within_its_time_and_every_purchase_after_its_click() -> None:
    world = World(5)
    for number in range(500):
        visit = world.visit(number, 0.0)
        reactions = world.reactions(visit, np.arange(10))

        assert (reactions.click_after_s <= LONGEST_CLICK_S).all()
        bought = reactions.bought
        assert (reactions.purchase_after_s[bought] > reactions.click_after_s[bought] + 0.9).all()
        assert not (reactions.bought & ~reactions.clicked).any()


def test_an_abrupt_drift_changes_what_many_readers_like_and_nothing_before_it() -> None:
    still, drifting = World(4), World(4, DriftPlan((60.0,)))
    readers = range(still.options.users)

    def correlation(time_s: float, reader: int) -> float:
        return alike(still.tastes.of(reader, time_s), drifting.tastes.of(reader, time_s))

    assert all(correlation(59.9, reader) == pytest.approx(1.0) for reader in readers)
    changed = np.mean([correlation(60.0, reader) < 0.9 for reader in readers])
    assert 0.5 < changed < 0.9


def test_what_the_best_order_earns_stays_level_over_a_drift() -> None:
    world = World(4, DriftPlan((60.0,)))

    before, after = (np.mean([world.best(world.visit(n, at)) for n in range(1_000)]) for at in (59.0, 61.0))

    assert after == pytest.approx(before, rel=0.12)


def test_tastes_drift_slowly_all_the_time() -> None:
    tastes = World(4).tastes
    now, soon, later = (tastes.of(0, at) for at in (0.0, 30.0, 1_350.0))

    assert alike(now, soon) > 0.99
    assert alike(now, later) < 0.6


@pytest.mark.parametrize(("time_s", "passed"), [(0, 0), (149.9, 0), (150, 1), (449, 1), (450, 2), (1_050, 4)])
def test_drifts_go_on_at_their_interval(time_s: float, passed: int) -> None:
    assert DriftPlan((150.0,), 300.0).passed(time_s) == passed


def test_each_drift_has_its_time() -> None:
    plan = DriftPlan((20.0, 50.0), 100.0)

    assert [plan.time_s(number) for number in (1, 2, 3, 4)] == [20.0, 50.0, 150.0, 250.0]
