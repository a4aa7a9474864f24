"""Bounds on what one value can do to a figure: labels far from all others, losses far above all others.

Letters: B samples.
"""

from __future__ import annotations

import numpy as np

from freshet.types import F64

__all__ = ["MEDIANS", "TRIMMED", "Typical", "largest_usual", "winsorised"]

MEDIANS = 1_000.0
"""A number is left out beyond this many medians of the label's other numbers (of their magnitudes, zeros left
out). The top of what people spend or watch is a hundred medians; a wrong unit (ms for s) is a thousand."""

TRIMMED = 0.01
"""Share of the largest losses that count as the next smaller one."""

_FEWEST = 5  # numbers whose median means something
_KEPT = 512  # numbers of a label whose median is taken


def largest_usual(values: F64) -> float:
    """The magnitude beyond which a number is an outlier among `values` (B,); infinite if they are too few to
    tell."""
    magnitudes = np.abs(values)
    magnitudes = magnitudes[(magnitudes > 0) & np.isfinite(magnitudes)]
    return MEDIANS * float(np.median(magnitudes)) if len(magnitudes) >= _FEWEST else float("inf")


def winsorised(losses: F64) -> float:
    """The magnitude to which losses (B,) are clipped, so that a few cannot outweigh all others: the largest
    TRIMMED of them, but at least one, count as the next smaller one. Infinite for a single loss.

    Source: winsorised means, Dixon, Annals of Mathematical Statistics 31 (1960). Clipping, and not leaving
    out, keeps the order of two versions where their largest losses differ.
    """
    if len(losses) < 2:
        return float("inf")
    trimmed = max(1, int(len(losses) * TRIMMED))
    return float(np.partition(losses, len(losses) - trimmed - 1)[len(losses) - trimmed - 1])


class Typical:
    """The newest numbers of one label, by which the next ones are judged. Used by one thread at a time."""

    def __init__(self) -> None:
        self._kept = np.empty(0)
        self.outliers = 0  # so far

    def without_outliers(self, values: F64) -> F64:
        """Return (B,) values with NaN in place of outliers, which are counted."""
        self._kept = np.concatenate([self._kept, values[(values != 0) & np.isfinite(values)]])[-_KEPT:]
        most = largest_usual(self._kept)
        beyond = np.abs(values) > most
        if not beyond.any():
            return values
        self.outliers += int(beyond.sum())
        return np.where(beyond, np.nan, values)
