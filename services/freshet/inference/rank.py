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

import orjson

from freshet import _native
from freshet.clock import Clock
from freshet.config.avro.schema import SERVED_FIELD
from freshet.config.settings import Inference as Settings
from freshet.config.spec.model import Explore, Spec
from freshet.features import JsonTranscoder
from freshet.http.app import Reply
from freshet.http.messages import Request, Response, error_response, json_response, require_json
from freshet.inference.pipeline import Encoded, Scored, explained
from freshet.inference.requests import (
    Filling,
    Order,
    RankRequest,
    events_of,
    get_path,
    order,
    parse_rank,
    refuse_expanded,
    time_value,
)
from freshet.inference.scoring import Client, Outcome, Scoring
from freshet.inference.served_log import Loggable, NativeRules, Served, ServedLogger, places_of, served_events
from freshet.inference.versions import ServingVersion
from freshet.observability.spans import RankAnswer, rank_answer
from freshet.observability.tracing import Context, active, now_ns
from freshet.types import BytesColumn

_NOTHING_LOGGED: NativeRules = (None, None, None, 0)
_NO_ID = '""'
"""JSON of the empty id, which `Filling` refuses."""

MOST_PLACES = 64  # RankText's bound of fields by which an item has its position


@dataclass(frozen=True, slots=True, eq=False)
class FastRequest:
    """A request that native code has parsed."""

    encoded: Encoded
    k: int  # items to return, 1 to the number of candidates
    dry_run: bool
    _text: _native.RankText
    _rules: _native.RankRules

    @property
    def key(self) -> bytes:
        """The request id as text, as in the impression's key."""
        return self._text.id.strip('"').encode()

    @property
    def logged_bytes(self) -> int:
        """Bytes of the impression as Avro, before it is ordered and scored."""
        return self._text.logged_bytes

    def answer(
        self, order: Order, scored: Scored, version: int, freshness_ms: int | None, *, log: bool
    ) -> tuple[bytes, Served | None]:
        """Return the answer's body, and the impression if `log` is true."""
        text = self._text
        items, served = text.ranked(
            self._rules,
            order.indices,
            scored.scores,
            scored.predictions,
            order.propensity,
            version,
            order.explored,
            log,
        )
        body = (
            b'{"request_id":%b,"items":%b,"version":%d,"freshness_ms":%b,"unknown_rows":%b,'
            b'"defaulted_rows":%b,"explored":%b}'
            % (
                text.id.encode(),
                items,
                version,
                b"null" if freshness_ms is None else b"%d" % freshness_ms,
                orjson.dumps(scored.unknown),
                orjson.dumps(scored.defaulted),
                b"true" if order.explored else b"false",
            )
        )
        return body, None if served is None else Served([self.key], [served])


class FastPath:
    """Parses requests of one spec. Thread-safe."""

    def __init__(
        self,
        spec: Spec,
        transcoder: JsonTranscoder,
        filling: Filling,
        max_candidates: int,
        loggable: Loggable | None = None,
    ) -> None:
        """Compile the rules; raises ValueError if the spec does not fit (see `fits`).

        Args:
            transcoder: of the request schema.
            loggable: checks the impression; None: none is logged.
        """
        stream = spec.events.served
        if not self.fits(spec):
            raise ValueError(
                "expected a spec whose candidates, request id and time stand at the top of events"
            )
        self._filling, self._loggable = filling, loggable
        self._writer, _, _ = transcoder.native
        self._rules = _native.RankRules(
            stream.explode or "",
            stream.key[0],
            stream.time.path,
            SERVED_FIELD,
            places_of(spec),
            [orjson.dumps(label.name).decode() for label in spec.labels],
            max_candidates,
        )

    @staticmethod
    def fits(spec: Spec) -> bool:
        """Return whether candidates, request id and time are top-level fields of the served event."""
        stream = spec.events.served
        names = [stream.explode or ".", stream.key[0], stream.time.path, *places_of(spec)]
        return len(names) <= MOST_PLACES and not any("." in name for name in names)

    def read(self, body: bytes, now_ms: int) -> FastRequest | None:
        """Parse a request's body; None if it cannot take the fast path."""
        filling = self._filling
        new_id = orjson.dumps(filling.new_id()).decode()
        now = orjson.dumps(time_value(now_ms, filling.stream.time)).decode()
        logged = self._loggable.native(now_ms) if self._loggable is not None else _NOTHING_LOGGED
        text = _native.RankText.read(self._rules, self._writer, body, new_id, now, *logged)
        if text is None or text.id == _NO_ID:
            return None
        encoded = Encoded(BytesColumn(*text.record()), text.candidates)
        return FastRequest(encoded, text.k, text.dry_run, text, self._rules)


Arrival = tuple[int, Context | None]
"""When a request arrived by the wall clock, and the span of its HTTP request."""

