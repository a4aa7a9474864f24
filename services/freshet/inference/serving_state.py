"""What is served at this moment: rows, a version, and how fresh they are."""

from __future__ import annotations

from typing import cast

from freshet.clock import Clock
from freshet.errors import Unavailable
from freshet.inference.core import freshness_ms
from freshet.inference.pipeline import Lookup
from freshet.inference.rows import RowFollower
from freshet.inference.versions import ServingVersion, VersionFollower

__all__ = ["Live"]


class Live:
    """A view of the two followers; may be asked from any thread."""

    def __init__(self, rows: RowFollower, versions: VersionFollower, clock: Clock) -> None:
        self._rows, self._versions, self._clock = rows, versions, clock

    def version(self) -> ServingVersion | None:
        """The version that is served; None while rows or versions are not there yet."""
        return self._versions.state.serving if self._rows.state.sink is not None else None

    def now(self) -> tuple[Lookup, ServingVersion]:
        """Rows and version to score with, together. Raises Unavailable before they are there."""
        table, serving = self._rows.state.sink, self._versions.state.serving
        if table is None:
            raise Unavailable(f"rows are not served yet: {self._rows.state.reason}")
        if serving is None:
            raise Unavailable(f"no version is served yet: {self._versions.state.reason}")
        return cast(Lookup, table), serving

    def rows_freshness_ms(self) -> int | None:
        """As `freshness_ms`, of rows alone, whatever dense versions have learned; until rows have learned
        anything the same."""
        rows_ms = self._rows.state.event_time_ms
        return freshness_ms(self._clock.now_ms(), rows_ms, 0) if rows_ms > 0 else self.freshness_ms()

    def freshness_ms(self) -> int | None:
        """Now minus the newest event learned from; None before anything was learned."""
        serving = self._versions.state.serving
        dense_ms = serving.manifest.event_time_ms if serving is not None else 0
        return freshness_ms(self._clock.now_ms(), self._rows.state.event_time_ms, dense_ms)
