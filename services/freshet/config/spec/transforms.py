"""Transforms of dense features: descriptors with name, parameters and function.

A transform is an elementwise function of one column, (B,) float32 with NaN for missing numbers; it changes
the column in place or returns another. It has no state; the model itself computes `standard`, as its running
mean is saved with the weights. A new built-in one needs a descriptor here and a line in its test. Users add a
function in a module beside the spec (`dense = "my_module:my_function"`), or an entry point of the group
`freshet.transforms`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np

from freshet.config.options import nearest_hint
from freshet.config.spec.inputs import Feature, Parameter, Step
from freshet.config.spec.model import Spec
from freshet.errors import ConfigError, Mismatch
from freshet.types import F32

# --- Steps of a dense column after the native decoder, which calls `Column.run` for samples, backtests,
# replays, rank requests and Open Inference Protocol rows alike.

PROBE: F32 = np.array(
    [np.nan, 0, 1, -1, 0.5, -0.5, 0.01, 2, 3, 7, 10, 24, 99, 100, 1e3, -1e3, 1e-6, 1e6, -1e6, 1e9], np.float32
)
"""Numbers on which transforms are checked; counts, prices, rates, ages and times are of these magnitudes."""


@dataclass(frozen=True, slots=True)
class Column:
    """Steps of one dense column after the native decoder, in order."""

    where: str
    key: str  # features.NAME.dense
    steps: tuple[tuple[Transform, tuple[tuple[str, float], ...]], ...]

    @property
    def has_user_code(self) -> bool:
        """Whether one of the transforms is the user's."""
        return any(not transform.built_in for transform, _ in self.steps)

    def run(self, column: F32) -> F32:
        """Transform a column (B,); the result is NaN where a number is missing or not finite afterwards.

        Raises ConfigError if a function raises, or returns another shape or dtype.
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
                result = transform.function(given, **parameters)
        except Exception as error:  # the user's function may raise any error
            hint = f"it raised {type(error).__name__}: {error}"
            raise self.error(transform, "a function of a (B,) float32 column", hint) from error
        result = given if result is None else result
        if not isinstance(result, np.ndarray) or result.shape != column.shape:
            found = (
                f"shape {result.shape}" if isinstance(result, np.ndarray) else f"a {type(result).__name__}"
            )
            raise self.error(transform, f"as many numbers as it is given, {column.shape}", f"it gave {found}")
        if result.dtype != np.float32:
            hint = f"it gave {result.dtype}; end with .astype(np.float32)"
            raise self.error(transform, "a column of float32", hint)
        return result if result.flags.writeable else result.copy()

    def error(self, transform: Transform, expected: str, hint: str) -> ConfigError:
        """Return an error about a step."""
        return ConfigError(self.where, self.key, transform.name, expected, hint)

    def check(self) -> None:
        """Check the steps on `PROBE`. Raises ConfigError if one is not elementwise or not finite."""
        column = PROBE
        for transform, pairs in self.steps:
            result = self._step(transform, dict(pairs), column)
            self._check_finite(transform, column, result)
            alone = [self._step(transform, dict(pairs), column[i : i + 1]) for i in range(len(column))]
            self._check_alone(transform, column, result, np.concatenate(alone))
            column = result
            column[~np.isfinite(column)] = np.nan

    def _check_finite(self, transform: Transform, given: F32, result: F32) -> None:
        infinite = np.flatnonzero(np.isinf(result))
        if len(infinite):
            hint = f"it makes {result[infinite[0]]} of {given[infinite[0]]:g}; clip the numbers first"
            raise self.error(transform, "finite numbers of finite numbers", hint)

    def _check_alone(self, transform: Transform, given: F32, result: F32, alone: F32) -> None:
        """Check that a number's result does not depend on the rest of the column, as batches differ."""
        differ = np.flatnonzero(~np.isclose(result, alone, rtol=1e-5, atol=1e-6, equal_nan=True))
        if len(differ):
            i = differ[0]
            hint = (
                f"it makes {result[i]:g} of {given[i]:g} among others, but {alone[i]:g} of it alone;"
                " what depends on other numbers would differ between training and serving"
            )
            raise self.error(transform, "a function that works number by number", hint)


