"""The processes that the console asks: their roles, names and addresses. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from freshet.errors import ConfigError
from freshet.http.addresses import Address, address_of

__all__ = ["ROLES", "Instance", "Places", "listed_places", "local_places"]

ROLES = ("gateway", "joiner", "embedder", "paramserver", "trainer", "inference", "simulator")
"""What may be listed, in the order of an event's way."""

MOST = 500
"""Instances of a list: each is asked every second."""

SETTING = "FRESHET_CONSOLE_SERVICES"


@dataclass(frozen=True, slots=True)
class Instance:
    """One process of a role."""

    role: str
    name: str  # the role itself where it is the only one
    address: Address


@dataclass(frozen=True, slots=True)
class Places:
    """Where the services of a model answer HTTP."""

    instances: Sequence[Instance]
    optional: Sequence[Instance] = ()  # shown only if they answer and are of this run, or are supervised
    supervised: bool = False  # whether the run folder knows of them: processes, ends, other ports


def local_places(ports: Mapping[str, int], optional: Mapping[str, int], host: str = "127.0.0.1") -> Places:
    """One of each service, on this machine, as `freshet up` runs them."""
    return Places(_local(ports, host), _local(optional, host), supervised=True)


def _local(ports: Mapping[str, int], host: str) -> list[Instance]:
    return [Instance(name, name, Address(host, port)) for name, port in ports.items()]


def listed_places(text: str) -> Places:
    """The services that a list names: `role=host:port`, separated by commas; a role may come again.

    Raises ConfigError: an entry is no such thing, or stands twice.
    """
    found: list[tuple[str, Address]] = []
    for entry in (part.strip() for part in text.split(",")):
        one = _entry(entry)
        if one in found:
            raise _wrong(entry, "each service once", "take the second one out")
        found.append(one)
    if len(found) > MOST:
        raise _wrong(f"{len(found)} services", f"at most {MOST}", "each is asked every second")
    names = {role: _names(role, [a.host for r, a in found if r == role]) for role, _ in found}
    places = [Instance(role, names[role].pop(0), address) for role, address in found]
    return Places(sorted(places, key=lambda i: ROLES.index(i.role)))


def _entry(entry: str) -> tuple[str, Address]:
    role, equals, where = entry.partition("=")
    role = role.strip()
    if not equals or role not in ROLES:
        raise _wrong(entry, f"role=host:port, the role one of {', '.join(ROLES)}",
                     "such as gateway=gateway-0:7000,gateway=gateway-1:7000")  # fmt: skip
    try:
        return role, address_of(where.strip())
    except ValueError as error:
        raise _wrong(entry, f"role=host:port; after the role {error}",
                     f"such as {role}={role}-0:7000 or {role}=[fd00::5]:7000") from None  # fmt: skip


def _names(role: str, hosts: Sequence[str]) -> list[str]:
    """What tells the instances of a role apart: their hosts' names where these say it, else numbers."""
    if len(hosts) == 1:
        return [role]
    labels = [host.partition(".")[0] for host in hosts]
    if len(set(labels)) == len(labels) and all(label.startswith(f"{role}-") for label in labels):
        return labels
    return [f"{role}-{i}" for i in range(len(hosts))]


def _wrong(found: str, expected: str, hint: str) -> ConfigError:
    return ConfigError("environment", SETTING, found, expected, hint)
