"""Requests that wait at the same moment are scored together: one decoding, one lookup and one pass through
the model cost several requests less than one of each for every request.

Adaptive: whoever has arrived is taken, nobody is waited for. A request that comes alone is scored alone, one
turn of the event loop later; under load the requests that came while the last batch was scored are the next.
Results go to callbacks, not futures: a request needs no task of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from freshet.inference.pipeline import Encoded

__all__ = ["Batcher", "Pace"]

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

FIRST_GUESS_S = 5e-6
"""What a candidate is taken to cost before any was scored; the first batches correct it."""

FORGET = 0.1
"""Weight of the newest batch in what a candidate is taken to cost."""


class Pace:
    """What a candidate has cost of late, and so how many requests fit a budget."""

    def __init__(self, budget_s: float) -> None:
        """`budget_s`: what scoring one batch should take at most; 0 means one request at a time."""
        self.budget_s = budget_s
        self.candidate_s = FIRST_GUESS_S

    def fits(self, waiting: Sequence[int]) -> int:
        """How many of the requests that wait, given by their candidates, are one batch: the first always, and
        those after it for as long as the budget lasts."""
        taken, candidates = 1, waiting[0]
        for more in waiting[1:]:
            candidates += more
            if candidates * self.candidate_s > self.budget_s:
                break
            taken += 1
        return taken

    def note(self, candidates: int, seconds: float) -> None:
        """A batch of so many candidates took so long."""
        if candidates:
            self.candidate_s += FORGET * (seconds / candidates - self.candidate_s)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Generic[Result]):
    request: Encoded
    done: Callable[[Result | Exception], None]


class Batcher(Generic[Result]):
    """A queue before the scorer, on the event loop's thread, which also scores."""

    def __init__(
        self,
        score: Callable[[Sequence[Encoded]], Sequence[Result | Exception]],
        *,
        budget_s: float,
        observe: Callable[[int], None] = lambda requests: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`score` gives each request its result, or what is wrong with it; what it raises is tried again with
        each request alone. `observe` is told how many requests each batch held."""
        self._score, self._observe, self._clock = score, observe, clock
        self._pace = Pace(budget_s)
        self._waiting: deque[_Waiting[Result]] = deque()
        self._due = False  # whether a turn is scheduled

    def ask(self, request: Encoded, done: Callable[[Result | Exception], None]) -> None:
        """Score a request with others that wait, in a later turn of the running loop; `done` is then given
        its result, or what is wrong with it. What it raises is logged, and harms no other request."""
        self._waiting.append(_Waiting(request, done))
        if not self._due:
            self._due = True
            loop = asyncio.get_running_loop()
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Score one batch; what still waits has the next turn, after the answers have gone out."""
        try:
            taken = self._take()
            started = self._clock()
            results = self._scored([one.request for one in taken])
            self._pace.note(sum(one.request.candidates for one in taken), self._clock() - started)
            self._observe(len(taken))
            for one, result in zip(taken, results, strict=True):
                _tell(one.done, result)
        finally:  # whatever went wrong with this batch: who comes later is still scored
            self._due = bool(self._waiting)
            if self._due:
                loop.call_soon(self._turn, loop)

    def _take(self) -> list[_Waiting[Result]]:
        count = self._pace.fits([one.request.candidates for one in self._waiting])
        return [self._waiting.popleft() for _ in range(count)]

    def _scored(self, requests: Sequence[Encoded]) -> Sequence[Result | Exception]:
        try:
            return self._score(requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
        return [result for one in requests for result in self._scored([one])]


def _tell(done: Callable[[Result | Exception], None], result: Result | Exception) -> None:
    try:
        done(result)
    except Exception as error:
        log.error("a rank request could not be answered", exc_info=error)
