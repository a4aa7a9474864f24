"""What must not stand in a log: credentials, and events. Taken out of every line, whoever wrote it."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

__all__ = ["HIDDEN", "MOST_CHARS", "scrubbed"]

HIDDEN = "***"

MOST_CHARS = 4_000
"""Of one value: an error with what it expected fits; a body does not. Of a traceback the end is kept."""

MOST_ITEMS = 50

_SECRET_NAME = (
    r"(?:[\w.-]*(?:password|passwd|secret|token|credential|api[_-]?key|access[_-]?key|authorization))"  # nosec B105
)
_SECRET_KEY = re.compile(_SECRET_NAME, re.IGNORECASE)

_IN_TEXT = (
    # scheme://user:password@host, also with an empty user (Redis)
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]*@", re.IGNORECASE), rf"\1{HIDDEN}@"),
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{4,}", re.IGNORECASE), rf"\1 {HIDDEN}"),
    # sasl.password=…, "token": "…", X-Amz-Signature=…; a name alone, as in "the token is missing", stays
    (
        re.compile(
            rf"({_SECRET_NAME}|x-amz-signature)"
            r"(['\"]?\s*[=:]\s*)(?!\*|Bearer\b|Basic\b)(['\"]?)[^\s'\",;&]+",
            re.IGNORECASE,
        ),
        rf"\1\2\3{HIDDEN}",
    ),
)


def scrubbed(key: str, value: Any) -> Any:
    """A line's value without what must not be there; numbers and booleans are as they were."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if _SECRET_KEY.fullmatch(key):
        return HIDDEN
    if isinstance(value, dict | list | tuple | set | frozenset):
        return _several(key, value)
    if getattr(value, "ndim", None) == 0:  # a number of numpy's
        return value.item()
    return _text(str(value), keep_end=key == "exception")


def _several(key: str, values: Any) -> Any:
    more = len(values) - MOST_ITEMS
    if isinstance(values, dict):
        kept = {str(k): scrubbed(str(k), v) for k, v in islice(values.items(), MOST_ITEMS)}
        return kept | ({"…": f"{more} more"} if more > 0 else {})
    return [scrubbed(key, value) for value in islice(values, MOST_ITEMS)] + ([f"… {more} more"] * (more > 0))


def _text(text: str, *, keep_end: bool) -> str:
    if len(text) > MOST_CHARS:
        left_out = f"… ({len(text) - MOST_CHARS} characters left out) …"
        text = left_out + text[-MOST_CHARS:] if keep_end else text[:MOST_CHARS] + left_out
    for pattern, instead in _IN_TEXT:
        text = pattern.sub(instead, text)
    return text
