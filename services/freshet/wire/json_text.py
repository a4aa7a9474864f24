"""JSON from outside, written on and shown: what is read may be nested deeper than is written, or shown."""

from __future__ import annotations

import reprlib

import orjson

from freshet.errors import BadInput

__all__ = ["MOST_LEVELS", "shown", "too_deep", "written"]

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


def shown(value: object) -> str:
    """A value as an error shows it: its beginning, at little cost however long or deep it is."""
    return reprlib.repr(value)[:_SHOWN_CHARS]
