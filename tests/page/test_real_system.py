"""The page on a running system with simulated readers: its figures come from real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from freshet.apps.local import local
from freshet.demo import write_spec
from tests.fixtures.readers import kill, readers

pytestmark = [pytest.mark.browser, pytest.mark.system, pytest.mark.timeout(280)]

LEARNED_MS = 120_000.0  # a window of 10 s, its labels' 20 s and grace, on a machine that is busy
BACK_MS = 60_000.0  # a killed process is started again and has found its place


def test_the_page_shows_a_system_that_learns_and_outlives_kills(
    opened: Callable[..., Page], tmp_path: Path
) -> None:
    spec = write_spec(tmp_path / "demo")
    with local(spec, folder=tmp_path / "run", console=True, ready_s=120) as system, readers(system, 300):
        token = (system.folder / "state" / "console.token").read_text().strip()
        page = opened(f"{system.console}/#token={token}", lost=True)
        connection, learning = page.locator("#connection"), page.locator("#learning figcaption")

        expect(connection).to_have_text("● live")
        expect(learning).to_contain_text("of what the model showed was clicked", timeout=LEARNED_MS)
        expect(page.locator("#quality figcaption").first).to_contain_text("AUC on", timeout=LEARNED_MS)
        page.get_by_role("button", name="Rank", exact=True).click()
        expect(page.locator("#try tbody tr")).to_have_count(10)
        page.get_by_role("button", name="Promote version").last.click()
        page.get_by_role("dialog").locator("#ask-yes").click()
        expect(page.locator("#versions-said")).to_contain_text("was promoted")

        kill(system, "console")
        expect(page.locator("#lost")).to_contain_text("Connection lost, trying again.")
        expect(connection).to_have_text("● live", timeout=BACK_MS)
        expect(learning).to_contain_text("of what the model showed was clicked")

        kill(system, "trainer")
        trainer = page.locator("#services tr", has_text="trainer")
        expect(trainer).to_contain_text("SIGKILL", timeout=BACK_MS)
        expect(trainer).to_contain_text("● ready", timeout=BACK_MS)
        expect(page.locator("#health")).to_have_text("● all good", timeout=BACK_MS)
