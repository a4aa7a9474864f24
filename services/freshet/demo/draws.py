"""Chance as a function: the same seed, purpose and numbers give the same draw, in whatever order and on
whatever machine they are asked for.

A generator with a state would make every draw depend on how many came before it, and so on timing.
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
    """Draws of one seed. `of` names the purpose; numbers may be scalars or arrays that broadcast."""

    def __init__(self, seed: int) -> None:
        self._seed = np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF)
        self._starts: dict[str, U64] = {}

    def bits(self, of: str, *numbers: int | Iterable[int]) -> U64:
        """64 random bits for each broadcast element of `numbers`."""
        start = self._starts.get(of)
        if start is None:
            start = self._starts[of] = _mixed(np.array([self._seed]) ^ np.uint64(zlib.crc32(of.encode())))
        mixed = start
        for number in numbers:
            mixed = _mixed(mixed ^ np.asarray(number).astype(np.uint64))
        return mixed

    def uniform(self, of: str, *numbers: int | Iterable[int]) -> F64:
        """Uniform in (0, 1), never 0 or 1."""
        return ((self.bits(of, *numbers) >> np.uint64(11)).astype(np.float64) + 0.5) * _UNIT

    def normal(self, of: str, *numbers: int | Iterable[int]) -> F64:
        """Standard normal, by Box and Muller (1958) from two uniform draws."""
        radius = np.sqrt(-2.0 * np.log(self.uniform(f"{of}/radius", *numbers)))
        drawn: F64 = radius * np.cos(2.0 * np.pi * self.uniform(f"{of}/angle", *numbers))
        return drawn

    def choice(self, cumulative: F64, of: str, *numbers: int | Iterable[int]) -> np.ndarray:
        """Index by weight: `cumulative` rises to 1."""
        return np.searchsorted(cumulative, self.uniform(of, *numbers), side="right")


def _mixed(x: U64) -> U64:
    """SplitMix64's step (Steele, Lea and Flood 2014): every bit of the result depends on every bit of x."""
    x = x + _GOLDEN
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    mixed: U64 = x ^ (x >> _31)
    return mixed
