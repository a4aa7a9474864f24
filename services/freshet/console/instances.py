"""The processes that the console asks: their roles, names and addresses. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from freshet.errors import ConfigError
from freshet.http.addresses import Address, address_of

__all__ = [
    "ROLES",
    "RULES",
    "Instance",
    "Places",
    "Service",
    "Standing",
    "listed_places",
    "local_places",
    "merged",
    "number",
    "roles_of",
    "whole",
]


@dataclass(frozen=True, slots=True)
class Service:
    """One service as it was seen last. None: not known."""

    name: str  # tells it apart: its role, or one of several
    role: str
    state: Literal["ready", "starting", "down"]
    reason: str  # why it is not ready; "" if it is
    host: str | None  # where it answers; None: this machine
    port: int | None
    pid: int | None = None
    up_s: float | None = None
    restarts: int | None = None
    last_exit: str = ""
    memory_mb: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)  # its /status; empty while it does not answer

    def to_json(self) -> dict[str, Any]:
        """As the page gets it."""
        return {
            "name": self.name,
            "role": self.role,
            "state": self.state,
            "reason": self.reason,
            "host": self.host,
            "port": self.port,
            "pid": self.pid,
            "up_s": self.up_s,
            "restarts": self.restarts,
            "last_exit": self.last_exit,
            "memory_mb": self.memory_mb,
        }


def number(value: Any) -> float | None:
    """A finite number as such; None for anything else that JSON can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -1e300 < value < 1e300 else None


def whole(value: Any) -> int | None:
    """A finite number without its fraction; None for anything else that JSON can hold."""
    found = number(value)
    return None if found is None else int(found)


# --- What several instances of a role say, as one: a rule for each figure that the console reads. Pure.
#
# Totals are not added up here: what is away takes its part with it, so sums are made of rates
# (`Rates.summed`).


Standing = Literal["ready", "degraded", "starting", "down"]
Rule = Callable[[Sequence[Any]], Any]
Figures = Mapping[str, Any]


def total(values: Sequence[Any]) -> Any:
    """The sum of what is known; None if nothing is."""
    known = [value for value in map(number, values) if value is not None]
    return _as_given(sum(known)) if known else None


def least(values: Sequence[Any]) -> Any:
    """The smallest that is known."""
    known = [value for value in map(number, values) if value is not None]
    return _as_given(min(known)) if known else None


def most(values: Sequence[Any]) -> Any:
    """The largest that is known."""
    known = [value for value in map(number, values) if value is not None]
    return _as_given(max(known)) if known else None


def total_by_key(values: Sequence[Any]) -> Any:
    """{key: the sum of what is known of it}."""
    return _by_key(values, total)


def least_by_key(values: Sequence[Any]) -> Any:
    """{key: the smallest that is known of it}."""
    return _by_key(values, least)


def first(values: Sequence[Any]) -> Any:
    """Take the first instance's value: a leader comes before the others."""
    return next((value for value in values if value is not None), None)


RULES: Mapping[str, Mapping[str, Rule]] = {
    "trainer": {
        "lag_blocks": total,  # ranks have partitions of their own
        "measures": first,  # every rank has those of all
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
        "freshness_ms": most,  # of the server that is furthest behind
        "version": least,  # the oldest that is served
        "rows_next": least_by_key,
    },
    "simulator": {
        "windows": first,
        "drifts": first,
        "rate": total,
        "seed": first,
    },
}
"""{role: {figure: its rule}}; other figures are not read of a role as a whole."""


def merged(services: Iterable[Service]) -> dict[str, Figures]:
    """{role: its figures}: one instance's as they are, several instances' by RULES.

    Counted are those that are ready; if none is, all that answer. Who is still starting would make a whole
    role look as if it stood at its beginning.
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
        counted = sorted(counted, key=_seat)
    told = {name: rule([s.figures.get(name) for s in counted]) for name, rule in RULES.get(role, {}).items()}
    return {name: value for name, value in told.items() if value is not None}


def _seat(rank: Service) -> float:
    """Of the ranks of a world, the one of the lowest seat leads."""
    ranks = rank.figures.get("ranks")
    seat = number(ranks.get("seat")) if isinstance(ranks, Mapping) else None
    return seat if seat is not None and seat >= 0 else float("inf")


def roles_of(services: Iterable[Service]) -> list[dict[str, Any]]:
    """Each role as a whole: {role, state, ready, of, memory_mb}."""
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
    """ready: all are; down: none answers; degraded: some are ready, or some answer and some do not."""
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
