"""Transforms of one's own, named by the spec beside: `dense = ["my_transforms:log_odds", "standard"]`."""

import numpy as np

from freshet.types import F32


def log_odds(x: F32, *, floor: float = 1e-4) -> F32:
    """Log-odds of a rate, which is kept `floor` away from 0 and 1."""
    rate = np.clip(x, np.float32(floor), np.float32(1 - floor))
    odds: F32 = np.log(rate / (1 - rate))
    return odds
