"""What the console has seen of one service, and how it reads figures that others tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Service", "number", "whole"]


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
