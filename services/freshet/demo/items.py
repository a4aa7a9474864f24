"""What there is to show: items numbered as they arrive, and what is known of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freshet.demo.draws import Draws
from freshet.types import F64, I64

__all__ = ["Items"]

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
