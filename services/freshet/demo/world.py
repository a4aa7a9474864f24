"""Who visits, what there is to show, and who clicks: a small news site as a known truth.

Nothing here knows of freshet. A visit is a function of (seed, its number, the time), a click one of (seed,
visit, item, place): nothing depends on what was asked before, so a run can be repeated whatever the timing,
and what the best possible order would earn can be computed exactly.

Letters: C candidates of a visit, K items shown, T topics, S items in the catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from freshet.demo.draws import Draws
from freshet.demo.items import Items
from freshet.demo.tastes import DriftPlan, TasteOptions, Tastes
from freshet.types import F64, I64, Bool

__all__ = ["LONGEST_CLICK_S", "Reactions", "Visit", "World", "WorldOptions"]

TOPICS = (
    "politics", "business", "tech", "science", "health", "sport",
    "film", "music", "food", "travel", "style", "games",
)  # fmt: skip
GROUPS = ("18-24", "25-34", "35-44", "45-54", "55-64", "65+")
DEVICES = ("phone", "desktop", "tablet")
FORMATS = ("article", "video", "gallery")

LONGEST_CLICK_S = 8.0
"""Every click comes within this time of its page: the spec's window of 10 s takes them all."""
CLICK_S, PURCHASE_S = 0.4, 1.0  # at least, after the page and after the click
LONGEST_PURCHASE_S = 8.0
"""Every purchase comes within this time of its click."""


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """What the world is made of. Effects are in log-odds of a click on an item that is looked at."""

    users: int = 500
    items: int = 2_000  # in the catalogue at any time
    arrivals_per_s: float = 1.0  # a new item takes the place of the oldest
    candidates: int = 30  # what retrieval hands to the ranking
    shown: int = 10
    base: float = -3.4
    quality: float = 0.6  # deviation over items: why some items are popular with everybody
    topic: float = 0.3  # deviation over topics
    hour: float = 0.3  # deviation over parts of the day and topics
    device: float = 0.3  # deviation over devices and formats
    fresh: float = 0.6  # what a new item has over an old one
    fresh_s: float = 600.0  # in this time, 1/e of it is left
    bias: float = 0.7  # place j (from 0) is looked at with probability (1 + j) ** -bias
    purchase: float = -2.2  # log-odds that a click leads to a purchase: rarely
    buys: float = 0.5  # deviation over age groups, devices and topics of these log-odds
    price: float = 0.4  # deviation over items of these log-odds
    activity: float = 0.8  # deviation of the logarithm of how often readers come
    tastes: TasteOptions = field(default_factory=TasteOptions)


NO_DRIFT = DriftPlan()
DEFAULT_OPTIONS = WorldOptions()


@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """Somebody opens the page."""

    number: int
    time_s: float  # since the world began
    user: int
    group: int
    device: int
    hour: int  # of the reader's own day
    items: I64 = field(repr=False)  # (C,) candidates, all different
    ages_s: F64 = field(repr=False)  # (C,)
    attraction: F64 = field(repr=False)  # (C,) probability of a click if the item is looked at


@dataclass(frozen=True, slots=True, eq=False)
class Reactions:
    """What the reader does with K items shown, first place first."""

    clicked: Bool  # (K,)
    click_after_s: F64  # (K,) after the page; only where clicked
    bought: Bool  # (K,) only where clicked
    purchase_after_s: F64  # (K,) after the page; only where bought


