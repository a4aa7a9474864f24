"""Requests that wait for their turn or for rows on disk: their bytes, and clients that disconnect."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from freshet.config.settings import load_settings
from freshet.errors import Overloaded, Unavailable
from freshet.features import DecodedRequests
from freshet.http.messages import ClientGoneError
from freshet.inference.pipeline import Encoded, Pipeline, Scored
from freshet.inference.row_reads import RowReads, RowsOnDisk, RowsRead, Unread
from freshet.inference.scoring import Client, Outcome, RequestCounts, Scoring, ServingState
from freshet.types import BytesColumn

MOST_BYTES = 1 << 20
LARGE = 600_000
DECODED = cast(DecodedRequests, object())


@dataclass
class Parts:
    """A pipeline whose rows are all on disk, and reads of them that end when the test says so."""

    scored: int = 0
    scorer: None = None  # as of a version
    on_disk: bool = True
    reads: list[Callable[[], None]] = field(default_factory=list)

    def score(self, samples: object, table: object, scorer: object, *, explain: bool = False) -> Scored:
        self.scored += 1
        unread = frozenset({(0, 1)} if self.on_disk else ())
        return Scored(np.zeros((1, 1), np.float32), np.zeros(1, np.float32), {}, unread)

    def score_all(self, requests: Sequence[Encoded], table: object, scorer: object) -> list[Scored]:
        return [self.score(one, table, scorer) for one in requests]

    def now(self) -> tuple[object, Any]:
        return self, self

    def read(
        self, unread: Unread, table: RowsOnDisk, done: Callable[[RowsRead], None], before: RowsRead | None
    ) -> None:
        until_s = asyncio.get_running_loop().time()
        self.reads.append(lambda: done(RowsRead(table, until_s, absent=unread)))

    def end_reads(self) -> None:
        reads, self.reads = self.reads, []
        for end in reads:
            end()

    def scoring(self, registry: CollectorRegistry) -> Scoring:
        settings = load_settings({"FRESHET_INFERENCE_MAX_BODIES_BYTES": str(MOST_BYTES)}).inference
        return Scoring(
            cast(Pipeline, self), cast(ServingState, self), settings, registry, cast(RowReads, self)
        )


@pytest.fixture
def parts() -> Parts:
    return Parts()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def scoring(parts: Parts, registry: CollectorRegistry) -> Scoring:
    return parts.scoring(registry)


def request(size: int = LARGE) -> Encoded:
    return Encoded(BytesColumn.of([b"x" * size]), 1)


async def some_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def shed(registry: CollectorRegistry, why: str) -> float | None:
    return registry.get_sample_value("freshet_inference_shed_total", {"why": why})


def watched(gone: list[bool]) -> Callable[[], Callable[[], bool]]:
    """Watch a client that is gone once the list says so."""
    return lambda: lambda: bool(gone)


async def in_time(running: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.wait_for(running, 60)


def test_answered_requests_are_freed_without_a_collection(scoring: Scoring, parts: Parts) -> None:
    parts.on_disk = False
    left: list[weakref.ref[Any]] = []

    async def talk() -> None:
        def done(_: Outcome) -> None: ...

        left.append(weakref.ref(done))
        scoring.submit(request(), done, Client())
        del done
        await some_turns()

    gc.disable()
    try:
        asyncio.run(in_time(talk()))
        assert left[0]() is None
    finally:
        gc.enable()


def test_requests_that_wait_for_rows_count_in_the_bytes(
    scoring: Scoring, parts: Parts, registry: CollectorRegistry
) -> None:
    answers: list[Outcome] = []

    async def talk() -> None:
        scoring.submit(request(), answers.append, Client())
        await some_turns()
        assert len(parts.reads) == 1, "the first waits for its rows"
        with pytest.raises(Overloaded, match="FRESHET_INFERENCE_MAX_BODIES_BYTES"):
            scoring.submit(request(), answers.append, Client())
        scoring.submit(request(1_000), answers.append, Client())
        await some_turns()
        parts.end_reads()
        await some_turns()
        assert [isinstance(answer, tuple) for answer in answers] == [True, True]
        scoring.submit(request(), answers.append, Client())

    asyncio.run(talk())
    assert shed(registry, "wait") == 1.0


@pytest.mark.parametrize("outcome", ["scored", "failed", "gone"])
def test_bytes_of_answered_requests_are_released(scoring: Scoring, parts: Parts, outcome: str) -> None:
    parts.on_disk = False
    answers: list[Outcome] = []

    def no_version() -> tuple[object, Any]:
        raise Unavailable("no version is served yet")

    async def talk() -> None:
        for n in range(3):
            if outcome == "failed":
                parts.now = no_version  # type: ignore[method-assign]
            client = Client(is_cancelled=lambda: outcome == "gone")
            scoring.submit(request(MOST_BYTES), answers.append, client)
            await some_turns()
            assert len(answers) == n + 1

    asyncio.run(talk())


def test_a_request_of_any_size_is_accepted_alone(scoring: Scoring, parts: Parts) -> None:
    parts.on_disk = False
    answers: list[Outcome] = []

    async def talk() -> None:
        scoring.submit(request(2 * MOST_BYTES), answers.append, Client())
        await some_turns()

    asyncio.run(talk())
    assert isinstance(answers[0], tuple)


def test_samples_that_wait_count_in_the_bytes(
    scoring: Scoring, parts: Parts, registry: CollectorRegistry
) -> None:
    parts.on_disk = False

    async def talk() -> list[Any]:
        samples = [scoring.score_samples(1, lambda: DECODED, LARGE, None) for _ in range(3)]
        return await asyncio.gather(*samples, return_exceptions=True)

    answers = asyncio.run(in_time(talk()))

    assert [isinstance(answer, Overloaded) for answer in answers] == [False, True, True]
    assert (parts.scored, shed(registry, "wait")) == (1, 2.0)


def test_client_that_leaves_while_rows_are_read_is_not_scored(
    scoring: Scoring, parts: Parts, registry: CollectorRegistry
) -> None:
    answers: list[Outcome] = []
    gone: list[bool] = []

    async def talk() -> None:
        scoring.submit(request(), answers.append, Client(watched(gone)))
        await some_turns()
        gone.append(True)
        parts.end_reads()
        await some_turns()

    asyncio.run(talk())
    assert isinstance(answers[0], ClientGoneError)
    assert (parts.scored, shed(registry, "gone")) == (1, 1.0)


def test_samples_of_a_client_that_leaves_are_not_decoded(
    scoring: Scoring, parts: Parts, registry: CollectorRegistry
) -> None:
    parts.on_disk = False
    decoded: list[int] = []

    def decode(n: int) -> DecodedRequests:
        decoded.append(n)
        return DECODED

    async def talk() -> list[Any]:
        first = scoring.score_samples(1, lambda: decode(1), 1, watched([True]))  # scored in its first turn
        second = scoring.score_samples(1, lambda: decode(2), 1, watched([True]))
        return list(await asyncio.gather(first, second, return_exceptions=True))

    answers = asyncio.run(in_time(talk()))

    assert (isinstance(answers[0], tuple), isinstance(answers[1], ClientGoneError)) == (True, True)
    assert (decoded, shed(registry, "gone")) == ([1], 1.0)


def test_candidates_with_a_number_not_finite_are_counted() -> None:
    registry = CollectorRegistry()
    predictions = np.array([[0.5, 1], [0.5, np.inf], [0.5, 1]], np.float32)

    RequestCounts(registry).scored(Scored(predictions, np.array([1, 1, np.nan], np.float32), {}))

    assert registry.get_sample_value("freshet_inference_not_finite_scores_total") == 2
