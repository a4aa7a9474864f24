"""Rank requests: read, completed, scored with others that wait, ordered, logged as served, and answered.

All on the event loop's thread and by callbacks: a task for each request, or a hop to another thread and back,
costs about as much as scoring it does.
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
from freshet.http.browser_checks import require_json
from freshet.http.request import Request
from freshet.http.responses import Response, error_response, json_response
from freshet.http.routes import Reply
from freshet.inference import metrics
from freshet.inference.core import Order, RankRequest, events_of, get_path, order, parse_rank, refuse_expanded
from freshet.inference.explanation import explained
from freshet.inference.fast_path import PlainRequest, PlainRequests
from freshet.inference.fields import Filling
from freshet.inference.log_limits import Loggable
from freshet.inference.pipeline import Scored
from freshet.inference.scorer import Outcome, Scoring
from freshet.inference.served_log import Served, ServedLogger, served_events
from freshet.inference.serving_state import Live
from freshet.inference.versions import ServingVersion
from freshet.observability.spans import RankAnswer, rank_answer
from freshet.observability.tracing import Context, now_ns

__all__ = ["Ranker", "Tally", "Totals"]

Arrival = tuple[int, Context | None]
"""When a request arrived by the wall clock, and the span of its HTTP request."""

START_LOOK_S = 0.02
"""How often a request that waits for the server's start looks whether it can be answered."""


@dataclass(slots=True)
class Totals:
    """What the server has done since it started."""

    requests: int = 0  # answered with scores, those of the Open Inference Protocol too
    candidates: int = 0  # scored
    explored: int = 0  # requests ordered at random


class Tally:
    """Counts what is scored, for people (`totals`) and for Prometheus."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.totals = Totals()
        self._candidates = metrics.CANDIDATES.counter(registry)
        self._unknown = metrics.UNKNOWN_ROWS.counter(registry)
        self._unknown_of: dict[str, Counter] = {}  # finding a counter by its label costs more than counting
        self._explored = metrics.EXPLORED.counter(registry)

    def scored(self, scored: Scored) -> None:
        """A request was scored."""
        self.totals.requests += 1
        self.totals.candidates += len(scored.scores)
        self._candidates.inc(len(scored.scores))
        for feature, n in scored.unknown.items():
            counter = self._unknown_of.get(feature)
            if counter is None:
                counter = self._unknown_of[feature] = self._unknown.labels(feature)
            counter.inc(n)

    def explored(self) -> None:
        """A request was ordered at random."""
        self.totals.explored += 1
        self._explored.inc()


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A rank request on its way."""

    request: RankRequest
    context: Mapping[str, Any]  # the request's, with its id and time
    now_ms: int
    reply: Reply
    came: Arrival | None  # None while tracing is off


