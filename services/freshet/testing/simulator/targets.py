"""Which gateways and inference servers the simulated readers visit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from freshet.errors import ConfigError
from freshet.runtime import tls
from freshet.runtime.addresses import Address, address_of, reached_by
from freshet.settings import Settings

__all__ = ["Targets", "server_of", "targets_by"]

HTTP_PORT = 80


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
        parts = urlsplit(url)
        if parts.scheme != tls.scheme() or parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ValueError(f"{tls.scheme()}://, a host and a port, and nothing behind them")
        bare = parts.netloc.rpartition("]")[2]  # of an IPv6 address, what stands behind its bracket
        return address_of(parts.netloc if ":" in bare else f"{parts.netloc}:{HTTP_PORT}")
    except ValueError as error:
        raise ConfigError("simulate", option, url, str(error), "such as http://gateway-0:7000") from None
