"""Forms of the values in the spec and the settings.

A form converts a TOML value to the value of a dataclass field, or raises `Wrong`. `expected` completes
"expected ..." in errors and in the reference. `json_schema` describes the form to editors (draft 7) as far as
JSON Schema can; it refuses no value that `read` accepts.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "MISSING",
    "Boolean",
    "Choice",
    "Duration",
    "Form",
    "Integer",
    "ListOf",
    "Missing",
    "Number",
    "Text",
    "Wrong",
    "duration_text",
]


class Missing:
    """Type of MISSING, an absent value; errors show it as `(missing)`."""

    def __repr__(self) -> str:
        return "(missing)"


MISSING = Missing()

ANYTHING = r"(?s:.+)"
DURATION = r"([0-9]{1,12}(?:\.[0-9]{1,6})?)[ \t]*(ms|s|m|h|d)"
UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
"""Milliseconds in each unit of a duration."""


class Wrong(Exception):
    """A value does not fit its form. `part` is the place inside the value ("[1]"); "" for the whole value."""

    def __init__(self, expected: str, hint: str = "", part: str = "", found: Any = MISSING) -> None:
        super().__init__(expected)
        self.expected, self.hint, self.part, self.found = expected, hint, part, found


class Form(Protocol):
    """Form of one value."""

    @property
    def expected(self) -> str:
        """The allowed values in words."""

    def read(self, value: Any) -> Any:
        """Convert a TOML value to the field's value. Raises Wrong."""

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the TOML value."""


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number from `low` to `high`."""

    low: int
    high: int
    power_of_two: bool = False

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        return f"{'a power of two' if self.power_of_two else 'an integer'} from {self.low} to {self.high}"

    def read(self, value: Any) -> int:
        """Return the integer. Raises Wrong."""
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise Wrong(self.expected)
        if self.power_of_two and value & (value - 1):
            raise Wrong(self.expected)
        return value

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema: an integer within the bounds, or an enum of powers of two."""
        if self.power_of_two:
            return {"enum": [1 << i for i in range(64) if self.low <= 1 << i <= self.high]}
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from `low` to `high`; with `open_low`, above `low`."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        if math.isinf(self.low):
            return "a finite number"
        if math.isinf(self.high):
            return f"a number above {self.low:g}" if self.open_low else f"a number of at least {self.low:g}"
        if self.open_low:
            return f"a number above {self.low:g}, up to {self.high:g}"
        return f"a number from {self.low:g} to {self.high:g}"

    def read(self, value: Any) -> float:
        """Return the number as a float. Raises Wrong."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not _is_double(value):
            raise Wrong(self.expected)
        if not self.low <= value <= self.high or (self.open_low and value == self.low):
            raise Wrong(self.expected)
        return float(value)

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema: a number within the finite bounds."""
        least = "exclusiveMinimum" if self.open_low else "minimum"
        bounds = {least: self.low, "maximum": self.high}
        return {"type": "number", **{k: v for k, v in bounds.items() if math.isfinite(v)}}


def _is_double(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False


@dataclass(frozen=True, slots=True)
class Boolean:
    """True or false."""

    expected: str = "true or false"

    def read(self, value: Any) -> bool:
        """Return the value. Raises Wrong."""
        if not isinstance(value, bool):
            raise Wrong(self.expected)
        return value

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of a boolean."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Duration:
    """A duration such as "30s", in milliseconds; with `never`, false means no limit."""

    low_ms: int
    high_ms: int
    never: bool = False

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        never = ", or false" if self.never else ""
        return f"a duration from {duration_text(self.low_ms)} to {duration_text(self.high_ms)}{never}"

    def read(self, value: Any) -> int | None:
        """Return milliseconds, or None for no limit. Raises Wrong."""
        if value is False and self.never:
            return None
        if not isinstance(value, str):
            raise Wrong(
                self.expected, 'a duration is text, a number and its unit: "20ms", "30s", "2m", "24h", "30d"'
            )
        match = re.fullmatch(DURATION, value)
        if match is None:
            raise Wrong(
                self.expected, 'a duration is a number and its unit: "20ms", "30s", "2m", "24h", "30d"'
            )
        ms = float(match[1]) * UNITS_MS[match[2]]
        if ms != int(ms):
            raise Wrong(self.expected, "a millisecond is the smallest unit of time here")
        if not self.low_ms <= ms <= self.high_ms:
            raise Wrong(self.expected)
        return int(ms)

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema: text of a number and its unit, without bounds; with `never` also false."""
        written = {"type": "string", "pattern": f"^{DURATION}$"}
        return {"anyOf": [written, {"const": False}]} if self.never else written


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        return ("one of " if len(self.words) > 1 else "") + ", ".join(f'"{w}"' for w in self.words)

    def read(self, value: Any) -> str:
        """Return the word. Raises Wrong."""
        if not isinstance(value, str) or value not in self.words:
            raise Wrong(self.expected, nearest_hint(value, self.words))
        return value

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema: an enum of the words."""
        return {"type": "string", "enum": list(self.words)}


@dataclass(frozen=True, slots=True)
class Text:
    """Text that matches a pattern as a whole; `expected` describes the pattern in words."""

    expected: str
    pattern: str = ANYTHING
    longest: int = 1_000

    def read(self, value: Any) -> str:
        """Return the text. Raises Wrong."""
        if (
            not isinstance(value, str)
            or len(value) > self.longest
            or not re.fullmatch(self.pattern, value, re.ASCII)
        ):
            raise Wrong(self.expected)
        return value

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema; its pattern means the same in all dialects of regular expressions."""
        schema = {"type": "string", "minLength": 1, "maxLength": self.longest}
        if self.pattern == ANYTHING:
            return schema
        return {**schema, "pattern": f"^(?:{_portable(self.pattern)})$"}


