"""The reducer that follows the links: within a twentieth of the best codec, on simulated links."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import numpy as np
import pytest

from freshet.model import Lane
from freshet.trainer.gradient_sums import GradientSums
from freshet.trainer.process_group import ProcessGroup
from freshet.trainer.reducers import PlainReducer, Reducer
from freshet.trainer.reducers.group_codecs import IntegerCodec
from freshet.trainer.reducers.ladder import EVERY_S, LADDER, MOST_STEPS, SLACK, LadderReducer
from freshet.trainer.reducers.two_phase import TwoPhase
from freshet.types import F32, F64, U8

SIZE = 4096
"""Floats of a gradient: 16 kB."""
MAKES = (
    PlainReducer,
    lambda: TwoPhase(IntegerCodec(8), SIZE),
    lambda: TwoPhase(IntegerCodec(4), SIZE),
)


class Link:
    """A `Collectives` of rank 0 of 2, whose messages take simulated time; the other rank sends zeros."""

    rank, size = 0, 2

    def __init__(self, goodput: float, latency_s: float = 1e-4) -> None:
        self.goodput, self.latency_s = goodput, latency_s
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    def send(self, size: int) -> None:
        self.now += self.latency_s + size / self.goodput

    def reduce(self, buffers: Sequence[F32 | F64]) -> None:
        self.send(sum(buffer.nbytes for buffer in buffers))

    def all_to_all(self, parts: Sequence[U8], sizes: Sequence[int] | None = None) -> list[U8]:
        self.send(parts[1].nbytes)
        return [parts[0], np.zeros_like(parts[0])]

    def all_gather(self, part: U8, sizes: Sequence[int] | None = None) -> list[U8]:
        assert sizes is not None
        self.send(part.nbytes)
        return [part, np.zeros(sizes[1], np.uint8)]


class Steps:
    """Steps of a rank over a link: the time that each codec was in use."""

    def __init__(self, link: Link, rest_s: float) -> None:
        self.link, self.rest_s = link, rest_s
        self.ladder = LadderReducer(SIZE, link.clock)
        self.used = dict.fromkeys(LADDER, 0.0)
        self.gradient = np.random.default_rng(3).normal(size=SIZE).astype(np.float32)

    def run(self, seconds: float) -> int:
        """Step for so long; returns the steps made."""
        made, until = 0, self.link.now + seconds
        while self.link.now < until:
            began, codec = self.link.now, self.ladder.codec
            self.link.now += self.rest_s
            self.ladder.reduce(self.link, self.gradient.copy())
            if self.ladder.flush_due:
                self.ladder.flush(self.link)
            self.used[codec] += self.link.now - began
            made += 1
        return made

    def best_step_s(self) -> float:
        """Seconds of a step with the fastest codec."""
        return min(self._step_s(make()) for make in MAKES)

    def _step_s(self, reducer: Reducer) -> float:
        link = Link(self.link.goodput, self.link.latency_s)
        reducer.reduce(link, self.gradient.copy())
        return self.rest_s + link.now - 1000.0


@pytest.mark.slow
@pytest.mark.parametrize("rest_s", [1e-3, 1e-2, 0.2])
@pytest.mark.parametrize("goodput", [1e4, 1e6, 1e7, 1e8, 1e10])
def test_it_stays_near_the_fastest_codec(goodput: float, rest_s: float) -> None:
    steps = Steps(Link(goodput), rest_s)
    steps.run(20.0 if goodput > 1e4 else 120.0)  # the first round of probes
    seconds = 60.0

    made = steps.run(seconds)

    assert seconds / made <= steps.best_step_s() * (1 + SLACK) * 1.03, steps.ladder.reason


def test_a_fast_link_keeps_whole_gradients_and_tries_no_codec() -> None:
    steps = Steps(Link(1e10, 1e-5), 1e-2)

    steps.run(100.0)

    assert (steps.used["int8"], steps.used["int4"]) == (0.0, 0.0)
    assert steps.ladder.reason.endswith("it needs no codec")


def test_a_slow_link_gets_a_codec_and_a_recovered_one_none() -> None:
    steps = Steps(Link(1e6), 1e-2)
    steps.run(10.0)
    slow, why = steps.ladder.codec, steps.ladder.reason

    steps.link.goodput = 1e9
    steps.run(EVERY_S / 2)

    assert slow != "fp32"
    assert "in fp32 16.5 ms" in why
    assert steps.ladder.codec == "fp32"


def test_a_slower_link_is_noticed_before_the_next_round() -> None:
    steps = Steps(Link(1e9), 1e-2)
    steps.run(EVERY_S + 5)  # right after a round

    steps.link.goodput = 1e6
    steps.run(EVERY_S / 4)

    assert steps.ladder.codec != "fp32"


def test_a_codec_that_costs_what_it_saves_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(Link(3e6), 1e-3)
    encode = IntegerCodec.encode

    def slowly(codec: IntegerCodec, values: F32, real: int) -> U8:
        steps.link.now += 3e-3
        return encode(codec, values, real)

    monkeypatch.setattr(IntegerCodec, "encode", slowly)
    steps.run(5.0)

    assert steps.ladder.codec == "fp32"
    assert "codecs would not save a twentieth" in steps.ladder.reason


def test_a_codec_near_the_rule_does_not_change_back_and_forth() -> None:
    steps = Steps(Link(1e6), 1e-2)
    rng = np.random.default_rng(5)
    steps.run(10.0)
    chosen = [steps.ladder.codec]
    steps.rest_s = 0.0165 / 0.0525  # fp32 costs about a twentieth of a step more
    for _ in range(20):
        steps.link.goodput = 1e6 * rng.uniform(0.97, 1.03)
        steps.used = dict.fromkeys(LADDER, 0.0)
        steps.run(EVERY_S)
        chosen.append(max(LADDER, key=lambda codec: steps.used[codec]))

    assert sum(a != b for a, b in pairwise(chosen)) <= 1, chosen


def test_an_idle_hour_does_not_delay_the_next_round_of_probes() -> None:
    steps = Steps(Link(1e6), 1e-2)
    steps.run(0.1)
    steps.link.now += 3600
    steps.run(10.0)

    steps.link.goodput = 1e9
    steps.run(2 * EVERY_S)

    assert steps.ladder.codec == "fp32"


def test_what_was_timed_before_a_loss_is_forgotten() -> None:
    steps = Steps(Link(1e6), 1e-2)
    steps.run(10.0)

    steps.ladder.load_state(steps.ladder.state())
    steps.link.now += 100
    steps.ladder.reduce(steps.link, steps.gradient.copy())
    steps.ladder.reduce(steps.link, steps.gradient.copy())

    assert not steps.ladder.flush_due


def test_a_flush_is_due_only_once_there_is_something_to_flush() -> None:
    link = Link(1e6)
    sums = GradientSums(LadderReducer(1, link.clock))
    lane = cast(Lane, OneNumber())
    for _ in range(MOST_STEPS + 1):
        sums.reduce(cast(ProcessGroup, link), [lane])
    before = sums.flush_due

    sums.flush(cast(ProcessGroup, link))
    link.now += 2 * EVERY_S

    assert (before, sums.flush_due) == (True, False)


class OneNumber:
    """A `Lane` with a gradient of one number."""

    def reduce_buffers(self) -> list[F32]:
        return [np.ones(1, np.float32)]


def test_the_next_leader_probes_all_codecs_itself() -> None:
    link = Link(1e6)
    steps = Steps(link, 1e-2)
    follower = steps.ladder
    link.rank = 1
    steps.run(0.05)
    follower.load_state({"codec": np.array([1])})  # as the leader of that time has chosen

    link.rank = 0
    steps.run(10.0)

    assert min(steps.used.values()) > 0
    assert follower.codec == "int4"


@pytest.mark.parametrize("found", [-3, 17])
def test_a_codec_of_another_release_is_bounded(found: int) -> None:
    ladder = LadderReducer(SIZE)

    ladder.load_state({"codec": np.array([found])})

    assert ladder.codec in cast(Sequence[str], LADDER)
