"""The promise holds over every seed, and each rule is needed: broken on its own, some seed shows it."""

from __future__ import annotations

import os
from itertools import chain

import pytest

from .control import LEASE, POLL, ControlView, Record
from .embedder import next_stop, start_over
from .faults import FAULTS_OF, lost_claim, plan
from .joiner import DISORDER, WINDOW, Event, Join, Kind, sample_id
from .rules import RULE_NAMES, Rules
from .shard import Verdict, judge_push
from .store import Cut, Meta, Outcome, judge_flush
from .trainer import gather
from .world import run_seed

SEEDS = int(os.environ.get("FRESHET_TEST_SEEDS", "250"))
CHUNK = 50  # seeds of one test, so that a failure names a few and the suite can be spread over cores

# Most broken rules show within the first seeds. These need a rare company of faults: seeds known to show them
# are tried first, and then all others, so a change of the schedule costs time and not the test.
RARE: dict[str, tuple[int, ...]] = {
    "requests_name_the_claim": (238,),
    "replace_publishes_whole": (1306,),
    "dense_ranges_gathered": (223,),
    "rows_offset_of_the_copy": (103,),
    "claim_publishes_whole": (75,),
    "reader_drops_lower_fence": (278,),
    "reader_starts_at_writer": (31,),
}
BOUND = 1500


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_sample_is_learned_exactly_once_whatever_fails(first: int) -> None:
    failures = [run_seed(seed, Rules()) for seed in range(first, first + CHUNK)]

    assert [str(failure) for failure in failures if failure is not None] == []


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_a_rule_that_is_switched_off_is_caught(rule: str) -> None:
    broken, faults = Rules().without(rule), FAULTS_OF.get(rule, plan)

    seeds = chain(RARE.get(rule, ()), range(BOUND))
    assert any(run_seed(seed, broken, faults=faults) is not None for seed in seeds)


def test_a_lost_claim_hides_no_row_from_readers() -> None:
    failures = [run_seed(seed, Rules(), faults=lost_claim) for seed in range(2 * CHUNK)]

    assert [str(failure) for failure in failures if failure is not None] == []


def test_a_seed_replays_exactly() -> None:
    first: list[str] = []
    second: list[str] = []

    run_seed(7, Rules(), first.append)
    run_seed(7, Rules(), second.append)

    assert first == second


def test_a_push_applies_skips_or_is_refused_as_one() -> None:
    rules = Rules()

    assert judge_push({0: (4, 8), 1: (2, 3)}, [4, 2], rules) is Verdict.APPLY
    assert judge_push({0: (4, 8), 1: (2, 3)}, [8, 9], rules) is Verdict.SKIP
    assert judge_push({0: (4, 8), 1: (2, 3)}, [8, 2], rules) is Verdict.REFUSE
    assert judge_push({0: (4, 8)}, [6], rules) is Verdict.REFUSE
    assert judge_push({0: (4, 8)}, [3], rules) is Verdict.REFUSE


@pytest.mark.parametrize(
    ("stored", "outcome"),
    [
        ((7, 3), Outcome.WRITE),  # what I wrote last
        ((7, 4), Outcome.DONE),  # what I am retrying
        ((9, 3), Outcome.FENCED),  # another owner claimed it
        ((7, 2), Outcome.REPLACE),  # a failover lost writes
        ((5, 8), Outcome.REPLACE),  # and another owner wrote
    ],
)
def test_a_flush_compares_what_is_stored_with_what_it_wrote_last(
    stored: tuple[int, int], outcome: Outcome
) -> None:
    cut = Cut(0, (7, 3), Meta(7, 4, 0, (0,), 0), {}, whole=False)

    assert judge_flush(stored, cut, Rules()) is outcome


def test_an_embedder_rewinds_to_the_smallest_offset() -> None:
    position, cuts = start_over([12, 8, 12, 10], 20, Rules())

    assert (position, cuts) == (8, [10, 12])
    assert [next_stop(at, cuts, 30, Rules()) for at in (8, 9, 10, 12)] == [10, 10, 12, 30]


def test_ranks_judge_ranges_in_rank_order_and_count_each_once() -> None:
    verdicts, vector = gather([{0: (0, 4), 1: (3, 5)}, {0: (0, 4)}], [0, 3], Rules())

    assert verdicts == [{0: 1, 1: 1}, {0: 0}]
    assert vector == (4, 5)
    assert gather([{0: (6, 8)}, None], [4, 5], Rules()) == ([None, None], (4, 5))


def test_the_first_claim_of_a_fence_wins_by_its_offset() -> None:
    view = ControlView(Rules())

    view.apply(4, Record("a", "bucket/1", replaces=-1))
    view.apply(5, Record("b", "bucket/1", replaces=-1))
    view.apply(6, Record("c", "bucket/1", replaces=4))

    assert (view.owner("bucket/1").owner, view.owner("bucket/1").fence) == ("c", 6)


def test_a_lease_does_not_run_out_while_the_log_is_away() -> None:
    view = ControlView(Rules())
    view.tick(0)
    view.apply(0, Record("a", "seat"))

    view.failed(POLL)
    view.tick(10 * LEASE)
    assert not view.claimable("seat")

    for now in range(10 * LEASE, 11 * LEASE + 1, POLL):
        view.tick(now)
    assert view.claimable("seat")


def test_the_first_positive_waits_for_its_window_to_close() -> None:
    join = Join(partitions=1, watermark=0)

    assert join.on_event(Event(Kind.SERVED, 3, 10), 0, 0) == []
    assert join.on_event(Event(Kind.ACTION, 3, 20), 0, 1) == []
    assert join.on_event(Event(Kind.TICK, 0, 10 + WINDOW + DISORDER), 0, 2) == []
    assert join.advance() == [sample_id(3, clicked=True)]


def test_a_repeated_impression_is_joined_once() -> None:
    join = Join(partitions=1, watermark=0, began=-1000)
    served, action = Event(Kind.SERVED, 3, 10), Event(Kind.ACTION, 3, 20)

    assert join.on_event(served, 0, 0) == []
    assert join.on_event(action, 0, 1) == [sample_id(3, clicked=True)]
    assert join.on_event(served, 0, 2) == []
    assert join.on_event(action, 0, 3) == []
