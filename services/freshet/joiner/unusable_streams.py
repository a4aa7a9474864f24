"""Streams of which nothing can be used: told in the log and in the readiness of the joiner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from freshet.joiner.decode import Refused

__all__ = ["BAD_IN_A_ROW", "BadInARow"]

log = structlog.get_logger("freshet.joiner")

BAD_IN_A_ROW = 100
"""Refused events of a stream without a good one in between, from which on the joiner is not ready."""

LOG_AGAIN_S = 60.0
"""Between two log lines about one stream and reason."""


@dataclass(slots=True)
class BadInARow:
    """Counts refused events of each stream since its last good one. Used by one thread."""

    monotonic: Callable[[], float]  # seconds
    _in_a_row: dict[str, int] = field(default_factory=dict)  # role -> events
    _last: dict[str, str] = field(default_factory=dict)  # role -> reason of the last
    _logged_s: dict[tuple[str, str], float] = field(default_factory=dict)  # (role, word) -> when

    def note(self, role: str, topic: str, records: int, refused: Refused) -> None:
        """Take note of a batch of `records` records of a stream, and of what was refused of it."""
        if not len(refused):
            if records and self._in_a_row.get(role):
                self._in_a_row[role] = 0
            return
        good = records > len(set(refused.rows))
        self._in_a_row[role] = 0 if good else self._in_a_row.get(role, 0) + len(refused)
        self._last[role] = refused.reasons[-1]
        now = self.monotonic()
        for word, events in refused.by_reason().items():
            if events and now - self._logged_s.get((role, word), float("-inf")) >= LOG_AGAIN_S:
                self._logged_s[role, word] = now
                log.warning(
                    "events were refused", topic=topic, why=word, records=events, reason=refused.reasons[-1]
                )

    def trouble(self) -> str | None:
        """None, or which stream is bad and why."""
        for role, events in self._in_a_row.items():
            if events >= BAD_IN_A_ROW:
                return f"the last {events} events of {role} were all refused: {self._last[role]}"
        return None
