"""What the figures of the services mean: rates, edges of the pipeline with their levels, health. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Edge", "Look", "Rates", "Service", "edges_of", "health_of", "level_of", "number"]

Level = Literal["ok", "warn", "bad", "idle", "unknown"]
Health = Literal["good", "degraded", "starting", "down"]

PIPELINE = ("gateway", "joiner", "trainer", "inference")
"""The services that an event goes through; without one of them the model does not learn, or not serve."""

RATE_SPAN_S = 5.0
"""What a rate is the mean of: long enough to be calm, short enough to follow a change with the eye."""

WARN_BEHIND_S, BAD_BEHIND_S = 2.0, 10.0
"""How far behind, in seconds of work, is told: freshness promises about one second."""


@dataclass(frozen=True, slots=True)
class Service:
    """One service as it was seen last. None: not known."""

    name: str
    state: Literal["ready", "starting", "down"]
    reason: str  # why it is not ready; "" if it is
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
            "state": self.state,
            "reason": self.reason,
            "port": self.port,
            "pid": self.pid,
            "up_s": self.up_s,
            "restarts": self.restarts,
            "last_exit": self.last_exit,
            "memory_mb": self.memory_mb,
        }


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at services and log found."""

    services: Mapping[str, Service]
    joined: Mapping[str, int]  # stream role -> events that the joiner has taken; empty: not known
    ends: Mapping[str, int]  # what -> end offsets, summed over partitions: roles, "samples", "rows"
    log_served: bool  # whether inference logs what it served

    def figure(self, service: str, *path: str) -> Any:
        """A figure of a service's /status; None if it is not there."""
        found = self.services.get(service)
        value: Any = found.figures if found is not None else None
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def number(value: Any) -> float | None:
    """A finite number as such; None for anything else that JSON can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -1e300 < value < 1e300 else None


class Rates:
    """Rates of totals that may fall back to 0, as their process began anew. The clock is an argument."""

    def __init__(self, span_s: float = RATE_SPAN_S) -> None:
        self._span_s = span_s
        self._seen: dict[str, deque[tuple[float, float]]] = {}

    def take(self, name: str, total: float | None, now_s: float) -> float | None:
        """Growth a second of this total over the last few seconds; None while two looks are not to be had.

        A total that is not known now, or is less than it was, begins anew.
        """
        seen = self._seen.setdefault(name, deque())
        if total is None or (seen and total < seen[-1][1]):
            seen.clear()
        if total is None:
            return None
        seen.append((now_s, total))
        while len(seen) > 2 and now_s - seen[1][0] >= self._span_s:
            seen.popleft()
        (first_s, first), (last_s, last) = seen[0], seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


@dataclass(frozen=True, slots=True)
class Edge:
    """What flows from one service to another."""

    source: str
    target: str
    what: str
    rate: float | None
    unit: str
    lag: int | None = None  # what waits on the way; None: nothing can wait there, or it is not known
    lag_unit: str | None = None
    level: Level = "unknown"
    note: str = ""

    @property
    def name(self) -> str:
        """As vitals name it."""
        return f"{self.source}>{self.target}"

    def to_json(self) -> dict[str, Any]:
        """As the page gets it."""
        return {
            "from": self.source,
            "to": self.target,
            "what": self.what,
            "rate": self.rate,
            "unit": self.unit,
            "lag": self.lag,
            "lag_unit": self.lag_unit,
            "level": self.level,
            "note": self.note,
        }


def level_of(lag: int | None, rate: float | None, per_s: float | None, floor: int) -> Level:
    """How bad a lag is.

    Args:
        rate:  what passes now; 0 and no lag is idle.
        per_s: how many of the lag's units come a second, in which the lag is measured.
        floor: a lag up to this is no lag: it is what is always in hand.
    """
    if lag is None:
        return "unknown"
    if lag <= floor:
        return "idle" if not rate and not lag else "ok"
    behind_s = lag / per_s if per_s else float("inf")
    if behind_s <= WARN_BEHIND_S:
        return "ok"
    return "warn" if behind_s <= BAD_BEHIND_S else "bad"


def _flow(rate: float | None) -> Level:
    """The level of an edge on which nothing can wait."""
    return "unknown" if rate is None else "ok" if rate else "idle"


def edges_of(look: Look, rates: Rates, now_s: float) -> list[Edge]:
    """The pipeline's edges, in the order of an event's way."""
    from_inference = ("served",) if look.log_served else ()
    from_gateway = tuple(role for role in ("served", "shown", "action") if role not in from_inference)
    return [
        _plain("client", "gateway", "events", "events/s", rates.take("accepted", _accepted(look), now_s)),
        _to_joiner(look, rates, now_s, "gateway", "events", from_gateway),
        _to_joiner(look, rates, now_s, "inference", "served", from_inference),
        _to_trainer(look, rates, now_s),
        _to_inference(look, rates, now_s),
        _plain(
            "inference",
            "client",
            "requests",
            "requests/s",
            rates.take("asked", number(look.figure("inference", "requests")), now_s),
        ),
    ]


def _plain(source: str, target: str, what: str, unit: str, rate: float | None) -> Edge:
    return Edge(source, target, what, rate, unit, level=_flow(rate))


def _accepted(look: Look) -> float | None:
    by_role = look.figure("gateway", "events")
    if not isinstance(by_role, Mapping):
        return number(look.figure("gateway", "events_appended"))
    counts = [number(role.get("accepted")) for role in by_role.values() if isinstance(role, Mapping)]
    return sum(c for c in counts if c is not None)


def _to_joiner(look: Look, rates: Rates, now_s: float, source: str, what: str, roles: Sequence[str]) -> Edge:
    if not roles:
        return Edge(
            source, "joiner", what, 0.0, f"{what}/s", level="idle", note="the spec logs nothing served"
        )
    here = [role for role in roles if role in look.ends]
    known = bool(here) and all(role in look.joined for role in here)
    taken = sum(look.joined[role] for role in here) if known else None
    end = sum(look.ends[role] for role in here) if here else None
    rate = rates.take(f"{source}>joiner", taken, now_s)
    arriving = rates.take(f"{source} end", end, now_s)
    lag = max(0, end - taken) if end is not None and taken is not None else None
    level = level_of(lag, rate, max(arriving or 0.0, rate or 0.0), floor=200)
    return Edge(source, "joiner", what, rate, f"{what}/s", lag, "records", level)


def _to_trainer(look: Look, rates: Rates, now_s: float) -> Edge:
    rate = rates.take("trained", number(look.figure("trainer", "samples")), now_s)
    blocks_per_s = rates.take("samples end", look.ends.get("samples"), now_s)
    lag = _whole(look.figure("trainer", "lag_blocks"))
    level = level_of(lag, rate, blocks_per_s, floor=16)
    return Edge("joiner", "trainer", "samples", rate, "samples/s", lag, "blocks", level)


def _to_inference(look: Look, rates: Rates, now_s: float) -> Edge:
    rate = rates.take("published", number(look.figure("trainer", "shard", "published_rows")), now_s)
    records_per_s = rates.take("rows end", look.ends.get("rows"), now_s)
    following = look.figure("inference", "rows_next")
    lag: int | None = None
    if isinstance(following, Mapping) and following and "rows" in look.ends:
        lag = max(0, look.ends["rows"] - sum(_whole(n) or 0 for n in following.values()))
    level = level_of(lag, rate, records_per_s, floor=64)
    return Edge("trainer", "inference", "rows", rate, "rows/s", lag, "records", level)


def _whole(value: Any) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def health_of(services: Sequence[Service], edges: Sequence[Edge], look: Look) -> tuple[Health, list[str]]:
    """(health, why it is not good) of the whole; the console itself does not count."""
    others = [s for s in services if s.name != "console"]
    notes = [f"{s.name}: {s.reason or s.state}" for s in others if s.state != "ready"]
    notes += [
        f"{edge.target}: {edge.lag:,} {edge.lag_unit} from {edge.source} wait"
        for edge in edges
        if edge.level == "bad"
    ]
    for key in ("served_log", "rows", "versions"):  # inference says there what is wrong, if anything is
        said = look.figure("inference", key)
        if isinstance(said, str) and said and look.services["inference"].state == "ready":
            notes.append(f"inference: {said}")
    down = [s for s in others if s.state == "down"]
    if others and len(down) == len(others):
        return "down", notes
    if down or any(s.state == "starting" and s.restarts for s in others):
        return "degraded", notes
    if any(s.state == "starting" for s in others) or not others:
        return "starting", notes
    return ("degraded" if notes else "good"), notes
