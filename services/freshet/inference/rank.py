"""The route `/v1/rank`: parse, complete, score, order, log and answer requests.

All runs on the event loop's thread by callbacks: a task or a change of threads per request costs about as
much as scoring it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from freshet.clock import Clock
from freshet.config.settings import Inference as Settings
from freshet.config.spec.model import Explore, Spec
from freshet.http.app import Reply
from freshet.http.messages import Request, Response, error_response, json_response, require_json
from freshet.inference import metrics
from freshet.inference.core import Order, RankRequest, events_of, get_path, order, parse_rank, refuse_expanded
from freshet.inference.explanation import explained
from freshet.inference.fast_path import FastPath, FastRequest
from freshet.inference.fields import Filling
from freshet.inference.log_limits import Loggable
from freshet.inference.pipeline import Scored
from freshet.inference.scorer import Outcome, Scoring
from freshet.inference.served_log import Served, ServedLogger, served_events
from freshet.inference.serving_state import ServingState
from freshet.inference.versions import ServingVersion
from freshet.observability.spans import RankAnswer, rank_answer
from freshet.observability.tracing import Context, now_ns

__all__ = ["Ranker", "Tally", "Totals"]

Arrival = tuple[int, Context | None]
"""When a request arrived by the wall clock, and the span of its HTTP request."""

START_POLL_S = 0.02
"""Interval at which a request that came during the server's start checks for rows and a version."""


@dataclass(slots=True)
class Totals:
    """Counts since the server's start."""

    requests: int = 0  # answered with scores, including those of the Open Inference Protocol
    candidates: int = 0  # scored
    explored: int = 0  # requests ordered at random


