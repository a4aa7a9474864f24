"""Addresses of listeners and clients: a host and a port in settings, options and errors; proxies."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # `_` as container names have it
_PORTS = {"http": 80, "https": 443}
_ENTRY = re.compile(
    r"\[([^\]]*)\](?::\d{1,5})?|([^:]*):\d{1,5}", re.ASCII
)  # of X-Forwarded-For: some have a port
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")

IPV6_CLIENT_BITS = 64
"""Bits of an IPv6 address that identify a client."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host name or IP address, and a port."""

    host: str  # without brackets
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address_of(text: str) -> Address:
    """Parse `host:port`, with an IPv6 host in brackets. Raises ValueError with the expected form."""
    host, colon, digits = text.rpartition(":")
    if not colon:
        raise ValueError("host:port")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 5 and 0 < int(digits) < 65_536):
        raise ValueError("a port from 1 to 65535 after the last colon")
    if host.startswith("[") and host.endswith("]"):
        try:
            return Address(str(IPv6Address(host[1:-1])), int(digits))
        except ValueError:
            raise ValueError("an IPv6 address between the brackets") from None
    if ":" in host:
        raise ValueError("an IPv6 address in brackets, such as [::1]:7000")
    if len(host) > 253 or not _NAME.fullmatch(host):
        raise ValueError("a host name or an IP address before the port")
    return Address(host, int(digits))


def is_on_this_host(host: str) -> bool:
    """Return whether a host name or IP address is one of this host; False if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_is_own(family, str(address[0])) for family, _, _, _, address in found)


def _is_own(family: int, ip: str) -> bool:
    """Only an address of this host can be bound."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True


def address_in(url: str, *schemes: str) -> tuple[str, Address]:
    """Return scheme and server of a URL with one of these schemes; the port may be the scheme's default.

    Raises ValueError with the expected form.
    """
    parts = urlsplit(url)
    if parts.scheme not in schemes or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(
            f"{' or '.join(f'{one}://' for one in schemes)}, a host and a port, and nothing behind them"
        )
    bare = parts.netloc.rpartition("]")[2]  # after the bracket of an IPv6 address
    return parts.scheme, address_of(parts.netloc if ":" in bare else f"{parts.netloc}:{_PORTS[parts.scheme]}")


def reachable_host(bind_address: str) -> str:
    """Return a host by which this machine reaches a listener: loopback for 0.0.0.0 and ::."""
    try:
        every = ip_address(bind_address)
    except ValueError:
        return bind_address
    if not every.is_unspecified:
        return bind_address
    return "::1" if every.version == 6 else "127.0.0.1"


def client_key(address: str) -> str:
    """Return the part of an address that identifies a client: an IPv6 client has all addresses of a /64."""
    if ":" not in address:
        return address
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    host_bits = 128 - IPV6_CLIENT_BITS
    return str(IPv6Address(int(found) >> host_bits << host_bits))


def forwarded_address(peer: str, forwarded: bytes | None, proxies: int) -> str:
    """Return the address that the outermost trusted proxy has seen.

    Each proxy appends its client's address to X-Forwarded-For, some with the port; entries before those are
    the client's own. If there are fewer entries than proxies, the request did not pass them, and the peer
    itself is the client.
    """
    if not proxies or not forwarded:
        return peer
    entries = forwarded.decode("latin-1").split(",")
    if len(entries) < proxies:
        return peer
    entry = entries[-proxies].strip()
    found = _ENTRY.fullmatch(entry)
    try:
        return str(ip_address(entry if found is None else found[1] or found[2]))
    except ValueError:
        return peer
