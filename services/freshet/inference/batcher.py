"""Adaptive batching: requests that wait at the same moment are decoded, looked up and scored together.

No request waits for others: a batch holds the requests that arrived while the last one was scored. Results
go to callbacks, so that a request needs no task. Requests that cannot be batched (`Solo`) wait in the same
queue, so that one bound on the waiting time holds for requests of all routes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, TypeVar

import structlog

from freshet.errors import Overloaded
from freshet.http.messages import ClientGoneError
from freshet.inference.pipeline import Encoded

__all__ = ["SHED_WHYS", "Batcher", "Pace", "Solo", "Throughput"]

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

FIRST_GUESS_S = 5e-6
"""Initial estimate of the seconds per candidate."""

FORGET = 0.1
"""Weight of the newest batch in the estimates."""

SHED_WHYS = ("wait", "gone")

RETRY_AFTER_S = 1.0
"""Retry-After of refused requests: by then most waiting requests are answered or abandoned."""


class Throughput:
    """Estimates the duration of turns of the loop: a constant and a part per candidate.

    The fit is least squares with exponentially decaying weights. A turn includes the loop's other work.
    """

    def __init__(self) -> None:
        self._sums: tuple[float, ...] = (0.0,) * 5

    def wait_s(self, turns: float, candidates: float) -> float:
        """Return the expected seconds of `turns` turns that hold `candidates` together."""
        n, x, y, xx, xy = (of + GUESSED * guess for of, guess in zip(self._sums, GUESS, strict=True))
        candidate_s = max(0.0, (n * xy - x * y) / (n * xx - x * x))
        turn_s = (y - candidate_s * x) / n
        return turns * turn_s + candidates * candidate_s if turn_s > 0 else candidates * y / x

    def observe(self, candidates: int, seconds: float) -> None:
        """Add a turn's duration; a pause of the process is limited to `SLOWEST` times the expectation."""
        if candidates:
            seconds = min(seconds, SLOWEST * self.wait_s(1, candidates))
            turn = _sums_of(candidates, seconds)
            self._sums = tuple((1 - FORGET) * of + one for of, one in zip(self._sums, turn, strict=True))


def _sums_of(candidates: float, seconds: float) -> tuple[float, ...]:
    return 1.0, candidates, seconds, candidates**2, candidates * seconds


EMPTY_S = 1e-3
"""Initial estimate of a turn's constant part."""

GUESS = tuple(map(sum, zip(_sums_of(0, EMPTY_S), _sums_of(1e3, EMPTY_S + 1e3 * FIRST_GUESS_S), strict=True)))
"""Prior of the fit: two turns of different sizes, so that it is determined while all turns are small."""

GUESSED = 1e-4
"""Weight of the prior; the newest turn has 1."""

SLOWEST = 5.0
"""Limit of a measured cost, as a multiple of the estimate: one pause raises the estimate by half."""


class Pace:
    """Estimates the seconds per candidate, and how many requests fit a time budget."""

    def __init__(self, budget_s: float) -> None:
        """`budget_s`: longest time to score one batch; 0: one request at a time."""
        self.budget_s = budget_s
        self.candidate_s = FIRST_GUESS_S

    def fits(self, waiting: Iterable[int]) -> int:
        """Return how many waiting requests, given by their candidates, form a batch: at least one."""
        taken = candidates = 0
        for more in waiting:
            candidates += more
            if taken and candidates * self.candidate_s > self.budget_s:
                break
            taken += 1
        return taken

    def turns(self, waiting: int, candidates: int) -> float:
        """Return the approximate number of batches for `waiting` requests."""
        fit = candidates * self.candidate_s / self.budget_s if self.budget_s else waiting
        return min(waiting, 1 + fit)

    def observe(self, candidates: int, seconds: float) -> None:
        """Add a batch's duration, limited to `SLOWEST` times the expectation."""
        if candidates:
            cost_s = min(seconds / candidates, SLOWEST * self.candidate_s)
            self.candidate_s += FORGET * (cost_s - self.candidate_s)


def _never_gone() -> bool:
    return False


@dataclass(frozen=True, slots=True, eq=False)
class Solo(Generic[Result]):
    """A request that is not batched."""

    candidates: int
    score: Callable[[], Result]  # an exception is the request's outcome
    size: int = 0  # bytes that it holds while it waits


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Generic[Result]):
    request: Encoded | Solo[Result]
    done: Callable[[Result | Exception], None]
    gone: Callable[[], bool]


