"""Scoring with the rows and the version served, by adaptive batching.

Requests that wait at the same moment are decoded, looked up and scored together.
No request waits for others: a batch holds the requests that arrived while the last one was scored. Results
go to callbacks, so that a request needs no task. Requests that cannot be batched (`Solo`) wait in the same
queue, so that one bound on the waiting time holds for requests of all routes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Generic, Protocol, TypeVar, cast

import structlog
from prometheus_client import CollectorRegistry, Counter

from freshet.clock import Clock
from freshet.config.settings import Inference as Settings
from freshet.errors import Overloaded, Unavailable
from freshet.features import DecodedRequests
from freshet.http.messages import ClientGoneError
from freshet.inference import metrics
from freshet.inference.pipeline import Encoded, Lookup, Pipeline, Scored, count_not_finite
from freshet.inference.row_reads import DEFAULTED_WHYS, RowReads, RowsOnDisk, RowsRead, Unread
from freshet.inference.rows import RowFollower
from freshet.inference.versions import ServingVersion, VersionFollower

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


class BatchBudget:
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


@dataclass(frozen=True, slots=True, eq=False)
class Solo(Generic[Result]):
    """A request that is not batched."""

    candidates: int
    score: Callable[[], Result]  # an exception is the request's outcome


Watch = Callable[[], Callable[[], bool]]
"""Begins to watch a request's client; the function returned reports whether it has disconnected."""


def _never() -> bool:
    return False


class Client:
    """A request's client. It is watched only once the request has to wait, as watching costs a task."""

    __slots__ = ("_is_cancelled", "_is_gone", "_watch")

    def __init__(self, watch: Watch | None = None, is_cancelled: Callable[[], bool] = _never) -> None:
        """`is_cancelled`: whether the request was given up, where that is known without a watch."""
        self._watch, self._is_cancelled = watch, is_cancelled
        self._is_gone: Callable[[], bool] = _never

    def watch(self) -> None:
        """Begin to watch the client. Idempotent."""
        if self._watch is not None:
            self._is_gone, self._watch = self._watch(), None

    def is_gone(self) -> bool:
        """Return whether the client is known to have disconnected."""
        return self._is_cancelled() or self._is_gone()


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Result]):
    request: Encoded | Solo[Result]
    done: Callable[[Result | Exception], None]
    client: Client
    is_taken: bool = False


