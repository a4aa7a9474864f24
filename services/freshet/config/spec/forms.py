"""Forms that several parts of the spec share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freshet.config.options import Number, Text, Wrong

__all__ = ["DAY", "HOUR", "MINUTE", "NAME", "PATH", "SECOND", "Constant", "Parameter", "Step", "StepForm"]

# --- A number that an update rule or a transform takes: its default, its range and what it means.


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number. Spec key, error, reference and identity follow from it."""

    name: str
    default: float
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False  # `low` itself is not allowed
    doc: str = ""

    def allows(self, value: float) -> bool:
        """Whether the thing is defined for this value."""
        return self.low <= value <= self.high and not (self.low_open and value == self.low)

    @property
    def expected(self) -> str:
        """The range in words, for an error."""
        return self.form.expected

    @property
    def form(self) -> Number:
        """How it is written."""
        return Number(self.low, self.high, open_low=self.low_open)


SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000  # milliseconds

NAME = Text(
    "a name of letters, digits and _, starting with a letter, at most 64 long", r"[A-Za-z]\w*", longest=64
)
PATH = Text('the path of a field, such as "user.id"', r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class Constant:
    """The form of a value of the user's own: text or a number."""

    expected = "text, an integer of 64 bits or a finite number"

    def read(self, value: Any) -> str | int | float:
        """The value."""
        if isinstance(value, str):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        raise Wrong(self.expected)

    def json_schema(self) -> dict[str, Any]:
        """Text or a number."""
        return {"type": ["string", "number"]}


@dataclass(frozen=True, slots=True)
class Step:
    """A transform of a number with parameters that are not its defaults."""

    name: str
    parameters: tuple[tuple[str, float], ...]  # by name

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value:g}' for name, value in self.parameters)})"

    def as_written(self) -> Mapping[str, str | float]:
        """As the spec writes it."""
        return {"name": self.name, **dict(self.parameters)}


TRANSFORM_NAME = Text(
    'the name of a transform, or "package.module:function"',
    r"[A-Za-z]\w*|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*",
)


class StepForm:
    """The form of a transform: its name, or a table of its name and parameters."""

    expected = 'a transform: its name, or { name = "...", parameter = number }'

    def read(self, value: Any) -> str | Step:
        """The bare name, or the step; which names there are is known to `freshet.config.spec.transforms`."""
        if not isinstance(value, Mapping):
            return TRANSFORM_NAME.read(value)
        name = TRANSFORM_NAME.read(value["name"]) if "name" in value else None
        if name is None:
            raise Wrong(self.expected)
        parameters = []
        for key, given in value.items():
            if key != "name":
                try:
                    parameters.append((str(key), Number().read(given)))
                except Wrong as wrong:
                    raise Wrong(wrong.expected, f"a parameter of {name}", f".{key}", given) from None
        return Step(name, tuple(sorted(parameters)))

    def json_schema(self) -> dict[str, Any]:
        """A name or a table; `freshet.config.spec.json_schema` adds the known names and parameters."""
        name = TRANSFORM_NAME.json_schema()
        table = {
            "type": "object",
            "properties": {"name": name},
            "required": ["name"],
            "additionalProperties": Number().json_schema(),
        }
        return {"anyOf": [name, table]}
