"""Counter-based random numbers: a draw is a function of seed, purpose and numbers.

A generator with state would make each draw depend on the number of earlier draws, and so on timing.

Numbers are scalars or integer arrays; `...` in a shape is their broadcast shape.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from freshet.types import F64, U64

__all__ = ["Draws"]

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