def _portable(pattern: str) -> str:
    r"""Replace `\w`, which is ASCII here (`re.ASCII`) but all of Unicode in some validators."""
    inside = re.sub(r"\[([^\]]*)\]", lambda m: f"[{m[1].replace(WORD, LETTERS)}]", pattern)
    return inside.replace(WORD, f"[{LETTERS}]")


WORD, LETTERS = r"\w", "A-Za-z0-9_"


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of `low` to `high` values of one form, as a tuple; with `lone`, also one bare value."""

    item: Form
    low: int = 0
    high: int = 64
    lone: bool = False

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        lone = f"{self.item.expected}, or " if self.lone else ""
        size = f"{self.low} to {self.high}" if self.low != self.high else f"{self.low}"
        return f"{lone}a list of {size} values, each {self.item.expected}"

    def read(self, value: Any) -> tuple[Any, ...]:
        """Return the values. Raises Wrong."""
        if self.lone and not isinstance(value, list):
            return (self.item.read(value),)
        if not isinstance(value, list) or not self.low <= len(value) <= self.high:
            raise Wrong(self.expected)
        return tuple(self._item(i, v) for i, v in enumerate(value))

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema: an array; with `lone` also a single item."""
        item = self.item.json_schema()
        array = {"type": "array", "items": item, "minItems": self.low, "maxItems": self.high}
        return {"anyOf": [item, array]} if self.lone else array

    def _item(self, i: int, value: Any) -> Any:
        try:
            return self.item.read(value)
        except Wrong as wrong:
            inner = value if isinstance(wrong.found, Missing) else wrong.found
            raise Wrong(wrong.expected, wrong.hint, f"[{i}]{wrong.part}", inner) from None


def duration_text(ms: int) -> str:
    """Format milliseconds in the largest unit that divides them: 90000 is "90s"."""
    for unit in ("d", "h", "m", "s"):
        if ms and ms % UNITS_MS[unit] == 0:
            return f"{ms // UNITS_MS[unit]}{unit}"
    return f"{ms}ms"


def nearest_hint(found: Any, known: Sequence[str]) -> str:
    """Return `did you mean "..."?` with the most similar known name, or "" if none is similar."""
    if not isinstance(found, str):
        return ""
    close = difflib.get_close_matches(found, known, n=1, cutoff=0.6)
    return f'did you mean "{close[0]}"?' if close else ""
