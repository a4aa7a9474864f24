"""`freshet demo` under SIGKILL: each process in turn, then the supervisor. The status shows each kill,
everything comes back by itself (the supervisor's once it is started again), nothing is lost or doubled.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from freshet.cli.status import as_text
from freshet.config.spec import load_spec
from freshet.config.spec.topics import topics_of
from freshet.log import EventLog
from freshet.testing.conditions import wait_until
from tests.fixtures import audit
from tests.system.demo_audit import Tracked, read_demo
from tests.system.demo_process import NAMES, Demo, processes_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path / "demo", rate=60)
    yield demo
    demo.end()
    assert processes_of(demo.folder) == []


def test_kills_show_in_the_status_and_lose_or_double_nothing(demo: Demo) -> None:
    demo.start()
    demo.wait_until_ready()
    tracked = Tracked(f"http://127.0.0.1:{demo.ports['gateway']}")
    tracked.start()
    try:
        wait_until("it has learned", lambda: learned(demo), within_s=60)
        for name in NAMES:
            killed = demo.kill(name)
            took_s = demo.wait_until_back(name, killed)
            print(f"{name}: back {took_s:.1f} s after its kill")
            assert_told(demo, name)
        demo.kill_supervisor()
        assert_told_of_supervisor(demo)
        demo.start()
        demo.wait_until_ready()
        assert "supervisor" in [one["name"] for one in demo.status()["history"]]
        before = demo.told("joiner")["samples"]
        wait_until("it learns on", lambda: demo.figures("joiner").get("samples", 0) > before, within_s=60)
    finally:
        tracked.stop()
    assert tracked.errors == []
    log = audit.open_log(demo.folder)
    try:
        come_to_rest(demo, log)
        books = read_demo(log)
        ends = audit.ends_of(log, "demo.samples")
    finally:
        log.close()
    measured = demo.told("trainer")["measures"]["training"]["click"]["n"]
    ledger = demo.told("joiner")["ledger"]
    excused = ledger["events"]["actions_late"] + ledger["events"]["actions_orphan"]
    assert demo.process.poll() is None, demo.said
    resume_readers(demo)
    assert demo.stop() == 0
    print(
        f"{len(books.shown)} items shown ({len(tracked.pages)} tracked), {excused} actions late; "
        f"{len(books.samples['click'])} click samples, {measured:.0f} measured"
    )
    assert list(books.differences(tracked, excused=excused)) == []
    assert 0 < measured <= len(books.samples["click"])  # what is replayed after a kill is not measured again
    assert list(audit.against_offsets(ends, demo.folder, load_spec(demo.folder / "freshet.toml"))) == []
    assert not ledger["refused"]
    assert "Traceback" not in demo.said


def learned(demo: Demo) -> bool:
    """Whether serving has learned from something, and the simulator has sent actions."""
    return (
        demo.figures("inference").get("freshness_ms") is not None
        and demo.figures("simulator").get("actions", {}).get("sent", 0) > 0
    )


def assert_told(demo: Demo, name: str) -> None:
    status = demo.status()
    last = status["history"][-1]
    assert (last["name"], last["how"]) == (name, "signal 9 (SIGKILL)")
    assert last["again_ms"] >= last["time_ms"]
    assert status["services"][name]["restarts"] == 1
    assert f"{name:10} signal 9 (SIGKILL) after" in as_text(status)


def assert_told_of_supervisor(demo: Demo) -> None:
    status = demo.status()
    assert status["supervisor"]["state"] == "gone"
    assert {service["state"] for service in status["services"].values()} == {"down"}
    text = as_text(status)
    assert "was killed, or the machine went down" in text
    assert f"`freshet demo {demo.folder} --rate 60` goes on where it was" in text


def come_to_rest(demo: Demo, log: EventLog) -> None:
    """The readers stand still; all windows close, and all samples are applied and in a version."""
    pid = demo.pid("simulator")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    topics = topics_of(load_spec(demo.folder / "freshet.toml"))

    def decided() -> bool:
        said = demo.figures("joiner")
        return (
            bool(said)
            and not any(said["lag"].values())
            and not any(counts["pending"] for counts in said["ledger"]["labels"].values())
        )

    def applied() -> bool:
        found = {int(p): n for p, n in demo.figures("trainer").get("applied", {}).items()}
        return found == audit.ends_of(log, topics.samples)

    def in_a_version() -> bool:
        return audit.applied_by_newest_version(demo.folder) == audit.ends_of(log, topics.samples)

    wait_until("all windows are decided", decided, within_s=90)
    wait_until("all samples are trained on", applied, within_s=60)
    wait_until("a version has learned from all samples", in_a_version, within_s=60)


def resume_readers(demo: Demo) -> None:
    """So that they can be stopped."""
    pid = demo.pid("simulator")
    assert pid is not None
    os.kill(pid, signal.SIGCONT)
