"""Letters: JSON records about a record that could not be used, with its bytes in base64.

A letter never exceeds what its topic takes. If the whole record does not fit, its beginning is kept and
`left_out_bytes` says how many bytes are missing; where the record lies in the log (topic, partition, offset),
the letter names the place.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import orjson

__all__ = ["TEXT_CHARS", "letter"]

TEXT_CHARS = 2_000
"""Of a text in a letter, such as a reason; a longer one is cut."""

_SPARE_BYTES = 64
"""For the key and the number of `left_out_bytes`."""


def letter(fields: Mapping[str, object], raw: bytes, *, key: str = "bytes", max_bytes: int) -> bytes:
    """One letter as JSON.

    Args:
        fields: what it says beside the record; texts longer than TEXT_CHARS are cut.
        raw: the record.
        key: under which its bytes stand.
        max_bytes: of the letter; at least what `fields` take.
    """
    said = {name: _cut(value) for name, value in fields.items()}
    whole = orjson.dumps({**said, key: ""})
    kept = max(0, max_bytes - len(whole) - _SPARE_BYTES) // 4 * 3
    if len(raw) <= kept:
        return orjson.dumps({**said, key: base64.b64encode(raw).decode()})
    text = base64.b64encode(raw[:kept]).decode()
    return orjson.dumps({**said, key: text, "left_out_bytes": len(raw) - kept})


def _cut(value: object) -> object:
    if isinstance(value, str) and len(value) > TEXT_CHARS:
        return value[:TEXT_CHARS] + "…"
    return value
