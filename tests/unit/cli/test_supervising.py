"""What `freshet up` asks of its supervisor."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from freshet.cli.supervising import Run
from freshet.runtime.lifecycle import KILL_AFTER_S
from freshet.settings import load_settings


class Watched:
    """A supervisor that ends at once."""

    restarts: Mapping[str, int] = {}

    def run(self, stop: threading.Event, *, patience_s: float) -> Mapping[str, str]:
        self.patience_s = patience_s
        return {}


def test_services_are_killed_only_after_their_drain_and_what_comes_behind_it(tmp_path: Path) -> None:
    settings, supervisor = load_settings({"FRESHET_COMMON_DRAIN": "3s"}, run_folder=tmp_path), Watched()

    Run(tmp_path, settings, [], supervisor).until_stopped(  # type: ignore[arg-type]
        threading.Event(), lambda: None
    )

    assert supervisor.patience_s == 3 + KILL_AFTER_S