def resolve(feature: Feature, folder: str, where: str) -> tuple[str | Step, ...]:
    """Check the transforms of a dense feature, and return them in canonical form.

    A step with default parameters becomes its bare name, so both spellings have the same identity.

    Raises:
        ConfigError: a transform or parameter is unknown, the order is invalid, or a function fails its check.
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


def column_of(feature: Feature, folder: str) -> Column | None:
    """Return the steps of a dense feature that the native decoder does not compute, or None."""
    rest = feature.dense[1:] if native_first(feature) else feature.dense
    column = _column(rest, folder, "spec", f"features.{feature.name}.dense")
    return column if column.steps else None


def native_first(feature: Feature) -> bool:
    """Return whether the native decoder computes the feature's first step."""
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
    """Remove parameters equal to their defaults from a step."""
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
    stated = tuple(sorted((n, v) for n, v in step.parameters if v != parameters[n].default))
    return Step(step.name, stated) if stated else step.name


# --- Outcomes of the user's transforms on the probe.
#
# A model's identity covers the name and parameters of a transform, but not its code. So each version stores
# the outcomes at training, and changed code is refused before it trains or serves with skew.


Outcomes = Mapping[str, Sequence[float | None]]
"""Feature -> result for each number of `PROBE`; None: missing."""

RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""Tolerances for the rounding of other processors and numpy releases."""


def outcomes_of(spec: Spec) -> Outcomes:
    """Compute the outcomes of dense features with a transform of the user."""
    found = {}
    for feature in spec.features:
        column = column_of(feature, spec.folder) if feature.dense else None
        if column is not None and column.has_user_code:
            result = column.run(PROBE).astype(np.float64)
            found[feature.name] = [None if np.isnan(x) else float(x) for x in result]
    return found


def check_outcomes(spec: Spec, trained: Outcomes, owner: str) -> None:
    """Compare current outcomes with those at the training of `owner`, such as "version 3".

    Raises:
        Mismatch: a transform has another result; names feature, transforms and the first such number.
    """
    for name, now in outcomes_of(spec).items():
        before = trained.get(name, [])
        if len(before) != len(now):
            continue  # from a release with another probe, or without one
        a, b = (np.array([np.nan if x is None else x for x in xs]) for xs in (before, now))
        differ = np.flatnonzero(~np.isclose(a, b, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True))
        if len(differ):
            i = differ[0]
            steps = ", ".join(str(step) for step in spec.feature(name).dense)
            raise Mismatch(
                f"features.{name}.dense: {steps} makes {b[i]:g} of {PROBE[i]:g}\n"
                f"  {owner} was trained when it made {a[i]:g}\n"
                "  undo the change of its code; or give it another name, which makes it a new model"
            )


GROUP = "freshet.transforms"
"""Group of entry points by which installed distributions add transforms."""

INF = float("inf")

Function = Callable[..., F32 | None]


@dataclass(frozen=True, slots=True)
class Transform:
    """Descriptor of a function of a number, applied before the model."""

    name: str
    doc: str
    function: Function | None = None  # (B,) float32, parameters by keyword; None: no step here
    parameters: tuple[Parameter, ...] = ()
    native: bool = False  # as a first step, the native decoder computes it, faster
    state: str = ""  # state and its place; only transforms that the model computes have any
    built_in: bool = field(default=True, compare=False)


def _log1p(x: F32) -> F32:
    return np.copysign(np.log1p(np.abs(x)), x)


def _clip(x: F32, *, low: float, high: float) -> None:
    if not low < high or (low == -INF and high == INF):
        raise ValueError("low must be below high, and one of them must be set")
    np.clip(x, np.float32(low), np.float32(high), out=x)


TRANSFORMS: Mapping[str, Transform] = {
    transform.name: transform
    for transform in (
        Transform("raw", "the number unchanged; the only step"),
        Transform("log1p", "log(1 + x), odd: a negative number gives −log(1 − x)", _log1p, native=True),
        Transform(
            "clip",
            "limits the number to `low` … `high`",
            _clip,
            (Parameter("low", -INF, doc="least value"), Parameter("high", INF, doc="greatest value")),
        ),
        Transform(
            "standard",
            "subtracts the mean, divides by the deviation, clips at ±10; the last step",
            state="mean and deviation of all values so far, with the dense weights; a single wild value moves"
            " them little, `clip` before it bounds many",
        ),
    )
}
"""Built-in transforms by name."""


def find_transform(name: str, folder: str, *, where: str, key: str) -> Transform:
    """Return the transform of a name: built in, by entry point, or `package.module:name`.

    Raises:
        ConfigError: there is no such transform, it cannot be imported, or the object is no transform.
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
    except Exception as error:  # another distribution may raise any error
        hint = f"entry point {added[name].value} raised {type(error).__name__}: {error}"
        raise ConfigError(where, key, name, "a transform that can be imported", hint) from error
    return _described(found, name, where, key)


