"""Rates, edges of the pipeline with their levels, and health, from the figures of services. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from freshet.console.instances import Service, merged, number, whole

Level = Literal["ok", "warn", "bad", "idle", "unknown"]
Health = Literal["good", "degraded", "starting", "down"]

RATE_SPAN_S = 5.0
"""Time over which a rate is a mean: long enough to be steady, short enough to follow changes."""

WARN_BEHIND_S, BAD_BEHIND_S = 2.0, 10.0
"""Seconds of waiting work from which on an edge is warned about or bad; freshness promises about a second."""


@dataclass(frozen=True)
class Look:
    """Services and log at one time."""

    services: Mapping[str, Service]  # by name
    joined: Mapping[str, int]  # stream role -> events that the joiner has read; empty: not known
    ends: Mapping[str, int]  # stream role, "samples" or "rows" -> end offsets, summed over partitions
    log_served: bool  # whether inference logs served events

    @cached_property
    def roles(self) -> Mapping[str, Mapping[str, Any]]:
        """{role: figures of all its instances, merged}."""
        return merged(self.services.values())

    @property
    def holder(self) -> str:
        """The role that holds the rows: shards if there are any, else the trainer."""
        return "paramserver" if "paramserver" in self.roles else "trainer"

    def figure(self, role: str, *path: str) -> Any:
        """Return a figure of a role; None if it is not known."""
        return _at(self.roles.get(role), path)

    def totals(self, role: str, *path: str) -> dict[str, float | None]:
        """Return {instance: its total}, for rates; None: not known."""
        return {name: number(_at(figures, path)) for name, figures in self.figures_of(role).items()}

    def figures_of(self, role: str) -> dict[str, Mapping[str, Any]]:
        """Return {instance: its figures}."""
        return {name: s.figures for name, s in self.services.items() if s.role == role}


def _at(value: Any, path: Sequence[str]) -> Any:
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


class Rates:
    """Rates of totals that fall to 0 when their process restarts. The clock is an argument."""

    def __init__(self, span_s: float = RATE_SPAN_S) -> None:
        self._span_s = span_s
        self._seen: dict[str, deque[tuple[float, float]]] = {}

    def rate_of(self, name: str, total: float | None, now_s: float) -> float | None:
        """Add a total; return its growth per second over the last few seconds, or None before two totals.

        A total that is not known now, or smaller than before, begins anew.
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

    def summed(self, name: str, totals: Mapping[str, float | None], now_s: float) -> float | None:
        """Return the sum of the known rates of several instances' totals; None if none is known.

        Each total has a rate of its own, so that an instance that restarts or is away changes no other rate.
        """
        found = [self.rate_of(f"{name} {instance}", total, now_s) for instance, total in totals.items()]
        known = [rate for rate in found if rate is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Edge:
    """Flow of records from one service to another."""

    source: str
    target: str
    what: str
    rate: float | None
    unit: str
    lag: int | None = None  # waiting records; None: none can wait there, or it is not known
    lag_unit: str | None = None
    level: Level = "unknown"
    note: str = ""

    @property
    def name(self) -> str:
        """Name in vitals."""
        return f"{self.source}>{self.target}"

    def to_json(self) -> dict[str, Any]:
        """Return the edge as the page reads it."""
        figures = asdict(self)
        return {"from": figures.pop("source"), "to": figures.pop("target"), **figures}


def level_of(lag: int | None, rate: float | None, per_s: float | None, floor: int) -> Level:
    """Return the level of a lag.

    Args:
        rate:  current rate; idle is a rate of 0 without lag.
        per_s: arrivals per second, in the unit of the lag.
        floor: a lag up to this is work in hand.
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
    """Return the level of an edge on which nothing can wait."""
    return "unknown" if rate is None else "ok" if rate else "idle"


def edges_of(look: Look, rates: Rates, now_s: float) -> list[Edge]:
    """Return the pipeline's edges, in the order of an event's path."""
    from_inference = ("served",) if look.log_served else ()
    from_gateway = tuple(role for role in ("served", "shown", "action") if role not in from_inference)
    return [
        _plain("client", "gateway", "events", "events/s", rates.summed("accepted", _accepted(look), now_s)),
        _to_joiner(look, rates, now_s, "gateway", "events", from_gateway),
        _to_joiner(look, rates, now_s, "inference", "served", from_inference),
        _to_trainer(look, rates, now_s),
        _to_inference(look, rates, now_s),
        _plain(
            "inference",
            "client",
            "requests",
            "requests/s",
            rates.summed("requests", look.totals("inference", "requests"), now_s),
        ),
    ]


def _plain(source: str, target: str, what: str, unit: str, rate: float | None) -> Edge:
    return Edge(source, target, what, rate, unit, level=_flow(rate))


def _accepted(look: Look) -> dict[str, float | None]:
    return {name: _accepted_by(figures) for name, figures in look.figures_of("gateway").items()}


def _accepted_by(figures: Mapping[str, Any]) -> float | None:
    by_role = figures.get("events")
    if not isinstance(by_role, Mapping):
        return number(figures.get("events_appended"))
    counts = [number(role.get("accepted")) for role in by_role.values() if isinstance(role, Mapping)]
    return sum(c for c in counts if c is not None)


def _to_joiner(look: Look, rates: Rates, now_s: float, source: str, what: str, roles: Sequence[str]) -> Edge:
    if not roles:
        return Edge(
            source, "joiner", what, 0.0, f"{what}/s", level="idle", note="the spec logs nothing served"
        )
    here = [role for role in roles if role in look.ends]
    known = bool(here) and all(role in look.joined for role in here)
    joined = sum(look.joined[role] for role in here) if known else None
    end = sum(look.ends[role] for role in here) if here else None
    rate = rates.rate_of(f"{source}>joiner", joined, now_s)
    arriving = rates.rate_of(f"{source} end", end, now_s)
    lag = max(0, end - joined) if end is not None and joined is not None else None
    level = level_of(lag, rate, max(arriving or 0.0, rate or 0.0), floor=200)
    return Edge(source, "joiner", what, rate, f"{what}/s", lag, "records", level)


def _to_trainer(look: Look, rates: Rates, now_s: float) -> Edge:
    rate = rates.summed("trained", look.totals("trainer", "samples"), now_s)
    blocks_per_s = rates.rate_of("samples end", look.ends.get("samples"), now_s)
    lag = whole(look.figure("trainer", "lag_blocks"))
    level = level_of(lag, rate, blocks_per_s, floor=16)
    return Edge("joiner", "trainer", "samples", rate, "samples/s", lag, "blocks", level)


def _to_inference(look: Look, rates: Rates, now_s: float) -> Edge:
    rate = rates.summed("published", look.totals(look.holder, "shard", "published_rows"), now_s)
    records_per_s = rates.rate_of("rows end", look.ends.get("rows"), now_s)
    following = look.figure("inference", "rows_next")
    lag: int | None = None
    if isinstance(following, Mapping) and following and "rows" in look.ends:
        lag = max(0, look.ends["rows"] - sum(whole(n) or 0 for n in following.values()))
    level = level_of(lag, rate, records_per_s, floor=64)
    return Edge("trainer", "inference", "rows", rate, "rows/s", lag, "records", level)


def losses_of(look: Look) -> list[dict[str, Any]]:
    """Return lost and all events of each figure of losses in the last five minutes, over all instances."""
    sums: dict[str, list[int]] = {}
    for role in ("joiner", "inference"):
        for figures in look.figures_of(role).values():
            recent = _at(figures, ("losses", "recent"))
            for name, one in recent.items() if isinstance(recent, Mapping) else ():
                lost, of = whole(_at(one, ("lost",))), whole(_at(one, ("of",)))
                if isinstance(name, str) and lost is not None and of is not None:
                    so_far = sums.setdefault(name, [0, 0])
                    sums[name] = [so_far[0] + lost, so_far[1] + of]
    return [{"figure": name, "lost": lost, "of": of} for name, (lost, of) in sums.items()]


ORPHANS, ORPHANS_SHARE = 50, 0.2
"""Orphans of the last five minutes, and their share, from which on the system counts as degraded."""


def _lost(services: Sequence[Service]) -> list[str]:
    """Return notes on keys in different partitions, and on many orphans."""
    notes = []
    for s in services:
        trouble = _at(s.figures, ("placing", "trouble")) if s.role == "joiner" else None
        if isinstance(trouble, Mapping):
            notes += [f"{s.name}: {reason}" for reason in trouble.values() if isinstance(reason, str)]
        orphans = _at(s.figures, ("losses", "recent", "orphans")) if s.role == "joiner" else None
        lost, of = whole(_at(orphans, ("lost",))), whole(_at(orphans, ("of",)))
        if lost is not None and of and lost >= ORPHANS and lost >= ORPHANS_SHARE * of:
            notes.append(f"{s.name}: {lost:,} of {of:,} actions of the last 5 minutes found no impression")
    return notes


AHEAD_MS = 60_000
"""Event time that is further ahead of now was moved by a wrong clock."""


def _clocks(services: Sequence[Service]) -> list[str]:
    """Return notes on clocks that were set or that disagree, and on event time that is ahead of now."""
    notes = []
    for s in services:
        if s.role != "joiner":
            continue
        if step_ms := whole(s.figures.get("clock_step_ms")) or 0:
            notes.append(
                f"{s.name}: its wall clock was set by {step_ms / 1000:+,.0f} s; the former time counts until "
                "the new one has lasted 2 minutes"
            )
        if waiting := _wholes(s.figures.get("disputed_ms")):
            notes.append(
                f"{s.name}: clocks disagree, and {len(waiting)} partitions wait for that to end: an event "
                f"there is dated {max(waiting) / 1000:,.0f} s ahead"
            )
        now_ms, marks = whole(s.figures.get("now_ms")), _wholes(s.figures.get("watermark_ms"))
        if now_ms and marks and (ahead_ms := max(marks) - now_ms) > AHEAD_MS:
            notes.append(
                f"{s.name}: event time has followed a clock that was wrong; for the next "
                f"{ahead_ms / 1000:,.0f} s all events are late; `freshet late set-back` ends that at once"
            )
    return notes


def _wholes(found: object) -> list[int]:
    """Return the whole numbers among the values of a mapping."""
    values = found.values() if isinstance(found, Mapping) else ()
    return [number for value in values if (number := whole(value)) is not None]


def health_of(services: Sequence[Service], edges: Sequence[Edge]) -> tuple[Health, list[str]]:
    """Return (health, reasons why it is not good) of the system without the console."""
    others = [s for s in services if s.role != "console"]
    notes = [f"{s.name}: {s.reason or s.state}" for s in others if s.state != "ready"]
    notes += [
        f"{edge.target}: {edge.lag:,} {edge.lag_unit} from {edge.source} wait"
        for edge in edges
        if edge.level == "bad"
    ]
    notes += [
        f"{s.name}: {problem}"
        for s in others
        if s.role == "inference" and s.state == "ready"
        for key in ("served_log", "rows", "versions")  # figures with the reason of a problem, or ""
        if isinstance(problem := s.figures.get(key), str) and problem
    ]
    notes += _lost(others)
    notes += _clocks(others)
    down = [s for s in others if s.state == "down"]
    if others and len(down) == len(others):
        return "down", notes
    if down or any(s.state == "starting" and s.restarts for s in others):
        return "degraded", notes
    if any(s.state == "starting" for s in others) or not others:
        return "starting", notes
    return ("degraded" if notes else "good"), notes
