"""What transforms of the user's make of the probe: kept with each version, compared before it goes on.

The name and parameters of a transform are part of the model's identity; its code cannot be. So a version says
what each column came to when it was trained, and code that gives other numbers is noticed before it trains on
or serves: it would be skew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from freshet.config.spec.model import Spec
from freshet.config.spec.transform_steps import PROBE, column_of
from freshet.errors import Mismatch

__all__ = ["Outcomes", "check_outcomes", "outcomes_of"]

Outcomes = Mapping[str, Sequence[float | None]]
"""Feature -> what became of each number of `PROBE`; None: missing."""

RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""Differences below these are another processor's rounding, or another numpy's."""


def outcomes_of(spec: Spec) -> Outcomes:
    """The outcomes of every dense feature with a transform that is not freshet's own."""
    found = {}
    for feature in spec.features:
        column = column_of(feature, spec.folder) if feature.dense else None
        if column is not None and column.of_the_users:
            made = column.run(PROBE).astype(np.float64)
            found[feature.name] = [None if np.isnan(x) else float(x) for x in made]
    return found


def check_outcomes(spec: Spec, trained: Outcomes, what: str) -> None:
    """Compare with what `what` was trained with.

    Raises:
        Mismatch: a transform gives other numbers; names feature, transforms and the first such number.
    """
    for name, now in outcomes_of(spec).items():
        before = trained.get(name, [])
        if len(before) != len(now):
            continue  # written when the probe was another, or by a release without one
        a, b = (np.array([np.nan if x is None else x for x in xs]) for xs in (before, now))
        apart = np.flatnonzero(~np.isclose(a, b, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True))
        if len(apart):
            i = apart[0]
            steps = ", ".join(str(step) for step in spec.feature(name).dense)
            raise Mismatch(
                f"features.{name}.dense: {steps} makes {b[i]:g} of {PROBE[i]:g}\n"
                f"  {what} was trained when it made {a[i]:g}\n"
                "  undo the change of its code; or give it another name, which makes it a new model"
            )
