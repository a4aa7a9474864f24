"""`python -m ops.reference`: write stale pages of docs/reference/ and the figure of ARCHITECTURE.md; with
--check, only name them."""

from __future__ import annotations

import sys
from pathlib import Path

from ops.reference.pages import PAGES
from ops.reference.structure import with_figure

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"


def main(*, check: bool) -> int:
    """Returns the exit status: with `check`, 1 if a page is stale."""
    texts = {FOLDER / page.name: page.text for page in PAGES}
    texts[ARCHITECTURE] = lambda: with_figure(ARCHITECTURE.read_text(encoding="utf-8"))
    stale = []
    for path, text_of in texts.items():
        text = text_of()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(f"{'stale' if check else 'wrote'} {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
