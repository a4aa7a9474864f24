"""Takes credentials and events out of log lines of freshet and of libraries: a structlog processor.

Clients choose many logged texts, so the time for a text must grow with its length and no faster: no pattern
begins with a repetition that may start anywhere, and none can fail after a long one over and over.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

from structlog.typing import EventDict

__all__ = ["HIDDEN", "MOST_CHARS", "MOST_CHARS_IN_ALL", "scrub", "scrubbed"]

HIDDEN = "***"

MOST_CHARS = 4_000
"""Of one text: an error with what it expected fits; a body does not. Of a traceback the end is kept."""

MOST_CHARS_IN_ALL = 20_000
"""Of all texts in one value."""

MOST_ITEMS = 50

_BEYOND_THE_CUT = 200
"""Characters that are looked at besides those that are kept, so that a credential across a cut is known."""

_SECRET = r"(?:password|passwd|secret|token|credential|api[_-]?key|access[_-]?key|authorization)"  # nosec B105
_SECRET_KEY = re.compile(rf"[\w.-]*{_SECRET}", re.IGNORECASE)

_IN_TEXT = (
    # scheme://user:password@host, up to the last @, as people forget to encode those of a password
    (re.compile(r"://[^\s/'\"]*@"), f"://{HIDDEN}@"),
    # A token of ours, 43 characters of base64: also its beginning. Names of metrics have no capital letters.
    (re.compile(r"freshet_(?=[a-z0-9_-]{0,60}[A-Z])[A-Za-z0-9_-]{20,}"), f"freshet_{HIDDEN}"),
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{4,}", re.IGNORECASE), rf"\1 {HIDDEN}"),
    # sasl.password=…, "token": "…", X-Amz-Signature=…; a name alone, as in "the token is missing", stays.
    # What is quoted is hidden to its quote, or to the line's end: the quote may have been cut off.
    (
        re.compile(
            rf"((?:{_SECRET}|x-amz-signature)\\*['\"]?\s*[=:]\s*)(?!Bearer\b|Basic\b)"
            r"(?:(?P<quote>\\{0,3}['\"])(?:(?!(?P=quote))(?:\\.|[^\\\n]))*|[^\s'\",;&]+)",
            re.IGNORECASE,
        ),
        lambda found: f"{found[1]}{found['quote'] or ''}{HIDDEN}",
    ),
)


def scrub(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Scrub every value of a line."""
    return {key: scrubbed(key, value) for key, value in event.items()}


def scrubbed(key: str, value: Any) -> Any:
    """Return a line's value without credentials and bytes of events; numbers and booleans stay."""
    return _Scrubbing().value(key, value)


class _Scrubbing:
    """Scrubs one value and the values in it."""

    def __init__(self) -> None:
        self._left = MOST_CHARS_IN_ALL

    def value(self, key: str, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, bytes | bytearray | memoryview):
            return f"<{len(value)} bytes>"
        if len(key) <= MOST_CHARS and _SECRET_KEY.fullmatch(key):
            return HIDDEN
        if isinstance(value, dict | list | tuple | set | frozenset):
            return self._several(key, value)
        if getattr(value, "ndim", None) == 0:  # a number of numpy's
            return value.item()
        return self._text(str(value), keep_end=key == "exception")

    def _several(self, key: str, values: Any) -> Any:
        more = len(values) - MOST_ITEMS
        if isinstance(values, dict):
            kept = {self._text(str(k)): self.value(str(k), v) for k, v in islice(values.items(), MOST_ITEMS)}
            return kept | ({"…": f"{more} more"} if more > 0 else {})
        few = [self.value(key, value) for value in islice(values, MOST_ITEMS)]
        return few + ([f"… {more} more"] * (more > 0))

    def _text(self, text: str, *, keep_end: bool = False) -> str:
        most = min(MOST_CHARS, self._left)
        self._left -= min(len(text), most)
        cut = len(text) - most
        if cut <= 0:
            return _without_secrets(text)
        left_out, seen = f"… ({cut} characters left out) …", most + _BEYOND_THE_CUT
        if keep_end:
            return left_out + _without_secrets(text[-seen:])[-most:] if most else left_out
        return _without_secrets(text[:seen])[:most] + left_out


def _without_secrets(text: str) -> str:
    for pattern, instead in _IN_TEXT:
        text = pattern.sub(instead, text)
    return text
