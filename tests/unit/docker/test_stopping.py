"""docker compose waits for a service's end as long as that may take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from freshet.apps.services import RUNNERS
from freshet.config.settings import load_settings
from freshet.process.lifecycle import KILL_AFTER_S
from tests.fixtures.pages import ROOT
from tests.unit.docker.stack_files import filled

COMPOSE = yaml.safe_load(filled((ROOT / "docker-compose.yml").read_text(), {}))


def role_of(service: Mapping[str, Any]) -> str:
    """Return the role of its image; "" if it is an external one, or runs once."""
    name: str = service["image"].rpartition("/")[2].partition(":")[0]
    return name if name in RUNNERS and service["restart"] != "no" else ""


SERVICES = {name: service for name, service in COMPOSE["services"].items() if role_of(service)}


def test_each_role_is_among_the_services() -> None:
    assert {role_of(service) for service in SERVICES.values()} == set(RUNNERS)


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_is_given_the_drain_and_what_comes_behind_it(name: str) -> None:
    given = {k: str(v) for k, v in SERVICES[name]["environment"].items() if k == "FRESHET_COMMON_DRAIN"}
    drain_s = load_settings(given).common.drain_ms / 1000
    grace = re.fullmatch(r"(\d+)s", SERVICES[name]["stop_grace_period"])

    assert grace is not None
    assert int(grace[1]) >= drain_s + KILL_AFTER_S
