"""Unsupported formats are detected by their first bytes, but a csv may begin with the same ones."""

from __future__ import annotations

import bz2

import pytest

from freshet.recordings.csv_text import other_format


@pytest.mark.parametrize(
    "name", ["PARENT_ID", "ORCID", "FEA1", "BZh_score", "BZh9", "SQLite format", "Object"]
)
def test_csv_may_begin_with_magic_of_other_format(name: str) -> None:
    assert other_format(f"{name},click\n1,0\n".encode()) is None


@pytest.mark.parametrize("level", range(1, 10))
def test_bzip2_is_detected_at_every_level(level: int) -> None:
    found = other_format(bz2.compress(b"a,b\n1,2\n", level))
    assert found is not None
    assert "bzip2" in found