class Batcher(Generic[Result]):
    """Queues requests and scores them in batches, on the event loop's thread."""

    def __init__(
        self,
        score: Callable[[Sequence[Encoded]], Sequence[Result | Exception]],
        *,
        budget_s: float,
        most_wait_s: float = float("inf"),
        observe: Callable[[int], None] = lambda requests: None,
        shed: Callable[[str], None] = lambda why: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Queue no request yet.

        Args:
            score: returns a result or an error per request; if it raises, each request is scored alone.
            budget_s: longest time to score one batch; 0: one request at a time.
            most_wait_s: longest expected wait; above it requests are refused.
            observe: called with the number of requests of each batch.
            shed: called per unscored request: "wait" if refused, "gone" if its client has disconnected.
        """
        self._score, self._observe, self._shed, self._clock = score, observe, shed, clock
        self._budget, self._throughput, self._most_wait_s = BatchBudget(budget_s), Throughput(), most_wait_s
        self._candidates = 0  # of waiting requests
        self._solo = self._solo_candidates = 0  # of waiting `Solo` requests
        self._before: tuple[float, int] | None = None  # start, candidates of a turn that left requests
        self._waiting: deque[_Waiting[Result]] = deque()
        self._unwatched: list[_Waiting[Result]] = []  # that came since the last turn
        self._due = False  # whether a turn is scheduled

    def submit(
        self, request: Encoded | Solo[Result], done: Callable[[Result | Exception], None], client: Client
    ) -> None:
        """Queue a request; a later turn of the running loop scores it.

        Args:
            done: called with the result or the error; an exception that it raises is logged.
            client: watched once the request has waited for a turn: most requests are scored in the first
                one. If it has disconnected, `done` gets a ClientGoneError.

        Raises:
            Overloaded: the expected wait exceeds its bound.
        """
        self.refuse_if_late()
        waiting = _Waiting(request, done, client)
        self._waiting.append(waiting)
        self._unwatched.append(waiting)
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
        turns = self._solo + self._budget.turns(waiting - self._solo, batched)
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
                self._watch_waiting()
                self._before = (began, candidates)
                loop.call_soon(self._turn, loop)
            else:
                self._throughput.observe(candidates, self._clock() - began)
            self._unwatched.clear()

    def _watch_waiting(self) -> None:
        """Watch the clients of requests that came since the turn before and still wait."""
        for one in self._unwatched:
            if not one.is_taken:
                one.client.watch()

    def _next_batch(self) -> list[_Waiting[Result]]:
        """Return the next batch or `Solo` request, without requests of clients that have disconnected."""
        together = takewhile(lambda one: not isinstance(one.request, Solo), self._waiting)
        fit = self._budget.fits(one.request.candidates for one in together)
        taken = []
        for _ in range(max(1, fit)):
            one = self._waiting.popleft()
            one.is_taken = True
            self._count(one.request, -1)
            error = self.error_if_gone(one.client)
            if error is None:
                taken.append(one)
            else:
                _answer(one.done, error)
        return taken

    def error_if_gone(self, client: Client) -> ClientGoneError | None:
        """Return the outcome of a waiting request whose client has disconnected, and count it; else None."""
        if not client.is_gone():
            return None
        self._shed("gone")
        return ClientGoneError("the client went away while its request waited")

    def _score_batch(self, taken: list[_Waiting[Result]], candidates: int) -> Sequence[Result | Exception]:
        first = taken[0].request
        if isinstance(first, Solo):  # its duration does not count for batches
            try:
                return [first.score()]
            except Exception as error:
                return [error]
        started = self._clock()
        results = self._score_or_split([one.request for one in taken if not isinstance(one.request, Solo)])
        self._budget.observe(candidates, self._clock() - started)
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


class ServedRows(Lookup, RowsOnDisk, Protocol):
    """Rows to score with."""


class ServingState:
    """The two followers' rows and version. Thread-safe."""

    def __init__(self, rows: RowFollower, versions: VersionFollower, clock: Clock) -> None:
        self._rows, self._versions, self._clock = rows, versions, clock

    def version(self) -> ServingVersion | None:
        """Return the version served; None before rows and a version are loaded."""
        return self._versions.state.serving if self._rows.state.sink is not None else None

    def now(self) -> tuple[ServedRows, ServingVersion]:
        """Return rows and version to score with. Raises Unavailable before both are loaded."""
        table, serving = self._rows.state.sink, self._versions.state.serving
        if table is None:
            raise Unavailable(f"rows are not served yet: {self._rows.state.reason}")
        if serving is None:
            raise Unavailable(f"no version is served yet: {self._versions.state.reason}")
        return cast(ServedRows, table), serving

    def rows_freshness_ms(self) -> int | None:
        """Return the freshness of rows without versions; `freshness_ms` until rows have learned."""
        rows_ms = self._rows.state.event_time_ms
        return freshness_ms(self._clock.now_ms(), rows_ms, 0) if rows_ms > 0 else self.freshness_ms()

    def freshness_ms(self) -> int | None:
        """Return now minus the newest event learned from; None before any."""
        serving = self._versions.state.serving
        dense_ms = serving.manifest.event_time_ms if serving is not None else 0
        return freshness_ms(self._clock.now_ms(), self._rows.state.event_time_ms, dense_ms)


def freshness_ms(now_ms: int, rows_ms: int, dense_ms: int) -> int | None:
    """Return now minus the newest event time that rows or weights have learned from; None before any."""
    newest = max(rows_ms, dense_ms)
    return max(0, now_ms - newest) if newest > 0 else None


@dataclass(slots=True)
class Totals:
    """Counts since the server's start."""

    requests: int = 0  # answered with scores, including those of the Open Inference Protocol
    candidates: int = 0  # scored
    explored: int = 0  # requests ordered at random


class RequestCounts:
    """Counts scored requests for `/status` (`totals`) and Prometheus."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.totals = Totals()
        self._candidates = metrics.CANDIDATES.counter(registry)
        self._not_finite = metrics.NOT_FINITE_SCORES.counter(registry)
        self._unknown = metrics.UNKNOWN_ROWS.counter(registry)
        self._unknown_of: dict[str, Counter] = {}  # cached: `labels` costs more than `inc`
        self._explored = metrics.EXPLORED.counter(registry)
        defaulted = metrics.DEFAULTED_ROWS.counter(registry)
        self._defaulted = {why: defaulted.labels(why) for why in DEFAULTED_WHYS}  # from 0 on, for the alert

    def scored(self, scored: Scored) -> None:
        """Count a scored request."""
        self.totals.requests += 1
        self.totals.candidates += len(scored.scores)
        self._candidates.inc(len(scored.scores))
        if wrong := count_not_finite(scored.scores, scored.predictions):
            self._not_finite.inc(wrong)
        for feature, n in scored.unknown.items():
            counter = self._unknown_of.get(feature)
            if counter is None:
                counter = self._unknown_of[feature] = self._unknown.labels(feature)
            counter.inc(n)
        for why, n in scored.defaulted.items():
            self._defaulted[why].inc(n)

    def explored(self) -> None:
        """Count a request that was ordered at random."""
        self.totals.explored += 1
        self._explored.inc()


ByVersion = tuple[Scored, ServingVersion]
"""Scores, and the version that made them."""

Outcome = ByVersion | Exception


@dataclass(frozen=True, slots=True, eq=False)
class _NeedsRows:
    """A request of which rows may be on disk."""

    unread: Unread
    table: RowsOnDisk
    read: RowsRead | None  # the last read for it


Attempt = ByVersion | _NeedsRows
Make = Callable[[RowsRead | None], Encoded | Solo[Attempt]]
"""Makes a request anew, after a read of its rows."""


@dataclass(frozen=True, slots=True, eq=False)
class _Submitted:
    """A request without an answer. Nothing refers to it from below: cycles of references, one a request,
    would leave a collection of 30 ms to other requests."""

    make: Make
    done: Callable[[Outcome], None]
    client: Client
    size: int  # bytes that it holds


class Scoring:
    """Scores requests of all routes with the rows and weights served at that moment, on one event loop.

    Requests of `/v1/rank` are scored in batches; requests with `explain` and samples of the Open Inference
    Protocol are scored one at a time. A request with rows on disk waits for a read of them, beside the queue;
    then it is queued again.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        live: ServingState,
        settings: Settings,
        registry: CollectorRegistry,
        reads: RowReads | None = None,
    ) -> None:
        """Register the metrics of the queue and of scored requests; `reads`: of rows on disk."""
        self.pipeline, self.live, self.counts = pipeline, live, RequestCounts(registry)
        self._reads = reads
        self._unread = metrics.UNREAD_ROWS.counter(registry)
        shed = metrics.SHED.counter(registry)
        counted = {why: shed.labels(why).inc for why in SHED_WHYS}
        self._shed_late = counted["wait"]
        self._bytes, self._most_bytes = 0, settings.max_bodies_bytes  # of requests that have no answer yet
        self.queue: Batcher[Attempt] = Batcher(
            self._score_all,
            budget_s=settings.batch_budget_ms / 1e3,
            most_wait_s=settings.queue_wait_ms / 1e3 or float("inf"),
            shed=lambda why: counted[why](),
            observe=metrics.BATCH_REQUESTS.histogram(registry).observe,
        )

    def submit(
        self, request: Encoded, done: Callable[[Outcome], None], client: Client, *, explain: bool = False
    ) -> None:
        """Queue a request; `explain`: report existence and age of its rows. See `Batcher.submit`.

        Raises:
            Overloaded: the expected wait, or the bytes of requests without an answer, exceed their bounds.
        """

        def make(read: RowsRead | None) -> Encoded | Solo[Attempt]:
            if explain:
                attempt = partial(self._alone, partial(self.pipeline.request, request), read, explain=True)
                return Solo(request.candidates, attempt)
            return request if read is None else replace(request, read=read)

        self._submit(make, done, client, request.size)

    async def score_samples(
        self, count: int, decode: Callable[[], DecodedRequests], size: int, watch: Watch | None
    ) -> ByVersion:
        """Score `count` samples; `decode` makes them just before, as that takes the loop's time, too.

        Samples of a cancelled call, or of a client that has disconnected, are neither decoded nor scored.

        Args:
            count: number of samples.
            decode: makes the samples.
            size: bytes that the request holds until it is scored.
            watch: begins to watch the client; None: its call is cancelled when it disconnects.

        Raises:
            BadInput: the samples do not fit.   Unavailable: no model is served yet.
            ClientGoneError: the client has disconnected.   Overloaded: as `submit`.
        """
        answered: asyncio.Future[ByVersion] = asyncio.get_running_loop().create_future()

        def done(outcome: Outcome) -> None:
            if answered.done():  # its task was cancelled
                return
            if isinstance(outcome, Exception):
                answered.set_exception(outcome)
            else:
                answered.set_result(outcome)

        client = Client(watch, answered.done)
        self._submit(lambda read: Solo(count, partial(self._alone, decode, read)), done, client, size)
        return await answered

    def _submit(self, make: Make, done: Callable[[Outcome], None], client: Client, size: int) -> None:
        """Queue a request, and queue it again each time that rows for it were read.

        Its `size` counts until it is answered, so that one bound holds for requests in the queue and for
        those that wait for rows. A request is always accepted if no other waits.
        """
        if self._bytes and self._bytes + size > self._most_bytes:
            self._shed_late()
            raise Overloaded(
                f"requests of {self._bytes:,} bytes wait to be scored, this one has {size:,}; at most "
                f"{self._most_bytes:,} bytes together (FRESHET_INFERENCE_MAX_BODIES_BYTES)",
                retry_after_s=RETRY_AFTER_S,
            )
        self._queue(_Submitted(make, done, client, size), None)
        self._bytes += size

    def _queue(self, request: _Submitted, read: RowsRead | None) -> None:
        self.queue.submit(request.make(read), partial(self._attempted, request), request.client)

    def _attempted(self, request: _Submitted, attempt: Attempt | Exception) -> None:
        if isinstance(attempt, _NeedsRows):
            assert self._reads is not None, "a server with rows on disk reads them"
            request.client.watch()
            again = partial(self._queue_again, request)
            self._reads.read(attempt.unread, attempt.table, again, attempt.read)
        else:
            self._bytes -= request.size
            request.done(attempt)

    def _queue_again(self, request: _Submitted, found: RowsRead) -> None:
        try:
            self._queue(request, found)
        except Overloaded as error:
            _answer(partial(self._attempted, request), error)

    def _score_all(self, requests: Sequence[Encoded]) -> Sequence[Attempt | Exception]:
        table, serving = self.live.now()
        scored = self.pipeline.score_all(requests, table, serving.scorer)
        return [
            made if isinstance(made, Exception) else self._attempt((made, serving), table, one.read)
            for made, one in zip(scored, requests, strict=True)
        ]

    def _alone(
        self,
        decode: Callable[[], DecodedRequests],
        read: RowsRead | None,
        *,
        explain: bool = False,
    ) -> Attempt:
        table, serving = self.live.now()
        scored = self.pipeline.score(decode(), table, serving.scorer, explain=explain)
        return self._attempt((scored, serving), table, read)

    @staticmethod
    def _is_over(read: RowsRead) -> bool:
        return bool(read.ended) or asyncio.get_running_loop().time() >= read.until_s

    def _attempt(self, made: ByVersion, table: RowsOnDisk, read: RowsRead | None) -> Attempt:
        """Return scores, with the number of rows that they lack for good, or that rows must be read."""
        scored, serving = made
        unread = scored.unread
        if not unread:
            return made
        if read is None or read.table is not table:
            self._unread.inc(len(unread))
            if read is None or not self._is_over(read):
                return _NeedsRows(unread, table, read)
            read = replace(read, absent=frozenset(), unreadable=frozenset())
        unread -= read.absent
        defaulted: dict[str, int] = {}
        if failed := unread & read.unreadable:
            defaulted["unreadable"] = len(failed)
            unread -= failed
        if unread:  # rows have come or left since they were read, or were not read
            if not self._is_over(read):
                return _NeedsRows(unread, table, read)
            defaulted[read.ended or "late"] = len(unread)
        return replace(scored, defaulted=defaulted), serving
