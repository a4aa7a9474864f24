"""Where something answers: a host and a port, as settings, options and errors write it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

__all__ = ["Address", "address_in", "address_of", "reached_by"]

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # `_` as container names have it
_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


@dataclass(frozen=True, slots=True)
class Address:
    """A host, by name or number, and a port of it."""

    host: str  # without brackets
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address_of(text: str) -> Address:
    """The address that a text writes: `host:port`, with IPv6 in brackets.

    Raises ValueError, which says what was expected.
    """
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


def address_in(url: str, *schemes: str) -> tuple[str, Address]:
    """The scheme, one of these, and the server that a URL names, by the scheme's own port if it gives none.

    Raises ValueError, which says what was expected.
    """
    parts = urlsplit(url)
    if parts.scheme not in schemes or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(
            f"{' or '.join(f'{one}://' for one in schemes)}, a host and a port, and nothing behind them"
        )
    bare = parts.netloc.rpartition("]")[2]  # of an IPv6 address, what stands behind its bracket
    return parts.scheme, address_of(parts.netloc if ":" in bare else f"{parts.netloc}:{_PORTS[parts.scheme]}")


def reached_by(bind_address: str) -> str:
    """How a process of this machine reaches what listens on that address: 0.0.0.0 and :: are every one."""
    try:
        every = ip_address(bind_address)
    except ValueError:
        return bind_address
    if not every.is_unspecified:
        return bind_address
    return "::1" if every.version == 6 else "127.0.0.1"
