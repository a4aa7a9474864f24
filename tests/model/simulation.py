"""Time, chance and processes: a discrete-event scheduler that a seed replays exactly.

A process is a handful of generators ("steps"); every `yield n` is n ticks in which anything else may happen,
a pause and a kill included. What happens between two yields is one hold of a lock.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[int, None, T]

HOP = 3  # ticks: the longest ordinary way of a message


class Unavailable(Exception):
    """The other side did not answer: the request was not carried out, or not known to be."""


class Simulation:
    """The event heap. Ties are broken by order of scheduling, so that a seed is a schedule."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0
        self.steps = 0
        self._heap: list[tuple[int, int, Process | None, Callable[[], None]]] = []
        self._order = 0
        self._trace = trace
        self.lost_answers = self.rng.choice([0.0, 0.01, 0.03])

    def note(self, text: str) -> None:
        """Write a line of the schedule, if a trace is kept."""
        if self._trace is not None:
            self._trace(f"{self.now:6d}  {text}")

    def after(self, delay: int, what: Callable[[], None], process: Process | None = None) -> None:
        """Do something later; at a process only if it is still alive, and once it is awake."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay, self._order, process, what))

    def hop(self) -> int:
        """How long a message travels."""
        return 1 + int(self.rng.random() * HOP)

    def run(self, until: int) -> None:
        """Run every event up to a moment."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, order, process, what = heapq.heappop(heap)
            if process is not None:
                if not process.alive:
                    continue
                if process.paused_until > self.now:
                    heapq.heappush(heap, (process.paused_until, order, process, what))
                    continue
            self.steps += 1
            what()
        self.now = until


class Process:
    """One life of a process. A restart is a new object with a new name: no memory leaks from life to life."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self.sim = sim
        self.name = name
        self.alive = True
        self.paused_until = 0
        self.healthy_since = sim.now  # neither paused nor dead since then

    def kill(self) -> None:
        """End at once; memory is gone, messages already sent still travel."""
        self.alive = False

    def pause(self, ticks: int) -> None:
        """Stop for a while and come back believing that no time has passed."""
        self.paused_until = max(self.paused_until, self.sim.now + ticks)
        self.healthy_since = self.paused_until

    def awake(self) -> bool:
        """Whether it could answer now."""
        return self.alive and self.paused_until <= self.sim.now

    def spawn(self, steps: Steps[None], delay: int = 0) -> None:
        """Run a generator as part of this process."""

        def advance() -> None:
            try:
                ticks = next(steps)
            except StopIteration:
                return
            self.sim.after(ticks, advance, self)

        self.sim.after(delay, advance, self)

    def call(self, request: Callable[[], T]) -> Steps[T]:
        """A round trip. The answer may be lost although the request was carried out.

        Raises:
            Unavailable: nothing is known about the request.
        """
        yield self.sim.hop()
        answer = request()
        yield self.sim.hop()
        if self.sim.rng.random() < self.sim.lost_answers:
            raise Unavailable
        return answer
