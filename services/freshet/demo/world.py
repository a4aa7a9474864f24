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
from freshet.types import F64, I64, Bool

__all__ = [
    "LONGEST_CLICK_S",
    "DriftPlan",
    "Items",
    "Reactions",
    "TasteOptions",
    "Tastes",
    "Visit",
    "World",
    "WorldOptions",
]

# --- What there is to show: items numbered as they arrive, and what is known of each.


BLOCK = 4_096
FORMAT_SHARES = (0.6, 0.85)  # cumulative: articles, videos; the rest are galleries


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    first: int  # number of the first item
    topic: I64
    format: I64
    quality: F64
    price: F64


class Items:
    """Properties by number, drawn some thousand at a time and forgotten when older ones retire.

    Thread-safe: what is drawn is the same whoever draws it.
    """

    def __init__(self, draws: Draws, topics: int) -> None:
        self._draws, self._topics = draws, topics
        self._known = self._drawn(0, BLOCK)

    def topic(self, items: I64) -> I64:
        """Topic of each item."""
        known = self._of(items)
        return known.topic[items - known.first]

    def format(self, items: I64) -> I64:
        """Format of each item."""
        known = self._of(items)
        return known.format[items - known.first]

    def quality(self, items: I64) -> F64:
        """How much better than others each item is, in standard deviations."""
        known = self._of(items)
        return known.quality[items - known.first]

    def price(self, items: I64) -> F64:
        """How much more readily than others each item is bought, in standard deviations."""
        known = self._of(items)
        return known.price[items - known.first]

    def _of(self, items: I64) -> _Known:
        known, first, last = self._known, int(items.min()), int(items.max())
        if not known.first <= first <= last < known.first + len(known.topic):
            known = self._known = self._drawn(first - first % BLOCK, last - last % BLOCK + BLOCK)
        return known

    def _drawn(self, first: int, stop: int) -> _Known:
        items, draws = np.arange(first, stop), self._draws
        return _Known(
            first,
            (draws.uniform("item topic", items) * self._topics).astype(np.int64),
            np.searchsorted(FORMAT_SHARES, draws.uniform("item format", items)).astype(np.int64),
            draws.normal("quality", items),
            draws.normal("price", items),
        )


# --- What each reader likes, and how that changes: slowly all the time, abruptly at stated times.
#
# A taste is a vector over topics. An abrupt drift deals a reader's likes and dislikes out to other
# topics, the slow one turns one vector into another of equal length: what is liked changes, how
# strongly does not. So what the best possible order earns stays nearly level, and a fall of the click
# rate is the model's.
#
# Letters: U readers, G age groups, T topics.


@dataclass(frozen=True, slots=True)
class DriftPlan:
    """When tastes change abruptly, in seconds after the world began."""

    at_s: tuple[float, ...] = ()  # rising
    every_s: float | None = None  # after the last of them, again and again; None: no more

    def passed(self, time_s: float) -> int:
        """How many drifts have happened by then."""
        count = sum(at <= time_s for at in self.at_s)
        if self.every_s is None or not self.at_s or time_s < self.at_s[-1]:
            return count
        return count + int((time_s - self.at_s[-1]) // self.every_s)

    def time_s(self, number: int) -> float:
        """When drift `number` (from 1) happens; only of those that `passed` has counted."""
        if number <= len(self.at_s):
            return self.at_s[number - 1]
        assert self.every_s is not None, "a drift beyond the stated ones repeats"
        return self.at_s[-1] + (number - len(self.at_s)) * self.every_s


@dataclass(frozen=True, slots=True)
class TasteOptions:
    """How strong and how different tastes are; all in log-odds of a click."""

    group: float = 1.3  # deviation over topics that an age group shares
    own: float = 0.9  # deviation over topics of the reader alone
    readers: float = 0.34  # share of readers whose own tastes an abrupt drift deals out anew
    groups: float = 0.34  # share of age groups whose tastes it deals out anew
    period_s: float = 5_400.0  # of the slow drift: in a quarter of it a taste becomes another one


class Tastes:
    """Log-odds that readers add for topics, at any time. Pure but for a cache of the newest drift."""

    def __init__(
        self, draws: Draws, group_of: I64, topics: int, plan: DriftPlan, options: TasteOptions
    ) -> None:
        """`group_of`: (U,) age group of each reader."""
        self._draws, self._group_of, self._plan, self._options = draws, group_of, plan, options
        self._groups = np.arange(int(group_of.max()) + 1)
        self._users, self._topics = np.arange(len(group_of)), np.arange(topics)
        self._cached: tuple[int, _Circle, _Circle] | None = None

    def of(self, user: int, time_s: float) -> F64:
        """(T,) what the reader adds to the log-odds of a click, by topic."""
        groups, own = self._circles(self._plan.passed(time_s))
        turned = time_s / self._options.period_s
        return groups.at(int(self._group_of[user]), turned) + own.at(user, turned)

    def _circles(self, drifts: int) -> tuple[_Circle, _Circle]:
        if self._cached is None or self._cached[0] != drifts:
            options = self._options
            self._cached = (
                drifts,
                self._drawn("group", self._groups, options.groups, drifts, options.group),
                self._drawn("own", self._users, options.readers, drifts, options.own),
            )
        return self._cached[1], self._cached[2]

    def _drawn(self, of: str, who: I64, share: float, drifts: int, size: float) -> _Circle:
        epochs = np.zeros(len(who), np.int64)  # the last drift that each of them took part in
        for drift in range(1, drifts + 1):
            drawn = np.argsort(self._draws.uniform(f"{of} drift", drift, who))
            epochs[drawn[: round(share * len(who))]] = drift
        keys = who[:, None], self._topics[None, :]
        now = _standard(self._draws.normal(f"{of} now", *keys))
        later = self._draws.normal(f"{of} later", *keys)
        later = _standard(later - (later * now).mean(axis=1, keepdims=True) * now)
        topics = np.argsort(self._draws.uniform(f"{of} topics", *keys, epochs[:, None]), axis=1)
        return _Circle(
            size * np.take_along_axis(now, topics, axis=1),
            size * np.take_along_axis(later, topics, axis=1),
            self._draws.uniform(f"{of} phase", who),
        )


def _standard(tastes: F64) -> F64:
    """Each row with mean 0 and deviation 1."""
    centred = tastes - tastes.mean(axis=1, keepdims=True)
    standard: F64 = centred / centred.std(axis=1, keepdims=True)
    return standard


@dataclass(frozen=True, slots=True, eq=False)
class _Circle:
    """Tastes that turn slowly from one into another and on to the opposites of both."""

    now: F64  # (N, T)
    later: F64  # (N, T)
    phase: F64  # (N,) where on the circle each begins, 0 to 1

    def at(self, one: int, turned: float) -> F64:
        angle = 2 * np.pi * (turned + self.phase[one])
        taste: F64 = self.now[one] * np.cos(angle) + self.later[one] * np.sin(angle)
        return taste


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
