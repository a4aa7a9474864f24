"""Sections of a configuration: values are taken by form, unknown keys are refused, errors name the whole
path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, field, fields
from typing import Any, Literal, TypeVar

from freshet.config.options.forms import MISSING, Form, Missing, Wrong, nearest_hint
from freshet.errors import ConfigError

__all__ = ["Kind", "Section", "default_of", "key_of", "option", "options_of", "read_object"]

# --- Options: dataclass fields that know their key, form, meaning and kind.


Kind = Literal["identity", "tunable", "deployment"]
"""What changing an option means: another model, the same model going on otherwise, or another place to run.
"""


def option(kind: Kind, doc: str, form: Form | None = None, **metadata: Any) -> Any:
    """A dataclass field with its kind, meaning and form; `metadata` may hold default, key, hint and former.

    `former` maps a generation of defaults to the default that it and earlier ones had, where that differs.
    A field without a form is read by hand (a section of its own, or derived) or not by the user at all.
    """
    default = metadata.pop("default", ...)
    factory = metadata.pop("default_factory", None)
    info = {"kind": kind, "doc": doc, "form": form, **metadata}
    if factory is not None:
        return field(default_factory=factory, metadata=info)
    return field(metadata=info) if default is ... else field(default=default, metadata=info)


def options_of(cls: type) -> Sequence[Field[Any]]:
    """The fields of a spec class that the user writes as single values."""
    return [f for f in fields(cls) if f.metadata.get("form") is not None]


def default_of(option: Field[Any], generation: int | None) -> Any:
    """The option's default in a generation of defaults (None: the newest); dataclasses' MISSING if none."""
    former = option.metadata.get("former", {})
    if generation is not None:
        for last in sorted(former):
            if generation <= last:
                return former[last]
    if option.default_factory is not NO_DEFAULT:
        return option.default_factory()
    return option.default


def key_of(option: Field[Any]) -> str:
    """The key of an option within its section, dotted if it stands in a table of its own (`batch.rows`)."""
    return str(option.metadata.get("key", option.name))


T = TypeVar("T")


class Section:
    """One table of a configuration, with where it stands (`freshet.toml`, `tables.user`).

    `defaults` is the generation of defaults by which absent keys are filled in; None: the newest.
    """

    def __init__(self, where: str, path: str, values: Mapping[str, Any], defaults: int | None = None) -> None:
        self.where, self.path, self._values, self.defaults = where, path, values, defaults

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def names(self) -> tuple[str, ...]:
        """The keys that are given, in order."""
        return tuple(self._values)

    def raw(self, key: str) -> Any:
        """The value as it was written, or MISSING."""
        return self._values.get(key, MISSING)

    def error(self, key: str, expected: str, hint: str = "", found: Any = None) -> ConfigError:
        """An error about one key; `found` is its value unless said otherwise."""
        path = f"{self.path}.{key}" if self.path and key else self.path or key
        return ConfigError(self.where, path, self.raw(key) if found is None else found, expected, hint)

    def only(self, known: Iterable[str]) -> None:
        """Refuse every key that is not one of `known`."""
        names = sorted(set(known))
        for key in self._values:
            if key not in names:
                raise self.error(
                    key, f"one of {', '.join(names)}", nearest_hint(key, names) or "there is no such key"
                )

    def take(self, key: str, form: Form, default: Any = MISSING, hint: str = "") -> Any:
        """The value of a key, read by its form; the default if it is absent."""
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
        """A table within; an absent one is empty unless it is required."""
        value = self.raw(key)
        if isinstance(value, Missing) and not required:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(key, "a table, [...] or { ... }", hint)
        return Section(self.where, f"{self.path}.{key}" if self.path else key, value, self.defaults)


def read_object(cls: type[T], section: Section, *, also: Iterable[str] = (), **given: Any) -> T:
    """Make a spec object from a section: every option by its form, `given` as it is.

    `also` names keys that the caller reads itself. A key given in `given` still belongs to the section.
    """
    options = options_of(cls)
    section.only([*(key_of(o).split(".")[0] for o in options), *also])
    inner: dict[str, list[str]] = {}
    for o in options:
        head, _, rest = key_of(o).partition(".")
        if rest:
            inner.setdefault(head, []).append(rest)
    for head, names in inner.items():
        section.section(head).only(names)
    values = {o.name: _take(section, o) for o in options if o.name not in given}
    return cls(**values, **given)


def _take(section: Section, option: Field[Any]) -> Any:
    head, _, rest = key_of(option).partition(".")
    default = default_of(option, section.defaults)
    default = MISSING if default is NO_DEFAULT else default
    hint = option.metadata.get("hint") or f"{rest or head}: {option.metadata['doc']}"
    if rest:
        return section.section(head).take(rest, option.metadata["form"], default, hint)
    return section.take(head, option.metadata["form"], default, hint)
