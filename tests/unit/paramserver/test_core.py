from freshet.paramserver.core import AfterFlush, FlushBook
from freshet.seams.rowstore import FlushOutcome
from freshet.types import Bucket, BucketMeta, Fence, TimeMs

B = Bucket(7)


def claimed_book() -> FlushBook:
    book = FlushBook(Fence(9))
    book.claimed({B: BucketMeta(Fence(9), 4, 0, {0: 3, 1: 1}, 20, TimeMs(0))})
    return book


def next_meta(book: FlushBook) -> BucketMeta:
    return book.next_meta(B, rows=2, applied={0: 5, 1: 1}, rows_offset=30, clock_ms=TimeMs(1))


def test_a_flush_writes_one_more_than_the_last_acknowledged_sequence():
    book = claimed_book()

    assert next_meta(book).seq == 5
    assert next_meta(book).seq == 5  # not acknowledged: a retry writes the same


def test_an_acknowledged_flush_moves_the_sequence_and_the_smallest_offsets():
    book = claimed_book()
    meta = next_meta(book)

    assert book.done(B, meta, FlushOutcome.DONE) is AfterFlush.KEEP
    assert next_meta(book).seq == 6
    assert book.smallest_applied(2) == {0: 5, 1: 1}
    assert book.smallest_rows_offset(range(8)) == 30


def test_a_store_that_holds_something_else_gets_the_bucket_whole():
    book = claimed_book()

    assert book.done(B, next_meta(book), FlushOutcome.REPLACE) is AfterFlush.AGAIN_WHOLE
    assert book.previous(B).seq == 4


def test_a_fenced_bucket_is_dropped():
    book = claimed_book()

    assert book.done(B, next_meta(book), FlushOutcome.FENCED) is AfterFlush.DROP
    assert B not in book.stored