def _described(found: Any, name: str, where: str, key: str) -> Transform:
    """Return the user's descriptor, or create one of a function, with its further arguments as parameters."""
    if isinstance(found, Transform):
        if found.function is None:
            raise ConfigError(where, key, name, "a freshet.Transform with a function", "it has none")
        return Transform(name, found.doc, found.function, found.parameters, built_in=False)
    if not inspect.isfunction(found):
        expected = "a function of a column, or a freshet.Transform"
        raise ConfigError(where, key, name, expected, f"it is a {type(found).__name__}")
    arguments = list(inspect.signature(found).parameters.values())
    if not arguments or arguments[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise ConfigError(where, key, name, "a function of a column: f(x)", "it takes no column")
    for other in arguments[1:]:
        if type(other.default) not in (int, float) or other.kind is other.POSITIONAL_ONLY:
            raise ConfigError(
                where,
                key,
                name,
                "a function of a column, then parameters with numbers as defaults: f(x, *, limit=99.0)",
                f"{other.name} is not such a parameter",
            )
    doc = (inspect.getdoc(found) or "").partition("\n")[0]
    parameters = tuple(Parameter(p.name, float(p.default)) for p in arguments[1:])
    return Transform(name, doc, found, parameters, built_in=False)


# --- Import of the user's code that a spec names as `package.module:name`.
#
# The module is an installed package, on PYTHONPATH, or beside the spec file. The spec's folder goes to the
# end of `sys.path`, so a file there never shadows an installed module. Errors name the key of the spec.

REFERENCE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
"""Pattern of a reference to code: a module, a colon, a name in the module."""


def load_object(reference: str, folder: str, *, where: str, key: str) -> Any:
    """Import the object that `package.module:name` names.

    Args:
        reference: matches `REFERENCE`.
        folder: folder of the spec file; "" if the spec has no file.
        where, key: place for errors.

    Raises:
        ConfigError: the module is missing or its import fails, the module lacks the name, or another module
            shadows the one beside the spec.
    """
    module_name, _, name = reference.partition(":")
    beside = _beside(module_name, folder)
    if folder and (path := str(Path(folder).resolve())) not in sys.path:
        sys.path.append(path)
    try:
        module = import_module(module_name)
    except Exception as error:  # the user's module may raise any error
        raise ConfigError(where, key, reference, *_why(error, module_name, folder)) from error
    if beside is not None and _root(module_name) != beside:
        raise ConfigError(
            where,
            key,
            reference,
            f"the module beside the spec, {beside}",
            f"another one of that name was imported, {_root(module_name)}; give yours a name of its own",
        )
    if not hasattr(module, name):
        names = [n for n in vars(module) if not n.startswith("_")]
        hint = nearest_hint(name, names) or f"there is no {name} in {module.__file__}"
        raise ConfigError(where, key, reference, f"a name that module {module_name} defines", hint)
    return getattr(module, name)


def _why(error: Exception, module: str, folder: str) -> tuple[str, str]:
    """Return the expectation and the hint for a failed import: the module is missing, or its code raised."""
    parts = module.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    if isinstance(error, ModuleNotFoundError) and error.name in prefixes:
        place = f"put {parts[0]}.py beside the spec, in {Path(folder).resolve()}, or " if folder else ""
        return "a module that can be imported", f"there is no module {error.name}: {place}install its package"
    return "a module that can be imported", f"importing {module} raised {type(error).__name__}: {error}"


def _beside(module: str, folder: str) -> Path | None:
    """Return the file of the module's outermost package in the spec's folder, if there is one."""
    if not folder:
        return None
    head = Path(folder).resolve() / module.partition(".")[0]
    if head.with_suffix(".py").is_file():
        return head.with_suffix(".py")
    return head / "__init__.py" if (head / "__init__.py").is_file() else None


def _root(module: str) -> Path | None:
    file = getattr(sys.modules[module.partition(".")[0]], "__file__", None)
    return Path(file).resolve() if file else None
