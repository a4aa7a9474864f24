"""The reducers by the names that `train.reduce` gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from freshet.config.spec.model import Spec
from freshet.trainer.reducers import Reducer
from freshet.trainer.reducers.plain import PlainReducer

__all__ = ["build_reducer"]

BUILDERS: Mapping[str, Callable[[Spec], Reducer]] = {"fp32": lambda spec: PlainReducer()}


def build_reducer(spec: Spec) -> Reducer:
    """Build the reducer of `train.reduce`."""
    return BUILDERS[spec.train.reduce](spec)
