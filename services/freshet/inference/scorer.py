"""The scoring queue of all routes, on one event loop.

Requests of `/v1/rank` are scored in batches; requests with `explain` and rows of the Open Inference Protocol
are scored one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from freshet.config.settings import Inference as Settings
from freshet.features import JsonTranscoder
from freshet.inference import metrics
from freshet.inference.batcher import SHED_WHYS, Batcher, Solo
from freshet.inference.pipeline import Encoded, Pipeline, Scored
from freshet.inference.serving_state import ServingState
from freshet.inference.versions import ServingVersion
from freshet.types import I64

__all__ = ["Outcome", "Scoring"]

Result = tuple[Scored, ServingVersion]
Outcome = Result | Exception
Done = Callable[[Outcome], None]
Rows = tuple[list[dict[str, Any]], I64]
"""B samples, and their (B,) event times in ms."""


class Scoring:
    """Scores requests with the rows and weights served at that moment.

    Methods that queue a request raise Overloaded if the expected wait exceeds FRESHET_INFERENCE_QUEUE_WAIT.
    """

    def __init__(
        self, pipeline: Pipeline, live: ServingState, settings: Settings, registry: CollectorRegistry
    ) -> None:
        """Register the metrics of the queue."""
        self._pipeline, self._live = pipeline, live
        shed = metrics.SHED.counter(registry)
        counted = {why: shed.labels(why).inc for why in SHED_WHYS}
        self._batcher: Batcher[Result] = Batcher(
            self._score_all,
            budget_s=settings.batch_budget_ms / 1e3,
            most_wait_s=settings.queue_wait_ms / 1e3 or float("inf"),
            most_bytes=settings.max_bodies_bytes,
            shed=lambda why: counted[why](),
            observe=metrics.BATCH_REQUESTS.histogram(registry).observe,
        )

    @property
    def transcoder(self) -> JsonTranscoder:
        """Transcoder of served events."""
        return self._pipeline.transcoder

    def refuse_if_late(self) -> None:
        """Raises Overloaded if the expected wait is too long.

        Routes call it before they parse a request, which costs about as much as scoring it.
        """
        self._batcher.refuse_if_late()

    def encoded(self, events: Sequence[Mapping[str, Any]], candidates: int) -> Encoded:
        """As `Pipeline.encoded`."""
        return self._pipeline.encoded(events, candidates)

    def submit(self, request: Encoded, done: Done, gone: Callable[[], bool]) -> None:
        """As `Batcher.submit`."""
        self._batcher.submit(request, done, gone)

    def submit_explained(self, request: Encoded, done: Done, gone: Callable[[], bool]) -> None:
        """Queue a request that is scored alone, with existence and age of its rows."""

        def score() -> Result:
            table, serving = self._live.now()
            return self._pipeline.score_one(request, table, serving.scorer, explain=True), serving

        self._batcher.submit(Solo(request.candidates, score, request.size), done, gone)

    async def score_rows(self, count: int, made: Callable[[], Rows]) -> Result:
        """Score `count` rows; `made` makes them just before, as that takes the loop's time too.

        A cancelled call is neither made nor scored.

        Raises:
            BadInput: the rows do not fit.   Unavailable: no model is served yet.
        """

        def score() -> Result:
            table, serving = self._live.now()
            rows, times_ms = made()
            return self._pipeline.score(self._pipeline.rows(rows, times_ms), table, serving.scorer), serving

        answered: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def done(outcome: Outcome) -> None:
            if answered.done():  # its task was cancelled
                return
            if isinstance(outcome, Exception):
                answered.set_exception(outcome)
            else:
                answered.set_result(outcome)

        self._batcher.submit(Solo(count, score), done, answered.done)
        return await answered

    def _score_all(self, requests: Sequence[Encoded]) -> Sequence[Outcome]:
        table, serving = self._live.now()
        return [
            one if isinstance(one, Exception) else (one, serving)
            for one in self._pipeline.score_all(requests, table, serving.scorer)
        ]
