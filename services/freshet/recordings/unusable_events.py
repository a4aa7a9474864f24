"""Events of a run's topics that the spec cannot read: counted by stream and reason, each reason with its
first example."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from freshet.errors import BadInput

__all__ = ["Reason", "SetAside"]

Reason = Literal["unreadable", "no_schema"]
"""As the joiner counts them: the bytes are not what their schema says, or have a value that the spec's schema
does not take; the schema is not known, or does not resolve to the spec's."""


@dataclass(slots=True)
class _Kind:
    records: int = 0
    first: str = ""  # place and reason of the first


@dataclass(slots=True)
class SetAside:
    """Gathers what one replay sets aside."""

    read: Counter[str] = field(default_factory=Counter)  # records by stream, the good ones, too
    _kinds: dict[tuple[str, Reason], _Kind] = field(default_factory=dict)

    def add(self, stream: str, reason: Reason, example: str, records: int = 1) -> None:
        """Count records of one reason; `example` is place and reason of the first of them."""
        kind = self._kinds.setdefault((stream, reason), _Kind())
        kind.records += records
        kind.first = kind.first or example

    def refuse_bad_streams(self) -> None:
        """Raise BadInput, naming the stream, if none of a stream's records could be read."""
        for stream, read in self.read.items():
            mine = [kind for (role, _), kind in self._kinds.items() if role == stream]
            if read and sum(kind.records for kind in mine) == read:
                first = "\n  ".join(kind.first for kind in mine)
                raise BadInput(
                    f"replay topics: expected events of the {stream} stream that the spec can read, "
                    f"found none among {read:,} records; the first:\n  {first}\n"
                    "  is it the spec, or a later one, of the model that wrote them?"
                )

    def as_json(self) -> dict[str, Any]:
        """Stream -> reason -> how many records, and the first; empty where nothing was set aside."""
        found: dict[str, Any] = {}
        for (stream, reason), kind in self._kinds.items():
            found.setdefault(stream, {})[reason] = {"records": kind.records, "first": kind.first}
        return found

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"set aside: {kind.records:,} of {self.read[stream]:,} records of the {stream} stream, {reason}\n"
            f"  first: {kind.first}"
            for (stream, reason), kind in self._kinds.items()
        ]