class Ranker:
    """Answers `POST /v1/rank`. Lives on one event loop."""

    def __init__(
        self,
        spec: Spec,
        scoring: Scoring,
        filling: Filling,
        live: Live,
        settings: Settings,
        *,
        logger: ServedLogger | None,
        loggable: Loggable | None,
        tally: Tally,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """`logger`: takes what was served, `loggable` checks before scoring that it can; both None where the
        spec logs nothing."""
        self._spec, self._scoring, self._filling, self._live = spec, scoring, filling, live
        self._settings, self._logger, self._tally, self._clock, self._rng = (
            settings,
            logger,
            tally,
            clock,
            rng,
        )
        self._loggable = loggable
        self._labels = [label.name for label in spec.labels]
        self._id_path = spec.events.served.key[0]
        self._plain = None
        if PlainRequests.fits(spec):
            self._plain = PlainRequests(spec, scoring.transcoder, filling, settings.max_candidates, loggable)

    def take(self, request: Request, reply: Reply) -> None:
        """Answer a request, in a later turn of the loop.

        Raises BadInput and TooLarge for a body that is no rank request, does not fit the schema, or could not
        be logged as an impression; HttpError for one that is not sent as JSON; Overloaded, before it is read,
        where so many wait that it would be answered too late.
        """
        require_json(request)
        self._scoring.refuse_if_late()
        is_served = self._live.version() is not None
        if is_served and self._plain is not None:
            plain = self._plain.read(request.body, self._clock.now_ms())
            if plain is not None and self._is_small(len(request.body), plain):
                came = self._came(request)
                answer = partial(self._answer_plain, plain, reply, came)
                self._scoring.ask(plain.encoded, answer, request.watch_client())
                return
        asked = parse_rank(request.body, self._settings.max_candidates)
        explode, most = self._spec.events.served.explode, self._settings.max_body_bytes
        refuse_expanded(explode, asked, len(request.body), most)
        came = self._came(request)
        if is_served:
            self._rank(asked, reply, came, request.watch_client())
        else:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + self._settings.start_wait_ms / 1e3
            self._rank_once_served(asked, reply, came, request.watch_client(), loop, deadline)

    def _is_small(self, body_bytes: int, plain: PlainRequest) -> bool:
        """Whether what is logged of a request is surely small enough; else `_rank` checks it."""
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
        asked: RankRequest,
        reply: Reply,
        came: Arrival | None,
        gone: Callable[[], bool],
        loop: asyncio.AbstractEventLoop,
        deadline: float,
    ) -> None:
        """Hold a request back while the server starts: a restart is then a pause to its clients, no error."""
        if self._live.version() is None and loop.time() < deadline:
            loop.call_later(START_LOOK_S, self._rank_once_served, asked, reply, came, gone, loop, deadline)
            return
        try:
            self._rank(asked, reply, came, gone)
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
        answer = partial(self._answer, _Asked(request, context, now_ms, reply, came))
        if request.explain:
            self._scoring.ask_explained(encoded, answer, gone)
        else:
            self._scoring.ask(encoded, answer, gone)

    def _answer(self, asked: _Asked, outcome: Outcome) -> None:
        try:
            if isinstance(outcome, Exception):
                raise outcome
            content = self._ranked(asked, *outcome)
            asked.reply(json_response(200, content))
        except Exception as error:
            asked.reply(error_response(error))

    def _answer_plain(
        self, plain: PlainRequest, reply: Reply, came: Arrival | None, outcome: Outcome
    ) -> None:
        try:
            if isinstance(outcome, Exception):
                raise outcome
            scored, serving = outcome
            found = self._ordered(scored, plain.k, dry_run=plain.dry_run)
            version, log = serving.manifest.number, self._logger is not None and not plain.dry_run
            body, served = plain.answer(found, scored, version, self._live.freshness_ms(), log=log)
            traced = _rank_answer(came, scored, serving, logged=served is not None)
            if self._logger is not None and served is not None:
                self._logger.offer(served if traced is None else replace(served, answer=traced))
            reply(Response(200, body))
        except Exception as error:
            reply(error_response(error))

    def _ordered(self, scored: Scored, k: int, *, dry_run: bool) -> Order:
        """The best k candidates, counted."""
        self._tally.scored(scored)
        found = order(scored.scores, k, Explore() if dry_run else self._spec.serve.explore, self._rng)
        if found.explored:
            self._tally.explored()
        return found

    def _ranked(self, asked: _Asked, scored: Scored, serving: ServingVersion) -> dict[str, Any]:
        """What the client is told; what was served is logged before."""
        request, version = asked.request, serving.manifest.number
        found = self._ordered(scored, request.k, dry_run=request.dry_run)
        if self._logger is not None and not request.dry_run:
            events = served_events(
                self._spec,
                asked.context,
                request.candidates,
                found,
                scored.scores,
                scored.predictions,
                version,
            )
            answer = _rank_answer(asked.came, scored, serving, logged=True)
            self._logger.offer(replace(Served.of(self._spec, events), answer=answer))
        else:
            _rank_answer(asked.came, scored, serving, logged=False)
        return {
            "request_id": get_path(asked.context, self._id_path),
            "items": self._items(found, scored, asked.now_ms),
            "version": version,
            "freshness_ms": self._live.freshness_ms(),
            "unknown_rows": scored.unknown,
            "explored": found.explored,
        }

    def _items(self, found: Order, scored: Scored, now_ms: int) -> list[dict[str, Any]]:
        """The answer's items, best first."""
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
