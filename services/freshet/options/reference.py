"""Options as tables of Markdown: the docs of the spec and of the settings are written by this."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field
from typing import Any

from freshet.options.forms import Boolean, Duration, duration_text
from freshet.options.option import key_of, options_of

__all__ = ["default_text", "grid", "option_rows"]

HEAD = ("key", "allowed", "default", "kind", "meaning")


def option_rows(cls: type, prefix: str = "") -> list[tuple[str, ...]]:
    """One row for each option of a class, as `HEAD` names the columns."""
    return [
        (
            f"`{prefix}{key_of(o)}`",
            _escaped(o.metadata["form"].expected),
            default_text(o),
            o.metadata["kind"],
            _escaped(o.metadata["doc"]),
        )
        for o in options_of(cls)
    ]


def default_text(option: Field[Any]) -> str:
    """The default as the user would write it; empty where the key is needed or another rule fills it in."""
    if option.default is NO_DEFAULT:
        return "" if option.default_factory is NO_DEFAULT else f"`{option.default_factory()}`"
    value = option.default
    if isinstance(option.metadata["form"], Duration) and value is not None:
        value = duration_text(value)
    if value is None or value in ((), ""):
        return ""
    if isinstance(option.metadata["form"], Boolean):
        return f"`{str(value).lower()}`"
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def grid(rows: Iterable[Sequence[str]], head: Sequence[str] = HEAD) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
