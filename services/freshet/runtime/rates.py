"""How often clients may come: token buckets, one for each of them, as many as fit. Time is an argument."""

from __future__ import annotations

from collections import OrderedDict
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

__all__ = ["MOST_CLIENTS", "Buckets", "Payer", "address_key", "forwarded_address"]

MOST_CLIENTS = 10_000
"""That are remembered, in about 2 MB; the one that has not come for longest is forgotten for a new one, and
would begin again with a full bucket: whoever has so many addresses is not held by this."""

BURST_S = 1.0
"""A client that was quiet may come as often at once as it may within this time."""

IPV6_NETWORK = 64
"""Bits of an IPv6 address that name a client: it has all addresses of its network."""


class Payer(NamedTuple):
    """Who pays for events, and how many it may send a second."""

    key: str
    events_per_s: float  # > 0


class Buckets:
    """Thread-unsafe. A bucket holds a second's worth, at least one, and fills at its rate."""

    def __init__(self, most: int = MOST_CLIENTS) -> None:
        self._most = most
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # key -> level, when

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, rate: float, now: float) -> float:
        """Take one; 0 if there was one, else seconds until there is. `rate`: a second, > 0."""
        level = self._level(key, rate, now)
        if level >= 1.0:
            self._keep(key, level - 1.0, now)
            return 0.0
        return (1.0 - level) / rate

    def debt_s(self, key: str, rate: float, now: float) -> float:
        """Seconds until what was paid is earned again; 0 for who owes nothing."""
        return max(0.0, -self._level(key, rate, now) / rate)

    def pay(self, key: str, rate: float, now: float, n: float) -> None:
        """Take `n`, whether there are as many or not: what was done is paid afterwards."""
        self._keep(key, self._level(key, rate, now) - n, now)

    def _level(self, key: str, rate: float, now: float) -> float:
        full = max(1.0, rate * BURST_S)
        found = self._buckets.get(key)
        return full if found is None else min(full, found[0] + max(0.0, now - found[1]) * rate)

    def _keep(self, key: str, level: float, now: float) -> None:
        self._buckets[key] = (level, now)
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)


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
