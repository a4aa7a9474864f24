"""How services are that run on other machines or in containers, each asked at its address."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freshet.console.instances import Instance, Places

__all__ = ["ask_all"]

AT_ONCE = 32


def ask_all(places: Places) -> dict[str, dict[str, Any]]:
    """{name: role, address, state, reason and figures} of every instance, in the order of the list."""
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ask") as threads:
        told = list(threads.map(_service, places.instances))
    return {one.name: service for one, service in zip(places.instances, told, strict=True)}


def _service(one: Instance) -> dict[str, Any]:
    from freshet.runtime.asking import figures_of, why_unready

    host, port = one.address.host, one.address.port
    state, figures = "ready", {}
    try:
        reason = why_unready(port, host=host)
        state = "starting" if reason else "ready"
        figures = figures_of(port, host=host)
    except OSError as error:
        state, reason = "away", f"does not answer: {error}"
    return {
        "role": one.role,
        "address": str(one.address),
        "state": state,
        "reason": reason,
        "figures": figures,
    }
