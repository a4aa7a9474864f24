"""Options as dataclass fields, and sections that read values by form and raise errors with the full path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, field, fields
from typing import Any, Literal, TypeVar

from freshet.config.options.forms import MISSING, Form, Missing, Wrong, nearest_hint
from freshet.errors import ConfigError

__all__ = ["Kind", "Section", "default_of", "key_of", "option", "options_of", "read_object"]


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
    """Return the key of an option within its section; dotted if it is in a nested table (`batch.rows`)."""
    return str(option.metadata.get("key", option.name))


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
