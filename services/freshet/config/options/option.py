"""Options: dataclass fields that know their key, form, meaning and kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, field, fields
from typing import Any, Literal

from freshet.config.options.forms import Form

__all__ = ["Kind", "default_of", "key_of", "option", "options_of"]

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
