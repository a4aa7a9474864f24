"""Groups over gloo, their ranks in threads of this process: the same sums for all of them, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freshet.model.hedge import HedgeDense
from freshet.trainer.membership import Quorum, QuorumOptions
from freshet.trainer.process_group import Proposal, ProposedBatch, RankLost
from freshet.trainer.reducers import Collectives, Reducer
from freshet.trainer.reducers.group_codecs import IntegerCodec
from freshet.trainer.reducers.two_phase import TwoPhase
from freshet.trainer.torch_process_group import (
    BROADCAST_BYTES,
    TorchProcessGroup,
    connect_store,
    host_store,
)
from freshet.types import Fence, OffsetRange
from tests.fixtures.local_ranks import SteppedDct
from tests.fixtures.rank_threads import run_ranks
from tests.fixtures.specs import make_batch, make_spec

ROOT = Path(__file__).parents[3]
PARTITIONS = 4
FORM_S = 30.0
ANSWER_S = 30.0
HOSTS: list[object] = []
"""The store of the newest groups, which they need to split."""
SPEC = make_spec(ids=3, dims=(16,), dense=((True, False),), deep=(32, 16))


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returned, all of them run at the same time; the first error is raised."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def groups(
    size: int, *, fence: int = 1, lanes: int = 1, answer_s: float = ANSWER_S, address: str = "127.0.0.1"
) -> list[TorchProcessGroup]:
    host, place = host_store(address, FORM_S)
    HOSTS[:] = [host]
    quorum = Quorum({member: Fence(member) for member in range(size)}, place, lanes, Fence(fence))
    options = QuorumOptions(address, lanes, PARTITIONS, FORM_S, answer_s)
    return at_once(
        *(
            lambda rank=rank: TorchProcessGroup(connect_store(place, FORM_S), quorum, rank, options)
            for rank in range(size)
        )
    )


@pytest.fixture(params=[2, 3])
def made(request: pytest.FixtureRequest) -> Iterator[list[TorchProcessGroup]]:
    found = groups(request.param, lanes=2)
    yield found
    for group in found:
        group.close()


def test_ranks_of_a_site_have_a_group_of_their_own() -> None:
    three = groups(3)
    sites = at_once(*(partial(group.split, name) for group, name in zip(three, "aba", strict=True)))
    sums = [np.array([n], np.float32) for n in (1.0, 10.0, 100.0)]
    at_once(*(partial(site.reduce, [of_rank]) for site, of_rank in zip(sites, sums, strict=True)))
    of_all = [np.array([n], np.float32) for n in (1.0, 10.0, 100.0)]
    at_once(*(partial(group.reduce, [of_rank]) for group, of_rank in zip(three, of_all, strict=True)))
    sites[2].close()

    with pytest.raises(RankLost):
        sites[0].reduce([np.ones(1, np.float32)])
    for group in (*sites, *three):
        group.close()

    assert [(site.rank, site.size) for site in sites] == [(0, 2), (0, 1), (1, 2)]
    assert [float(of_rank[0]) for of_rank in sums] == [101.0, 10.0, 101.0]
    assert [float(of_rank[0]) for of_rank in of_all] == [111.0] * 3


def test_proposals_arrive_in_rank_order(made: list[TorchProcessGroup]) -> None:
    offers = [
        Proposal(7, 9, (ProposedBatch((OffsetRange(rank, 5, 6 + rank),), 3), None), leaving=rank == 1)
        for rank in range(len(made))
    ]

    told = at_once(*(lambda g=g: g.gather(offers[g.rank]) for g in made))

    assert told == [offers] * len(made)


def test_sums_of_any_type_and_size_are_equal_on_all_ranks(made: list[TorchProcessGroup]) -> None:
    rng = np.random.default_rng(5)
    sizes = [0, 1, 2, 1000, 30_001]
    floats = [[rng.normal(size=n).astype(np.float32) for n in sizes] for _ in made]
    doubles = [[rng.normal(size=n) for n in sizes] for _ in made]
    both: list[list[NDArray[Any]]] = [[*f, *d] for f, d in zip(floats, doubles, strict=True)]
    before = [[a.copy() for a in of] for of in both]

    at_once(*(lambda g=g: g.reduce(both[g.rank]) for g in made))

    for i in range(2 * len(sizes)):
        assert all(of[i].tobytes() == both[0][i].tobytes() for of in both)
        np.testing.assert_allclose(both[0][i], np.sum([of[i] for of in before], axis=0), rtol=0, atol=1e-6)


def test_bytes_are_exchanged_and_broadcast_whatever_their_length(made: list[TorchProcessGroup]) -> None:
    data = [bytes(range(17 * rank)) for rank in range(len(made))]  # of rank 0: none

    assert at_once(*(lambda g=g: g.exchange(data[g.rank]) for g in made)) == [data] * len(made)
    assert at_once(*(lambda g=g: g.exchange(b"") for g in made)) == [[b""] * len(made)] * len(made)
    for content in (b"weights", b""):
        sent = at_once(*(lambda g=g, c=content: g.broadcast(c if g.rank == 1 else None, 1) for g in made))
        assert sent == [content] * len(made)


@dataclass
class SlowLink:
    """A gloo group over a link that carries `most` bytes in the time-out of one operation."""

    group: Any
    most: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def broadcast(self, tensors: Sequence[Any], options: Any) -> Any:
        if sum(tensor.nbytes for tensor in tensors) > self.most:
            raise RuntimeError("Timed out waiting for send operation to complete")
        return self.group.broadcast(tensors, options)


@pytest.mark.parametrize("further", [0, 1])
def test_a_state_of_any_size_arrives_over_a_slow_link(further: int) -> None:
    pair = groups(2)
    for group in pair:
        group._group = SlowLink(group._group, BROADCAST_BYTES)
    state = np.random.default_rng(3).bytes(3 * BROADCAST_BYTES + further)

    sent = at_once(*(lambda g=g: g.broadcast(state if g.rank == 1 else None, 1) for g in pair))

    assert sent == [state, state]
    for group in pair:
        group.close()


@pytest.mark.parametrize("known", [True, False])
def test_parts_reach_their_ranks(made: list[TorchProcessGroup], known: bool) -> None:
    def part(sender: int, receiver: int) -> NDArray[np.uint8]:
        return np.full(5 * sender * receiver + sender, 16 * sender + receiver, np.uint8)  # of rank 0: none

    ranks = range(len(made))

    def call(g: TorchProcessGroup) -> tuple[list[NDArray[np.uint8]], list[NDArray[np.uint8]]]:
        lengths = [len(part(i, g.rank)) for i in ranks] if known else None
        sent = g.all_to_all([part(g.rank, j) for j in ranks], lengths)
        return sent, g.all_gather(part(g.rank, 1), [len(part(i, 1)) for i in ranks] if known else None)

    for rank, (sent, gathered) in enumerate(at_once(*(lambda g=g: call(g) for g in made))):
        assert [p.tobytes() for p in sent] == [part(i, rank).tobytes() for i in ranks]
        assert [p.tobytes() for p in gathered] == [part(i, 1).tobytes() for i in ranks]


@pytest.mark.parametrize("make", [lambda: TwoPhase(IntegerCodec(4), 5000), lambda: SteppedDct(5000)])
def test_reducers_sum_over_gloo_as_over_threads(
    made: list[TorchProcessGroup], make: Callable[[], Reducer]
) -> None:
    def work(group: Collectives) -> bytes:
        reducer, results = make(), b""
        for step in range(5):
            gradient = np.random.default_rng((step, group.rank)).normal(size=5000).astype(np.float32)
            reducer.reduce(group, gradient)
            results += gradient.tobytes()
        return results

    found = at_once(*(lambda g=g: work(g) for g in made))

    assert found == run_ranks(len(made), work)
    assert len(set(found)) == 1


def test_parts_for_a_rank_that_ended_raise_rank_lost() -> None:
    pair = groups(2)
    pair[1].close()
    part = np.ones(3, np.uint8)

    for call in (lambda: pair[0].all_to_all([part, part], [3, 3]), lambda: pair[0].all_gather(part, [3, 3])):
        with pytest.raises(RankLost, match="ended"):
            call()
    pair[0].close()


def test_tls_that_this_torch_does_not_have_is_not_claimed() -> None:
    """In a process of its own: gloo looks once."""
    code = "from freshet.trainer.torch_process_group import _device; _device('127.0.0.1')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "GLOO_DEVICE_TRANSPORT": "TCP_TLS", "PYTHONPATH": str(ROOT / "services")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "ConfigError: ranks: GLOO_DEVICE_TRANSPORT = 'TCP_TLS'" in done.stderr
    assert "network of their own" in done.stderr


def test_when_a_rank_closes_the_others_form_a_new_group() -> None:
    first = groups(3)
    first[2].close()

    for group in first[:2]:
        with pytest.raises(RankLost, match="ended"):
            group.gather(Proposal(0, 0, (None,)))
        group.close()
    second = groups(2, fence=2)
    assert at_once(*(lambda g=g: len(g.gather(Proposal(0, 0, (None,)))) for g in second)) == [2, 2]
    for group in second:
        group.close()


@pytest.mark.parametrize("address", ["::1", "localhost"])
def test_ranks_meet_at_an_address_of_either_family_or_a_name(address: str) -> None:
    pair = groups(2, address=address)
    sums = np.ones(8, np.float32), np.full(8, 2, np.float32)
    at_once(*(lambda g=g, s=s: g.reduce([s]) for g, s in zip(pair, sums, strict=True)))
    for summed in sums:
        np.testing.assert_array_equal(summed, np.full(8, 3, np.float32))

    for group in pair:
        group.close()


def test_the_place_of_a_store_puts_ipv6_in_brackets() -> None:
    store, place = host_store("::1", FORM_S)
    assert place.startswith("[::1]:")
    del store


def test_a_rank_that_does_not_answer_is_lost_after_the_time_out() -> None:
    pair = groups(2, answer_s=0.2)

    with pytest.raises(RankLost, match="does not answer"):
        pair[0].reduce([np.ones(8, np.float32)])

    for group in pair:
        group.close()


def test_a_store_that_is_not_there_is_a_rank_that_is_lost() -> None:
    with pytest.raises(RankLost, match=r"127\.0\.0\.1:1 "):
        connect_store("127.0.0.1:1", 0.2)


# The default model


def batches_of(rank: int, steps: int) -> list[Any]:
    rng = np.random.default_rng(100 + rank)
    return [make_batch(SPEC, 64, rng) for _ in range(steps)]


def state_bytes(model: HedgeDense) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in model.state().items()}


def trained(group: TorchProcessGroup, lanes: int, steps: int) -> HedgeDense:
    """A model of one rank after some steps with the others."""
    model = HedgeDense(SPEC, training=True, precision="fp32")
    own = [model.lane() for _ in range(lanes)]
    data = [batches_of(group.rank * lanes + i, steps) for i in range(lanes)]
    for step in range(steps):
        for lane, of in zip(own, data, strict=True):
            lane.forward_backward(of[step])
        for other in own[1:]:
            own[0].merge(other)
        group.reduce(own[0].reduce_buffers())
        model.step([own[0]])
    return model


def alone(lanes: int, steps: int) -> HedgeDense:
    """The same batches in one process."""
    model = HedgeDense(SPEC, training=True, precision="fp32")
    own = [model.lane() for _ in range(lanes)]
    data = [batches_of(i, steps) for i in range(lanes)]
    for step in range(steps):
        for lane, of in zip(own, data, strict=True):
            lane.forward_backward(of[step])
        model.step(own)
    return model


def test_after_many_steps_all_ranks_have_equal_bits(made: list[TorchProcessGroup]) -> None:
    models: Sequence[HedgeDense] = at_once(*(lambda g=g: trained(g, 2, 20) for g in made))

    first = state_bytes(models[0])
    assert all(state_bytes(model) == first for model in models[1:])


def test_two_ranks_of_one_lane_equal_one_process_of_two_lanes() -> None:
    pair = groups(2)
    first, _ = at_once(*(lambda g=g: trained(g, 1, 20) for g in pair))

    assert state_bytes(first) == state_bytes(alone(2, 20))  # a + b is b + a, in floating point too
    for group in pair:
        group.close()


def test_ranks_of_many_lanes_differ_by_the_order_of_sums_only(
    made: list[TorchProcessGroup],
) -> None:
    models = at_once(*(lambda g=g: trained(g, 2, 20) for g in made))

    other = alone(2 * len(made), 20).state()
    for name, array in models[0].state().items():
        np.testing.assert_allclose(array, other[name], rtol=1e-4, atol=1e-6, err_msg=name)
