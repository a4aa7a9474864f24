"""What the console writes down, in `<model>.measures`: its own past, read back when it starts again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from freshet.clock import Clock
from freshet.config.spec.model import Spec
from freshet.console.board import tables_of
from freshet.console.core import Edge, Look
from freshet.console.history import History
from freshet.console.service_snapshot import number
from freshet.log import Writer
from freshet.types import Append, BytesColumn

__all__ = ["Recorder", "news_of", "vitals_of"]


class Recorder:
    """Writes vitals every few seconds, and what a simulator says of its world, once. Used by one thread."""

    def __init__(self, spec: Spec, writer: Writer, topic: str, every_ms: int, clock: Clock) -> None:
        """`writer` becomes the recorder's, to be closed with it."""
        self._spec, self._writer, self._topic, self._clock = spec, writer, topic, clock
        self._every_s = every_ms / 1e3
        self._due = clock.monotonic() + self._every_s  # there are rates by then
        self._clicks_until_ms = 0  # end of the newest window of clicks that was written

    def write(
        self, look: Look, edges: Sequence[Edge], history: History, trace: Mapping[str, float] | None
    ) -> None:
        """Write down this look, if it is time. Raises Unavailable as the log does; the next one is then
        written."""
        now_s = self._clock.monotonic()
        if now_s < self._due:
            return
        self._due = now_s + self._every_s
        vitals = vitals_of(self._spec, look, edges, trace, self._clock.now_ms())
        news = news_of(look, history, max(history.clicks_until_ms, self._clicks_until_ms))
        values = [orjson.dumps({"v": 1, **r}, option=orjson.OPT_NON_STR_KEYS) for r in (vitals, *news)]
        self._writer.append([Append(self._topic, 0, BytesColumn.of(values))])
        ends = [r["stop_ms"] for r in news if r["kind"] == "clicks"]
        self._clicks_until_ms = max([self._clicks_until_ms, *ends])

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


def vitals_of(
    spec: Spec, look: Look, edges: Sequence[Edge], trace: Mapping[str, float] | None, now_ms: int
) -> dict[str, Any]:
    """Rates, lags, freshness, memory and rows at one look."""
    return {
        "kind": "vitals",
        "time_ms": now_ms,
        "rates": {e.name: None if e.rate is None else round(e.rate, 2) for e in edges},
        "lag": {e.name: e.lag for e in edges if e.lag is not None},
        "freshness_ms": look.figure("inference", "freshness_ms"),
        "trace": trace,
        "memory_mb": {s.name: s.memory_mb for s in look.services.values()},
        "rows": {t["table"]: t["rows"] for t in tables_of(spec.tables, look)},
        "rows_bytes": look.figure(look.holder, "bytes"),
        "version": look.figure("inference", "version"),
    }


def news_of(look: Look, history: History, clicks_until_ms: int) -> list[dict[str, Any]]:
    """Windows of clicks that end after that, and drifts that the history does not know."""
    windows, drifts = (look.figure("simulator", key) for key in ("windows", "drifts"))
    clicks = [
        {"kind": "clicks", **w}
        for w in (windows if isinstance(windows, list) else [])
        if isinstance(w, dict) and (number(w.get("stop_ms")) or 0) > clicks_until_ms
    ]
    known = {d["time_ms"] for d in history.drifts}
    return clicks + [
        {"kind": "drift", "time_ms": d["time_ms"], "what": d.get("what")}
        for d in (drifts if isinstance(drifts, list) else [])
        if isinstance(d, dict) and type(d.get("time_ms")) is int and d["time_ms"] not in known
    ]
