"""Options, forms and sections: the schema and parser of the spec, of the settings and of options in URLs.

An option is a dataclass field with its key, the form of its value, its meaning and its kind. A form converts
a TOML value to the field's value, or raises `Wrong`; `expected` completes "expected ..." in errors and in the
reference; `json_schema` describes the form to editors (draft 7) as far as JSON Schema can, and refuses no
value that `read` accepts. Parser, errors, reference pages and `freshet check` derive from options (ADR 0028).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, field, fields
from fractions import Fraction
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from freshet.errors import ConfigError


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
        match = re.fullmatch(DURATION, value) if isinstance(value, str) else None
        if match is None:
            form = "a number and its unit" if isinstance(value, str) else "text, a number and its unit"
            raise Wrong(self.expected, f'a duration is {form}: "20ms", "30s", "2m", "24h", "30d"')
        ms = Fraction(match[1]) * UNITS_MS[match[2]]
        if ms.denominator != 1:
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
        r"""Return the JSON Schema. `\w` is ASCII here, but all of Unicode in some validators."""
        schema = {"type": "string", "minLength": 1, "maxLength": self.longest}
        if self.pattern == ANYTHING:
            return schema
        classes = re.sub(r"\[([^\]]*)\]", lambda m: m[0].replace(r"\w", LETTERS), self.pattern)
        return {**schema, "pattern": "^(?:" + classes.replace(r"\w", f"[{LETTERS}]") + ")$"}


LETTERS = "A-Za-z0-9_"


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


Kind = Literal["identity", "tunable", "deployment"]
"""Effect of a change: identity makes another model; tunable keeps the model; deployment moves processes or
data."""


def option(kind: Kind, doc: str, form: Form | None = None, **metadata: Any) -> Any:
    """Create a dataclass field with kind, meaning and form.

    `metadata` may have default, default_factory, key, hint and former.

    `former` maps a generation of defaults to the default of that generation and of earlier ones. A field
    without a form has a parser of its own, or is derived.
    """
    default = metadata.pop("default", ...)
    factory = metadata.pop("default_factory", None)
    info = {"kind": kind, "doc": doc, "form": form, **metadata}
    if factory is not None:
        return field(default_factory=factory, metadata=info)
    return field(metadata=info) if default is ... else field(default=default, metadata=info)


identity = partial(option, "identity")
tunable = partial(option, "tunable")
deployment = partial(option, "deployment")


def options_of(cls: type) -> Sequence[Field[Any]]:
    """Return the fields of a class that have a form."""
    return [f for f in fields(cls) if f.metadata.get("form") is not None]


def default_of(option: Field[Any], generation: int | None) -> Any:
    """Return the default in a generation of defaults (None: the newest), or `dataclasses.MISSING`."""
    former = option.metadata.get("former", {})
    if generation is not None:
        for last in sorted(former):
            if generation <= last:
                return former[last]
    if option.default_factory is not NO_DEFAULT:
        return option.default_factory()
    return option.default


def key_of(option: Field[Any]) -> str:
    """Return the key of an option within its section; dotted if it is in a nested table (`batch.rows`).

    It is the name of the field, for a duration without the unit, unless the option states another.
    """
    unit = "_ms" if isinstance(option.metadata.get("form"), Duration) else ""
    return str(option.metadata.get("key") or option.name.removesuffix(unit))


T = TypeVar("T")


class Section:
    """One table of a configuration, with its file and path (`freshet.toml`, `tables.user`).

    `defaults` is the generation of defaults for absent keys; None: the newest.
    """

    def __init__(self, where: str, path: str, values: Mapping[str, Any], defaults: int | None = None) -> None:
        self.where, self.path, self._values, self.defaults = where, path, values, defaults

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def names(self) -> tuple[str, ...]:
        """Return the present keys, in order."""
        return tuple(self._values)

    def raw(self, key: str) -> Any:
        """Return the value before its form is applied, or MISSING."""
        return self._values.get(key, MISSING)

    def error(self, key: str, expected: str, hint: str = "", found: Any = None) -> ConfigError:
        """Return an error about a key; `found` defaults to the key's value."""
        path = f"{self.path}.{key}" if self.path and key else self.path or key
        return ConfigError(self.where, path, self.raw(key) if found is None else found, expected, hint)

    def check_keys(self, known: Iterable[str]) -> None:
        """Check the keys. Raises ConfigError for the first one that is not in `known`."""
        names = sorted(set(known))
        for key in self._values:
            if key not in names:
                raise self.error(
                    key, f"one of {', '.join(names)}", nearest_hint(key, names) or "there is no such key"
                )

    def read_value(self, key: str, form: Form, default: Any = MISSING, hint: str = "") -> Any:
        """Return a key's value by its form, or the default if it is absent.

        Raises ConfigError if the value does not fit the form, or is absent without a default.
        """
        value = self.raw(key)
        if isinstance(value, Missing):
            if isinstance(default, Missing):
                raise self.error(key, form.expected, hint)
            return default
        try:
            return form.read(value)
        except Wrong as wrong:
            found = value if isinstance(wrong.found, Missing) else wrong.found
            raise self.error(key + wrong.part, wrong.expected, wrong.hint or hint, found) from None

    def section(self, key: str, *, hint: str = "", required: bool = False) -> Section:
        """Return a nested table; an absent one is empty.

        Raises ConfigError if the value is no table, or is absent and `required`.
        """
        value = self.raw(key)
        if isinstance(value, Missing) and not required:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(key, "a table, [...] or { ... }", hint)
        return Section(self.where, f"{self.path}.{key}" if self.path else key, value, self.defaults)


def read_object(cls: type[T], section: Section, *, also: Iterable[str] = (), **given: Any) -> T:
    """Create an object of `cls` from a section: options by their forms, the fields in `given` as they are.

    `also` names keys that the caller reads. The section may also contain the keys of the fields in `given`.
    """
    options = options_of(cls)
    section.check_keys([*(key_of(o).split(".")[0] for o in options), *also])
    inner: dict[str, list[str]] = {}
    for o in options:
        head, _, rest = key_of(o).partition(".")
        if rest:
            inner.setdefault(head, []).append(rest)
    for head, names in inner.items():
        section.section(head).check_keys(names)
    values = {o.name: _read_option(section, o) for o in options if o.name not in given}
    return cls(**values, **given)


def _read_option(section: Section, option: Field[Any]) -> Any:
    head, _, rest = key_of(option).partition(".")
    default = default_of(option, section.defaults)
    default = MISSING if default is NO_DEFAULT else default
    hint = option.metadata.get("hint") or f"{rest or head}: {option.metadata['doc']}"
    if rest:
        return section.section(head).read_value(rest, option.metadata["form"], default, hint)
    return section.read_value(head, option.metadata["form"], default, hint)
