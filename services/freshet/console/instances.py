"""Instances of services: roles, names, addresses, snapshots of them, and figures of a whole role. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from freshet.errors import ConfigError
from freshet.http.addresses import Address, address_of


@dataclass(frozen=True, slots=True)
class Service:
    """Snapshot of a service. None: not known."""

    name: str  # unique: its role, with a number if it is one of several
    role: str
    state: Literal["ready", "starting", "down"]
    reason: str  # why it is not ready; "" if it is
    host: str | None  # of its listener; None: this machine
    port: int | None
    pid: int | None = None
    up_s: float | None = None
    restarts: int | None = None
    last_exit: str = ""
    memory_mb: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)  # its /status; empty while it does not answer

    def to_json(self) -> dict[str, Any]:
        """Return the service as the page reads it."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "figures"}


def number(value: Any) -> float | None:
    """Return a finite number as a float; None for any other value of JSON."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -1e300 < value < 1e300 else None


def whole(value: Any) -> int | None:
    """Return a finite number without its fraction; None for any other value of JSON."""
    found = number(value)
    return None if found is None else int(found)


# --- Figures of several instances of a role, merged by a rule for each figure that the console reads.
#
# Totals are not added here: the sum would fall while an instance is away. Rates are (`Rates.summed`).


Standing = Literal["ready", "degraded", "starting", "down"]
Rule = Callable[[Sequence[Any]], Any]
Figures = Mapping[str, Any]


def total(values: Sequence[Any]) -> Any:
    """Return the sum of the known values; None if none is known."""
    known = [value for value in map(number, values) if value is not None]
    return _as_given(sum(known)) if known else None


def least(values: Sequence[Any]) -> Any:
    """Return the smallest known value."""
    known = [value for value in map(number, values) if value is not None]
    return _as_given(min(known)) if known else None


def most(values: Sequence[Any]) -> Any:
    """Return the largest known value."""
    known = [value for value in map(number, values) if value is not None]
    return _as_given(max(known)) if known else None


def total_by_key(values: Sequence[Any]) -> Any:
    """Return {key: sum of its known values}."""
    return _by_key(values, total)


def least_by_key(values: Sequence[Any]) -> Any:
    """Return {key: smallest known value}."""
    return _by_key(values, least)


def first(values: Sequence[Any]) -> Any:
    """Return the first known value: a leader comes before the others."""
    return next((value for value in values if value is not None), None)


RULES: Mapping[str, Mapping[str, Rule]] = {
    "trainer": {
        "lag_blocks": total,  # each rank has its own partitions
        "measures": first,  # all ranks have the same
        "open": first,
        "rows": total_by_key,
        "row_bytes": total_by_key,
        "evicted": total_by_key,
        "bytes": total,
    },
    "paramserver": {
        "rows": total_by_key,
        "row_bytes": total_by_key,
        "evicted": total_by_key,
        "bytes": total,
    },
    "inference": {
        "freshness_ms": most,  # of the oldest replica
        "version": least,  # the oldest served version
        "rows_next": least_by_key,
    },
    "simulator": {
        "windows": first,
        "drifts": first,
        "rate": total,
        "seed": first,
    },
}
"""{role: {figure: its rule}}; other figures of a whole role are not read."""


def merged(services: Iterable[Service]) -> dict[str, Figures]:
    """Return {role: its figures}: of a single instance unchanged, of several by RULES.

    Only ready instances count, or all that answer if none is ready: the figures of one that starts would make
    the whole role seem to be at its beginning.
    """
    by_role: dict[str, list[Service]] = {}
    for service in services:
        by_role.setdefault(service.role, []).append(service)
    return {role: _of_role(role, instances) for role, instances in by_role.items()}


def _of_role(role: str, instances: Sequence[Service]) -> Figures:
    if len(instances) == 1:
        return instances[0].figures
    counted = [s for s in instances if s.state == "ready"] or [s for s in instances if s.figures]
    if role == "trainer":
        counted = sorted(counted, key=_lease)
    merged_figures = {
        name: rule([s.figures.get(name) for s in counted]) for name, rule in RULES.get(role, {}).items()
    }
    return {name: value for name, value in merged_figures.items() if value is not None}


def _lease(rank: Service) -> float:
    """Return a rank's membership lease; the rank of the lowest one leads its quorum."""
    ranks = rank.figures.get("ranks")
    lease = number(ranks.get("seat")) if isinstance(ranks, Mapping) else None
    return lease if lease is not None and lease >= 0 else float("inf")


