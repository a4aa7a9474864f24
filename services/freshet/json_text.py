"""JSON from outside: writing it again, within the nesting limit of the writer, and quoting it in errors."""

from __future__ import annotations

import reprlib

import orjson

from freshet.errors import BadInput

MOST_LEVELS = 254
"""Levels of nested objects and arrays that orjson writes; it reads up to 1,024."""

_SHOWN_CHARS = 60


def written(value: object, where: str) -> bytes:
    """Encode a value that was read from JSON. Raises BadInput, with `where`, if it is nested too deep."""
    try:
        return orjson.dumps(value)
    except TypeError:
        raise too_deep(where) from None


def too_deep(where: str) -> BadInput:
    """Return the error for nesting beyond MOST_LEVELS."""
    return BadInput(f"{where}: nested too deep; expected at most {MOST_LEVELS} levels of objects and arrays")


_WORDS = {None: "null", True: "true", False: "false"}
_KINDS = {dict: "an object", list: "an array", str: "a string", int: "a number", float: "a number"}


def shown(value: object) -> str:
    """Return the beginning of a value for an error message; cheap for any length and depth."""
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    return reprlib.repr(value)[:_SHOWN_CHARS]


def kind_of(value: object) -> str:
    """Return the JSON type of a value that was read from JSON: `an array`, `null`."""
    return _KINDS.get(type(value)) or shown(value)
