"""A simulated news site with known probabilities of clicks and purchases. It does not know freshet.

A visit is a function of (seed, number, time), a click of (seed, visit, item, position). No draw depends on
earlier ones, so a run repeats at any timing, and the expected clicks of the best order can be computed.

Letters: C candidates of a visit, K items shown, T topics, U readers, G age groups, N any number.
Items are (N,) int64 numbers in the order of their arrival.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from freshet.types import F64, I64, U64, Bool

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)
_UNIT = 2.0**-53


class Draws:
    """Draws of one seed, independent by `purpose`."""

    def __init__(self, seed: int) -> None:
        self._seed = np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF)
        self._starts: dict[str, U64] = {}

    def bits(self, purpose: str, *numbers: int | Iterable[int]) -> U64:
        """(...) uint64: random bits."""
        start = self._starts.get(purpose)
        if start is None:
            hashed = np.uint64(zlib.crc32(purpose.encode()))
            start = self._starts[purpose] = _mix(np.array([self._seed]) ^ hashed)
        mixed = start
        for number in numbers:
            mixed = _mix(mixed ^ np.asarray(number).astype(np.uint64))
        return mixed

    def uniform(self, purpose: str, *numbers: int | Iterable[int]) -> F64:
        """(...) float64: uniform in (0, 1), never 0 or 1."""
        return ((self.bits(purpose, *numbers) >> np.uint64(11)).astype(np.float64) + 0.5) * _UNIT

    def normal(self, purpose: str, *numbers: int | Iterable[int]) -> F64:
        """(...) float64: standard normal, by Box and Muller (1958) from two uniform draws."""
        radius = np.sqrt(-2.0 * np.log(self.uniform(f"{purpose}/radius", *numbers)))
        drawn: F64 = radius * np.cos(2.0 * np.pi * self.uniform(f"{purpose}/angle", *numbers))
        return drawn

    def choice(self, cumulative: F64, purpose: str, *numbers: int | Iterable[int]) -> np.ndarray:
        """(...) int64: indices drawn by weight; `cumulative` is (N,) float64 and rises to 1."""
        return np.searchsorted(cumulative, self.uniform(purpose, *numbers), side="right")


def _mix(x: U64) -> U64:
    """One step of SplitMix64 (Steele, Lea and Flood 2014): each bit depends on all bits of x."""
    x = x + _GOLDEN
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    result: U64 = x ^ (x >> _31)
    return result


BLOCK = 4_096
FORMAT_SHARES = (0.6, 0.85)  # cumulative: articles, videos; the rest are galleries


@dataclass(frozen=True, slots=True, eq=False)
class _Properties:
    first: int  # number of the first item
    topic: I64
    format: I64
    quality: F64
    price: F64


class Items:
    """Properties of items, drawn in blocks and dropped as items leave the catalogue.

    Thread-safe, because each thread would draw the same properties.
    """

    def __init__(self, draws: Draws, topics: int) -> None:
        self._draws, self._topics = draws, topics
        self._drawn = self._draw(0, BLOCK)

    def topic(self, items: I64) -> I64:
        """(N,) int64: topic of each of the (N,) items."""
        drawn = self._covering(items)
        return drawn.topic[items - drawn.first]

    def format(self, items: I64) -> I64:
        """(N,) int64: format of each of the (N,) items."""
        drawn = self._covering(items)
        return drawn.format[items - drawn.first]

    def quality(self, items: I64) -> F64:
        """(N,) float64: standard normal, the attraction of each of the (N,) items."""
        drawn = self._covering(items)
        return drawn.quality[items - drawn.first]

    def price(self, items: I64) -> F64:
        """(N,) float64: standard normal, added to the log-odds of a purchase of each of the (N,) items."""
        drawn = self._covering(items)
        return drawn.price[items - drawn.first]

    def _covering(self, items: I64) -> _Properties:
        drawn, first, last = self._drawn, int(items.min()), int(items.max())
        if not drawn.first <= first <= last < drawn.first + len(drawn.topic):
            drawn = self._drawn = self._draw(first - first % BLOCK, last - last % BLOCK + BLOCK)
        return drawn

    def _draw(self, first: int, stop: int) -> _Properties:
        items, draws = np.arange(first, stop), self._draws
        return _Properties(
            first,
            (draws.uniform("item topic", items) * self._topics).astype(np.int64),
            np.searchsorted(FORMAT_SHARES, draws.uniform("item format", items)).astype(np.int64),
            draws.normal("quality", items),
            draws.normal("price", items),
        )


# A taste is a vector over topics. An abrupt drift permutes it over the topics; the slow drift rotates it
# towards another vector of equal length. Both keep the strength of tastes, so the clicks of the best order
# stay nearly constant, and a lower click rate is the model's fault.


@dataclass(frozen=True, slots=True)
class DriftPlan:
    """Times of abrupt drifts, in seconds after the start of the simulation."""

    at_s: tuple[float, ...] = ()  # rising
    every_s: float | None = None  # period of further drifts after the last of them; None: no more

    def passed(self, time_s: float) -> int:
        """Return the number of drifts up to `time_s`."""
        count = sum(at <= time_s for at in self.at_s)
        if self.every_s is None or not self.at_s or time_s < self.at_s[-1]:
            return count
        return count + int((time_s - self.at_s[-1]) // self.every_s)

    def time_s(self, number: int) -> float:
        """Return the time of drift `number` (from 1), which must be one that `passed` has counted."""
        if number <= len(self.at_s):
            return self.at_s[number - 1]
        assert self.every_s is not None, "a drift beyond the stated ones repeats"
        return self.at_s[-1] + (number - len(self.at_s)) * self.every_s


@dataclass(frozen=True, slots=True)
class TasteOptions:
    """Strength and drift of tastes, in log-odds of a click."""

    group: float = 1.3  # deviation over topics of an age group's tastes
    own: float = 0.9  # deviation over topics of a reader's own tastes
    readers: float = 0.34  # share of the own tastes that an abrupt drift permutes
    groups: float = 0.34  # share of the groups' tastes that an abrupt drift permutes
    period_s: float = 5_400.0  # of the slow drift: after a quarter a taste is an independent one


class Tastes:
    """Log-odds of a click by reader, topic and time. Pure, but for a cache of the newest drift."""

    def __init__(
        self, draws: Draws, group_of: I64, topics: int, plan: DriftPlan, options: TasteOptions
    ) -> None:
        """`group_of`: (U,) int64, the age group of each reader."""
        self._draws, self._group_of, self._plan, self._options = draws, group_of, plan, options
        self._groups = np.arange(int(group_of.max()) + 1)
        self._users, self._topics = np.arange(len(group_of)), np.arange(topics)
        self._cached: tuple[int, _Circle, _Circle] | None = None

    def log_odds(self, user: int, time_s: float) -> F64:
        """(T,) float64: the reader's part of the log-odds of a click, by topic."""
        groups, own = self._circles(self._plan.passed(time_s))
        turns = time_s / self._options.period_s
        return groups.at(int(self._group_of[user]), turns) + own.at(user, turns)

    def _circles(self, drifts: int) -> tuple[_Circle, _Circle]:
        if self._cached is None or self._cached[0] != drifts:
            options = self._options
            self._cached = (
                drifts,
                self._draw("group", self._groups, options.groups, drifts, options.group),
                self._draw("own", self._users, options.readers, drifts, options.own),
            )
        return self._cached[1], self._cached[2]

    def _draw(self, kind: str, ids: I64, share: float, drifts: int, size: float) -> _Circle:
        epochs = np.zeros(len(ids), np.int64)  # the last drift that changed each taste
        for drift in range(1, drifts + 1):
            order = np.argsort(self._draws.uniform(f"{kind} drift", drift, ids))
            epochs[order[: round(share * len(ids))]] = drift
        keys = ids[:, None], self._topics[None, :]
        now = _standardise(self._draws.normal(f"{kind} now", *keys))
        later = self._draws.normal(f"{kind} later", *keys)
        later = _standardise(later - (later * now).mean(axis=1, keepdims=True) * now)
        topics = np.argsort(self._draws.uniform(f"{kind} topics", *keys, epochs[:, None]), axis=1)
        return _Circle(
            size * np.take_along_axis(now, topics, axis=1),
            size * np.take_along_axis(later, topics, axis=1),
            self._draws.uniform(f"{kind} phase", ids),
        )


