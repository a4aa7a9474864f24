"""Ctrl-C at any moment: it ends with the right code, without a traceback, an orphan, or a folder that the
next start could not take."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freshet.apps.supervision import is_ready
from freshet.config.settings import RunFolder
from freshet.errors import FreshetError
from freshet.process.run_state import read_run
from freshet.testing.conditions import wait_until
from tests.system.demo_process import Demo, processes_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path / "demo", rate=50)
    yield demo
    demo.end()


def made_its_folder(demo: Demo) -> bool:
    return demo.folder.exists()


def started_services(demo: Demo) -> bool:
    return (demo.folder / "state" / "services.json").exists()


def has_one_ready(demo: Demo) -> bool:
    return any(is_ready(port) for port in demo.ports.values())


def has_readers(demo: Demo) -> bool:
    return bool(demo.figures("simulator").get("events"))


MOMENTS = (made_its_folder, started_services, has_one_ready, has_readers)


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda m: m.__name__)
def test_ctrl_c_ends_everything_and_the_folder_can_be_reused(
    demo: Demo, moment: Callable[[Demo], bool]
) -> None:
    demo.start()
    wait_until(moment.__name__, lambda: moment(demo), within_s=60)

    code = demo.stop()

    assert code in (0, -signal.SIGINT), demo.said  # the signal's own: nothing had been started
    assert "Traceback" not in demo.said
    assert processes_of(demo.folder) == []
    if code == 0:
        run = read_run(RunFolder(demo.folder))
        assert run is not None
        assert run.stopped_ms is not None
        assert f"freshet demo {demo.folder}" in demo.said
    demo.start()
    wait_until("its readers come", lambda: has_readers(demo), within_s=60)
    assert demo.stop() == 0


def test_a_second_ctrl_c_ends_all_services_at_once(demo: Demo) -> None:
    demo.start()
    wait_until("its readers come", lambda: has_readers(demo), within_s=60)

    demo.process.send_signal(signal.SIGINT)
    wait_until("it stops", lambda: _some_stopped(demo), within_s=60)
    demo.process.send_signal(signal.SIGINT)

    assert demo.process.wait(30) in (0, 130)  # 0: the first one was done before the second came
    wait_until("no process is left", lambda: not processes_of(demo.folder), within_s=60)
    assert "Traceback" not in demo.said


def _some_stopped(demo: Demo) -> bool:
    """Whether the stop has begun: a service has gone."""
    if demo.process.poll() is not None:
        return True
    try:
        run = read_run(RunFolder(demo.folder))
    except FreshetError:
        return False
    pids = [one["pid"] for one in run.services.values()] if run is not None else []
    return len([pid for pid in pids if pid in processes_of(demo.folder)]) < len(pids)


def test_json_ends_with_one_object_and_logs_are_json(demo: Demo) -> None:
    demo.start("--json")
    wait_until("it has learned", lambda: "the first predictions that have learned" in demo.said, within_s=180)
    assert demo.stop() == 0

    summary = demo.summary()
    assert set(summary["ended"].values()) == {"stopped"}
    assert summary["simulator"]["events"] > 0
    assert summary["first_learned_s"] is not None
    for file in (demo.folder / "logs").glob("*.log"):  # which docs/operations.md pipes into jq
        for line in file.read_text().splitlines():
            assert "event" in json.loads(line), file.name


def test_a_demo_ends_by_itself_after_its_seconds(demo: Demo) -> None:
    began = time.monotonic()
    demo.start("--json", "--seconds", "20")

    assert demo.process.wait(180) == 0, demo.said
    assert time.monotonic() - began >= 20
    assert "ended" in demo.summary()  # the services may have been in the midst of their start
