"""Dead letters never exceed the limit of their topic, and give the number of omitted bytes."""

from __future__ import annotations

import base64

import orjson
from hypothesis import given
from hypothesis import strategies as st

from freshet.log.records import TEXT_CHARS, letter

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=2_500)


@given(st.binary(max_size=5_000), WORDS, WORDS, st.integers(30_000, 80_000))
def test_no_dead_letter_exceeds_its_limit(raw: bytes, reason: str, found: str, limit: int) -> None:
    said = {"v": 1, "offset": 2**53, "reason": reason, "found": found}
    record = letter(said, raw * 20, max_bytes=limit)

    read = orjson.loads(record)
    kept = base64.b64decode(read["bytes"])
    assert len(record) <= limit
    assert (raw * 20).startswith(kept)
    assert len(kept) + read.get("left_out_bytes", 0) == len(raw * 20)
    assert read["offset"] == 2**53


def test_dead_letter_that_fits_keeps_every_byte() -> None:
    read = orjson.loads(letter({"reason": "why"}, b"\x00" * 3_000, key="value", max_bytes=5_000))

    assert read == {"reason": "why", "value": base64.b64encode(b"\x00" * 3_000).decode()}


def test_long_reason_is_truncated() -> None:
    read = orjson.loads(letter({"reason": "x" * 9_999}, b"", max_bytes=5_000))

    assert read["reason"] == "x" * TEXT_CHARS + "…"