class Tally:
    """Counts scored requests for `/status` (`totals`) and Prometheus."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.totals = Totals()
        self._candidates = metrics.CANDIDATES.counter(registry)
        self._unknown = metrics.UNKNOWN_ROWS.counter(registry)
        self._unknown_of: dict[str, Counter] = {}  # cached: `labels` costs more than `inc`
        self._explored = metrics.EXPLORED.counter(registry)

    def scored(self, scored: Scored) -> None:
        """Count a scored request."""
        self.totals.requests += 1
        self.totals.candidates += len(scored.scores)
        self._candidates.inc(len(scored.scores))
        for feature, n in scored.unknown.items():
            counter = self._unknown_of.get(feature)
            if counter is None:
                counter = self._unknown_of[feature] = self._unknown.labels(feature)
            counter.inc(n)

    def explored(self) -> None:
        """Count a request that was ordered at random."""
        self.totals.explored += 1
        self._explored.inc()


@dataclass(frozen=True, slots=True, eq=False)
class _Ranking:
    """A rank request that waits for its scores."""

    request: RankRequest
    context: Mapping[str, Any]  # with id and time
    now_ms: int
    reply: Reply
    came: Arrival | None  # None while tracing is off


class Ranker:
    """Answers `POST /v1/rank`. Methods run on one event loop."""

    def __init__(
        self,
        spec: Spec,
        scoring: Scoring,
        filling: Filling,
        live: ServingState,
        settings: Settings,
        *,
        logger: ServedLogger | None,
        loggable: Loggable | None,
        tally: Tally,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """Keep the parts.

        Args:
            logger: logs impressions; None if the spec logs none.
            loggable: checks impressions before scoring; None if the spec logs none.
        """
        self._spec, self._scoring, self._filling, self._live = spec, scoring, filling, live
        self._settings, self._logger, self._loggable = settings, logger, loggable
        self._tally, self._clock, self._rng = tally, clock, rng
        self._labels = [label.name for label in spec.labels]
        self._id_path = spec.events.served.key[0]
        self._fast_path = None
        if FastPath.fits(spec):
            self._fast_path = FastPath(spec, scoring.transcoder, filling, settings.max_candidates, loggable)

    def handle(self, request: Request, reply: Reply) -> None:
        """Queue a request; a later turn of the loop answers it.

        Raises BadInput or TooLarge if the body is no valid rank request or its impression cannot be logged,
        HttpError if its type is not JSON, and Overloaded, before parsing, if the expected wait is too long.
        """
        require_json(request)
        self._scoring.refuse_if_late()
        is_served = self._live.version() is not None
        if is_served and self._fast_path is not None:
            plain = self._fast_path.read(request.body, self._clock.now_ms())
            if plain is not None and self._is_small(len(request.body), plain):
                came = self._came(request)
                answer = partial(self._answer_fast, plain, reply, came)
                self._scoring.submit(plain.encoded, answer, request.watch_client())
                return
        parsed = parse_rank(request.body, self._settings.max_candidates)
        explode, most = self._spec.events.served.explode, self._settings.max_body_bytes
        refuse_expanded(explode, parsed, len(request.body), most)
        came = self._came(request)
        if is_served:
            self._rank(parsed, reply, came, request.watch_client())
        else:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + self._settings.start_wait_ms / 1e3
            self._rank_once_served(parsed, reply, came, request.watch_client(), loop, deadline)

    def _is_small(self, body_bytes: int, plain: FastRequest) -> bool:
        """Return whether the impression is certainly within the limits; else `_rank` checks it."""
        if self._loggable is None or plain.dry_run:
            return True
        return self._loggable.is_small(body_bytes, plain.encoded.candidates)

    @staticmethod
    def _came(request: Request) -> Arrival | None:
        """Return when a request arrived, and for which client's span; None while tracing is off."""
        start_ns = now_ns()
        return (start_ns, request.span) if start_ns else None

    def _rank_once_served(
        self,
        request: RankRequest,
        reply: Reply,
        came: Arrival | None,
        gone: Callable[[], bool],
        loop: asyncio.AbstractEventLoop,
        deadline: float,
    ) -> None:
        """Delay a request while the server starts, so that clients see a restart as a pause, not an error."""
        if self._live.version() is None and loop.time() < deadline:
            loop.call_later(START_POLL_S, self._rank_once_served, request, reply, came, gone, loop, deadline)
            return
        try:
            self._rank(request, reply, came, gone)
        except Exception as error:
            reply(error_response(error))

    def _rank(
        self, request: RankRequest, reply: Reply, came: Arrival | None, gone: Callable[[], bool]
    ) -> None:
        now_ms = self._clock.now_ms()
        context = self._filling.filled(request.context, request.request_id, now_ms)
        events = events_of(self._spec, context, request.candidates)
        encoded = self._scoring.encoded(events, len(request.candidates))
        if self._loggable is not None and not request.dry_run:
            items = self._loggable.placed(request.candidates)
            self._loggable.check(events_of(self._spec, context, items), now_ms)
        answer = partial(self._answer, _Ranking(request, context, now_ms, reply, came))
        if request.explain:
            self._scoring.submit_explained(encoded, answer, gone)
        else:
            self._scoring.submit(encoded, answer, gone)

    def _answer(self, ranking: _Ranking, outcome: Outcome) -> None:
        try:
            if isinstance(outcome, Exception):
                raise outcome
            content = self._ranked(ranking, *outcome)
            ranking.reply(json_response(200, content))
        except Exception as error:
            ranking.reply(error_response(error))

    def _answer_fast(self, plain: FastRequest, reply: Reply, came: Arrival | None, outcome: Outcome) -> None:
        try:
            if isinstance(outcome, Exception):
                raise outcome
            scored, serving = outcome
            found = self._ordered(scored, plain.k, dry_run=plain.dry_run)
            version, log = serving.manifest.number, self._logger is not None and not plain.dry_run
            body, served = plain.answer(found, scored, version, self._live.freshness_ms(), log=log)
            traced = _rank_answer(came, scored, serving, logged=served is not None)
            if self._logger is not None and served is not None:
                self._logger.enqueue(served if traced is None else replace(served, answer=traced))
            reply(Response(200, body))
        except Exception as error:
            reply(error_response(error))

    def _ordered(self, scored: Scored, k: int, *, dry_run: bool) -> Order:
        """Order the best k candidates, and count the request."""
        self._tally.scored(scored)
        found = order(scored.scores, k, Explore() if dry_run else self._spec.serve.explore, self._rng)
        if found.explored:
            self._tally.explored()
        return found

    def _ranked(self, ranking: _Ranking, scored: Scored, serving: ServingVersion) -> dict[str, Any]:
        """Log the impression and return the answer's body."""
        request, version = ranking.request, serving.manifest.number
        found = self._ordered(scored, request.k, dry_run=request.dry_run)
        if self._logger is not None and not request.dry_run:
            events = served_events(
                self._spec,
                ranking.context,
                request.candidates,
                found,
                scored.scores,
                scored.predictions,
                version,
            )
            answer = _rank_answer(ranking.came, scored, serving, logged=True)
            self._logger.enqueue(replace(Served.of(self._spec, events), answer=answer))
        else:
            _rank_answer(ranking.came, scored, serving, logged=False)
        return {
            "request_id": get_path(ranking.context, self._id_path),
            "items": self._items(found, scored, ranking.now_ms),
            "version": version,
            "freshness_ms": self._live.freshness_ms(),
            "unknown_rows": scored.unknown,
            "explored": found.explored,
        }

    def _items(self, found: Order, scored: Scored, now_ms: int) -> list[dict[str, Any]]:
        """Return the answer's items, in order."""
        indices = found.indices
        items: list[dict[str, Any]] = [
            {"index": i, "score": s, "predictions": dict(zip(self._labels, p, strict=True)), "propensity": q}
            for i, s, p, q in zip(
                indices.tolist(),
                scored.scores[indices].tolist(),
                scored.predictions[indices].tolist(),
                found.propensity.tolist(),
                strict=True,
            )
        ]
        if scored.rows is not None:
            for item in items:
                item["rows"] = explained(scored.rows, item["index"], now_ms)
        return items


def _rank_answer(
    arrival: Arrival | None, scored: Scored, serving: ServingVersion, *, logged: bool
) -> RankAnswer | None:
    """Return the answer for spans; None while tracing is off."""
    if arrival is None:
        return None
    version = serving.manifest.spec_hash, serving.manifest.number
    return rank_answer(*arrival, version, len(scored.scores), logged=logged)
