"""Whether values of a label lie within the bounds that the spec states for it."""

from __future__ import annotations

import numpy as np

from freshet.types import F32, Bool

__all__ = ["Bounds", "bounds_text", "within"]

Bounds = tuple[float, float]
"""The least and the greatest value, both allowed."""


def within(bounds: Bounds, values: F32) -> Bool:
    """Which of (N,) values are allowed; NaN is not.

    Values of labels have 32 bits. So the bounds are rounded to 32 bits, too: a value that equals a bound in
    the file or event is allowed.
    """
    low, high = np.float32(bounds[0]), np.float32(bounds[1])
    allowed: Bool = (values >= low) & (values <= high)
    return allowed


def bounds_text(bounds: Bounds) -> str:
    """The bounds in words, such as `a number from 0 to 5`."""
    return f"a number from {bounds[0]:.9g} to {bounds[1]:.9g}"
