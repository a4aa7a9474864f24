"""A click changes the score that is served, without a new dense version."""

from __future__ import annotations

import pytest

from freshet.cli.local import local
from tests.perf.freshness import Background, delays, spec_of_rows_only
from tests.system.running import status

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def test_a_click_changes_the_served_score_of_its_reader_and_article() -> None:
    with local(spec_of_rows_only()) as system, Background(system, 100):
        seconds = delays(system, 5)  # raises if a score never changes
        version = status(system, "inference")["version"]

    assert len(seconds) == 5
    assert version == 0
