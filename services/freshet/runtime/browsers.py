"""Browsers on this machine: whatever page they have open can send requests to its ports, unread but done."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address

from freshet.runtime.answers import HttpError

__all__ = ["is_this_machine", "name_of", "refuse_other_sites"]


def name_of(host: str) -> str:
    """The name in a Host header or an origin: no port, lower case; "" if it is none."""
    host = host.strip().lower()
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        return name if bracket and (not rest or _is_port(rest)) else ""
    name, colon, rest = host.partition(":")
    return name.removesuffix(".") if not colon or _is_port(colon + rest) else ""


def _is_port(text: str) -> bool:
    return text[:1] == ":" and text[1:].isascii() and text[1:].isdigit()


def is_this_machine(name: str) -> bool:
    """Whether a name is one that a machine has for itself."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified  # a browser asks 127.0.0.1 for 0.0.0.0, too


def refuse_other_sites(headers: Mapping[bytes, bytes]) -> None:
    """Refuse what a page of another site asks of this machine (403): its events would teach the model.

    Browsers say so in `Sec-Fetch-Site`, which no page can change, and other clients do not. Where a proxy
    that keeps the public Host has let a request in, the question is the proxy's; so a name that somebody has
    made to point here is not refused.
    """
    if headers.get(b"sec-fetch-site") == b"cross-site":
        host = name_of(headers.get(b"host", b"").decode("latin-1"))
        if is_this_machine(host):
            raise HttpError(
                403,
                "origin",
                "a page from elsewhere may not ask this",
                expected="a request by no page, or one of this site",
                found=headers.get(b"origin", b"").decode("latin-1")[:200] or "Sec-Fetch-Site: cross-site",
                hint="let a proxy on this machine take requests of pages, and pass on those that may",
            )
