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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from freshet.config.options import nearest_hint
from freshet.config.spec.extensions import load_object
from freshet.config.spec.parameters import Parameter
from freshet.errors import ConfigError
from freshet.types import F32

__all__ = ["GROUP", "TRANSFORMS", "Transform", "find_transform"]

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
