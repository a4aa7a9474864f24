"""Metrics and settings that a page names are those that there are: a renamed one must not stay in prose."""

import re
from pathlib import Path

import pytest

from freshet.config.settings import variables
from tests.fixtures.pages import ROOT, pages

REFERENCE = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
METRICS = set(re.findall(r"`(freshet_\w+)`", REFERENCE)) | {
    name + series
    for name in re.findall(r"`(freshet_\w+)` \| histogram", REFERENCE)
    for series in ("_bucket", "_count", "_sum")
}
SETTINGS = {v.name for v in variables()}
FOR_TESTS = ("FRESHET_TEST_", "FRESHET_NATIVE_", "FRESHET_SUPERVISOR_")
PROSE = [p for p in pages() if "reference" not in p.parts and p.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", PROSE, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    metrics = set(
        re.findall(r"\bfreshet_(?:gateway|joiner|trainer|shard|inference|console|http)_[a-z_]+", text)
    )
    settings = {name.rstrip("_") for name in re.findall(r"\bFRESHET_[A-Z_]+", text)}

    described = set(re.findall(r'"(freshet_[a-z_]+)",\n', text))  # code that describes a counter: no _total

    unknown = {m for m in metrics if m not in METRICS}
    assert {m for m in unknown if not (m in described and f"{m}_total" in METRICS)} == set()
    assert {s for s in settings if s not in SETTINGS and not s.startswith(FOR_TESTS)} == set()
