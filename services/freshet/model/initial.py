"""Initial dense weights that are equal everywhere: the generator is written out here."""

from __future__ import annotations

import numpy as np

from freshet.types import F32, U64

__all__ = ["he_uniform", "uniform"]

_STEP = np.uint64(0x9E3779B97F4A7C15)


def uniform(seed: int, stream: int, n: int) -> U64:
    """n 64-bit words: splitmix64 (Steele et al. 2014), begun at mix(seed) + mix(stream + 1)."""
    start = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
    start = start + _mix(np.array([stream + 1], np.uint64))
    with np.errstate(over="ignore"):
        return _mix(start + _STEP * np.arange(1, n + 1, dtype=np.uint64))


def he_uniform(seed: int, stream: int, shape: tuple[int, int]) -> F32:
    """(K, N) weights uniform in ±√(6 / K): He et al. 2015, eq. 10, as a uniform of equal variance."""
    words = uniform(seed, stream, shape[0] * shape[1])
    unit = (words >> np.uint64(40)).astype(np.float64) / float(1 << 23) - 1.0  # 24 bits: exact in fp32
    weights: F32 = (unit * np.sqrt(6.0 / shape[0])).astype(np.float32).reshape(shape)
    return weights


def _mix(x: U64) -> U64:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
