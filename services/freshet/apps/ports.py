"""The services, and their ports by the settings."""

from __future__ import annotations

from collections.abc import Mapping

from freshet.config.settings import Settings

ROLES = ("gateway", "joiner", "trainer", "inference", "console")
"""Services that `freshet up` starts."""
BESIDE = ("embedder", "paramserver")
"""Services that only `freshet run` starts."""

PORT_SETTINGS: Mapping[str, str] = {
    "gateway": "FRESHET_GATEWAY_PORT",
    "joiner": "FRESHET_JOINER_ADMIN_PORT",
    "trainer": "FRESHET_TRAINER_ADMIN_PORT",
    "inference": "FRESHET_INFERENCE_PORT",
    "console": "FRESHET_CONSOLE_PORT",
}
"""{service: variable that sets its port}, in the order of an event's way through them."""


def ports_of(settings: Settings) -> Mapping[str, int]:
    """Return {service: port of /health/ready}."""
    return {
        "gateway": settings.gateway.port,
        "joiner": settings.joiner.admin_port,
        "trainer": settings.trainer.admin_port,
        "inference": settings.inference.port,
        "console": settings.console.port,
    }


def optional_ports_of(settings: Settings) -> Mapping[str, int]:
    """Return the ports of processes that a run need not have."""
    return {"simulator": settings.simulator.admin_port}
