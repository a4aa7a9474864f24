"""A number that an update rule or a transform takes: its default, its range and what it means."""

from __future__ import annotations

import math
from dataclasses import dataclass

from freshet.config.options import Number

__all__ = ["Parameter"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number. Spec key, error, reference and identity follow from it."""

    name: str
    default: float
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False  # `low` itself is not allowed
    doc: str = ""

    def allows(self, value: float) -> bool:
        """Whether the thing is defined for this value."""
        return self.low <= value <= self.high and not (self.low_open and value == self.low)

    @property
    def expected(self) -> str:
        """The range in words, for an error."""
        return self.form.expected

    @property
    def form(self) -> Number:
        """How it is written."""
        return Number(self.low, self.high, open_low=self.low_open)
