"""How often clients may come: token buckets, two each, as many as fit. Time is an argument."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

__all__ = ["MOST_CLIENTS", "Buckets", "Payer", "address_key", "forwarded_address"]

MOST_CLIENTS = 10_000
"""That are remembered, in about 4 MB; the one that has not come for longest is forgotten for a new one, and
would begin again with full buckets: whoever has so many addresses is not held by this."""

BURST_S = 1.0
"""A client that was quiet may come as often at once as it may within this time."""

IPV6_NETWORK = 64
"""Bits of an IPv6 address that name a client: it has all addresses of its network."""


class Payer(NamedTuple):
    """Who pays for events, and how many it may send a second."""

    key: str
    events_per_s: float  # > 0


class _Level(NamedTuple):
    level: float
    at: float  # when that was


@dataclass(slots=True)
class _Client:
    """None: full, nothing was taken of it yet."""

    requests: _Level | None = None
    events: _Level | None = None


class Buckets:
    """Thread-unsafe. A client's buckets, of requests and of events, hold a second's worth each, at least one,
    and fill at their rates."""

    def __init__(self, most: int = MOST_CLIENTS) -> None:
        self._most = most
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # who came last stands last

    def __len__(self) -> int:
        """Clients that are remembered."""
        return len(self._clients)

    def take(self, key: str, rate: float, now: float) -> float:
        """Take one request; 0 if there was one, else seconds until there is. `rate`: a second, > 0."""
        client = self._come(key)
        level = _level(client.requests, rate, now)
        if level < 1.0:
            return (1.0 - level) / rate
        client.requests = _Level(level - 1.0, now)
        return 0.0

    def debt_s(self, key: str, rate: float, now: float) -> float:
        """Seconds until the events that were paid are earned again; 0 for who owes nothing."""
        if key not in self._clients:
            return 0.0
        return max(0.0, -_level(self._come(key).events, rate, now) / rate)

    def pay(self, key: str, rate: float, now: float, n: float) -> None:
        """Take `n` events, whether there are as many or not: what was done is paid afterwards."""
        client = self._come(key)
        client.events = _Level(_level(client.events, rate, now) - n, now)

    def _come(self, key: str) -> _Client:
        """Whoever comes is the last to be forgotten, also who is refused: else a client deep in debt would be
        forgotten before idle ones, and begin again with full buckets."""
        client = self._clients.get(key)
        if client is not None:
            self._clients.move_to_end(key)
            return client
        if len(self._clients) >= self._most:
            self._clients.popitem(last=False)
        client = self._clients[key] = _Client()
        return client


def _level(known: _Level | None, rate: float, now: float) -> float:
    full = max(1.0, rate * BURST_S)
    return full if known is None else min(full, known.level + max(0.0, now - known.at) * rate)


def address_key(address: str) -> str:
    """What of an address names a client."""
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
    return str(IPv6Address(int(found) >> (128 - IPV6_NETWORK) << (128 - IPV6_NETWORK)))


def forwarded_address(peer: str, forwarded: bytes | None, proxies: int) -> str:
    """The address that the outermost of our proxies has seen.

    Each proxy adds, at the end of `X-Forwarded-For`, who asked it; what stands before that is whatever the
    client has sent. With fewer entries than proxies, somebody has asked past them: it is the peer itself.
    """
    if not proxies or not forwarded:
        return peer
    entries = forwarded.decode("latin-1").split(",")
    if len(entries) < proxies:
        return peer
    said = entries[-proxies].strip()
    try:
        return str(ip_address(said.strip("[]")))
    except ValueError:
        return peer
