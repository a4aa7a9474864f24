"""The containers of the compose file, for a test each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.stack import EXACT, Stack
from tests.fixtures.commands import LEDGER


@pytest.fixture
def stack(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """All of the compose file, healthy, with the ledger's spec; the test's process sees their stores. The
    parameter, if a test gives one: whether it is compose.small.yml, one of each."""
    made = Stack(LEDGER.parent, tmp_path, small=getattr(request, "param", False), variables=EXACT)
    made.down(volumes=True)
    try:
        print(f"\nall healthy after {made.up():.1f} s")
        for name, value in made.settings(tmp_path).items():
            monkeypatch.setenv(name, value)
        yield made
    finally:
        made.keep_words(tmp_path)
        made.down(volumes=True)
        made.close()
