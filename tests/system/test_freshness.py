"""A click changes the score that is served, without a new dense version."""

from __future__ import annotations

import pytest

from bench.freshness import Clicks, spec_of_rows_only
from bench.load import Background
from freshet.apps.local import local
from tests.fixtures.commands import told_by

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def test_a_click_changes_the_score_of_its_reader_and_article() -> None:
    with (
        local(spec_of_rows_only(), ready_s=120) as system,
        Clicks(system) as clicks,
        Background(system.ports["gateway"], 100) as background,
    ):
        done = [clicks.one() for _ in range(5)]  # raises if a score never changes
        version = told_by(system, "inference")["version"]
        load = background.figures()

    assert [sorted(c.stages_s.values()) for c in done] == [list(c.stages_s.values()) for c in done]
    assert version == 0
    assert load["events_failed"] == 0
