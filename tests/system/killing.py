"""SIGKILL at random times: whom, when, and how long each took to go on."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freshet.config.settings import RunFolder
from freshet.process.run_state import read_state

ROLES = ("gateway", "joiner", "trainer", "inference")
CLOCKED = ("gateway", "inference")
"""Their progress is when the newest request that was answered began; the others' is an offset."""

LOOK_S = 0.05
WHILE_IT_RECOVERS = 0.2  # share of kills that hit the process which has just been started for a killed one
WITH_ANOTHER = 0.2  # share that follow at once on the kill of another process
WAIT_S = 60.0  # a process that has not gone on by then is a failure
AGAIN = -1.0  # killed again before it went on


@dataclass(slots=True)
class Kill:
    """One kill: of whom, when (monotonic), and when it was seen to go on."""

    role: str
    at: float
    position: float  # of the role's progress before
    resumed_s: float | None = None  # None: not yet


@dataclass
class Killer:
    """Kills the services of a run folder. `progress` of a role rises with its work, and is None while it
    cannot be known."""

    folder: Path
    progress: Mapping[str, Callable[[], float | None]]
    rng: random.Random
    mean_gap_s: float
    kills: list[Kill] = field(default_factory=list)
    _killed: dict[str, int] = field(default_factory=dict)  # role -> last process killed

    def run(self, count: int) -> None:
        """Kill `count` times, each role equally often but in random order, then wait until all go on.

        Most kills hit a process that works; some the one just started in a killed one's place, and some two
        processes at once.
        """
        left = [ROLES[i % len(ROLES)] for i in range(count)]
        self.rng.shuffle(left)
        last = ""
        while left:
            last = self._victim(left, last)
            self.kill(last)
            left.remove(last)
        self._wait("all", lambda: not self.waiting())

    def _victim(self, left: Sequence[str], last: str) -> str:
        """Who is killed next; returns at the moment of it."""
        way = self.rng.random()
        others = [role for role in left if role != last]
        if way < WHILE_IT_RECOVERS and last in left:
            self._wait(last, lambda: self.pid(last) is not None)
            self._pass(self.rng.uniform(0.0, 1.5))
            return last
        if way < WHILE_IT_RECOVERS + WITH_ANOTHER and others:
            self._wait(others[0], lambda: self.pid(others[0]) is not None)
            return others[0]
        self._pass(self.rng.uniform(0.2, 1.8) * self.mean_gap_s)
        self._wait(left[0], lambda: self.pid(left[0]) is not None and not self.waiting(left[0]))
        return left[0]

    def kill(self, role: str) -> None:
        """SIGKILL, now."""
        pid = self.pid(role)
        assert pid is not None
        earlier = self.waiting(role)
        found = self.progress[role]() or 0.0
        now = time.monotonic()
        self._killed[role] = pid
        os.kill(pid, signal.SIGKILL)
        # Not `now`: who was answered between that and the kill is no sign that it goes on.
        position = time.monotonic() if role in CLOCKED else max([found, *(k.position for k in earlier)])
        self.kills.append(Kill(role, now, position))
        for kill in earlier:
            kill.resumed_s = AGAIN

    def pid(self, role: str) -> int | None:
        """The process of a role, if it runs and is not the one killed last."""
        state: Mapping[str, Any] = read_state(RunFolder(self.folder)).get(role, {})
        pid = state.get("pid")
        return pid if isinstance(pid, int) and pid != self._killed.get(role) and _runs(pid, role) else None

    def waiting(self, role: str | None = None) -> list[Kill]:
        """Kills whose process has not gone on yet."""
        return [k for k in self.kills if k.resumed_s is None and role in (None, k.role)]

    def report(self) -> str:
        """Kills and times to resume, role by role."""
        counts = Counter(k.role for k in self.kills)
        lines = [f"{len(self.kills)} kills: " + ", ".join(f"{role} {counts[role]}" for role in ROLES)]
        for role in ROLES:
            resumed = [k.resumed_s for k in self.kills if k.role == role and k.resumed_s is not None]
            times = sorted(s for s in resumed if s != AGAIN)
            if times:
                again = counts[role] - len(times)
                lines.append(
                    f"  {role:10} resumed after {times[0]:.1f} to {times[-1]:.1f} s, median "
                    f"{statistics.median(times):.1f} s; {again} times killed again before"
                )
        return "\n".join(lines)

    def away(self, role: str) -> list[tuple[float, float]]:
        """From each kill of a role until it was seen to go on, or was killed again (monotonic)."""
        kills = [k for k in self.kills if k.role == role]
        ends = [*(k.at for k in kills[1:]), float("inf")]
        return [
            (k.at, again if k.resumed_s is None or k.resumed_s == AGAIN else k.at + k.resumed_s)
            for k, again in zip(kills, ends, strict=True)
        ]

    def look(self) -> None:
        """Take note of who goes on again."""
        for kill in self.waiting():
            position = self.progress[kill.role]()
            if position is not None and position > kill.position:
                kill.resumed_s = time.monotonic() - kill.at

    def _wait(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            waiting = [k.role for k in self.waiting()]
            assert time.monotonic() < deadline, f"{what}: not going on again after {WAIT_S:g} s: {waiting}"
            self._pass(LOOK_S)

    def _pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        pause = threading.Event()
        while True:
            self.look()
            left = until - time.monotonic()
            if left <= 0:
                return
            pause.wait(min(LOOK_S, left))


def _runs(pid: int, role: str) -> bool:
    """Whether that process is a service of ours, and not another that was given its number."""
    try:
        words: Sequence[bytes] = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"run" in words and role.encode() in words