def roles_of(services: Iterable[Service]) -> list[dict[str, Any]]:
    """Return {role, state, ready, of, memory_mb} of each role."""
    by_role: dict[str, list[Service]] = {}
    for service in services:
        by_role.setdefault(service.role, []).append(service)
    return [
        {
            "role": role,
            "state": standing_of(instances),
            "ready": sum(s.state == "ready" for s in instances),
            "of": len(instances),
            "memory_mb": total([s.memory_mb for s in instances]),
        }
        for role, instances in by_role.items()
    ]


def standing_of(instances: Sequence[Service]) -> Standing:
    """Return the state of a role.

    ready: all instances are; down: none answers; degraded: some are ready, or only some answer.
    """
    states = {s.state for s in instances}
    if states == {"ready"}:
        return "ready"
    if states == {"down"}:
        return "down"
    return "starting" if states == {"starting"} else "degraded"


def _by_key(values: Sequence[Any], rule: Rule) -> Any:
    maps = [value for value in values if isinstance(value, Mapping)]
    if not maps:
        return None
    return {key: rule([m.get(key) for m in maps]) for key in dict.fromkeys(k for m in maps for k in m)}


def _as_given(value: float) -> float | int:
    return int(value) if value == int(value) else value


ROLES = ("gateway", "joiner", "embedder", "paramserver", "trainer", "inference", "simulator")
"""Roles that may be listed, in the order of an event's path."""

MOST = 500
"""Most instances of a list, as each is queried every second."""

SETTING = "FRESHET_CONSOLE_SERVICES"


@dataclass(frozen=True, slots=True)
class Instance:
    """One process of a role."""

    role: str
    name: str  # the role, if it is the only instance
    address: Address


@dataclass(frozen=True, slots=True)
class Places:
    """HTTP addresses of a model's services."""

    instances: Sequence[Instance]
    optional: Sequence[Instance] = ()  # shown only if they answer and belong to this run, or are supervised
    supervised: bool = False  # whether the run folder has their processes, exits and ports


def local_places(ports: Mapping[str, int], optional: Mapping[str, int], host: str = "127.0.0.1") -> Places:
    """Return one instance of each service on this machine, as `freshet up` runs them."""
    return Places(_local(ports, host), _local(optional, host), supervised=True)


def _local(ports: Mapping[str, int], host: str) -> list[Instance]:
    return [Instance(name, name, Address(host, port)) for name, port in ports.items()]


def listed_places(text: str) -> Places:
    """Parse a list of services: `role=host:port`, separated by commas; a role may be repeated.

    Raises ConfigError if an entry is malformed or repeated.
    """
    found: list[tuple[str, Address]] = []
    for entry in (part.strip() for part in text.split(",")):
        one = _entry(entry)
        if one in found:
            raise _wrong(entry, "each service once", "remove the second one")
        found.append(one)
    if len(found) > MOST:
        raise _wrong(f"{len(found)} services", f"at most {MOST}", "each is queried every second")
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
    """Return unique names of a role's instances: the hosts' names if they begin with the role, or numbers."""
    if len(hosts) == 1:
        return [role]
    labels = [host.partition(".")[0] for host in hosts]
    if len(set(labels)) == len(labels) and all(label.startswith(f"{role}-") for label in labels):
        return labels
    return [f"{role}-{i}" for i in range(len(hosts))]


def _wrong(found: str, expected: str, hint: str) -> ConfigError:
    return ConfigError("environment", SETTING, found, expected, hint)
