"""Which gateways and inference servers the simulated readers visit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freshet.config.settings import Settings
from freshet.errors import ConfigError
from freshet.http import tls
from freshet.http.addresses import Address, address_in, reached_by

__all__ = ["Targets", "server_of", "targets_by"]


@dataclass(frozen=True, slots=True)
class Targets:
    """At least one of each; readers are spread over them, and go to the next when one fails."""

    gateways: tuple[Address, ...]
    inferences: tuple[Address, ...]


def targets_by(settings: Settings, gateways: Sequence[str] = (), inferences: Sequence[str] = ()) -> Targets:
    """The servers of these URLs; without any of a role, the one of this machine by its port.

    Raises ConfigError: a URL is none of a server's.
    """
    host = reached_by(settings.common.bind_address)
    return Targets(
        tuple(server_of("--gateway", url) for url in gateways) or (Address(host, settings.gateway.port),),
        tuple(server_of("--inference", url) for url in inferences)
        or (Address(host, settings.inference.port),),
    )


def server_of(option: str, url: str) -> Address:
    """The server that a URL names. Raises ConfigError, naming the option."""
    try:
        return address_in(url, tls.scheme())[1]
    except ValueError as error:
        raise ConfigError("simulate", option, url, str(error), "such as http://gateway-0:7000") from None