def _standardise(tastes: F64) -> F64:
    """(N, T) float64: each row of (N, T) `tastes` scaled to mean 0 and deviation 1."""
    centred = tastes - tastes.mean(axis=1, keepdims=True)
    standard: F64 = centred / centred.std(axis=1, keepdims=True)
    return standard


@dataclass(frozen=True, slots=True, eq=False)
class _Circle:
    """Tastes that rotate in the plane of two orthogonal vectors."""

    now: F64  # (N, T)
    later: F64  # (N, T)
    phase: F64  # (N,) share of a turn at the start, 0 to 1

    def at(self, row: int, turns: float) -> F64:
        angle = 2 * np.pi * (turns + self.phase[row])
        taste: F64 = self.now[row] * np.cos(angle) + self.later[row] * np.sin(angle)
        return taste


TOPICS = (
    "politics", "business", "tech", "science", "health", "sport",
    "film", "music", "food", "travel", "style", "games",
)  # fmt: skip
GROUPS = ("18-24", "25-34", "35-44", "45-54", "55-64", "65+")
DEVICES = ("phone", "desktop", "tablet")
FORMATS = ("article", "video", "gallery")

LONGEST_CLICK_S = 8.0
"""Largest delay of a click after its page, less than the window of 10 s in the spec."""
CLICK_S, PURCHASE_S = 0.4, 1.0  # smallest delay after the page, and after the click
LONGEST_PURCHASE_S = 8.0
"""Largest delay of a purchase after its click."""


