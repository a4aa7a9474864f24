"""The transforms of dense features, described once: name, parameters, function. Spec keys, checks, docs and
what training, backtests and serving do to a number follow from this.

A transform is a vectorised function of one column, (B,) float32 with NaN where a number is missing: it
changes the column in place or returns another. It works number by number and keeps no state; `standard`,
which does, is the model's, as its running mean is saved with the weights. Adding one: a descriptor here and a
line in its test. One of your own: a function in a module beside the spec (`dense = "my_module:my_function"`),
or an entry point of the group `freshet.transforms`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from freshet.config.options import nearest_hint
from freshet.config.spec.extensions import load_object
from freshet.config.spec.forms import Parameter, Step
from freshet.config.spec.inputs import Feature
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError, Mismatch
from freshet.types import F32

__all__ = [
    "GROUP",
    "PROBE",
    "TRANSFORMS",
    "Column",
    "Outcomes",
    "Transform",
    "check_outcomes",
    "column_of",
    "find_transform",
    "native_first",
    "outcomes_of",
    "resolve",
]

# --- What `dense` of a feature says, as steps that can be run: resolved, checked on a probe, applied.
#
# `Column.run` is the one place where a number is transformed after the native decoder: samples for
# training, backtests and replays, rank requests and Open Inference Protocol rows all come through the
# decoder that calls it.


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


# --- What transforms of the user's make of the probe: kept with each version, compared before it goes on.
#
# The name and parameters of a transform are part of the model's identity; its code cannot be. So a
# version says what each column came to when it was trained, and code that gives other numbers is
# noticed before it trains on or serves: it would be skew.


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


GROUP = "freshet.transforms"
"""Entry points of this group are transforms that an installed distribution adds, by name."""

INF = float("inf")

Function = Callable[..., F32 | None]


@dataclass(frozen=True, slots=True)
class Transform:
    """What is done to a number before the model sees it."""

    name: str
    doc: str
    function: Function | None = None  # (B,) float32, parameters by keyword; None: nothing is left to do
    parameters: tuple[Parameter, ...] = ()
    native: bool = False  # where it comes first the native decoder does the same, faster
    state: str = ""  # what is kept of the past, and where; only the model's own transforms have any
    built_in: bool = field(default=True, compare=False)


def _log1p(x: F32) -> F32:
    return np.copysign(np.log1p(np.abs(x)), x)


def _clip(x: F32, *, low: float, high: float) -> None:
    if not low < high or (low == -INF and high == INF):
        raise ValueError("low must be below high, and one of them given")
    np.clip(x, np.float32(low), np.float32(high), out=x)


TRANSFORMS: Mapping[str, Transform] = {
    transform.name: transform
    for transform in (
        Transform("raw", "the number as it is; stands alone"),
        Transform("log1p", "log(1 + x), odd: a negative number gives −log(1 − x)", _log1p, native=True),
        Transform(
            "clip",
            "nothing below `low`, nothing above `high`",
            _clip,
            (Parameter("low", -INF, doc="least value"), Parameter("high", INF, doc="greatest value")),
        ),
        Transform(
            "standard",
            "less its mean, by its deviation, cut at ±10; comes last",
            state="mean and deviation so far, with the dense weights",
        ),
    )
}
"""Every built-in transform by name."""


def find_transform(name: str, folder: str, *, where: str, key: str) -> Transform:
    """The transform of that name: built in, by entry point, or `package.module:name`.

    Raises:
        ConfigError: there is none; or what the name stands for is no transform.
    """
    if name in TRANSFORMS:
        return TRANSFORMS[name]
    if ":" in name:
        return _described(load_object(name, folder, where=where, key=key), name, where, key)
    added = {point.name: point for point in entry_points(group=GROUP)}
    if name not in added:
        known = [*TRANSFORMS, *sorted(added)]
        hint = nearest_hint(name, known) or 'your own: "module:function", the module beside the spec'
        raise ConfigError(where, key, name, f"one of {', '.join(known)}", hint)
    try:
        found = added[name].load()
    except Exception as error:  # whatever a distribution of somebody's raises
        hint = f"entry point {added[name].value} raised {type(error).__name__}: {error}"
        raise ConfigError(where, key, name, "a transform that can be imported", hint) from error
    return _described(found, name, where, key)


def _described(found: Any, name: str, where: str, key: str) -> Transform:
    """A user's descriptor, or one made of a plain function: parameters are its keyword arguments."""
    if isinstance(found, Transform):
        if found.function is None:
            raise ConfigError(where, key, name, "a freshet.Transform with a function", "it has none")
        return Transform(name, found.doc, found.function, found.parameters, built_in=False)
    if not inspect.isfunction(found):
        expected = "a function of a column, or a freshet.Transform"
        raise ConfigError(where, key, name, expected, f"it is a {type(found).__name__}")
    takes = list(inspect.signature(found).parameters.values())
    if not takes or takes[0].kind not in (takes[0].POSITIONAL_ONLY, takes[0].POSITIONAL_OR_KEYWORD):
        raise ConfigError(where, key, name, "a function of a column: f(x)", "it takes no column")
    for other in takes[1:]:
        if type(other.default) not in (int, float) or other.kind is other.POSITIONAL_ONLY:
            raise ConfigError(
                where,
                key,
                name,
                "a function of a column, then parameters with numbers as defaults: f(x, *, limit=99.0)",
                f"{other.name} is not such a parameter",
            )
    doc = (inspect.getdoc(found) or "").partition("\n")[0]
    parameters = tuple(Parameter(p.name, float(p.default)) for p in takes[1:])
    return Transform(name, doc, found, parameters, built_in=False)
