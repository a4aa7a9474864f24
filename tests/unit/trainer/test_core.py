from freshet.trainer.step_coordinator import BatchVerdict, DenseLedger
from freshet.types import OffsetRange


def r(partition: int, start: int, stop: int) -> OffsetRange:
    return OffsetRange(partition, start, stop)


def test_batch_at_the_vector_counts_and_advances_it():
    ledger = DenseLedger({0: 5, 1: 0})

    assert ledger.decide([(r(0, 5, 9), r(1, 0, 2))]) == [BatchVerdict.LEARN]
    assert ledger.applied == {0: 9, 1: 2}


def test_applied_batch_has_dense_weight_zero():
    ledger = DenseLedger({0: 5})

    assert ledger.decide([(r(0, 2, 5),)]) == [BatchVerdict.APPLIED]
    assert ledger.applied == {0: 5}


def test_batch_ahead_of_or_across_the_vector_is_returned():
    ledger = DenseLedger({0: 5, 1: 5})

    assert (
        ledger.decide([(r(0, 6, 8),), (r(0, 3, 7),), (r(0, 2, 5), r(1, 5, 6))]) == [BatchVerdict.RETURN] * 3
    )
    assert ledger.applied == {0: 5, 1: 5}


def test_verdicts_of_one_step_follow_rank_order():
    ledger = DenseLedger({0: 0})

    assert ledger.decide([(r(0, 0, 3),), None, (r(0, 0, 3),), (r(0, 3, 4),)]) == [
        BatchVerdict.LEARN,
        None,
        BatchVerdict.APPLIED,
        BatchVerdict.LEARN,
    ]
