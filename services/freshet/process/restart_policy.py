"""Policies for hung services and for the backoff between restarts. Times are monotonic seconds."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from freshet.process.process_info import Activity


@dataclass(frozen=True, slots=True)
class HangPolicy:
    """Limits after which a running service that does not answer counts as hung.

    A wrong restart costs a lease and a replay, a late one only its delay: so the limits are many times the
    delays of a slow machine. They apply after the first answer, so a first load may take any time.
    """

    idle_s: float = 60.0
    """Silence without processor time: the process is stopped, or waits for an event that never comes."""
    busy_s: float = 600.0
    """Silence while the process works, or waits for a processor or a disk: the machine may be slow."""
    stuck_s: float = 10.0
    """Time for which the process reports a stalled main loop; the report itself has a limit of its own."""
    longest_gap_s: float = 8.0
    """The most that one interval between two checks counts: in a longer one the supervisor itself stalled."""
    working: float = 0.02
    """Share of one processor below which a process is idle."""


@dataclass(slots=True)
class Silence:
    """The time for which one process has not answered."""

    policy: HangPolicy = field(default_factory=HangPolicy)
    answered: bool = False  # ever
    silent_s: float = 0.0
    stuck_s: float = 0.0
    _busy_s: float = 0.0
    _checked_at: float | None = None
    _cpu_s: float | None = None

    def add_check(self, now: float, answer: str | None, activity: Activity | None) -> str:
        """Add one liveness check; return the reason to kill the process, or "".

        Args:
            answer: "" if the service is live, its reason if it reports that it is stuck, None without an
                answer.
            activity: None if it is unknown.
        """
        gap_s = 0.0 if self._checked_at is None else min(now - self._checked_at, self.policy.longest_gap_s)
        cpu_s = None if activity is None else activity.cpu_s
        worked_s = 0.0 if cpu_s is None or self._cpu_s is None else cpu_s - self._cpu_s
        self._checked_at, self._cpu_s = now, cpu_s
        if answer == "" or (activity is not None and activity.traced):
            self.answered = self.answered or answer == ""
            self.silent_s = self.stuck_s = self._busy_s = 0.0
            return ""
        if not self.answered:
            return ""
        if answer is not None:
            self.silent_s = self._busy_s = 0.0
            self.stuck_s += gap_s
            return f"hung: {answer}" if self.stuck_s >= self.policy.stuck_s else ""
        self.silent_s += gap_s
        if activity is None or activity.state in "RD" or worked_s > self.policy.working * gap_s:
            self._busy_s += gap_s
        idle_s = self.silent_s - self._busy_s
        if idle_s >= self.policy.idle_s or self.silent_s >= self.policy.busy_s:
            return f"hung: it has not answered for {self.silent_s:.0f} s"
        return ""


@dataclass(frozen=True, slots=True)
class Policy:
    """The backoff between restarts, which doubles up to a bound; a service that ran long enough resets it.

    The backoff is for services that cannot start. A service that is killed while it works restarts at once,
    even every few seconds. A trainer needs up to 4 s (its lease, and loading) before it works.
    """

    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0
    reset_after_s: float = 5.0


@dataclass(slots=True)
class Watch:
    """Starts and exits of one service."""

    policy: Policy = field(default_factory=Policy)
    restarts: int = 0
    started_at: float | None = None
    start_again_at: float | None = 0.0  # None: the service runs
    last_exit: str = ""
    _wait_s: float = 0.0

    def started(self, now: float) -> None:
        """Record a start."""
        self.started_at, self.start_again_at = now, None

    def exited(self, code: int, now: float) -> float:
        """Record an exit; return the time of the next start."""
        ran_long = self.started_at is not None and now - self.started_at >= self.policy.reset_after_s
        self._wait_s = (
            self.policy.first_wait_s
            if ran_long or not self._wait_s
            else min(2 * self._wait_s, self.policy.longest_wait_s)
        )
        self.restarts += 1
        self.last_exit = exit_in_words(code)
        self.start_again_at = now + self._wait_s
        return self.start_again_at

    def due(self, now: float) -> bool:
        """Report whether the service should start now."""
        return self.start_again_at is not None and now >= self.start_again_at


def exit_in_words(code: int) -> str:
    """Describe a return code: `exit code 1`, or `signal 9 (SIGKILL)` for a negative one."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"
