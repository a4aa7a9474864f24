"""The settings that compose gives each service are read, as they are without a `.env`."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from freshet.config.settings import load_settings
from tests.unit.docker.stack_files import COMPOSE

WITH_SETTINGS = sorted(
    name
    for name, service in COMPOSE.items()
    if any(key.startswith("FRESHET_COMMON_") for key in service.get("environment", {}))
)


def without_env(environment: Mapping[str, object]) -> dict[str, str]:
    """The variables with `${NAME:-default}` as compose reads it where NAME is not set."""
    return {
        key: re.sub(r"\$\{[A-Z_]+(?::?-([^}]*))?\}", lambda found: found[1] or "", str(value))
        for key, value in environment.items()
    }


@pytest.mark.parametrize("service", WITH_SETTINGS)
def test_the_settings_of_a_service_are_read(service: str) -> None:
    load_settings(without_env(COMPOSE[service]["environment"]))
