"""Where each service of a run answers, by the settings."""

from __future__ import annotations

from collections.abc import Mapping

from freshet.config.settings import Settings

__all__ = ["BESIDE", "PORT_SETTINGS", "ROLES", "optional_ports_of", "ports_of"]

# --- The services: which `freshet up` starts, and which run by themselves only.


ROLES = ("gateway", "joiner", "trainer", "inference", "console")
"""Of a run on one machine: what `freshet up` starts."""
BESIDE = ("embedder", "paramserver")
"""Started by hand, or by what runs services in a cluster."""


PORT_SETTINGS: Mapping[str, str] = {
    "gateway": "FRESHET_GATEWAY_PORT",
    "joiner": "FRESHET_JOINER_ADMIN_PORT",
    "trainer": "FRESHET_TRAINER_ADMIN_PORT",
    "inference": "FRESHET_INFERENCE_PORT",
    "console": "FRESHET_CONSOLE_PORT",
}
"""The setting that gives each service its port, in the order of an event's way through them."""


def ports_of(settings: Settings) -> Mapping[str, int]:
    """{service: the port where it answers /health/ready}."""
    return {
        "gateway": settings.gateway.port,
        "joiner": settings.joiner.admin_port,
        "trainer": settings.trainer.admin_port,
        "inference": settings.inference.port,
        "console": settings.console.port,
    }


def optional_ports_of(settings: Settings) -> Mapping[str, int]:
    """Those of what a run may do without."""
    return {"simulator": settings.simulator.admin_port}
