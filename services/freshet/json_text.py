"""JSON from outside, written on and shown: what is read may be nested deeper than is written, or shown."""

from __future__ import annotations

import reprlib

import orjson

from freshet.errors import BadInput

__all__ = ["MOST_LEVELS", "kind_of", "shown", "too_deep", "written"]

MOST_LEVELS = 254
"""Of objects and arrays within each other, that orjson writes; it reads 1,024."""

_SHOWN_CHARS = 60


def written(value: object, where: str) -> bytes:
    """JSON of what JSON was read into. Raises BadInput, with `where`, for what is nested too deep."""
    try:
        return orjson.dumps(value)
    except TypeError:
        raise too_deep(where) from None


def too_deep(where: str) -> BadInput:
    """The error for what is nested deeper than MOST_LEVELS."""
    return BadInput(f"{where}: nested too deep; expected at most {MOST_LEVELS} levels of objects and arrays")


_WORDS = {None: "null", True: "true", False: "false"}
_KINDS = {dict: "an object", list: "an array", str: "a string", int: "a number", float: "a number"}


def shown(value: object) -> str:
    """A value as an error shows it: its beginning, at little cost however long or deep it is."""
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    return reprlib.repr(value)[:_SHOWN_CHARS]


def kind_of(value: object) -> str:
    """What kind of value JSON was read into, in JSON's words: `an array`, `null`."""
    return _KINDS.get(type(value)) or shown(value)
