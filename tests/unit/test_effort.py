"""Random tests try fewer examples with the profile `quick`."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.fixtures import effort


@pytest.mark.parametrize(("usual", "tried"), [(100, 300), (25, 75), (1, 10)])
def test_examples_follow_the_profile(usual: int, tried: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "settings", lambda: settings(max_examples=usual))

    assert effort.examples(300) == tried
    assert effort.examples(3) == 3