class Batcher(Generic[Result]):
    """Queues requests and scores them in batches, on the event loop's thread."""

    def __init__(
        self,
        score: Callable[[Sequence[Encoded]], Sequence[Result | Exception]],
        *,
        budget_s: float,
        most_wait_s: float = float("inf"),
        most_bytes: float = float("inf"),
        observe: Callable[[int], None] = lambda requests: None,
        shed: Callable[[str], None] = lambda why: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Queue no request yet.

        Args:
            score: returns a result or an error per request; if it raises, each request is scored alone.
            budget_s: longest time to score one batch; 0: one request at a time.
            most_wait_s: longest expected wait; above it requests are refused.
            most_bytes: bound of the waiting requests' bytes; an empty queue accepts any request.
            observe: called with the number of requests of each batch.
            shed: called per unscored request: "wait" if refused, "gone" if its client has disconnected.
        """
        self._score, self._observe, self._shed, self._clock = score, observe, shed, clock
        self._pace, self._throughput, self._most_wait_s = Pace(budget_s), Throughput(), most_wait_s
        self._candidates = 0  # of waiting requests
        self._bytes, self._most_bytes = 0, most_bytes
        self._solo = self._solo_candidates = 0  # of waiting `Solo` requests
        self._before: tuple[float, int] | None = None  # start, candidates of a turn that left requests
        self._waiting: deque[_Waiting[Result]] = deque()
        self._due = False  # whether a turn is scheduled

    def submit(
        self,
        request: Encoded | Solo[Result],
        done: Callable[[Result | Exception], None],
        gone: Callable[[], bool] = _never_gone,
    ) -> None:
        """Queue a request; a later turn of the running loop scores it.

        Args:
            done: called with the result or the error; an exception that it raises is logged.
            gone: whether the client has disconnected; then `done` gets a ClientGoneError.

        Raises:
            Overloaded: the expected wait or the queue's bytes exceed their bounds.
        """
        self.refuse_if_late()
        if self._waiting and self._bytes + request.size > self._most_bytes:
            self._shed("wait")
            raise Overloaded(
                f"{len(self._waiting)} requests of {self._bytes:,} bytes wait to be scored; at most "
                f"{self._most_bytes:,} bytes (FRESHET_INFERENCE_MAX_BODIES_BYTES)",
                retry_after_s=RETRY_AFTER_S,
            )
        self._waiting.append(_Waiting(request, done, gone))
        self._count(request, 1)
        if not self._due:
            self._due = True
            loop = asyncio.get_running_loop()
            loop.call_soon(self._turn, loop)

    def refuse_if_late(self) -> None:
        """Raises Overloaded if the expected wait is too long: a check before a body is parsed."""
        waiting = len(self._waiting)
        if not waiting:
            return
        batched = self._candidates - self._solo_candidates
        turns = self._solo + self._pace.turns(waiting - self._solo, batched)
        wait_s = self._throughput.wait_s(turns, self._candidates)
        if wait_s > self._most_wait_s:
            self._shed("wait")
            raise Overloaded(
                f"{waiting} requests wait to be scored, for which {wait_s:.1f} s are expected; at most "
                f"{self._most_wait_s:g} s (FRESHET_INFERENCE_QUEUE_WAIT)",
                retry_after_s=RETRY_AFTER_S,
            )

    def _count(self, request: Encoded | Solo[Result], n: int) -> None:
        self._candidates += n * request.candidates
        self._bytes += n * request.size
        if isinstance(request, Solo):
            self._solo += n
            self._solo_candidates += n * request.candidates

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Score one batch; schedule the next turn if requests wait."""
        began = self._clock()
        if self._before is not None:  # the last turn and the loop's work since
            self._throughput.observe(self._before[1], began - self._before[0])
        taken = self._next_batch()
        candidates = sum(one.request.candidates for one in taken)
        try:
            if taken:
                for one, result in zip(taken, self._score_batch(taken, candidates), strict=True):
                    _answer(one.done, result)
        finally:  # later requests must be scored after any error
            self._before = None
            self._due = bool(self._waiting)
            if self._due:
                self._before = (began, candidates)
                loop.call_soon(self._turn, loop)
            else:
                self._throughput.observe(candidates, self._clock() - began)

    def _next_batch(self) -> list[_Waiting[Result]]:
        """Return the next batch or `Solo` request, without requests of clients that have disconnected."""
        together = takewhile(lambda one: not isinstance(one.request, Solo), self._waiting)
        fit = self._pace.fits(one.request.candidates for one in together)
        taken = []
        for _ in range(max(1, fit)):
            one = self._waiting.popleft()
            self._count(one.request, -1)
            if one.gone():
                self._shed("gone")
                _answer(one.done, ClientGoneError("the client went away while its request waited"))
            else:
                taken.append(one)
        return taken

    def _score_batch(self, taken: list[_Waiting[Result]], candidates: int) -> Sequence[Result | Exception]:
        first = taken[0].request
        if isinstance(first, Solo):  # its duration does not count for batches
            try:
                return [first.score()]
            except Exception as error:
                return [error]
        started = self._clock()
        results = self._score_or_split([one.request for one in taken if not isinstance(one.request, Solo)])
        self._pace.observe(candidates, self._clock() - started)
        self._observe(len(taken))
        return results

    def _score_or_split(self, requests: Sequence[Encoded]) -> Sequence[Result | Exception]:
        try:
            return self._score(requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
        return [result for one in requests for result in self._score_or_split([one])]


def _answer(done: Callable[[Result | Exception], None], result: Result | Exception) -> None:
    try:
        done(result)
    except Exception as error:
        log.error("a rank request could not be answered", exc_info=error)
