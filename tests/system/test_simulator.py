"""The demo's readers and a system that runs: they are served, and go on while parts of it are killed."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from freshet.apps.local import local
from freshet.config.settings import load_settings
from freshet.config.spec import Spec, load_spec
from freshet.demo import write_spec
from freshet.demo.service import Simulator, run
from freshet.demo.start_time import RunStart
from freshet.errors import ConfigError
from freshet.process.ports import lease_ports
from freshet.testing.conditions import wait_until
from tests.fixtures.commands import status, told_by
from tests.fixtures.readers import WORLD, PatientReaders, kill, readers, settings_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def patient(spec_file: Path) -> Spec:
    """With a grace that no pause of this machine outlasts: what is late then is the simulator's fault."""
    spec = load_spec(spec_file)
    return replace(spec, join=replace(spec.join, grace_ms=30_000))


def told(simulator: Simulator, what: str, figure: str) -> float:
    """Sum a figure of all windows that are over: a first page, alone in its window, may have random items."""
    return float(sum(window[what][figure] for window in simulator.status()["windows"]))


def test_readers_are_served_and_their_clicks_joined(tmp_path: Path) -> None:
    with (
        local(patient(write_spec(tmp_path / "demo")), folder=tmp_path / "run", ready_s=120) as system,
        readers(system, 300, PatientReaders) as simulator,
    ):
        wait_until("actions sent", lambda: simulator.status()["actions"]["sent"] > 30, within_s=60)

        def joined() -> bool:
            events = status(system, "joiner").get("ledger", {}).get("events", {})
            return bool(events.get("actions_matched", 0) > 30)

        wait_until("clicks are joined", joined, within_s=60)
        events = told_by(system, "joiner")["ledger"]["events"]
        wait_until("windows are told", lambda: told(simulator, "model", "impressions") > 200, within_s=60)

    assert {name: events[name] for name in ("actions_orphan", "actions_late", "actions_no_label")} == {
        "actions_orphan": 0,
        "actions_late": 0,
        "actions_no_label": 0,
    }
    assert 0 < told(simulator, "model", "expected") < told(simulator, "best", "clicks")
    assert simulator.status()["errors"] == 0


@pytest.mark.parametrize("role", ["gateway", "inference"])
def test_readers_go_on_after_a_kill_and_every_action_arrives(tmp_path: Path, role: str) -> None:
    with (
        local(write_spec(tmp_path / "demo"), folder=tmp_path / "run", ready_s=120) as system,
        readers(system, 300) as simulator,
    ):
        wait_until("actions sent", lambda: simulator.status()["actions"]["sent"] > 10, within_s=60)
        kill(system, role)
        wait_until("errors are counted", lambda: simulator.status()["errors"] > 0, within_s=60)
        before = simulator.status()

        def on_again() -> bool:
            now = simulator.status()
            sent = now["actions"]["sent"] > before["actions"]["sent"] + 30
            return bool(sent and now["impressions"] > before["impressions"] + 500)

        wait_until("readers are served again", on_again, within_s=60)
    after = simulator.status()  # no reader comes any more
    made = after["clicks"] + after["purchases"]
    assert after["actions"]["refused"] == after["actions"]["dropped"] == 0
    assert after["actions"]["sent"] + after["actions"]["waiting"] == made


def test_a_simulator_goes_on_with_its_seed_and_refuses_another(tmp_path: Path) -> None:
    with local(write_spec(tmp_path / "demo"), folder=tmp_path / "run", ready_s=120) as system:
        with readers(system, 300) as first:
            wait_until("items are shown", lambda: first.status()["impressions"] > 0, within_s=60)
            began_ms = first.status()["began_ms"]
        with readers(system, 300) as second:
            assert second.status()["began_ms"] == began_ms
            wait_until("actions sent", lambda: second.status()["actions"]["sent"] > 0, within_s=60)
            ledger = told_by(system, "joiner")["ledger"]["events"]

        with pytest.raises(ConfigError, match="start over in another folder"):
            Simulator(settings_of(system), RunStart(8, (150.0,), None), 300)

    assert ledger["impressions_repeated"] == 0


def test_health_metrics_and_status_are_served(tmp_path: Path) -> None:
    services = ("GATEWAY_PORT", "INFERENCE_PORT", "SIMULATOR_ADMIN_PORT")  # the first two do not run
    ports = {f"FRESHET_{s}": str(port) for s, port in zip(services, lease_ports(3), strict=True)}
    settings = load_settings(ports, run_folder=tmp_path)
    settings.common.run.create()
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(settings, WORLD, 300.0), kwargs={"stop": stop})
    thread.start()
    url = f"http://127.0.0.1:{settings.simulator.admin_port}"
    try:
        wait_until("it answers", lambda: answers(f"{url}/health/live"), within_s=60)
        ready, told = httpx.get(f"{url}/health/ready"), httpx.get(f"{url}/status")
    finally:
        stop.set()
        thread.join(60)

    assert ready.status_code == 503
    assert ready.json()["reason"] == "waiting for gateway and inference to be ready"
    assert (told.json()["seed"], told.json()["rate"], told.json()["events"]) == (7, 300.0, 0)


def answers(url: str) -> bool:
    """Whether a server answers there."""
    try:
        return httpx.get(url, timeout=1).status_code == 200
    except httpx.HTTPError:
        return False
