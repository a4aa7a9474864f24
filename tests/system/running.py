"""What the system tests do with a system that runs: ask it, and let it come to rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from freshet.apps.local import Local
from freshet.apps.ports import PORT_SETTINGS
from freshet.config.spec.topics import Topics
from freshet.log import EventLog
from freshet.process.ports import free_ports
from freshet.testing.waiting import wait_until
from tests.system import audit

LEDGER = Path(__file__).parent / "ledger" / "freshet.toml"


def url_of(system: Local, role: str) -> str:
    """Where a service answers."""
    return f"http://127.0.0.1:{system.ports[role]}"


def status(system: Local, role: str) -> dict[str, Any]:
    """What a service says of itself; empty while it does not answer."""
    try:
        found: dict[str, Any] = httpx.get(f"{url_of(system, role)}/status", timeout=2).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return found


def told_by(system: Local, role: str) -> dict[str, Any]:
    """What a service says of itself, once it answers: a busy machine lets one look pass."""
    found: dict[str, Any] = {}

    def answers() -> bool:
        found.update(status(system, role))
        return bool(found)

    wait_until(f"{role} says how it is", answers, within_s=30)
    return found


def applied(system: Local) -> dict[int, int]:
    """{partition: offset} that the trainer's dense weights have come to; empty while it does not answer."""
    return {int(p): n for p, n in status(system, "trainer").get("applied", {}).items()}


def drain(system: Local, folder: Path, log: EventLog, topics: Topics, impressions: int) -> None:
    """Wait until the windows of so many impressions are decided, and every store has applied all samples."""

    def decided() -> bool:
        said = status(system, "joiner")
        if "ledger" not in said or any(said["lag"].values()):
            return False
        events = said["ledger"]["events"]
        if events["impressions"] + events["impressions_late"] < impressions:
            return False
        return not any(counts["pending"] for counts in said["ledger"]["labels"].values())

    def trained() -> bool:
        return applied(system) == audit.ends_of(log, topics.samples)

    def in_a_version() -> bool:
        return audit.applied_by_newest_version(folder) == audit.ends_of(log, topics.samples)

    wait_until("all windows are decided", decided, within_s=60)
    wait_until("all samples are trained on", trained, within_s=60)
    wait_until("a version has learned from all samples", in_a_version, within_s=30)


def own_ports() -> dict[str, str]:
    """Settings that give every service a free port, for a `freshet up` of a test beside others."""
    ports = free_ports(len(PORT_SETTINGS))
    return dict(zip(PORT_SETTINGS.values(), map(str, ports), strict=True))
