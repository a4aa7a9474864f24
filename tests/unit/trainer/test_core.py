from freshet.trainer.step_coordinator import Counts, DenseLedger
from freshet.types import OffsetRange


def r(partition: int, start: int, stop: int) -> OffsetRange:
    return OffsetRange(partition, start, stop)


def test_a_batch_that_continues_the_vector_counts_and_moves_it():
    ledger = DenseLedger({0: 5, 1: 0})

    assert ledger.decide([(r(0, 5, 9), r(1, 0, 2))]) == [Counts.WHOLE]
    assert ledger.applied == {0: 9, 1: 2}


def test_a_batch_applied_before_has_dense_weight_zero():
    ledger = DenseLedger({0: 5})

    assert ledger.decide([(r(0, 2, 5),)]) == [Counts.ALREADY]
    assert ledger.applied == {0: 5}


def test_a_batch_ahead_of_the_vector_or_across_it_goes_back():
    ledger = DenseLedger({0: 5, 1: 5})

    assert ledger.decide([(r(0, 6, 8),), (r(0, 3, 7),), (r(0, 2, 5), r(1, 5, 6))]) == [Counts.BACK] * 3
    assert ledger.applied == {0: 5, 1: 5}


def test_batches_of_one_step_are_judged_in_rank_order_and_a_rank_may_have_none():
    ledger = DenseLedger({0: 0})

    assert ledger.decide([(r(0, 0, 3),), None, (r(0, 0, 3),), (r(0, 3, 4),)]) == [
        Counts.WHOLE,
        None,
        Counts.ALREADY,
        Counts.WHOLE,
    ]
