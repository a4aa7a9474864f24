"""What the page is shown of the model: quality, segments, tables, the simulated world. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from freshet.config.spec.model import Spec, Table
from freshet.console.core import Look
from freshet.console.history import History

__all__ = ["quality_of", "segments_of", "simulator_of", "tables_of"]


def quality_of(spec: Spec, look: Look, history: History) -> dict[str, Any]:
    """Figures since the beginning, windows that are still open, and reliability curves."""
    return {
        "labels": [label.name for label in spec.labels],
        "totals": look.figure("trainer", "measures") or {},
        "open": look.figure("trainer", "open") or [],
        "reliability": history.reliability.to_json(),
    }


def segments_of(history: History, text: Callable[[str, int], str | None]) -> list[dict[str, Any]]:
    """Changes of the segments; `text`: what stands for a segment's value, if that is known."""
    return [
        {**change, "text": text(change["segment"], change["value"])} for change in history.segments.changes()
    ]


def tables_of(tables: Sequence[Table], look: Look) -> list[dict[str, Any]]:
    """Rows of each table, their bytes in memory and how many were evicted; None while whoever
    holds them does not tell.
    """
    told = {key: look.figure(look.holder, key) for key in ("rows", "row_bytes", "evicted")}
    known = {key: figures if isinstance(figures, Mapping) else {} for key, figures in told.items()}
    return [
        {
            "table": t.name,
            "rows": known["rows"].get(t.name),
            "bytes": known["row_bytes"].get(t.name),
            "evicted": known["evicted"].get(t.name),
        }
        for t in tables
    ]


def simulator_of(look: Look, history: History) -> dict[str, Any] | None:
    """The simulated world; None where there is none."""
    figures = look.roles.get("simulator")
    if figures is None:
        return None
    told = [{"time_ms": d["time_ms"], "what": d.get("what")} for d in history.drifts]
    return {
        "rate": figures.get("rate"),
        "seed": figures.get("seed"),
        "drifts": figures.get("drifts") or told,
    }
