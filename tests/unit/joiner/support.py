"""Events for the join's tests: their columns, and a decoder of their records (JSON)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from freshet.config.expression import Column, compile_condition, compile_value
from freshet.joiner.core import ActionColumns, ImpressionColumns, ShownColumns
from freshet.joiner.decoder import Refused
from freshet.joiner.plan import JoinPlan, LabelPlan
from freshet.types import BytesColumn, Records


def label(
    name: str, window_ms: int = 1000, given: int = -1, on: str | None = None, value: str | None = None
) -> LabelPlan:
    """A label; true for actions whose `type` is its name (as a number: see `type_of`) unless `on` says
    otherwise.
    """
    condition = compile_condition(on or f"action.type == {type_of(name)}")
    return LabelPlan(name, window_ms, given, condition, compile_value(value) if value else None)


def type_of(name: str) -> int:
    return {"click": 1, "watch": 2, "buy": 3}[name]


def plan_of(
    *labels: LabelPlan,
    grace_ms: int = 100,
    require_shown: bool = False,
    early: bool = True,
    negatives: float = 1.0,
    ramp: int = 0,
) -> JoinPlan:
    return JoinPlan(labels or (label("click"),), grace_ms, require_shown, early, negatives, 60_000, ramp)


def key_of(name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def keys_of(names: Sequence[str]) -> np.ndarray:
    return np.array([key_of(n) for n in names], np.uint64).reshape(-1, 2)


@dataclass(frozen=True)
class Served:
    """A served event with its items; the impression of an item is named `<request>/<item>`."""

    request: str
    items: tuple[str, ...]
    time: int
    schema: int = 1

    def record(self) -> bytes:
        return orjson.dumps({"r": self.request, "i": self.items, "t": self.time, "s": self.schema})


@dataclass(frozen=True)
class Shown:
    impression: str
    time: int

    def record(self) -> bytes:
        return orjson.dumps({"k": self.impression, "t": self.time})


@dataclass(frozen=True)
class Action:
    impression: str
    time: int
    type: str = "click"
    id: str | None = None
    amount: float | None = None

    def record(self) -> bytes:
        return orjson.dumps(
            {"k": self.impression, "t": self.time, "y": self.type, "id": self.id, "a": self.amount}
        )


Event = Served | Shown | Action


def impressions(events: Sequence[Served], offsets: Sequence[int] | None = None) -> ImpressionColumns:
    """An event's bytes are `<request|`, then its items, then `|time>`: a sample's payload is
    `<r|item|time>`.
    """
    data = b""
    spans, elements, names, of = [], [], [], []
    for e, event in enumerate(events):
        begin = len(data) + 3  # framing, outside any event
        data += b"###" + f"<{event.request}|".encode()
        prefix = len(data)
        for item in event.items:
            elements.append((len(data), len(data) + len(item.encode())))
            data += item.encode()
            names.append(f"{event.request}/{item}")
            of.append(e)
        suffix = len(data)
        data += f"|{event.time}>".encode()
        spans.append((begin, prefix, suffix, len(data)))
    span = np.array(spans, np.int64).reshape(-1, 4)
    element = np.array(elements, np.int64).reshape(-1, 2)
    return ImpressionColumns(
        data=np.frombuffer(data, np.uint8),
        offsets=np.arange(len(events), dtype=np.int64) if offsets is None else np.array(offsets, np.int64),
        requests=np.array([key_of(e.request)[0] for e in events], np.uint64),
        schemas=np.array([e.schema for e in events], np.uint32),
        begins=span[:, 0].copy(),
        prefix_ends=span[:, 1].copy(),
        suffix_begins=span[:, 2].copy(),
        ends=span[:, 3].copy(),
        events=np.array(of, np.uint32),
        times_ms=np.array([events[e].time for e in of], np.int64),
        keys=keys_of(names),
        element_begins=element[:, 0].copy(),
        element_ends=element[:, 1].copy(),
    )


def shown(events: Sequence[Shown], offsets: Sequence[int] | None = None) -> ShownColumns:
    return ShownColumns(
        np.arange(len(events), dtype=np.int64) if offsets is None else np.array(offsets, np.int64),
        np.array([e.time for e in events], np.int64),
        keys_of([e.impression for e in events]),
    )


def actions(plan: JoinPlan, events: Sequence[Action], offsets: Sequence[int] | None = None) -> ActionColumns:
    n = len(events)
    amounts = np.array([np.nan if e.amount is None else e.amount for e in events], np.float64)
    columns = {
        "type": Column(np.array([type_of(e.type) for e in events], np.int64)),
        "amount": Column(amounts, np.isnan(amounts)),
    }
    masks = np.zeros(n, np.uint32)
    values = np.full((n, len(plan.aggregates)), np.nan)
    column = 0
    for i, one in enumerate(plan.labels):
        masks |= one.condition.true(columns, n).astype(np.uint32) << np.uint32(i)
        for argument in one.value.argument_columns(columns, n) if one.value else ():
            values[:, column] = argument.filled(np.nan)
            column += 1
    ids = [e.id or e.record().decode() for e in events]
    return ActionColumns(
        np.arange(n, dtype=np.int64) if offsets is None else np.array(offsets, np.int64),
        np.array([e.time for e in events], np.int64),
        keys_of([e.impression for e in events]),
        keys_of(ids),
        masks,
        values,
    )


class JsonDecoder:
    """Decodes records of `Served`, `Shown` and `Action`; refuses others."""

    def __init__(self, plan: JoinPlan) -> None:
        self.plan = plan

    def served(self, records: Records) -> tuple[ImpressionColumns, Refused]:
        rows, parsed, refused = _parse(records)
        events = [Served(p["r"], tuple(p["i"]), p["t"], p["s"]) for p in parsed]
        return impressions(events, records.offsets[rows].tolist()), refused

    def fitting(self, served: ImpressionColumns, records: Records, refused: Refused) -> ImpressionColumns:
        return served

    def shown(self, records: Records) -> tuple[ShownColumns, Refused]:
        rows, parsed, refused = _parse(records)
        return shown([Shown(p["k"], p["t"]) for p in parsed], records.offsets[rows].tolist()), refused

    def actions(self, records: Records) -> tuple[ActionColumns, Refused]:
        rows, parsed, refused = _parse(records)
        events = [Action(p["k"], p["t"], p["y"], p["id"], p["a"]) for p in parsed]
        return actions(self.plan, events, records.offsets[rows].tolist()), refused


def _parse(records: Records) -> tuple[list[int], list[dict], Refused]:  # type: ignore[type-arg]
    rows, parsed, refused = [], [], Refused()
    for row, value in enumerate(records.values):
        try:
            parsed.append(orjson.loads(value))
            rows.append(row)
        except orjson.JSONDecodeError:
            refused.add(np.array([row]), "expected JSON")
    return rows, parsed, refused


def records_of(events: Sequence[Event | bytes], start: int = 0, time_ms: int | None = None) -> Records:
    """Make records as a log returns them, logged at their event time or at `time_ms`."""
    values = [e if isinstance(e, bytes) else e.record() for e in events]
    times = [time_ms if time_ms is not None else 0 if isinstance(e, bytes) else e.time for e in events]
    return Records(
        np.arange(start, start + len(values), dtype=np.int64),
        np.array(times, np.int64),
        BytesColumn.of([b""] * len(values)),
        BytesColumn.of(values),
        start + len(values),
    )
