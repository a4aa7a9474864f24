"""Batching: waiting requests are scored together, and an error fails only its own request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs

from freshet.errors import BadInput, Overloaded
from freshet.http.messages import ClientGoneError
from freshet.inference.pipeline import Encoded
from freshet.inference.scoring import BatchBudget, Batcher, Client, Solo, Throughput
from freshet.types import BytesColumn

NOTHING = BytesColumn.of([])


def request(candidates: int = 10) -> Encoded:
    return Encoded(NOTHING, candidates)


def left() -> Client:
    """A client that has disconnected."""
    return Client(is_cancelled=lambda: True)


@dataclass
class Scorer:
    """Answers a request with its candidates, and takes its time by a clock of its own."""

    candidate_s: float = 0.0
    turn_s: float = 0.0
    pause_s: float = 0.0  # of the next turn alone
    now: float = 0.0
    batches: list[list[int]] = field(default_factory=list)

    def __call__(self, requests: Sequence[Encoded]) -> list[int | Exception]:
        sizes = [one.candidates for one in requests]
        self.batches.append(sizes)
        self.now += self.turn_s + self.candidate_s * sum(sizes) + self.pause_s
        self.pause_s = 0.0
        if 666 in sizes and len(sizes) > 1:
            raise RuntimeError("a transform failed")
        return [BadInput("no key") if n == 13 else RuntimeError("alone") if n == 666 else n for n in sizes]

    shed: list[str] = field(default_factory=list)

    def batcher(self, budget_s: float = 1.0, most_wait_s: float = float("inf")) -> Batcher[int]:
        return Batcher(
            self, budget_s=budget_s, most_wait_s=most_wait_s, shed=self.shed.append, clock=lambda: self.now
        )


def asked(batcher: Batcher[int], size: int) -> asyncio.Future[int | Exception]:
    answer: asyncio.Future[int | Exception] = asyncio.get_running_loop().create_future()
    batcher.submit(request(size), answer.set_result, Client())
    return answer


def ask(batcher: Batcher[int], *sizes: int) -> list[int | Exception]:
    async def together() -> list[int | Exception]:
        return await asyncio.gather(*(asked(batcher, n) for n in sizes))

    return asyncio.run(together())


def test_waiting_requests_are_one_batch_with_an_answer_each() -> None:
    scorer = Scorer()

    assert ask(scorer.batcher(), 1, 2, 3) == [1, 2, 3]
    assert scorer.batches == [[1, 2, 3]]


def test_a_request_that_comes_alone_is_scored_in_the_next_turn() -> None:
    scorer = Scorer()
    turns: list[int] = []

    async def alone() -> None:
        answer = asked(scorer.batcher(), 10)
        while not answer.done():
            turns.append(1)
            await asyncio.sleep(0)

    asyncio.run(alone())

    assert len(turns) <= 3


def test_a_bad_request_fails_solo() -> None:
    scorer = Scorer()

    good, bad, other = ask(scorer.batcher(), 1, 13, 3)

    assert (good, other) == (1, 3)
    assert isinstance(bad, BadInput)


def test_a_batch_that_raises_is_tried_one_by_one() -> None:
    scorer = Scorer()

    good, bad, other = ask(scorer.batcher(), 1, 666, 3)

    assert (good, other) == (1, 3)
    assert isinstance(bad, RuntimeError)
    assert scorer.batches == [[1, 666, 3], [1], [666], [3]]


def test_failing_callback_is_logged_and_others_are_answered() -> None:
    scorer = Scorer()
    batcher = scorer.batcher(budget_s=0.0)

    def broken(result: int | Exception) -> None:
        raise RuntimeError("no connection")

    async def talk() -> list[int | Exception]:
        batcher.submit(request(1), broken, Client())
        waiting = [asked(batcher, 2), asked(batcher, 3)]
        return [*await asyncio.gather(*waiting), await asked(batcher, 4)]

    with capture_logs() as logs:
        assert asyncio.run(asyncio.wait_for(talk(), 10)) == [2, 3, 4]
    assert [str(entry["exc_info"]) for entry in logs] == ["no connection"]


def test_failing_callback_does_not_end_its_batch() -> None:
    scorer = Scorer()
    batcher = scorer.batcher()

    def broken(result: int | Exception) -> None:
        raise RuntimeError("no connection")

    async def talk() -> int | Exception:
        batcher.submit(request(1), broken, Client())
        return await asked(batcher, 2)

    with capture_logs():
        assert asyncio.run(asyncio.wait_for(talk(), 10)) == 2
    assert scorer.batches == [[1, 2]]


def test_a_batch_that_cannot_be_noted_does_not_end_the_scoring() -> None:
    scorer, told = Scorer(), list[str]()

    def observe(requests: int) -> None:
        if len(scorer.batches) == 1:
            raise RuntimeError("no histogram")

    async def talk() -> int | Exception:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(str(what["exception"])))
        batcher = Batcher[int](scorer, budget_s=0.0, observe=observe)
        batcher.submit(request(1), lambda result: None, Client())
        return await asked(batcher, 2)

    assert asyncio.run(asyncio.wait_for(talk(), 10)) == 2
    assert told == ["no histogram"]


def test_a_batch_fits_the_budget_by_measured_cost() -> None:
    scorer = Scorer(candidate_s=1e-4)
    batcher = scorer.batcher(budget_s=5e-3)
    for _ in range(100):
        ask(batcher, 10)
    scorer.batches.clear()

    ask(batcher, *[20] * 5)

    assert scorer.batches == [[20, 20], [20, 20], [20]]


def test_a_budget_of_nothing_scores_one_by_one() -> None:
    scorer = Scorer()

    ask(scorer.batcher(budget_s=0.0), 1, 2, 3)

    assert scorer.batches == [[1], [2], [3]]


@pytest.mark.parametrize("candidates", [1, 10_000])
def test_a_request_larger_than_the_budget_is_taken_solo(candidates: int) -> None:
    pace = BatchBudget(1e-9)

    assert pace.fits([candidates, 1]) == 1


def test_requests_that_would_wait_too_long_are_shed_and_counted() -> None:
    scorer = Scorer(candidate_s=0.01)
    batcher = scorer.batcher(budget_s=0.0, most_wait_s=1.0)
    ask(batcher, *[10] * 100)  # the cost of a candidate is known from here on; nothing was refused before
    scorer.batches.clear()

    async def burst() -> tuple[list[int | Exception], list[Overloaded]]:
        waiting, refused = [], list[Overloaded]()
        for _ in range(50):
            try:
                waiting.append(asked(batcher, 10))
            except Overloaded as error:
                refused.append(error)
        return await asyncio.gather(*waiting), refused

    answers, refused = asyncio.run(burst())

    assert 10 <= len(answers) <= 12  # 0.1 s each
    assert answers == [10] * len(answers)
    assert len(refused) == 50 - len(answers)
    assert scorer.shed == ["wait"] * len(refused)
    assert "FRESHET_INFERENCE_QUEUE_WAIT" in str(refused[0])
    assert refused[0].retry_after_s > 0


def test_pause_of_the_process_sheds_no_request_in_time() -> None:
    scorer = Scorer(candidate_s=1e-4, turn_s=1e-3)
    batcher = scorer.batcher(budget_s=5e-3, most_wait_s=1.0)
    ask(batcher, *[10] * 100)

    scorer.pause_s = 5.0
    ask(batcher, 10)

    assert ask(batcher, *[10] * 400) == [10] * 400  # 0.4 s, and some turns
    assert scorer.shed == []


def test_a_slow_first_turn_sheds_no_request_answered_in_time() -> None:
    scorer = Scorer(candidate_s=1e-5, turn_s=1e-3, pause_s=5.0)
    batcher = scorer.batcher(budget_s=5e-3, most_wait_s=1.0)
    ask(batcher, 10)

    assert ask(batcher, *[100] * 400) == [100] * 400
    assert scorer.shed == []


def test_turns_without_requests_do_not_change_the_estimate() -> None:
    scorer = Scorer(candidate_s=1e-5, turn_s=1e-3)
    batcher = scorer.batcher(budget_s=5e-3, most_wait_s=1.0)

    def gone() -> bool:
        scorer.now += 0.01
        return True

    async def nobody() -> None:
        batcher.submit(request(100), lambda _: None, Client(is_cancelled=gone))
        await asyncio.sleep(0)

    ask(batcher, *[100] * 10)
    for _ in range(100):
        asyncio.run(nobody())

    assert ask(batcher, *[100] * 50) == [100] * 50
    assert scorer.shed == ["gone"] * 100


def test_small_requests_alone_do_not_say_what_large_ones_cost() -> None:
    scorer = Scorer(candidate_s=1e-5, turn_s=3e-3)
    batcher = scorer.batcher(budget_s=5e-3, most_wait_s=1.0)
    for _ in range(1000):
        ask(batcher, 1)

    assert ask(batcher, *[100] * 100) == [100] * 100  # 0.4 s
    assert scorer.shed == []


@pytest.mark.parametrize("size", [1, 100, 1_000])
def test_estimate_follows_a_slower_server_within_some_turns(size: int) -> None:
    throughput = Throughput()
    for _ in range(100):
        throughput.observe(size, 1e-4 + 1e-6 * size)
    assert throughput.wait_s(10, 10 * size) == pytest.approx(1e-3 + 1e-5 * size, rel=0.1)
    for _ in range(20):
        throughput.observe(size, 1e-3 + 1e-5 * size)

    assert throughput.wait_s(10, 10 * size) == pytest.approx(1e-2 + 1e-4 * size, rel=0.2)


def test_different_sizes_separate_turn_cost_from_candidate_cost() -> None:
    throughput = Throughput()
    for size in [20, 50, 30] * 20:
        throughput.observe(size, 2e-3 + 1e-4 * size)

    assert throughput.wait_s(1, 500) == pytest.approx(0.052, rel=0.1)


def test_a_request_alone_is_accepted_however_long_it_takes() -> None:
    scorer = Scorer(candidate_s=10.0)
    batcher = scorer.batcher(most_wait_s=0.001)

    assert [ask(batcher, 10) for _ in range(5)] == [[10]] * 5
    assert scorer.shed == []


def test_a_server_that_is_quick_again_refuses_no_request() -> None:
    scorer = Scorer(candidate_s=1.0)
    batcher = scorer.batcher(budget_s=0.0, most_wait_s=1.0)
    ask(batcher, *[10])
    scorer.candidate_s = 1e-5
    for _ in range(100):
        ask(batcher, 10)

    assert ask(batcher, *[10] * 50) == [10] * 50


def test_who_has_gone_is_not_scored_and_the_others_are() -> None:
    scorer = Scorer()
    batcher = scorer.batcher()
    told: list[int | Exception] = []

    async def some_go() -> list[int | Exception]:
        here = asked(batcher, 1)
        batcher.submit(request(2), told.append, left())
        also = asked(batcher, 3)
        return list(await asyncio.gather(here, also))

    assert asyncio.run(some_go()) == [1, 3]
    assert (scorer.batches, scorer.shed) == ([[1, 3]], ["gone"])
    assert isinstance(told[0], ClientGoneError)
    assert len(told) == 1
    assert ask(batcher, 4) == [4]


def test_client_is_watched_once_its_request_has_waited_a_turn() -> None:
    scorer, watched = Scorer(), list[int]()
    batcher = scorer.batcher(budget_s=0.0)

    async def talk() -> list[int | Exception]:
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[int | Exception]] = [loop.create_future() for _ in range(3)]
        for size, answer in enumerate(answers, 1):

            def watch(size: int = size) -> Callable[[], bool]:
                watched.append(size)
                return lambda: size == 2

            batcher.submit(request(size), answer.set_result, Client(watch))
        return await asyncio.gather(*answers)

    first, second, third = asyncio.run(asyncio.wait_for(talk(), 10))
    assert (first, third) == (1, 3)
    assert isinstance(second, ClientGoneError)
    assert sorted(watched) == [2, 3]
    assert (scorer.batches, scorer.shed) == ([[1], [3]], ["gone"])


def test_an_empty_batch_is_not_scored() -> None:
    scorer = Scorer()
    batcher = scorer.batcher(budget_s=0.0)

    async def go() -> int | Exception:
        batcher.submit(request(2), lambda _: None, left())
        return await asked(batcher, 3)

    assert asyncio.run(go()) == 3
    assert scorer.batches == [[3]]


def test_a_solo_request_ends_the_batch_before_it() -> None:
    scorer = Scorer()
    batcher = scorer.batcher()
    told: list[object] = []

    def alone() -> int:
        told.append(list(scorer.batches))
        return 7

    async def talk() -> None:
        for size in (1, 2):
            batcher.submit(request(size), told.append, Client())
        batcher.submit(Solo(5, alone), told.append, Client())
        batcher.submit(request(3), told.append, Client())
        await asked(batcher, 4)

    asyncio.run(asyncio.wait_for(talk(), 10))

    assert told == [1, 2, [[1, 2]], 7, 3]
    assert scorer.batches == [[1, 2], [3, 4]]


def test_failing_solo_request_gets_its_error_alone() -> None:
    batcher = Scorer().batcher()
    told: list[object] = []

    def alone() -> int:
        raise BadInput("no such tensor")

    async def talk() -> int | Exception:
        batcher.submit(Solo(5, alone), told.append, Client())
        return await asked(batcher, 4)

    assert asyncio.run(asyncio.wait_for(talk(), 10)) == 4
    assert list(map(str, told)) == ["no such tensor"]


def test_solo_requests_fill_the_queue_and_are_refused() -> None:
    scorer = Scorer()
    batcher = scorer.batcher(budget_s=0.005, most_wait_s=1.0)
    ask(batcher, 10)  # what a batch costs is known
    answered: list[object] = []

    def alone() -> int:
        scorer.now += 0.1
        return 7

    async def burst() -> int:
        refused = 0
        for _ in range(100):
            try:
                batcher.submit(Solo(10, alone), answered.append, Client())
            except Overloaded:
                refused += 1
        while len(answered) + refused < 100:
            await asyncio.sleep(0)
        return refused

    asyncio.run(burst())  # the cost of a candidate was not known before
    answered.clear()
    refused = asyncio.run(burst())

    assert 8 <= len(answered) <= 12  # 0.1 s each
    assert scorer.shed.count("wait") >= refused == 100 - len(answered)
    assert ask(batcher, *[10] * 8) == [10] * 8, "those that are answered are forgotten"


def test_solo_requests_do_not_change_the_batch_size() -> None:
    scorer = Scorer(candidate_s=1e-4)
    batcher = scorer.batcher(budget_s=5e-3)
    for _ in range(100):
        ask(batcher, 10)
    scorer.batches.clear()

    def alone() -> int:
        scorer.now += 1.0
        return 7

    async def many() -> None:
        for _ in range(10):
            batcher.submit(Solo(1, alone), lambda _: None, Client())
        await asked(batcher, 1)

    asyncio.run(many())
    scorer.batches.clear()

    ask(batcher, *[20] * 4)

    assert scorer.batches == [[20, 20], [20, 20]]


def test_a_batch_is_found_without_reading_all_waiting_requests() -> None:
    looked: list[int] = []
    waiting = (looked.append(n) or 10 for n in range(1_000))  # type: ignore[func-returns-value]

    assert BatchBudget(0.0).fits(waiting) == 1
    assert len(looked) == 2
