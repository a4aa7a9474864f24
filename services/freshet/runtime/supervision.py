"""When a service that died is started again: a pure policy, the clock an argument."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

__all__ = ["Policy", "Watch", "exit_in_words"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Restarts wait longer each time, up to a bound; a service that ran long enough starts afresh.

    The waits are for what cannot start; what was killed while it worked is back as soon as it can be, also
    if that happens every few seconds. A trainer needs up to 4 s (its lease, and loading) before it works.
    """

    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0
    settled_after_s: float = 5.0


@dataclass(slots=True)
class Watch:
    """One service as the supervisor sees it. Times are monotonic seconds."""

    policy: Policy = field(default_factory=Policy)
    restarts: int = 0
    started_at: float | None = None
    start_again_at: float | None = 0.0  # None: it runs
    last_exit: str = ""
    _wait_s: float = 0.0

    def started(self, now: float) -> None:
        """It was started."""
        self.started_at, self.start_again_at = now, None

    def exited(self, code: int, now: float) -> float:
        """It ended; returns when it is to be started again."""
        settled = self.started_at is not None and now - self.started_at >= self.policy.settled_after_s
        self._wait_s = (
            self.policy.first_wait_s
            if settled or not self._wait_s
            else min(2 * self._wait_s, self.policy.longest_wait_s)
        )
        self.restarts += 1
        self.last_exit = exit_in_words(code)
        self.start_again_at = now + self._wait_s
        return self.start_again_at

    def due(self, now: float) -> bool:
        """Whether it should be started now."""
        return self.start_again_at is not None and now >= self.start_again_at


def exit_in_words(code: int) -> str:
    """A process's return code: `exit code 1`, or `signal 9 (SIGKILL)` where it is negative."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"
