"""`freshet load` drives a whole system, and what it says is what the system has counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from freshet.adapters import open_eventlog
from freshet.apps.local import Local, local
from freshet.cli.load import command
from freshet.config.settings import load_settings
from freshet.config.spec import load_spec
from freshet.config.spec.topics import topics_of
from freshet.testing.conditions import wait_until
from tests.fixtures import audit
from tests.fixtures.commands import status, told_by, url_of

SPEC = Path(__file__).parents[2] / "examples" / "quickstart" / "freshet.toml"

pytestmark = [pytest.mark.system, pytest.mark.timeout(280)]


def loaded(system: Local, *words: str) -> dict[str, Any]:
    servers = ["--gateway", url_of(system, "gateway"), "--inference", url_of(system, "inference")]
    result = CliRunner().invoke(
        command,
        [str(SPEC), *servers, "--seed", "5", "--timeout", "60", "--json", *words],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    lanes: dict[str, Any] = orjson.loads(result.stdout)["lanes"]
    return lanes


def test_acknowledged_events_are_joined_and_requests_answered(tmp_path: Path) -> None:
    spec = load_spec(SPEC)
    # How late events come is the machine's doing; times of the load's own are still seen ("outside").
    spec = replace(spec, join=replace(spec.join, grace_ms=15_000))
    with local(spec, folder=tmp_path, ready_s=120) as system:
        lanes = loaded(
            system, "--events", "200", "--ranks", "20", "--seconds", "4", "--items", "3", "--dry-run"
        )

        events, ranks = lanes["events"], lanes["ranks"]
        assert events["answers"] == {"202": events["requests"]}
        assert ranks["answers"] == {"200": ranks["requests"]}
        assert 200 * 4 * 0.8 < events["requests"] < 200 * 4 * 1.2
        assert 20 * 4 * 0.5 < ranks["requests"] < 20 * 4 * 1.5
        said = {role: n["accepted"] for role, n in told_by(system, "gateway")["events"].items()}
        assert said["served"] + said["action"] == events["requests"]
        assert said["action"] / events["requests"] == pytest.approx(0.3, abs=0.1)

        def ends() -> dict[str, int]:
            counted: dict[str, int] = status(system, "joiner").get("ledger", {}).get("events", {})
            return counted

        def taken_of(stream: str) -> int:
            return sum(count for end, count in ends().items() if end.startswith(stream))

        wait_until(
            "the joiner has had every event",
            lambda: taken_of("impressions") == 3 * said["served"] and taken_of("actions") == said["action"],
            within_s=60,
        )
        assert not [
            end for end, n in ends().items() if n and end.rpartition("_")[2] in ("late", "orphan", "outside")
        ]
        wait_until(
            "serving has learned from some",
            lambda: status(system, "inference").get("freshness_ms") is not None,
            within_s=60,
        )
        fresh = loaded(system, "--ranks", "20", "--seconds", "2", "--candidates", "2")["ranks"]
        assert fresh["freshness"]["p50_ms"] > 0
    log = open_eventlog(load_settings(run_folder=tmp_path).common.log_url)
    assert sum(audit.ends_of(log, topics_of(spec).samples).values()) > 0
    log.close()
