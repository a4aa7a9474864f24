"""The supervisor and the first lines of `freshet up`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from freshet.apps import supervision
from freshet.apps.row_memory import rows_memory
from freshet.apps.supervision import Run
from freshet.config.settings import load_settings
from freshet.process.lifecycle import KILL_AFTER_S
from freshet.process.memory import machine_memory_bytes


class Watched:
    """A supervisor that ends at once."""

    restarts: Mapping[str, int] = {}

    def run(self, stop: threading.Event, *, drain_s: float) -> Mapping[str, str]:
        self.drain_s = drain_s
        return {}


def test_services_are_killed_after_drain_and_close_time(tmp_path: Path) -> None:
    settings, supervisor = load_settings({"FRESHET_COMMON_DRAIN": "3s"}, run_folder=tmp_path), Watched()

    Run(tmp_path, settings, [], supervisor).until_stopped(  # type: ignore[arg-type]
        threading.Event(), lambda: None
    )

    assert supervisor.drain_s == 3 + KILL_AFTER_S


def test_the_start_states_how_much_memory_rows_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = threading.Event()
    stop.set()  # nothing is waited for
    monkeypatch.setattr(supervision, "report_ready", lambda *_: False)
    settings = load_settings({}, run_folder=tmp_path)

    supervision.report_up(Run(tmp_path, settings, [], Watched()), stop, as_json=False)  # type: ignore[arg-type]

    said = capsys.readouterr().out
    assert rows_memory(settings).text() in said
    assert f"rows may take {machine_memory_bytes() // 4:,} bytes" in said
