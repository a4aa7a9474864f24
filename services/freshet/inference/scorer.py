"""The one way to scores: whoever wants some waits in the same queue, whatever door it came by.

What is asked over `/v1/rank` is scored with others that wait. What is explained, and rows of the Open
Inference Protocol, are scored alone, each in a turn of its own. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from freshet.config.settings import Inference as Settings
from freshet.features import JsonTranscoder
from freshet.inference import metrics
from freshet.inference.batcher import SHED_WHYS, Alone, Batcher
from freshet.inference.pipeline import Encoded, Pipeline, Scored
from freshet.inference.serving_state import Live
from freshet.inference.versions import ServingVersion
from freshet.types import I64

__all__ = ["Outcome", "Scoring"]

Result = tuple[Scored, ServingVersion]
Outcome = Result | Exception
Done = Callable[[Outcome], None]
Rows = tuple[list[dict[str, Any]], I64]
"""Samples field by field, and (B,) their event times."""


class Scoring:
    """Scores with the rows and weights that are served when a request's turn comes.

    Every method that asks raises Overloaded where the answer is expected too late
    (`FRESHET_INFERENCE_QUEUE_WAIT`).
    """

    def __init__(
        self, pipeline: Pipeline, live: Live, settings: Settings, registry: CollectorRegistry
    ) -> None:
        """Counts in the registry how many are scored together, and how many are not scored."""
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
        """Of served events."""
        return self._pipeline.transcoder

    def refuse_if_late(self) -> None:
        """Raise Overloaded if asking would. Doors call it before they read a request: reading costs about as
        much as scoring, and who is refused must cost less than who is served."""
        self._batcher.refuse_if_late()

    def encoded(self, events: Sequence[Mapping[str, Any]], candidates: int) -> Encoded:
        """As `Pipeline.encoded`."""
        return self._pipeline.encoded(events, candidates)

    def ask(self, request: Encoded, done: Done, gone: Callable[[], bool]) -> None:
        """As `Batcher.ask`."""
        self._batcher.ask(request, done, gone)

    def ask_explained(self, request: Encoded, done: Done, gone: Callable[[], bool]) -> None:
        """As `ask`, and say what the rows are."""

        def score() -> Result:
            table, serving = self._live.now()
            return self._pipeline.score_one(request, table, serving.scorer, explain=True), serving

        self._batcher.ask(Alone(request.candidates, score, request.size), done, gone)

    async def of_rows(self, count: int, made: Callable[[], Rows]) -> Result:
        """Scores of so many rows, which are made when it is their turn: that, too, takes the loop's time.

        Raises what `made` does, BadInput if the rows do not fit, Unavailable while nothing is served. Where
        its task is cancelled, nothing is made nor scored.
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

        self._batcher.ask(Alone(count, score), done, answered.done)
        return await answered

    def _score_all(self, asked: Sequence[Encoded]) -> Sequence[Outcome]:
        table, serving = self._live.now()
        return [
            one if isinstance(one, Exception) else (one, serving)
            for one in self._pipeline.score_all(asked, table, serving.scorer)
        ]