@dataclass(frozen=True, slots=True)
class SiteOptions:
    """Sizes and effects of the site. Effects are in log-odds of a click on an item that the reader views."""

    users: int = 500
    items: int = 2_000  # in the catalogue at any time
    arrivals_per_s: float = 1.0  # a new item replaces the oldest
    candidates: int = 30
    shown: int = 10
    base: float = -3.4
    quality: float = 0.6  # deviation over items
    topic: float = 0.3  # deviation over topics
    hour: float = 0.3  # deviation over parts of the day and topics
    device: float = 0.3  # deviation over devices and formats
    fresh: float = 0.6  # advantage of a new item, which decays
    fresh_s: float = 600.0  # time in which it decays to 1/e
    bias: float = 0.7  # readers view position j (from 0) with probability (1 + j) ** -bias
    purchase: float = -2.2  # log-odds that a click leads to a purchase
    buys: float = 0.5  # deviation over age groups, devices and topics of these log-odds
    price: float = 0.4  # deviation over items of these log-odds
    activity: float = 0.8  # deviation over readers of the logarithm of their visit rate
    tastes: TasteOptions = field(default_factory=TasteOptions)


NO_DRIFT = DriftPlan()
DEFAULT_OPTIONS = SiteOptions()


@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """A reader's request for a page."""

    number: int
    user: int
    group: int
    device: int
    hour: int  # local time of the reader
    items: I64 = field(repr=False)  # (C,) candidates, all different
    ages_s: F64 = field(repr=False)  # (C,)
    attraction: F64 = field(repr=False)  # (C,) probability of a click if the reader views the item


@dataclass(frozen=True, slots=True, eq=False)
class Reactions:
    """A reader's actions on K shown items, by position."""

    clicked: Bool  # (K,)
    click_after_s: F64  # (K,) after the page; only where clicked
    bought: Bool  # (K,) only where clicked
    purchase_after_s: F64  # (K,) after the page; only where bought


