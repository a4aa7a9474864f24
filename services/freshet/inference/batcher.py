"""Requests that wait at the same moment are scored together: one decoding, one lookup and one pass through
the model cost several requests less than one of each for every request.

Adaptive: whoever has arrived is taken, nobody is waited for. A request that comes alone is scored alone, one
turn of the event loop later; under load the requests that came while the last batch was scored are the next.
Results go to callbacks, not futures: a request needs no task of its own.

What cannot be scored with others (`Alone`) waits in the same queue and has a turn to itself, so that whatever
is asked, by whatever door, one bound says whether it is answered in time.
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
from freshet.http.responses import ClientGoneError
from freshet.inference.pipeline import Encoded

__all__ = ["SHED_WHYS", "Alone", "Batcher", "Pace", "Throughput"]

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

FIRST_GUESS_S = 5e-6
"""What a candidate is taken to cost before any was scored; the first batches correct it."""

FORGET = 0.1
"""Weight of the newest batch in what a candidate is taken to cost."""


SHED_WHYS = ("wait", "gone")

RETRY_AFTER_S = 1.0
"""What a refused client is told: by then most of those that wait are answered, or have given up."""


class Throughput:
    """What a turn has cost of late, with all that the loop does besides: a part whatever it holds, and a part
    for each candidate (least squares, of which the older turns weigh less)."""

    def __init__(self) -> None:
        self._sums: tuple[float, ...] = (0.0,) * 5

    def wait_s(self, turns: float, candidates: float) -> float:
        """How long as many turns with as many candidates together will take."""
        n, x, y, xx, xy = (of + GUESSED * guess for of, guess in zip(self._sums, GUESS, strict=True))
        candidate_s = max(0.0, (n * xy - x * y) / (n * xx - x * x))
        turn_s = (y - candidate_s * x) / n
        return turns * turn_s + candidates * candidate_s if turn_s > 0 else candidates * y / x

    def note(self, candidates: int, seconds: float) -> None:
        """A turn with as many took so long. One of nobody says nothing; one that took much longer than
        expected (the process stood still, or scored for the first time) counts as `SLOWEST`."""
        if candidates:
            seconds = min(seconds, SLOWEST * self.wait_s(1, candidates))
            turn = _sums_of(candidates, seconds)
            self._sums = tuple((1 - FORGET) * of + one for of, one in zip(self._sums, turn, strict=True))


def _sums_of(candidates: float, seconds: float) -> tuple[float, ...]:
    return 1.0, candidates, seconds, candidates**2, candidates * seconds


EMPTY_S = 1e-3
"""What a turn is taken to cost besides its candidates, before any was taken."""

GUESS = tuple(map(sum, zip(_sums_of(0, EMPTY_S), _sums_of(1e3, EMPTY_S + 1e3 * FIRST_GUESS_S), strict=True)))
"""Two turns that are taken to have been: so that small ones alone do not say what a large one costs."""

GUESSED = 1e-4
"""Their weight, where the newest turn has 1: nothing once sizes differ by some candidates."""

SLOWEST = 5.0
"""What a turn may say that its candidates cost, in what was expected: one pause makes the estimate half as
long again for some turns, and a server that has become slow is believed within ten."""


class Pace:
    """What a candidate has cost of late, and so how many requests fit a budget."""

    def __init__(self, budget_s: float) -> None:
        """`budget_s`: what scoring one batch should take at most; 0 means one request at a time."""
        self.budget_s = budget_s
        self.candidate_s = FIRST_GUESS_S

    def fits(self, waiting: Iterable[int]) -> int:
        """How many of the requests that wait, given by their candidates, are one batch: the first always, and
        those after it for as long as the budget lasts. No more of them are looked at."""
        taken = candidates = 0
        for more in waiting:
            candidates += more
            if taken and candidates * self.candidate_s > self.budget_s:
                break
            taken += 1
        return taken

    def turns(self, waiting: int, candidates: int) -> float:
        """About how many batches as many requests are."""
        fit = candidates * self.candidate_s / self.budget_s if self.budget_s else waiting
        return min(waiting, 1 + fit)

    def note(self, candidates: int, seconds: float) -> None:
        """A batch of so many candidates took so long; counts as `SLOWEST` at most."""
        if candidates:
            cost_s = min(seconds / candidates, SLOWEST * self.candidate_s)
            self.candidate_s += FORGET * (cost_s - self.candidate_s)


def _stays() -> bool:
    return False


@dataclass(frozen=True, slots=True, eq=False)
class Alone(Generic[Result]):
    """A request that is not scored with others."""

    candidates: int
    score: Callable[[], Result]  # called in its turn; what it raises is its answer
    size: int = 0  # bytes that it holds while it waits


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Generic[Result]):
    request: Encoded | Alone[Result]
    done: Callable[[Result | Exception], None]
    gone: Callable[[], bool]


class Batcher(Generic[Result]):
    """A queue before the scorer, on the event loop's thread, which also scores."""

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
        """`score` gives each request of a batch its result, or what is wrong with it; what it raises is tried
        again with each request alone.

        Args:
            most_wait_s: a request that would be answered later than that is refused at once.
            most_bytes: of requests that wait; one more is refused, but one alone is always taken.
            observe: is told how many requests each batch held.
            shed: is told of each request that is not scored: "wait" of those that are refused, "gone" of
                those whose clients have gone.
        """
        self._score, self._observe, self._shed, self._clock = score, observe, shed, clock
        self._pace, self._throughput, self._most_wait_s = Pace(budget_s), Throughput(), most_wait_s
        self._candidates = 0  # of those that wait
        self._bytes, self._most_bytes = 0, most_bytes
        self._alone = self._alone_candidates = 0  # of them, those that have a turn to themselves
        self._before: tuple[float, int] | None = None  # began, candidates: of a turn that left some waiting
        self._waiting: deque[_Waiting[Result]] = deque()
        self._due = False  # whether a turn is scheduled

    def ask(
        self,
        request: Encoded | Alone[Result],
        done: Callable[[Result | Exception], None],
        gone: Callable[[], bool] = _stays,
    ) -> None:
        """Score a request with others that wait, in a later turn of the running loop; `done` is then given
        its result, or what is wrong with it. What it raises is logged, and harms no other request.

        `gone`: whether its client has gone; it is then not scored, and `done` is given a ClientGoneError.

        Raises Overloaded: so many wait that it would be answered too late. Whoever comes alone is taken.
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
        """Raise as `ask` would now: for a door that has yet to read what it would ask, which costs about as
        much as scoring it does."""
        waiting = len(self._waiting)
        if not waiting:
            return
        batched = self._candidates - self._alone_candidates
        turns = self._alone + self._pace.turns(waiting - self._alone, batched)
        wait_s = self._throughput.wait_s(turns, self._candidates)
        if wait_s > self._most_wait_s:
            self._shed("wait")
            raise Overloaded(
                f"{waiting} requests wait to be scored, for which {wait_s:.1f} s are expected; at most "
                f"{self._most_wait_s:g} s (FRESHET_INFERENCE_QUEUE_WAIT)",
                retry_after_s=RETRY_AFTER_S,
            )

    def _count(self, request: Encoded | Alone[Result], n: int) -> None:
        self._candidates += n * request.candidates
        self._bytes += n * request.size
        if isinstance(request, Alone):
            self._alone += n
            self._alone_candidates += n * request.candidates

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Score one batch; what still waits has the next turn, after the answers have gone out."""
        began = self._clock()
        if self._before is not None:  # the last turn, and all that the loop did since
            self._throughput.note(self._before[1], began - self._before[0])
        taken = self._take()
        candidates = sum(one.request.candidates for one in taken)
        try:
            if taken:
                for one, result in zip(taken, self._results(taken, candidates), strict=True):
                    _tell(one.done, result)
        finally:  # whatever went wrong with this batch: who comes later is still scored
            self._before = None
            self._due = bool(self._waiting)
            if self._due:
                self._before = (began, candidates)
                loop.call_soon(self._turn, loop)
            else:
                self._throughput.note(candidates, self._clock() - began)

    def _take(self) -> list[_Waiting[Result]]:
        """The next batch, or the next that is scored alone; without those whose clients have gone."""
        together = takewhile(lambda one: not isinstance(one.request, Alone), self._waiting)
        fit = self._pace.fits(one.request.candidates for one in together)
        taken = []
        for _ in range(max(1, fit)):
            one = self._waiting.popleft()
            self._count(one.request, -1)
            if one.gone():
                self._shed("gone")
                _tell(one.done, ClientGoneError("the client went away while its request waited"))
            else:
                taken.append(one)
        return taken

    def _results(self, taken: list[_Waiting[Result]], candidates: int) -> Sequence[Result | Exception]:
        first = taken[0].request
        if isinstance(first, Alone):  # says nothing of what a candidate costs in a batch
            try:
                return [first.score()]
            except Exception as error:
                return [error]
        started = self._clock()
        results = self._scored([one.request for one in taken if not isinstance(one.request, Alone)])
        self._pace.note(candidates, self._clock() - started)
        self._observe(len(taken))
        return results

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