START_POLL_S = 0.02
"""Interval at which a request that came during the server's start checks for rows and a version."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ranking:
    """A rank request that waits for its scores."""

    request: RankRequest
    context: Mapping[str, Any]  # with id and time
    now_ms: int
    reply: Reply
    arrival: Arrival | None  # None while tracing is off


class Ranker:
    """Answers `POST /v1/rank`. Methods run on one event loop."""

    def __init__(
        self,
        spec: Spec,
        scoring: Scoring,
        filling: Filling,
        settings: Settings,
        *,
        logger: ServedLogger | None,
        loggable: Loggable | None,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """Keep the parts.

        Args:
            logger: logs impressions; None if the spec logs none.
            loggable: checks impressions before scoring; None if the spec logs none.
        """
        self._spec, self._scoring, self._filling, self._settings = spec, scoring, filling, settings
        self._live, self._counts, self._pipeline = scoring.live, scoring.counts, scoring.pipeline
        self._logger, self._loggable, self._clock, self._rng = logger, loggable, clock, rng
        self._traces = active() is not None
        self._labels = [label.name for label in spec.labels]
        self._id_path = spec.events.served.key[0]
        self._fast_path = None
        if FastPath.fits(spec):
            self._fast_path = FastPath(
                spec, self._pipeline.transcoder, filling, settings.max_candidates, loggable
            )

    def handle(self, request: Request, reply: Reply) -> None:
        """Queue a request; a later turn of the loop answers it.

        Raises BadInput or TooLarge if the body is no valid rank request or its impression cannot be logged,
        HttpError if its type is not JSON, and Overloaded, before parsing, if the expected wait is too long.
        """
        require_json(request)
        client, arrival = Client(request.watch_client), self._arrival(request)
        if self._live.version() is not None:
            self._rank(request.body, reply, arrival, client)
            return
        client.watch()
        rank = partial(self._rank, request.body, reply, arrival, client)
        deadline_s = asyncio.get_running_loop().time() + self._settings.start_wait_ms / 1e3
        self._rank_once_served(rank, reply, client, deadline_s)

    def _is_small(self, body_bytes: int, fast: FastRequest) -> bool:
        """Return whether the impression is certainly within the limits; else `_rank` checks it."""
        if self._loggable is None or fast.dry_run:
            return True
        return self._loggable.is_small(body_bytes, fast.logged_bytes, fast.key, fast.encoded.candidates)

    def _arrival(self, request: Request) -> Arrival | None:
        """Return when a request arrived, and for which client's span; None while tracing is off."""
        return (now_ns(), request.span) if self._traces else None

    def _rank_once_served(
        self, rank: Callable[[], None], reply: Reply, client: Client, deadline_s: float
    ) -> None:
        """Delay a request while the server starts, so that clients see a restart as a pause, not an error.

        Meanwhile it is not parsed: its body, which is bounded, takes less memory than its values.
        """
        loop = asyncio.get_running_loop()
        try:
            if (gone := self._scoring.queue.error_if_gone(client)) is not None:
                raise gone
            if self._live.version() is None and loop.time() < deadline_s:
                loop.call_later(START_POLL_S, self._rank_once_served, rank, reply, client, deadline_s)
            else:
                rank()
        except Exception as error:
            reply(error_response(error))

    def _rank(self, body: bytes, reply: Reply, arrival: Arrival | None, client: Client) -> None:
        self._scoring.queue.refuse_if_late()
        if self._fast_path is not None:
            fast = self._fast_path.read(body, self._clock.now_ms())
            if fast is not None and self._is_small(len(body), fast):
                answer = partial(self._answer_fast, fast, reply, arrival)
                self._scoring.submit(fast.encoded, answer, client)
                return
        request = parse_rank(body, self._settings.max_candidates)
        explode, most = self._spec.events.served.explode, self._settings.max_body_bytes
        refuse_expanded(explode, request, len(body), most)
        now_ms = self._clock.now_ms()
        context = self._filling.filled(request.context, request.request_id, now_ms)
        events = events_of(self._spec, context, request.candidates)
        encoded = self._pipeline.encoded(events, len(request.candidates))
        if self._loggable is not None and not request.dry_run:
            items = self._loggable.placed(request.candidates)
            self._loggable.check(events_of(self._spec, context, items), now_ms)
        answer = partial(self._answer, _Ranking(request, context, now_ms, reply, arrival))
        self._scoring.submit(encoded, answer, client, explain=request.explain)

    def _answer(self, ranking: _Ranking, outcome: Outcome) -> None:
        try:
            if isinstance(outcome, Exception):
                raise outcome
            content = self._ranked(ranking, *outcome)
            ranking.reply(json_response(200, content))
        except Exception as error:
            ranking.reply(error_response(error))

    def _answer_fast(
        self, fast: FastRequest, reply: Reply, arrival: Arrival | None, outcome: Outcome
    ) -> None:
        try:
            if isinstance(outcome, Exception):
                raise outcome
            scored, serving = outcome
            found = self._ordered(scored, fast.k, dry_run=fast.dry_run)
            version, log = serving.manifest.number, self._logger is not None and not fast.dry_run
            body, served = fast.answer(found, scored, version, self._live.freshness_ms(), log=log)
            traced = _rank_answer(arrival, scored, serving, logged=served is not None)
            if self._logger is not None and served is not None:
                self._logger.enqueue(served if traced is None else replace(served, answer=traced))
            reply(Response(200, body))
        except Exception as error:
            reply(error_response(error))

    def _ordered(self, scored: Scored, k: int, *, dry_run: bool) -> Order:
        """Order the best k candidates, and count the request."""
        self._counts.scored(scored)
        found = order(scored.scores, k, Explore() if dry_run else self._spec.serve.explore, self._rng)
        if found.explored:
            self._counts.explored()
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
            answer = _rank_answer(ranking.arrival, scored, serving, logged=True)
            self._logger.enqueue(replace(Served.of(self._spec, events), answer=answer))
        else:
            _rank_answer(ranking.arrival, scored, serving, logged=False)
        return {
            "request_id": get_path(ranking.context, self._id_path),
            "items": self._items(found, scored, ranking.now_ms),
            "version": version,
            "freshness_ms": self._live.freshness_ms(),
            "unknown_rows": scored.unknown,
            "defaulted_rows": scored.defaulted,
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