class NewsSite:
    """The simulated site. Thread-safe, because it is immutable except for caches."""

    def __init__(self, seed: int, plan: DriftPlan = NO_DRIFT, options: SiteOptions = DEFAULT_OPTIONS) -> None:
        self.options = options
        self._draws = draws = Draws(seed)
        users = np.arange(options.users)
        self._visit_shares = _cumulative(np.exp(options.activity * draws.normal("activity", users)))
        self._group = draws.choice(_cumulative(np.array([2.0, 3, 3, 2, 2, 1])), "group", users).astype(
            np.int64
        )
        self._zone = (draws.uniform("zone", users) * 24).astype(np.int64)
        self._phone = draws.uniform("phone", users)  # share of visits; desktop and tablet share the rest
        self.tastes = Tastes(draws, self._group, len(TOPICS), plan, options.tastes)
        self.items = Items(draws, len(TOPICS))
        topics = np.arange(len(TOPICS))
        self._topic = options.topic * draws.normal("topic", topics)
        self._hour = options.hour * draws.normal("hour", np.arange(4)[:, None], topics)
        self._device = options.device * draws.normal("device", np.arange(3)[:, None], np.arange(3))
        self._buys_group = options.buys * draws.normal("buys group", np.arange(len(GROUPS)))
        self._buys_device = options.buys * draws.normal("buys device", np.arange(len(DEVICES)))
        self._buys_topic = options.buys * draws.normal("buys topic", topics)
        self.view_chance: F64 = np.power(1.0 + np.arange(options.shown), -options.bias)  # (K,)

    def catalogue(self, time_s: float) -> tuple[int, int]:
        """Return the items of the catalogue as a range: oldest, newest + 1."""
        arrived = int(time_s * self.options.arrivals_per_s)
        return arrived, arrived + self.options.items

    def age_s(self, items: I64, time_s: float) -> F64:
        """(N,) float64: time since the arrival of each of the (N,) items, which may be before time 0."""
        arrived_s = (items - self.options.items + 1) / self.options.arrivals_per_s
        return np.maximum(0.0, time_s - arrived_s)

    def visit(self, number: int, time_s: float) -> Visit:
        """Draw visit `number`, at `time_s`."""
        draws, options = self._draws, self.options
        user = int(draws.choice(self._visit_shares, "user", number)[0])
        phone = self._phone[user]
        device = int(np.searchsorted([phone, (1 + phone) / 2], draws.uniform("device", number)[0]))
        hour = int(time_s // 3600 + self._zone[user]) % 24
        items = self._candidates(number, time_s)
        ages_s = self.age_s(items, time_s)
        topics = self.items.topic(items)
        logit = (
            options.base
            + self._topic[topics]
            + self.tastes.log_odds(user, time_s)[topics]
            + self._hour[hour // 6, topics]
            + self._device[device, self.items.format(items)]
            + options.quality * self.items.quality(items)
            + options.fresh * np.exp(-ages_s / options.fresh_s)
        )
        attraction: F64 = 1.0 / (1.0 + np.exp(-logit))
        return Visit(number, user, int(self._group[user]), device, hour, items, ages_s, attraction)

    def _candidates(self, number: int, time_s: float) -> I64:
        first, stop = self.catalogue(time_s)
        wanted = self.options.candidates
        chance = self._draws.uniform("candidates", number, np.arange(2 * wanted))
        drawn = (chance * (stop - first)).astype(np.int64)
        distinct = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
        return first + distinct[:wanted]

    def reactions(self, visit: Visit, shown: I64) -> Reactions:
        """Draw the reactions to the shown candidates, (K,) int64 indices by position."""
        draws, number, items = self._draws, visit.number, visit.items[shown]
        clicked = draws.uniform("click", number, items) < self.expected(visit, shown)
        bought, after_s, later_s = np.zeros_like(clicked), np.zeros(len(items)), np.zeros(len(items))
        if clicked.any():  # most pages get no click
            items, places = items[clicked], np.flatnonzero(clicked)
            delay_s = CLICK_S + 1.2 * np.exp(0.8 * draws.normal("click delay", number, items))
            after_s[places] = np.minimum(delay_s, LONGEST_CLICK_S)
            bought[places] = draws.uniform("purchase", number, items) < self.purchase(visit, shown[places])
            spread_s = LONGEST_PURCHASE_S - PURCHASE_S
            later_s[places] = PURCHASE_S + spread_s * draws.uniform("purchase delay", number, items)
        return Reactions(clicked, after_s, bought, after_s + later_s)

    def purchase(self, visit: Visit, shown: I64) -> F64:
        """(K,) float64: probability of a purchase after a click on each of the (K,) int64 shown candidates.

        It depends on age group, device, topic and price.
        """
        items = visit.items[shown]
        price = self.options.price * self.items.price(items)
        logit = self._buys_group[visit.group] + self._buys_device[visit.device] + price
        logit = logit + self._buys_topic[self.items.topic(items)] + self.options.purchase
        chances: F64 = 1.0 / (1.0 + np.exp(-logit))
        return chances

    def expected(self, visit: Visit, shown: I64) -> F64:
        """(K,) float64: probability of a click on each of the (K,) int64 shown candidates, viewed or not."""
        chances: F64 = self.view_chance[: len(shown)] * visit.attraction[shown]
        return chances

    def best(self, visit: Visit) -> float:
        """Return the expected clicks of the best order.

        Clicks on different positions are independent, so by the rearrangement inequality the best order sorts
        items by attraction.
        """
        best = np.sort(visit.attraction)[::-1][: self.options.shown]
        return float(best @ self.view_chance[: len(best)])


def _cumulative(weights: F64) -> F64:
    cumulative: F64 = np.cumsum(weights) / weights.sum()
    return cumulative
