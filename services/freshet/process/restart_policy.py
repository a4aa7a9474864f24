"""When a service that died, or hangs, is started again: pure policies, the clock an argument."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from freshet.process.process_info import Activity

__all__ = ["HangPolicy", "Policy", "Silence", "Watch", "exit_in_words"]


@dataclass(frozen=True, slots=True)
class HangPolicy:
    """When a service that runs and does not answer counts as hung.

    A wrong restart costs a lease and a replay, a late one costs that time: so the limits are many times what
    a slow machine takes. Only a service that has answered once is judged, so a first load may take any time.
    """

    idle_s: float = 60.0
    """No answer, and no processor time either: it is stopped, or waits for what never comes."""
    busy_s: float = 600.0
    """No answer, but it works, or waits for a processor or a disk: the machine may be slow."""
    stuck_s: float = 10.0
    """It answers that its main loop stands still, which has its own limit."""
    longest_gap_s: float = 8.0
    """Of the time between two looks at most this counts: in a longer one the supervisor stood still, too."""
    working: float = 0.02
    """Of a processor: less is no work."""


@dataclass(slots=True)
class Silence:
    """How long one process has not answered. Times are monotonic seconds."""

    policy: HangPolicy = field(default_factory=HangPolicy)
    answered: bool = False  # ever
    silent_s: float = 0.0
    stuck_s: float = 0.0
    _busy_s: float = 0.0
    _looked_at: float | None = None
    _cpu_s: float | None = None

    def look(self, now: float, said: str | None, activity: Activity | None) -> str:
        """Take note of one look.

        Args:
            said: "" if the service answered that it lives, why it is stuck if it said so, None without an
                answer.
            activity: of the process; None where it is not known.

        Returns why the process is to be killed; "" if it is not.
        """
        gap_s = 0.0 if self._looked_at is None else min(now - self._looked_at, self.policy.longest_gap_s)
        cpu_s = None if activity is None else activity.cpu_s
        worked_s = 0.0 if cpu_s is None or self._cpu_s is None else cpu_s - self._cpu_s
        self._looked_at, self._cpu_s = now, cpu_s
        if said == "" or (activity is not None and activity.traced):
            self.answered = self.answered or said == ""
            self.silent_s = self.stuck_s = self._busy_s = 0.0
            return ""
        if not self.answered:
            return ""
        if said is not None:
            self.silent_s = self._busy_s = 0.0
            self.stuck_s += gap_s
            return f"hung: {said}" if self.stuck_s >= self.policy.stuck_s else ""
        self.silent_s += gap_s
        if activity is None or activity.state in "RD" or worked_s > self.policy.working * gap_s:
            self._busy_s += gap_s
        idle_s = self.silent_s - self._busy_s
        if idle_s >= self.policy.idle_s or self.silent_s >= self.policy.busy_s:
            return f"hung: it has not answered for {self.silent_s:.0f} s"
        return ""


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
