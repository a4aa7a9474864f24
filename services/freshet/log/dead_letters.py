"""Dead letters: JSON records about a record that could not be used, with its bytes in base64.

A dead letter never exceeds the limit of its topic. If the whole record does not fit, its beginning is kept
and `left_out_bytes` is the number of missing bytes. If the record is in the log, its topic, partition and
offset are in the dead letter.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import orjson

__all__ = ["TEXT_CHARS", "letter"]

TEXT_CHARS = 2_000
"""Longest text in a dead letter, such as a reason; a longer one is truncated."""

_SPARE_BYTES = 64
"""Space for the key and the number of `left_out_bytes`."""


def letter(fields: Mapping[str, object], raw: bytes, *, key: str = "bytes", max_bytes: int) -> bytes:
    """Encode a dead letter as JSON.

    Args:
        fields: its contents besides the record; texts longer than TEXT_CHARS are truncated.
        raw: the record.
        key: of the record's bytes.
        max_bytes: of the dead letter; at least the size of `fields`.
    """
    texts = {name: _truncated(value) for name, value in fields.items()}
    whole = orjson.dumps({**texts, key: ""})
    kept = max(0, max_bytes - len(whole) - _SPARE_BYTES) // 4 * 3
    if len(raw) <= kept:
        return orjson.dumps({**texts, key: base64.b64encode(raw).decode()})
    text = base64.b64encode(raw[:kept]).decode()
    return orjson.dumps({**texts, key: text, "left_out_bytes": len(raw) - kept})


def _truncated(value: object) -> object:
    if isinstance(value, str) and len(value) > TEXT_CHARS:
        return value[:TEXT_CHARS] + "…"
    return value
