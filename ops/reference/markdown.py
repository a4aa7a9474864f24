"""What the reference pages share: headers, tables, escapes, options as rows."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field
from typing import Any

from freshet.config.options import Boolean, Duration, duration_text, key_of, options_of

OPTION_HEAD = ("key", "allowed", "default", "kind", "meaning")


def header(title: str, source: str) -> str:
    """A page's title and the note to those who would edit it."""
    return f"# {title}\n\n<!-- Written by `make docs`; edit {source} instead. -->\n"


def grid(rows: Iterable[Sequence[str]], head: Sequence[str] = OPTION_HEAD) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def escaped(text: str) -> str:
    """Text for a cell of a table; code between backticks keeps its angle brackets."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def code(text: str) -> str:
    """Code within a cell of a table; empty stays empty."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def first_paragraph(subject: object) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(subject) or "").partition("\n\n")[0].split())


def option_rows(cls: type, prefix: str = "") -> list[tuple[str, ...]]:
    """One row for each option of a class, as `OPTION_HEAD` names the columns."""
    return [
        (
            f"`{prefix}{key_of(o)}`",
            escaped(o.metadata["form"].expected),
            default_text(o),
            o.metadata["kind"],
            escaped(o.metadata["doc"]),
        )
        for o in options_of(cls)
    ]


def default_text(option: Field[Any]) -> str:
    """The default as the user would write it; empty where the key is needed or another rule fills it in."""
    if option.default is NO_DEFAULT:
        return "" if option.default_factory is NO_DEFAULT else f"`{option.default_factory()}`"
    former = [
        f"{_value_text(option, value) or 'none'} with `defaults = {generation}`"
        for generation, value in option.metadata.get("former", {}).items()
    ]
    return "; ".join(filter(None, [_value_text(option, option.default), *former]))


def _value_text(option: Field[Any], value: Any) -> str:
    form = option.metadata["form"]
    if isinstance(form, Duration):
        value = (False if form.never else None) if value is None else duration_text(value)
    if value is None or value in ((), ""):
        return ""
    if isinstance(value, bool) or isinstance(form, Boolean):
        return f"`{str(value).lower()}`"
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"
