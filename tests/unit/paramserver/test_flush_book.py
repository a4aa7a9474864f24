import numpy as np
import pytest

from freshet.config.spec.topics import ROWS_PARTITIONS
from freshet.paramserver.flusher import FlushBook
from freshet.rows.store import FlushOutcome
from freshet.tables import Flushed
from freshet.types import RUN, Bucket, BucketMeta, Fence, Flush, RowRuns, TimeMs

BUCKETS = 8
A, B = Bucket(6), Bucket(7)
NO_RUNS = RowRuns(np.empty(0, RUN), np.empty(0, np.uint8), np.zeros(256, np.uint32))


def claimed_book() -> FlushBook:
    book = FlushBook(buckets=BUCKETS, partitions=2)
    for bucket, fence in ((A, 9), (B, 12)):  # two claims
        book.claimed({bucket: BucketMeta(Fence(fence), 4, 0, {0: 3, 1: 1}, 20, TimeMs(7))})
    return book


def next_flush(book: FlushBook, *, whole: bool = False) -> Flush:
    changed = Flushed(
        buckets=np.array([A, B]),
        applied=np.array([[5, 1], [6, 1]]),
        clock_ms=np.array([11, 10]),
        stored=np.array([2, 3]),
        runs=NO_RUNS,
    )
    return book.next_flush(changed, np.arange(ROWS_PARTITIONS) + 30, whole=whole)


def outcomes(*each: FlushOutcome) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.array(each, np.uint8)


def test_a_flush_follows_the_last_acknowledged_sequence():
    book = claimed_book()

    assert next_flush(book).seqs.tolist() == [5, 5]
    assert next_flush(book).seqs.tolist() == [5, 5]  # not acknowledged, so a retry has the same


def test_a_flush_has_the_meta_of_the_copied_rows():
    partition = B * ROWS_PARTITIONS // BUCKETS

    assert next_flush(claimed_book()).meta(1) == BucketMeta(
        Fence(12), 5, 3, {0: 6, 1: 1}, 30 + partition, TimeMs(10)
    )


def test_an_acknowledged_flush_advances_sequence_and_offsets():
    book = claimed_book()
    assert book.clock_ms == 7

    again, fenced = book.done(next_flush(book), outcomes(FlushOutcome.DONE, FlushOutcome.DONE))

    assert (again.tolist(), fenced.tolist()) == ([], [])
    assert next_flush(book).seqs.tolist() == [6, 6]
    assert book.smallest_applied() == {0: 5, 1: 1}
    assert book.smallest_rows_offset(range(8)) == 30 + A * ROWS_PARTITIONS // BUCKETS
    assert book.smallest_rows_offset(range(4)) is None, "none of them is owned"
    assert book.clock_ms == 11


def test_a_bucket_with_another_stored_meta_is_written_whole():
    book = claimed_book()

    again, _ = book.done(next_flush(book), outcomes(FlushOutcome.DONE, FlushOutcome.REPLACE))

    assert again.tolist() == [B]
    assert next_flush(book, whole=True).seqs.tolist() == [6, 6], "5 was sent with other rows"
    assert book.smallest_applied() == {0: 3, 1: 1}


def test_a_whole_bucket_has_an_unused_sequence():
    book = claimed_book()
    book.done(next_flush(book), outcomes(FlushOutcome.REPLACE, FlushOutcome.REPLACE))
    whole = next_flush(book, whole=True)
    assert whole.seqs.tolist() == [6, 6]
    assert next_flush(book, whole=True).seqs.tolist() == [7, 7], "copied anew: rows may have changed"

    book.done(whole, outcomes(FlushOutcome.DONE, FlushOutcome.REPLACE))

    assert next_flush(book).seqs.tolist() == [7, 5], "increments follow what is acknowledged"


def test_a_claim_starts_at_the_stored_sequence():
    book = claimed_book()
    for _ in range(3):
        next_flush(book, whole=True)
    book.claimed({A: BucketMeta(Fence(20), 4, 0, {0: 3, 1: 1}, 20, TimeMs(7))})
    assert next_flush(book, whole=True).seqs.tolist() == [5, 8]


def test_a_fenced_bucket_is_dropped_and_written_ones_recorded():
    book = claimed_book()

    again, fenced = book.done(next_flush(book), outcomes(FlushOutcome.DONE, FlushOutcome.FENCED))

    assert (again.tolist(), fenced.tolist()) == ([], [B])
    assert book.smallest_applied() == {0: 3, 1: 1}, "retention is held until another shard serves it"
    book.lost([B])
    assert book.smallest_applied() == {0: 5, 1: 1}
    assert book.smallest_rows_offset(range(B, B + 1)) is None


@pytest.mark.parametrize("outcome", FlushOutcome)
def test_an_outcome_of_a_released_bucket_is_ignored(outcome):
    book = claimed_book()
    flush = next_flush(book)
    book.lost([B])
    if outcome is FlushOutcome.FENCED:  # and was claimed again
        book.claimed({B: BucketMeta(Fence(20), 0, 0, {0: 1, 1: 1}, 20, TimeMs(7))})

    again, fenced = book.done(flush, outcomes(FlushOutcome.DONE, outcome))

    assert (again.tolist(), fenced.tolist()) == ([], [])
