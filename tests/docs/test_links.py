"""Every relative link of every page leads to a file, and every anchor to a heading."""

from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.fixtures.pages import ROOT, anchors, links, pages, slug


@pytest.mark.parametrize("page", pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_each_link_leads_somewhere(page: Path) -> None:
    broken = []
    for line, target in links(page):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = unquote(target).partition("#")
        found = page if not path else (page.parent / path).resolve()
        if not found.exists():
            broken.append(f"line {line}: {target}: no such file")
        elif not found.is_relative_to(ROOT):
            broken.append(f"line {line}: {target}: outside the repository")
        elif anchor and found.suffix == ".md" and anchor not in anchors(found):
            broken.append(f"line {line}: {target}: no such heading; there are {sorted(anchors(found))}")

    assert broken == []


def test_anchors_are_spelt_as_github_spells_them() -> None:
    assert slug("`POST /v1/models/{model}`") == "post-v1modelsmodel"
    assert slug("What *never* happens: 3 rules") == "what-never-happens-3-rules"
    assert slug("[events]") == "events"
    assert slug("A - B") == "a---b"
