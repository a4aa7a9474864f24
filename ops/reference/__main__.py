"""`python -m ops.reference`: write each stale page of docs/reference/; with --check, only name them."""

from __future__ import annotations

import sys
from pathlib import Path

from ops.reference.pages import PAGES

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


def main(*, check: bool) -> int:
    """Returns the exit status: with `check`, 1 if a page is stale."""
    stale = []
    for page in PAGES:
        path = FOLDER / page.name
        text = page.text()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(page.name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(f"{'stale' if check else 'wrote'} {path.relative_to(FOLDER.parents[1])}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