class World:
    """The truth. Thread-safe for reading, as all but a cache is fixed when it is made."""

    def __init__(
        self, seed: int, plan: DriftPlan = NO_DRIFT, options: WorldOptions = DEFAULT_OPTIONS
    ) -> None:
        self.seed, self.plan, self.options = seed, plan, options
        self._draws = draws = Draws(seed)
        users = np.arange(options.users)
        self._came = _cumulative(np.exp(options.activity * draws.normal("activity", users)))
        self._group = draws.choice(_cumulative(np.array([2.0, 3, 3, 2, 2, 1])), "group", users).astype(
            np.int64
        )
        self._zone = (draws.uniform("zone", users) * 24).astype(np.int64)
        self._phone = draws.uniform("phone", users)  # share of visits by phone; the others are halved
        self.tastes = Tastes(draws, self._group, len(TOPICS), plan, options.tastes)
        self.items = Items(draws, len(TOPICS))
        topics = np.arange(len(TOPICS))
        self._topic = options.topic * draws.normal("topic", topics)
        self._hour = options.hour * draws.normal("hour", np.arange(4)[:, None], topics)
        self._device = options.device * draws.normal("device", np.arange(3)[:, None], np.arange(3))
        self._buys_group = options.buys * draws.normal("buys group", np.arange(len(GROUPS)))
        self._buys_device = options.buys * draws.normal("buys device", np.arange(len(DEVICES)))
        self._buys_topic = options.buys * draws.normal("buys topic", topics)
        self.looked_at: F64 = np.power(1.0 + np.arange(options.shown), -options.bias)  # (K,)

    # --- the catalogue

    def catalogue(self, time_s: float) -> tuple[int, int]:
        """The items that can be shown: [oldest, newest + 1). Items are numbered as they arrive."""
        arrived = int(time_s * self.options.arrivals_per_s)
        return arrived, arrived + self.options.items

    def age_s(self, items: I64, time_s: float) -> F64:
        """Seconds since each item arrived; the first ones arrived at the same pace before the world began."""
        arrived_s = (items - self.options.items + 1) / self.options.arrivals_per_s
        return np.maximum(0.0, time_s - arrived_s)

    # --- a visit

    def visit(self, number: int, time_s: float) -> Visit:
        """Visit `number`, if it happens at this time."""
        draws, options = self._draws, self.options
        user = int(draws.choice(self._came, "user", number)[0])
        phone = self._phone[user]
        device = int(np.searchsorted([phone, (1 + phone) / 2], draws.uniform("device", number)[0]))
        hour = int(time_s // 3600 + self._zone[user]) % 24
        items = self._candidates(number, time_s)
        ages_s = self.age_s(items, time_s)
        topics = self.items.topic(items)
        logit = (
            options.base
            + self._topic[topics]
            + self.tastes.of(user, time_s)[topics]
            + self._hour[hour // 6, topics]
            + self._device[device, self.items.format(items)]
            + options.quality * self.items.quality(items)
            + options.fresh * np.exp(-ages_s / options.fresh_s)
        )
        attraction: F64 = 1.0 / (1.0 + np.exp(-logit))
        return Visit(number, time_s, user, int(self._group[user]), device, hour, items, ages_s, attraction)

    def _candidates(self, number: int, time_s: float) -> I64:
        first, stop = self.catalogue(time_s)
        wanted = self.options.candidates
        chance = self._draws.uniform("candidates", number, np.arange(2 * wanted))
        drawn = (chance * (stop - first)).astype(np.int64)
        distinct = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
        return first + distinct[:wanted]

    def reactions(self, visit: Visit, shown: I64) -> Reactions:
        """What the reader does when these candidates (indices, first place first) are shown."""
        draws, number, items = self._draws, visit.number, visit.items[shown]
        clicked = draws.uniform("click", number, items) < self.expected(visit, shown)
        bought, after_s, later_s = np.zeros_like(clicked), np.zeros(len(items)), np.zeros(len(items))
        if clicked.any():  # most pages are left without a click
            items, places = items[clicked], np.flatnonzero(clicked)
            delay_s = CLICK_S + 1.2 * np.exp(0.8 * draws.normal("click delay", number, items))
            after_s[places] = np.minimum(delay_s, LONGEST_CLICK_S)
            bought[places] = draws.uniform("purchase", number, items) < self.purchase(visit, shown[places])
            spread_s = LONGEST_PURCHASE_S - PURCHASE_S
            later_s[places] = PURCHASE_S + spread_s * draws.uniform("purchase delay", number, items)
        return Reactions(clicked, after_s, bought, after_s + later_s)

    def purchase(self, visit: Visit, shown: I64) -> F64:
        """(K,) probability that a click on each item leads to a purchase.

        It is the reader's age group, the device, the topic and the item (its price) that make the difference.
        """
        items = visit.items[shown]
        price = self.options.price * self.items.price(items)
        logit = self._buys_group[visit.group] + self._buys_device[visit.device] + price
        logit = logit + self._buys_topic[self.items.topic(items)] + self.options.purchase
        chances: F64 = 1.0 / (1.0 + np.exp(-logit))
        return chances

    # --- what is known about it

    def expected(self, visit: Visit, shown: I64) -> F64:
        """(K,) probability of a click on each item shown: it is looked at, and it attracts."""
        chances: F64 = self.looked_at[: len(shown)] * visit.attraction[shown]
        return chances

    def best(self, visit: Visit) -> float:
        """Expected clicks of the best order there is.

        Clicks on different places do not influence each other, so by the rearrangement inequality the most
        attractive item belongs where most look, and so on.
        """
        best = np.sort(visit.attraction)[::-1][: self.options.shown]
        return float(best @ self.looked_at[: len(best)])

    def random(self, visit: Visit) -> float:
        """Expected clicks of an order drawn by chance."""
        return float(visit.attraction.mean() * self.looked_at[: len(visit.items)].sum())


def _cumulative(weights: F64) -> F64:
    cumulative: F64 = np.cumsum(weights) / weights.sum()
    return cumulative
