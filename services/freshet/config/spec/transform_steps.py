"""What `dense` of a feature says, as steps that can be run: resolved, checked on a probe, applied.

`Column.run` is the one place where a number is transformed after the native decoder: samples for training,
backtests and replays, rank requests and Open Inference Protocol rows all come through the decoder that calls
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freshet.config.spec.forms import Step
from freshet.config.spec.inputs import Feature
from freshet.config.spec.transforms import TRANSFORMS, Transform, find_transform
from freshet.errors import ConfigError
from freshet.types import F32

__all__ = ["PROBE", "Column", "column_of", "native_first", "resolve"]

PROBE: F32 = np.array(
    [np.nan, 0, 1, -1, 0.5, -0.5, 0.01, 2, 3, 7, 10, 24, 99, 100, 1e3, -1e3, 1e-6, 1e6, -1e6, 1e9], np.float32
)
"""Numbers that a transform is tried on: what counts, prices, rates, ages and times look like."""


@dataclass(frozen=True, slots=True)
class Column:
    """The steps that are left for one dense column after the native decoder, in order."""

    where: str
    key: str  # features.NAME.dense
    steps: tuple[tuple[Transform, tuple[tuple[str, float], ...]], ...]

    @property
    def of_the_users(self) -> bool:
        """Whether code that is not freshet's takes part."""
        return any(not transform.built_in for transform, _ in self.steps)

    def run(self, column: F32) -> F32:
        """Transform a column (B,); NaN where a number is missing, or is not finite after it.

        Raises ConfigError, naming feature and transform, if a function raises or gives no such column.
        """
        for transform, parameters in self.steps:
            column = self._step(transform, dict(parameters), column)
        column[~np.isfinite(column)] = np.nan
        return column

    def _step(self, transform: Transform, parameters: dict[str, float], column: F32) -> F32:
        given = column.copy()
        assert transform.function is not None
        try:
            with np.errstate(all="ignore"):
                made = transform.function(given, **parameters)
        except Exception as error:  # whatever a function of the user's raises
            hint = f"it raised {type(error).__name__}: {error}"
            raise self.error(transform, "a function of a (B,) float32 column", hint) from error
        made = given if made is None else made
        if not isinstance(made, np.ndarray) or made.shape != column.shape:
            found = f"shape {made.shape}" if isinstance(made, np.ndarray) else f"a {type(made).__name__}"
            raise self.error(transform, f"as many numbers as it is given, {column.shape}", f"it gave {found}")
        if made.dtype != np.float32:
            hint = f"it gave {made.dtype}; end with .astype(np.float32)"
            raise self.error(transform, "a column of float32", hint)
        return made

    def error(self, transform: Transform, expected: str, hint: str) -> ConfigError:
        """An error about one of the steps."""
        return ConfigError(self.where, self.key, transform.name, expected, hint)

    def check(self) -> None:
        """Try the steps on `PROBE`. Raises ConfigError for one that is no function of single numbers."""
        column = PROBE
        for transform, pairs in self.steps:
            made = self._step(transform, dict(pairs), column)
            self._check_finite(transform, column, made)
            alone = [self._step(transform, dict(pairs), column[i : i + 1]) for i in range(len(column))]
            self._check_alone(transform, column, made, np.concatenate(alone))
            column = made
            column[~np.isfinite(column)] = np.nan

    def _check_finite(self, transform: Transform, given: F32, made: F32) -> None:
        infinite = np.flatnonzero(np.isinf(made))
        if len(infinite):
            hint = f"it makes {made[infinite[0]]} of {given[infinite[0]]:g}; cut the numbers first"
            raise self.error(transform, "finite numbers of finite numbers", hint)

    def _check_alone(self, transform: Transform, given: F32, made: F32, alone: F32) -> None:
        """A number must become the same whatever stands beside it: batches differ, requests are small."""
        apart = np.flatnonzero(~np.isclose(made, alone, rtol=1e-5, atol=1e-6, equal_nan=True))
        if len(apart):
            i = apart[0]
            hint = (
                f"it makes {made[i]:g} of {given[i]:g} among others, but {alone[i]:g} of it alone;"
                " what depends on other numbers would differ between training and serving"
            )
            raise self.error(transform, "a function that works number by number", hint)


def resolve(feature: Feature, folder: str, where: str) -> tuple[str | Step, ...]:
    """`dense` of a feature with its transforms found, parameters checked and each tried.

    A step whose parameters are all the defaults is its bare name: so it is the same model, however written.

    Raises:
        ConfigError: an unknown transform or parameter, an order that has no meaning, a function that is none.
    """
    key = f"features.{feature.name}.dense"
    names = [step if isinstance(step, str) else step.name for step in feature.dense]
    if "raw" in names and len(names) > 1:
        raise ConfigError(where, key, names, '"raw" alone, or transforms', "raw means that nothing is done")
    if "standard" in names[:-1]:
        hint = "its running mean is the model's, which comes after all else"
        raise ConfigError(where, key, names, '"standard" as the last transform', hint)
    steps = tuple(_canonical(step, folder, where, key) for step in feature.dense)
    _column(steps, folder, where, key).check()
    return steps


def column_of(feature: Feature, folder: str, where: str = "spec") -> Column | None:
    """The steps of a dense feature that the native decoder leaves; None if it leaves none."""
    rest = feature.dense[1:] if native_first(feature) else feature.dense
    column = _column(rest, folder, where, f"features.{feature.name}.dense")
    return column if column.steps else None


def native_first(feature: Feature) -> bool:
    """Whether the native decoder does the feature's first step."""
    first = feature.dense[0]
    return isinstance(first, str) and first in TRANSFORMS and TRANSFORMS[first].native


def _column(steps: Sequence[str | Step], folder: str, where: str, key: str) -> Column:
    found = []
    for step in steps:
        name, given = (step, {}) if isinstance(step, str) else (step.name, dict(step.parameters))
        transform = find_transform(name, folder, where=where, key=key)
        if transform.function is not None:
            whole = tuple((p.name, given.get(p.name, p.default)) for p in transform.parameters)
            found.append((transform, whole))
    return Column(where, key, tuple(found))


def _canonical(step: str | Step, folder: str, where: str, key: str) -> str | Step:
    """The step without the parameters that are as their defaults."""
    if isinstance(step, str):
        find_transform(step, folder, where=where, key=key)
        return step
    parameters = {p.name: p for p in find_transform(step.name, folder, where=where, key=key).parameters}
    for name, value in step.parameters:
        if name not in parameters:
            expected = f"parameters of {step.name}: {', '.join(parameters) or 'it takes none'}"
            raise ConfigError(where, key, step.as_written(), expected, f"{name} is none of them")
        if not parameters[name].allows(value):
            hint = f"{name}: {parameters[name].doc}" if parameters[name].doc else ""
            raise ConfigError(where, f"{key}.{name}", value, parameters[name].expected, hint)
    apart = tuple(sorted((n, v) for n, v in step.parameters if v != parameters[n].default))
    return Step(step.name, apart) if apart else step.name
