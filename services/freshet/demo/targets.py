"""Gateways and inference servers to which the simulator sends requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freshet.config.settings import Settings
from freshet.errors import ConfigError
from freshet.http import tls
from freshet.http.addresses import Address, address_in, reachable_host

__all__ = ["Targets", "server_of", "targets_by"]


@dataclass(frozen=True, slots=True)
class Targets:
    """At least one server of each role; connections spread over them and change to the next on failure."""

    gateways: tuple[Address, ...]
    inferences: tuple[Address, ...]


def targets_by(settings: Settings, gateways: Sequence[str] = (), inferences: Sequence[str] = ()) -> Targets:
    """Parse URLs of servers; a role without URLs gets the address of this machine and the role's port.

    Raises ConfigError if a URL names no server.
    """
    host = reachable_host(settings.common.bind_address)
    return Targets(
        tuple(server_of("--gateway", url) for url in gateways) or (Address(host, settings.gateway.port),),
        tuple(server_of("--inference", url) for url in inferences)
        or (Address(host, settings.inference.port),),
    )


def server_of(option: str, url: str) -> Address:
    """Parse the URL of a server. Raises ConfigError, with the option, if it names none."""
    try:
        return address_in(url, tls.scheme())[1]
    except ValueError as error:
        raise ConfigError("simulate", option, url, str(error), "such as http://gateway-0:7000") from None
